"""What fan-out asks of graph_svc and tweet_svc. All raise UnavailableError, and NotFoundError for an unknown author."""

from collections.abc import AsyncIterator, Sequence

import grpc

from mesh.channels import streaming, translated
from mesh.principals import Credentials
from starling.graph.v1 import graph_pb2, graph_pb2_grpc
from starling.tweet.v1 import tweet_pb2, tweet_pb2_grpc

_CALL_SECONDS = 5.0
_STREAM_SECONDS = 300.0


class Peers:
    """graph_svc and tweet_svc. What is read ahead of a stream is bounded by gRPC's flow control."""

    def __init__(self, graph: grpc.aio.Channel, tweets: grpc.aio.Channel, credentials: Credentials) -> None:
        self._graph = graph_pb2_grpc.GraphServiceStub(graph)
        self._tweets = tweet_pb2_grpc.TweetServiceStub(tweets)
        self._credentials = credentials

    async def mode(self, author_id: int, followers_below: int = 0) -> graph_pb2.GetAuthorModeResponse:
        """An author's mode, read afresh, and in the same call the followers of an author who has but few."""
        with translated("graph_svc"):
            return await self._graph.GetAuthorMode(
                graph_pb2.GetAuthorModeRequest(author_id=author_id, followers_below=followers_below),
                timeout=_CALL_SECONDS,
                metadata=self._credentials.metadata(),
            )

    async def followers(self, author_id: int, bucket: int | None) -> AsyncIterator[Sequence[int]]:
        """All followers, or those of one bucket, chunk by chunk."""
        with translated("graph_svc"):
            call = self._graph.StreamFollowers(
                graph_pb2.StreamFollowersRequest(author_id=author_id, bucket=bucket),
                timeout=_STREAM_SECONDS,
                metadata=self._credentials.metadata(),
            )
            async with streaming(call):
                async for reply in call:
                    yield reply.follower_ids

    async def newest(self, author_id: int, limit: int) -> tuple[list[int], int]:
        """The author's newest ids from the store, at most `limit`, and how far down it was asked and answered."""
        request = tweet_pb2.StreamAuthorTweetsRequest(author_ids=[author_id], limit=limit)
        ids: list[int] = []
        exhausted = False
        with translated("tweet_svc"):
            call = self._tweets.StreamAuthorTweets(
                request, timeout=_CALL_SECONDS, metadata=self._credentials.metadata()
            )
            async with streaming(call):
                async for reply in call:
                    ids += reply.tweet_ids
                    exhausted = reply.exhausted
        assert exhausted or ids
        return ids, 0 if exhausted else ids[-1]

    async def bodies(self, tweet_ids: Sequence[int]) -> list[tweet_pb2.Tweet]:
        """Those of at most 200 tweets that are visible, as they are cached: without what is added for each reader."""
        requests = (tweet_pb2.HydrateTweetsRequest(tweet_ids=ids) for ids in (tweet_ids,))
        found: list[tweet_pb2.Tweet] = []
        with translated("tweet_svc"):
            call = self._tweets.HydrateTweets(requests, timeout=_CALL_SECONDS, metadata=self._credentials.metadata())
            async with streaming(call):
                async for reply in call:
                    found += reply.tweets
        for tweet in found:
            tweet.ClearField("counts")
            tweet.ClearField("media_urls")
        return found

    async def complete_drain(self, author_id: int, epoch: int, bucket: int) -> None:
        """A bucket is mended."""
        with translated("graph_svc"):
            await self._graph.CompleteDrain(
                graph_pb2.CompleteDrainRequest(author_id=author_id, epoch=epoch, bucket=bucket),
                timeout=_CALL_SECONDS,
                metadata=self._credentials.metadata(),
            )
