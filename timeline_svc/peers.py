"""What timeline_svc asks of graph_svc and tweet_svc, over gRPC. All raise UnavailableError, and NotFoundError for
an unknown viewer."""

from array import array
from collections.abc import AsyncGenerator, Collection, Sequence

import grpc

from mesh.channels import streaming, translated
from mesh.deadlines import remaining
from mesh.principals import Credentials
from mesh.valkey import chunks
from starling.graph.v1 import graph_pb2, graph_pb2_grpc
from starling.tweet.v1 import tweet_pb2, tweet_pb2_grpc
from timeline_svc.core import ViewerContext

_CALL_SECONDS = 4.0
_MOMENT_SECONDS = 0.3
_USERS_MAX = 100
_CHECKS_MAX = 1_000
_HYDRATE_MAX = 200


class Graph:
    """graph_svc."""

    def __init__(self, channel: grpc.aio.Channel, credentials: Credentials) -> None:
        self._stub = graph_pb2_grpc.GraphServiceStub(channel)
        self._credentials = credentials

    async def viewer_context(self, viewer_id: int, *, wait: bool = True) -> ViewerContext:
        """A viewer's version and followees, read at one moment. `wait`: for a connection, while graph_svc restarts."""
        with translated("graph_svc"):
            reply = await self._stub.GetViewerContext(
                graph_pb2.GetViewerContextRequest(viewer_id=viewer_id),
                timeout=remaining(_CALL_SECONDS),
                metadata=self._credentials.metadata(),
                wait_for_ready=wait,
            )
        return ViewerContext(
            viewer_id,
            reply.version,
            array("Q", reply.followee_ids),
            array("Q", reply.since),
            array("Q", reply.blocked_ids),
            array("Q", reply.muted_ids),
        )

    async def blockers(self, viewer_id: int, user_ids: Sequence[int]) -> Collection[int]:
        """Those of at most 1,000 users who block the viewer."""
        assert len(user_ids) <= _CHECKS_MAX
        with translated("graph_svc"):
            reply = await self._stub.CheckBlocks(
                graph_pb2.CheckBlocksRequest(user_id=viewer_id, other_ids=user_ids),
                timeout=remaining(_CALL_SECONDS),
                metadata=self._credentials.metadata(),
            )
        return frozenset(reply.blocked_by_ids)

    async def users(self, user_ids: Sequence[int]) -> list[graph_pb2.User]:
        """Those that exist."""
        found: list[graph_pb2.User] = []
        for start in range(0, len(user_ids), _USERS_MAX):
            with translated("graph_svc"):
                reply = await self._stub.BatchGetUsers(
                    graph_pb2.BatchGetUsersRequest(user_ids=user_ids[start : start + _USERS_MAX]),
                    timeout=remaining(_CALL_SECONDS),
                    metadata=self._credentials.metadata(),
                )
            found += reply.users
        return found


class Tweets:
    """tweet_svc. A page can't do without it, so calls wait for a connection while it restarts."""

    def __init__(self, channel: grpc.aio.Channel, credentials: Credentials) -> None:
        self._stub = tweet_pb2_grpc.TweetServiceStub(channel)
        self._credentials = credentials

    async def hydrate(self, tweet_ids: Sequence[int], *, at_once: bool = False) -> dict[int, tweet_pb2.Tweet]:
        """The bodies of visible tweets, over one stream of batches. `at_once`: in a moment, or not at all."""
        replies = self._hydrated(tweet_ids, at_once=at_once)
        return {tweet.tweet_id: tweet async for reply in replies for tweet in reply.tweets}

    async def deleted(self, tweet_ids: Sequence[int]) -> set[int]:
        """Those that were deleted, and so never come back."""
        replies = self._hydrated(tweet_ids, deleted_only=True)
        return {tweet_id async for reply in replies for tweet_id in reply.deleted}

    async def _hydrated(
        self, tweet_ids: Sequence[int], *, at_once: bool = False, deleted_only: bool = False
    ) -> AsyncGenerator[tweet_pb2.HydrateTweetsResponse, None]:
        requests = (
            tweet_pb2.HydrateTweetsRequest(tweet_ids=batch, deleted_only=deleted_only)
            for batch in chunks(tweet_ids, _HYDRATE_MAX)
        )
        with translated("tweet_svc"):
            call = self._stub.HydrateTweets(
                requests,
                timeout=remaining(_MOMENT_SECONDS if at_once else _CALL_SECONDS),
                metadata=self._credentials.metadata(),
                wait_for_ready=not at_once,
            )
            async with streaming(call):
                async for reply in call:
                    yield reply

    async def author_ids(
        self, author_ids: Sequence[int], below_id: int, limit: int
    ) -> AsyncGenerator[tuple[Sequence[int], bool], None]:
        """Ids of these authors below an id (0: from the newest), at most `limit`, descending, chunk by chunk; and with
        each chunk whether nothing is left below it."""
        request = tweet_pb2.StreamAuthorTweetsRequest(author_ids=author_ids, below_id=below_id, limit=limit)
        with translated("tweet_svc"):
            call = self._stub.StreamAuthorTweets(
                request,
                timeout=remaining(_CALL_SECONDS),
                metadata=self._credentials.metadata(),
                wait_for_ready=True,
            )
            async with streaming(call):
                async for reply in call:
                    yield reply.tweet_ids, reply.exhausted
