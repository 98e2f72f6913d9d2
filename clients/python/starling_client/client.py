"""One account's view of the mesh. Every method raises `grpc.RpcError`; see `explain`."""

import random
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import grpc

from starling.graph.v1 import graph_pb2, graph_pb2_grpc
from starling.timeline.v1 import timeline_pb2, timeline_pb2_grpc
from starling.tweet.v1 import tweet_pb2, tweet_pb2_grpc
from starling_client.channels import CALL_SECONDS, Token, connect
from starling_client.errors import explain
from starling_client.paging import pages

_POST_ATTEMPTS = 9  # within about five seconds: a restart takes two
_PASSING = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
}
_WAIT_SECONDS_MAX = 5.0
_WATCH_SECONDS = 30.0
_WATCH_FAILURES_MAX = 30
_GAP_SECONDS = 1.0
_SEEN_MAX = 5_000


class Starling:
    """Calls as whom the token speaks for. To be used as `with Starling(…) as starling`; safe to share between threads.

    `graph`, `tweet`, `timeline`: where the services are (`host:port`, `dns:///name:port`); those that aren't called may
    be left out.
    """

    def __init__(
        self,
        *,
        token: Token,
        graph: str = "",
        tweet: str = "",
        timeline: str = "",
        timeout: float = CALL_SECONDS,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._closing = ExitStack()
        self._targets = {"graph": graph, "tweet": tweet, "timeline": timeline}
        self._connect = partial(connect, token=token, timeout=timeout, credentials=credentials)

    def _channel(self, area: str) -> grpc.Channel:
        if not self._targets[area]:
            raise ValueError(f"no address of {area}_svc was given")
        return self._closing.enter_context(self._connect(self._targets[area]))

    @cached_property
    def graph(self) -> graph_pb2_grpc.GraphServiceStub:
        """graph_svc's stub. Raises ValueError when its address wasn't given."""
        return graph_pb2_grpc.GraphServiceStub(self._channel("graph"))

    @cached_property
    def tweets(self) -> tweet_pb2_grpc.TweetServiceStub:
        """tweet_svc's stub."""
        return tweet_pb2_grpc.TweetServiceStub(self._channel("tweet"))

    @cached_property
    def timelines(self) -> timeline_pb2_grpc.TimelineServiceStub:
        """timeline_svc's stub."""
        return timeline_pb2_grpc.TimelineServiceStub(self._channel("timeline"))

    def __enter__(self) -> "Starling":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channels; calls under way end as CANCELLED."""
        self._closing.close()

    def post(self, text: str, *, request_id: str = "", **fields: Any) -> tweet_pb2.CreateTweetResponse:
        """Post a tweet, once: it is tried again with the same request id, a UUID. `fields`: of CreateTweetRequest."""
        request = tweet_pb2.CreateTweetRequest(text=text, request_id=request_id or str(uuid.uuid4()), **fields)
        for attempt in range(1, _POST_ATTEMPTS):
            try:
                return self.tweets.CreateTweet(request)
            except grpc.RpcError as error:
                said = explain(error)
                if said.code not in _PASSING:
                    raise
                wait = said.retry_after_seconds or min(0.1 * 2**attempt, 1.0)
                time.sleep(min(wait, _WAIT_SECONDS_MAX) * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
        return self.tweets.CreateTweet(request)

    def home(
        self, *, page_size: int = 100, read_your_write_token: str = "", newer_than_id: int = 0
    ) -> Iterator[timeline_pb2.HomeTimelineItem]:
        """The whole home timeline, newest first, page by page as it is asked for. The token of `post` makes sure that
        the tweet is in it. `newer_than_id`: see `catch_up`."""

        def read(token: str) -> timeline_pb2.ListHomeTimelineResponse:
            return self.timelines.ListHomeTimeline(
                timeline_pb2.ListHomeTimelineRequest(
                    page_size=page_size,
                    page_token=token,
                    read_your_write_token=read_your_write_token,
                    newer_than_id=newer_than_id,
                )
            )

        for page in pages(read):
            yield from page.items

    def catch_up(self, known_ids: Collection[int]) -> list[timeline_pb2.HomeTimelineItem]:
        """What has come since, newest first. Give all `item_id`s that you have of the last minute before your newest: a
        tweet may come in *below* one that was read before it."""
        known = frozenset(known_ids)
        return [item for item in self.home(newer_than_id=max(known, default=0)) if item.item_id not in known]

    def watch(self, known_ids: Collection[int] = ()) -> Iterator[timeline_pb2.HomeTimelineItem]:
        """What comes to the home timeline, each once, without end: first what has come besides the items that you have
        (`known_ids`, as for `catch_up`); without any, all of it.

        A stream is short; the next one begins with what came since the newest item given out. After a gap this
        catches up by itself. Raises when nothing has answered 30 times.
        """
        newest, failures = max(known_ids, default=1), 0  # 0 would leave out what comes before a stream has begun
        seen = deque(sorted(known_ids), _SEEN_MAX)
        while True:
            try:
                for item in self._watched(newest):
                    failures = 0
                    if item.item_id not in seen:
                        seen.append(item.item_id)
                        newest = max(newest, item.item_id)
                        yield item
            except grpc.RpcError as error:
                failures += 1
                if explain(error).code not in _PASSING or failures > _WATCH_FAILURES_MAX:
                    raise
                time.sleep(min(0.1 * 2**failures, _WAIT_SECONDS_MAX))

    def _watched(self, newest: int) -> Iterator[timeline_pb2.HomeTimelineItem]:
        """The items of one stream, and what a gap has left out."""
        request = timeline_pb2.WatchHomeTimelineRequest(newer_than_id=newest)
        call = self.timelines.WatchHomeTimeline(request, timeout=_WATCH_SECONDS)
        try:
            for message in call:
                if message.HasField("gap"):
                    break
                if message.HasField("item"):
                    newest = max(newest, message.item.item_id)
                    yield message.item
            else:
                return
        finally:
            call.cancel()
        time.sleep(_GAP_SECONDS)
        # Oldest first: whatever ends it, the newest item given out is one up to which all were.
        yield from reversed(list(self.home(newer_than_id=newest)))

    def user_tweets(self, user_id: int, *, page_size: int = 100) -> Iterator[tweet_pb2.Tweet]:
        """An author's tweets, newest first."""

        def read(token: str) -> tweet_pb2.ListUserTweetsResponse:
            request = tweet_pb2.ListUserTweetsRequest(user_id=user_id, page_size=page_size, page_token=token)
            return self.tweets.ListUserTweets(request)

        for page in pages(read):
            yield from page.tweets

    def user(self, handle: str) -> graph_pb2.User:
        """A user by handle."""
        return self.graph.GetUser(graph_pb2.GetUserRequest(handle=handle)).user

    def users(self, user_ids: Sequence[int]) -> list[graph_pb2.User]:
        """Those of up to 100 users that exist, in the order asked for."""
        return list(self.graph.BatchGetUsers(graph_pb2.BatchGetUsersRequest(user_ids=user_ids)).users)
