"""A client of the whole mesh: one method per thing to do, users and tweets by their ids.

Every method may raise `grpc.aio.AioRpcError`; each call has a deadline. Not a part of the mesh: it signs tokens with
the development secret, which outside of a development machine only an identity provider has.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import grpc
import jwt
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from launcher.data_folder import DataFolder
from mesh import channels, principals
from mesh.channels import streaming
from mesh.ids import first_id_of
from mesh.principals import OPERATOR, Credentials, Kind, Principal
from starling.fanout.v1 import fanout_pb2, fanout_pb2_grpc
from starling.graph.v1 import graph_pb2, graph_pb2_grpc
from starling.timeline.v1 import timeline_pb2, timeline_pb2_grpc
from starling.tweet.v1 import tweet_pb2, tweet_pb2_grpc

CALL_SECONDS = 10.0
REBUILD_SECONDS = 60.0
_HEALTH_SECONDS = 2.0
_PRINCIPALS_MAX = 10_000
_BATCH_MAX = 100
_PAGES_MAX = 1_000_000
_WATCH_SECONDS = 30.0
_WATCH_RETRY_SECONDS = 1.0
_WATCH_FAILURES_MAX = 30
_SEEN_MAX = 5_000

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]


class NotPossibleError(Exception):
    """Something that can't be asked of the mesh as things are; the text is for people."""


class MeshNotRunningError(NotPossibleError):
    """There is no mesh to talk to."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Where the services are, each `host:port` or `dns:///name:port`; empty: unknown. `fanout`: workers by name."""

    graph: str = ""
    tweet: str = ""
    timeline: str = ""
    fanout: Mapping[str, str] = field(default_factory=dict)

    def named(self) -> dict[str, str]:
        """The known ones by name."""
        named = {"graph_svc": self.graph, "tweet_svc": self.tweet, **self.fanout, "timeline_svc": self.timeline}
        return {name: target for name, target in named.items() if target}


class Identity(Protocol):
    """Speaks for principals."""

    def metadata(self, principal: Principal) -> Metadata:
        """What to send so as to call as `principal`. Raises NotPossibleError."""
        ...


class Minting:
    """Signs tokens for anyone, with the development secret."""

    def __init__(self, secret: str) -> None:
        self._credentials = lru_cache(_PRINCIPALS_MAX)(lambda principal: Credentials(secret, principal))

    def metadata(self, principal: Principal) -> Metadata:
        """See the protocol."""
        return self._credentials(principal).metadata()


class GivenToken:
    """Has one token, and so speaks for one principal."""

    def __init__(self, token: str) -> None:
        self._token = token
        try:
            # Only to say early what would be wrong; the services verify it.
            self._subject = str(jwt.decode(token, options={"verify_signature": False}).get("sub", ""))
        except jwt.InvalidTokenError as error:
            raise NotPossibleError("STARLING_TOKEN isn't a token") from error

    def metadata(self, principal: Principal) -> Metadata:
        """See the protocol. The operator's calls are tried as whoever this is: some are open to all."""
        if principal.kind is Kind.USER and self._subject != str(principal):
            raise NotPossibleError(f"STARLING_TOKEN speaks for {self._subject}, not for {principal}")
        return ((principals.METADATA_KEY, f"Bearer {self._token}"),)


class Client:
    """See the module. To be used as `async with Client(…) as client`."""

    def __init__(self, targets: Targets, identity: Identity) -> None:
        self.targets = targets
        self._identity = identity
        self._closing = AsyncExitStack()
        self._channels: dict[str, grpc.aio.Channel] = {}

    @classmethod
    def of(cls, folder: DataFolder) -> "Client":
        """A client of the mesh that a launcher runs on a data folder. Raises MeshNotRunningError."""
        mesh = folder.read_mesh()
        if mesh is None:
            raise MeshNotRunningError(f"no mesh runs on the data folder {folder.path}: start it with 'make run'")
        targets = Targets(graph=mesh.graph, tweet=mesh.tweet, timeline=mesh.timeline, fanout=mesh.fanout)
        return cls(targets, Minting(folder.read_secrets().auth_secret))

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._closing.aclose()

    def _channel(self, service: str, target: str) -> grpc.aio.Channel:
        if not target:
            raise NotPossibleError(f"no address of {service}: give --target-{service.partition('_')[0]}")
        if target not in self._channels:
            self._channels[target] = channels.connect(target)
            self._closing.push_async_callback(self._channels[target].close)
        return self._channels[target]

    @property
    def graph(self) -> "graph_pb2_grpc.GraphServiceAsyncStub":
        """graph_svc's stub, for calls that have no method here; see `as_`."""
        return graph_pb2_grpc.GraphServiceStub(self._channel("graph_svc", self.targets.graph))

    @property
    def tweet(self) -> "tweet_pb2_grpc.TweetServiceAsyncStub":
        """tweet_svc's stub."""
        return tweet_pb2_grpc.TweetServiceStub(self._channel("tweet_svc", self.targets.tweet))

    @property
    def timeline(self) -> "timeline_pb2_grpc.TimelineServiceAsyncStub":
        """timeline_svc's stub."""
        return timeline_pb2_grpc.TimelineServiceStub(self._channel("timeline_svc", self.targets.timeline))

    def as_(self, principal: Principal) -> Metadata:
        """The `metadata` argument of a call by the principal."""
        return self._identity.metadata(principal)

    # Users and whom they follow

    async def create_user(self, handle: str, display_name: str = "") -> graph_pb2.User:
        """ALREADY_EXISTS when the handle is taken."""
        request = graph_pb2.CreateUserRequest(handle=handle, display_name=display_name)
        reply = await self.graph.CreateUser(request, timeout=CALL_SECONDS, metadata=self.as_(OPERATOR))
        return reply.user

    async def user(self, handle: str) -> graph_pb2.User:
        """A user by handle, without @. NOT_FOUND when there is none."""
        request = graph_pb2.GetUserRequest(handle=handle)
        reply = await self.graph.GetUser(request, timeout=CALL_SECONDS, metadata=self.as_(OPERATOR))
        return reply.user

    async def users(self, user_ids: Sequence[int]) -> list[graph_pb2.User]:
        """Those of the users that exist, in the order asked for."""
        found: list[graph_pb2.User] = []
        for start in range(0, len(user_ids), _BATCH_MAX):
            request = graph_pb2.BatchGetUsersRequest(user_ids=user_ids[start : start + _BATCH_MAX])
            reply = await self.graph.BatchGetUsers(request, timeout=CALL_SECONDS, metadata=self.as_(OPERATOR))
            found.extend(reply.users)
        return found

    async def _changes(self, user_id: int, call: Callable[..., Awaitable[Any]], request: Message) -> bool:
        """As a user; whether it changed something."""
        metadata = self.as_(principals.user(user_id))
        return bool((await call(request, timeout=CALL_SECONDS, metadata=metadata)).changed)

    async def follow(self, follower_id: int, followee_id: int) -> bool:
        """False when it stood before."""
        return await self._changes(follower_id, self.graph.Follow, graph_pb2.FollowRequest(followee_id=followee_id))

    async def unfollow(self, follower_id: int, followee_id: int) -> bool:
        """False when there was none."""
        return await self._changes(follower_id, self.graph.Unfollow, graph_pb2.UnfollowRequest(followee_id=followee_id))

    async def block(self, blocker_id: int, blocked_id: int) -> bool:
        """False when it stood before."""
        return await self._changes(blocker_id, self.graph.Block, graph_pb2.BlockRequest(user_id=blocked_id))

    async def unblock(self, blocker_id: int, blocked_id: int) -> bool:
        """False when there was none."""
        return await self._changes(blocker_id, self.graph.Unblock, graph_pb2.UnblockRequest(user_id=blocked_id))

    async def mute(self, muter_id: int, muted_id: int) -> bool:
        """False when it stood before."""
        return await self._changes(muter_id, self.graph.Mute, graph_pb2.MuteRequest(user_id=muted_id))

    async def unmute(self, muter_id: int, muted_id: int) -> bool:
        """False when there was none."""
        return await self._changes(muter_id, self.graph.Unmute, graph_pb2.UnmuteRequest(user_id=muted_id))

    async def followers_page(self, user_id: int, limit: int = 0, page_token: str = "") -> tuple[list[int], str]:
        """Ascending ids, and the next page's token."""
        request = graph_pb2.ListFollowersRequest(user_id=user_id, page_size=limit, page_token=page_token)
        reply = await self.graph.ListFollowers(request, timeout=CALL_SECONDS, metadata=self.as_(OPERATOR))
        return list(reply.user_ids), reply.next_page_token

    async def following_page(self, user_id: int, limit: int = 0, page_token: str = "") -> tuple[list[int], str]:
        """Ascending ids, and the next page's token."""
        request = graph_pb2.ListFollowingRequest(user_id=user_id, page_size=limit, page_token=page_token)
        reply = await self.graph.ListFollowing(request, timeout=CALL_SECONDS, metadata=self.as_(OPERATOR))
        return list(reply.user_ids), reply.next_page_token

    # Tweets

    async def post(
        self,
        author_id: int,
        text: str,
        *,
        in_reply_to_tweet_id: int = 0,
        quoted_tweet_id: int = 0,
        media_ids: Sequence[str] = (),
        request_id: str = "",
    ) -> tweet_pb2.CreateTweetResponse:
        """The tweet, and the token with which `home_page` is sure to show it. See the proto for `request_id`."""
        request = tweet_pb2.CreateTweetRequest(
            text=text,
            in_reply_to_tweet_id=in_reply_to_tweet_id,
            quoted_tweet_id=quoted_tweet_id,
            media_ids=media_ids,
            request_id=request_id,
        )
        metadata = self.as_(principals.user(author_id))
        return await self.tweet.CreateTweet(request, timeout=CALL_SECONDS, metadata=metadata)

    async def delete(self, author_id: int, tweet_id: int) -> None:
        """Again: succeeds."""
        request = tweet_pb2.DeleteTweetRequest(tweet_id=tweet_id)
        await self.tweet.DeleteTweet(request, timeout=CALL_SECONDS, metadata=self.as_(principals.user(author_id)))

    async def edit(self, author_id: int, tweet_id: int, text: str) -> tweet_pb2.Tweet:
        """The tweet as it is now. The same text again: succeeds."""
        request = tweet_pb2.UpdateTweetRequest(tweet=tweet_pb2.Tweet(tweet_id=tweet_id, text=text))
        metadata = self.as_(principals.user(author_id))
        return (await self.tweet.UpdateTweet(request, timeout=CALL_SECONDS, metadata=metadata)).tweet

    async def revisions_page(
        self, tweet_id: int, limit: int = 0, page_token: str = ""
    ) -> tweet_pb2.ListTweetRevisionsResponse:
        """A page of what a tweet's text is and was, newest first."""
        request = tweet_pb2.ListTweetRevisionsRequest(tweet_id=tweet_id, page_size=limit, page_token=page_token)
        return await self.tweet.ListTweetRevisions(request, timeout=CALL_SECONDS, metadata=self.as_(OPERATOR))

    async def retweet(self, author_id: int, tweet_id: int) -> tweet_pb2.RetweetResponse:
        """The retweet, also if it was made before, and its token for `home_page`."""
        request = tweet_pb2.RetweetRequest(tweet_id=tweet_id)
        return await self.tweet.Retweet(request, timeout=CALL_SECONDS, metadata=self.as_(principals.user(author_id)))

    async def undo_retweet(self, author_id: int, tweet_id: int) -> bool:
        """False when there was none."""
        return await self._changes(author_id, self.tweet.UndoRetweet, tweet_pb2.UndoRetweetRequest(tweet_id=tweet_id))

    async def like(self, user_id: int, tweet_id: int) -> bool:
        """False when it stood before."""
        return await self._changes(user_id, self.tweet.Like, tweet_pb2.LikeRequest(tweet_id=tweet_id))

    async def unlike(self, user_id: int, tweet_id: int) -> bool:
        """False when there was none."""
        return await self._changes(user_id, self.tweet.Unlike, tweet_pb2.UnlikeRequest(tweet_id=tweet_id))

    async def profile_page(
        self, user_id: int, limit: int = 0, page_token: str = ""
    ) -> tweet_pb2.ListUserTweetsResponse:
        """A page of an author's own tweets, newest first."""
        request = tweet_pb2.ListUserTweetsRequest(user_id=user_id, page_size=limit, page_token=page_token)
        return await self.tweet.ListUserTweets(request, timeout=CALL_SECONDS, metadata=self.as_(OPERATOR))

    async def home_page(
        self,
        viewer_id: int,
        limit: int = 0,
        page_token: str = "",
        read_your_write_token: str = "",
        newer_than_id: int = 0,
    ) -> timeline_pb2.ListHomeTimelineResponse:
        """A page of the viewer's home timeline; with `newer_than_id`, of a catch-up (see the proto and `catch_up`)."""
        request = timeline_pb2.ListHomeTimelineRequest(
            page_size=limit,
            page_token=page_token,
            read_your_write_token=read_your_write_token,
            newer_than_id=newer_than_id,
        )
        metadata = self.as_(principals.user(viewer_id))
        return await self.timeline.ListHomeTimeline(request, timeout=CALL_SECONDS, metadata=metadata)

    async def walk_home(
        self, viewer_id: int, page_size: int = 100, read_your_write_token: str = "", newer_than_id: int = 0
    ) -> AsyncIterator[timeline_pb2.HomeTimelineItem]:
        """The whole home timeline, page by page; with `newer_than_id`, what a catch-up looks at."""

        async def page(token: str) -> tuple[Sequence[timeline_pb2.HomeTimelineItem], str]:
            reply = await self.home_page(viewer_id, page_size, token, read_your_write_token, newer_than_id)
            return reply.items, reply.next_page_token

        async for items, _ in pages(page):
            for item in items:
                yield item

    async def watch_home(self, viewer_id: int, newer_than_id: int = 0) -> AsyncIterator[timeline_pb2.HomeTimelineItem]:
        """What comes to a home timeline, each item once, without end; with `newer_than_id`, what came since that first.

        The server's streams are short. Each begins with what came since the newest item known here; where it tells of a
        gap, this catches up by itself before it goes on.
        """
        newest = newer_than_id
        begun = first_id_of(int(time.time() * 1_000))
        seen: deque[int] = deque([newer_than_id], _SEEN_MAX)
        gap, failures = False, 0
        while True:
            try:
                came = self._missed(viewer_id, newest) if gap else self._watched(viewer_id, newest)
                gap = False
                async for item in came:
                    failures = 0
                    if gap := item is None:
                        break
                    if item and item.item_id not in seen:
                        seen.append(item.item_id)
                        newest = max(newest, item.item_id)
                        yield item
            except grpc.aio.AioRpcError as error:
                failures += 1
                if error.code() is not grpc.StatusCode.UNAVAILABLE or failures > _WATCH_FAILURES_MAX:
                    raise
            newest = max(newest, begun)
            if gap or failures:
                await asyncio.sleep(_WATCH_RETRY_SECONDS)

    async def _watched(self, viewer_id: int, newest: int) -> AsyncIterator[timeline_pb2.HomeTimelineItem | None]:
        """The items of one stream; None: a gap."""
        request = timeline_pb2.WatchHomeTimelineRequest(newer_than_id=newest)
        metadata = self.as_(principals.user(viewer_id))
        call = self.timeline.WatchHomeTimeline(request, timeout=_WATCH_SECONDS, metadata=metadata)
        async with streaming(call):
            async for message in call:
                if not message.HasField("heartbeat"):
                    yield message.item if message.HasField("item") else None

    async def _missed(self, viewer_id: int, newest: int) -> AsyncIterator[timeline_pb2.HomeTimelineItem | None]:
        """All that came since an item was the newest known, oldest first: whatever ends it, the newest item that was
        given is one up to which all were."""
        for item in reversed([item async for item in self.walk_home(viewer_id, newer_than_id=newest)]):
            yield item

    async def catch_up(
        self, viewer_id: int, known_ids: Collection[int], page_size: int = 100
    ) -> list[timeline_pb2.HomeTimelineItem]:
        """What has come to a home timeline besides the items that the caller has, newest first; all, if it has none.

        Ids are made before tweets are committed, by several processes on clocks that differ, so a tweet may come in
        *below* one that was read before it. A catch-up that stopped at the newest known id would miss it for good.
        That is why the pages go down to a minute below (`newer_than_id` in the proto), and why this wants *all*
        `item_id`s that the caller has of the last minute before its newest, not only that one: the others would come
        again.
        What left the timeline meanwhile (deleted, unfollowed) isn't told, and what a new follow brings only down to
        that minute: for these, walk.
        """
        known = frozenset(known_ids)
        walk = self.walk_home(viewer_id, page_size, newer_than_id=max(known, default=0))
        return [item async for item in walk if item.item_id not in known]

    # Running the mesh

    async def fanout_policy(self) -> graph_pb2.GetFanoutPolicyResponse:
        """The policy of fan-out, and what lag makes of it."""
        request = graph_pb2.GetFanoutPolicyRequest()
        return await self.graph.GetFanoutPolicy(request, timeout=CALL_SECONDS, metadata=self.as_(OPERATOR))

    async def set_fanout_policy(self, policy: graph_pb2.FanoutPolicy) -> None:
        """Set it, whole; authors' modes follow within seconds."""
        request = graph_pb2.UpdateFanoutPolicyRequest(policy=policy)
        await self.graph.UpdateFanoutPolicy(request, timeout=CALL_SECONDS, metadata=self.as_(OPERATOR))

    async def rebuild(self, viewer_id: int) -> int:
        """Make a viewer's list anew; returns its number of entries."""
        request = timeline_pb2.RebuildHomeTimelineRequest(viewer_id=viewer_id)
        metadata = self.as_(OPERATOR)
        return (await self.timeline.RebuildHomeTimeline(request, timeout=REBUILD_SECONDS, metadata=metadata)).entries

    async def verify(self, viewer_id: int) -> timeline_pb2.VerifyHomeTimelineResponse:
        """Hold the first pages of a viewer's home against the stores."""
        request = timeline_pb2.VerifyHomeTimelineRequest(viewer_id=viewer_id)
        return await self.timeline.VerifyHomeTimeline(request, timeout=REBUILD_SECONDS, metadata=self.as_(OPERATOR))

    async def explain(self, viewer_id: int, tweet_id: int) -> timeline_pb2.ExplainHomeTimelineItemResponse:
        """Why a tweet is in a viewer's home, or isn't."""
        request = timeline_pb2.ExplainHomeTimelineItemRequest(viewer_id=viewer_id, tweet_id=tweet_id)
        return await self.timeline.ExplainHomeTimelineItem(request, timeout=CALL_SECONDS, metadata=self.as_(OPERATOR))

    async def fanout_status(self) -> dict[str, fanout_pb2.GetFanoutStatusResponse]:
        """What each worker says, by name; the lag is the same for all of them."""
        request = fanout_pb2.GetFanoutStatusRequest()
        replies = {}
        for name, target in (self.targets.fanout or {"fanout_svc": ""}).items():
            stub = fanout_pb2_grpc.FanoutServiceStub(self._channel(name, target))
            replies[name] = await stub.GetFanoutStatus(request, timeout=CALL_SECONDS, metadata=self.as_(OPERATOR))
        return replies

    async def health(self) -> dict[str, str]:
        """By service: SERVING, NOT_SERVING, or UNREACHABLE."""
        return {name: await self._health(name, target) for name, target in self.targets.named().items()}

    async def _health(self, name: str, target: str) -> str:
        stub: Any = health_pb2_grpc.HealthStub(self._channel(name, target))
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_SECONDS)
        except grpc.aio.AioRpcError:
            return "UNREACHABLE"
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


Page = Callable[[str], Awaitable[tuple[Sequence[T], str]]]
"""Page token to items and the next token."""


async def pages(page: Page[T], page_token: str = "") -> AsyncIterator[tuple[Sequence[T], str]]:
    """Page after page. Only an empty token ends it: a page may be short, even empty."""
    for _ in range(_PAGES_MAX):
        items, page_token = await page(page_token)
        yield items, page_token
        if not page_token:
            return
    raise NotPossibleError(f"no end after {_PAGES_MAX:,} pages")
