"""TimelineService: pages and live news of home timelines, and lists made and mended behind the reads."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from mesh import checks, metrics, principals
from mesh.caches.bodies import Bodies
from mesh.caches.counts import Counts
from mesh.caches.viewer_versions import ViewerVersions
from mesh.clock import Clock
from mesh.errors import (
    AbortedError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
)
from mesh.ids import ID_MAX
from mesh.media import MediaUrls
from mesh.page_tokens import PageTokens
from mesh.server import OPERATORS, USERS, Allowed
from mesh.timelines import port as lists
from mesh.timelines.port import ListView
from mesh.timelines.valkey import ValkeyTimelines
from mesh.timelines.warming import Content, Warmer, rebuild
from mesh.valkey import Valkey
from starling.timeline.v1 import timeline_pb2, timeline_pb2_grpc
from timeline_svc import core
from timeline_svc.author_lists import AuthorLists
from timeline_svc.core import Verdict, ViewerContext
from timeline_svc.live import Live, Watch
from timeline_svc.peers import Graph, Tweets
from timeline_svc.pull_authors import PullAuthors
from timeline_svc.reader import HomeReader, Place
from timeline_svc.sampler import Sampler
from timeline_svc.sources import newest

log = logging.getLogger(__name__)

_SERVICE = "/starling.timeline.v1.TimelineService/"
ALLOWED: Allowed = {
    _SERVICE + "ListHomeTimeline": USERS,
    _SERVICE + "WatchHomeTimeline": USERS,
    _SERVICE + "RebuildHomeTimeline": OPERATORS,
    _SERVICE + "VerifyHomeTimeline": OPERATORS,
    _SERVICE + "ExplainHomeTimelineItem": USERS | OPERATORS,
}

_REBUILT, _COVERED = metrics.lists_made.labels("rebuild"), metrics.lists_made.labels("cover")
_RPC = "ListHomeTimeline"
_CATCH_UP_PAGE = 100
_CATCH_UP_MAX = 500
_WATCH_SECONDS = 8.0
"""A watch ends after so long, within the grace that an old connection has; the client calls again."""
_POLL_SECONDS = 1.0
"""How often pulled authors are looked at for a watch."""
_HEARTBEAT_SECONDS = 3.0
_SENT_MAX = 2_000


class TimelineService(timeline_pb2_grpc.TimelineServiceServicer):
    """Ports come as arguments; see the proto for what each method does."""

    def __init__(
        self,
        *,
        valkey: Valkey,
        timelines: ValkeyTimelines,
        versions: ViewerVersions,
        bodies: Bodies,
        graph: Graph,
        tweets: Tweets,
        page_tokens: PageTokens,
        pull_authors: PullAuthors,
        live: Live,
        media: MediaUrls,
        clock: Clock,
    ) -> None:
        self._timelines = timelines
        self._graph = graph
        self._tweets = tweets
        self._page_tokens = page_tokens
        self._live = live
        self._clock = clock
        self.stopping = asyncio.Event()
        """Set when the process stops: watches end then, so that nothing waits for them."""
        author_lists = AuthorLists(timelines, tweets, clock)
        self.warmer = Warmer(self.warm)
        self.author_warmer = author_lists.warmer
        self._reader = HomeReader(
            valkey=valkey,
            timelines=timelines,
            versions=versions,
            bodies=bodies,
            counts=Counts(valkey),
            graph=graph,
            tweets=tweets,
            author_lists=author_lists,
            pull_authors=pull_authors,
            clock=clock,
            media=media,
            missed=self.warmer.enqueue,
        )
        self.sampler = Sampler(self._reader, clock)

    async def ListHomeTimeline(
        self, request: timeline_pb2.ListHomeTimelineRequest, context: Any
    ) -> timeline_pb2.ListHomeTimelineResponse:
        """See the proto."""
        viewer_id = principals.current.get().user_id
        size = checks.page_size(request.page_size)
        down_to = core.catch_up_bound(request.newer_than_id) if request.newer_than_id else 0
        binding = (viewer_id, request.newer_than_id)
        own_tweet_id = _own_tweet(request.read_your_write_token)
        place = Place()
        if request.page_token:
            place = Place(*self._page_tokens.decode_with_known(_RPC, binding, request.page_token))
        page = await self._reader.page(viewer_id, size, place, down_to=down_to, own_tweet_id=own_tweet_id)
        after = page.after
        token = self._page_tokens.encode(_RPC, binding, after.below_id, after.retweeted) if after else ""
        return timeline_pb2.ListHomeTimelineResponse(items=page.items, next_page_token=token)

    async def WatchHomeTimeline(
        self, request: timeline_pb2.WatchHomeTimelineRequest, context: Any
    ) -> AsyncIterator[timeline_pb2.WatchHomeTimelineResponse]:
        """See the proto. What comes while the catch-up is read waits."""
        viewer_id = principals.current.get().user_id
        await self._reader.items(viewer_id, ())  # Unknown users are told so.
        if not self._live.has_room(viewer_id):  # Nothing is awaited until it is taken.
            raise ResourceExhaustedError("Too many watch here.", retry_after_seconds=5.0, reason="WATCHES_FULL")
        sent = _Sent(request.newer_than_id)
        with self._live.watch(viewer_id) as watch:
            bounds = dict(await self._reader.pulled_bounds(viewer_id))
            for message in await self._caught_up(viewer_id, request.newer_than_id, sent):
                yield message
            end = time.monotonic() + _WATCH_SECONDS
            said = time.monotonic()
            while time.monotonic() < end and not self.stopping.is_set():
                messages = await self._news(watch, bounds, sent)
                if not messages and time.monotonic() - said > _HEARTBEAT_SECONDS:
                    messages = [timeline_pb2.WatchHomeTimelineResponse(heartbeat=timeline_pb2.WatchHeartbeat())]
                for message in messages:
                    said = time.monotonic()
                    yield message

    async def _caught_up(
        self, viewer_id: int, newer_than_id: int, sent: "_Sent"
    ) -> list[timeline_pb2.WatchHomeTimelineResponse]:
        """What came since an item was the newest known, oldest first, so that whoever is cut off knows the newest up to
        which they have all; where that is a lot, a gap instead."""
        items: list[timeline_pb2.HomeTimelineItem] = []
        place: Place | None = Place() if newer_than_id else None
        while place and len(items) < _CATCH_UP_MAX:
            down_to = core.catch_up_bound(newer_than_id)
            page = await self._reader.page(viewer_id, _CATCH_UP_PAGE, place, down_to=down_to)
            items += page.items
            place = page.after
        return [_gap()] if place else sent.messages(reversed(items))

    async def _news(
        self, watch: Watch, bounds: dict[int, int], sent: "_Sent"
    ) -> list[timeline_pb2.WatchHomeTimelineResponse]:
        """What was delivered, and what pulled authors posted (`bounds`: their newest ids so far), in a moment."""
        ids, gap = await watch.take(_POLL_SECONDS)
        messages = [_gap()] if gap else []
        try:
            for author_id, bound in (await self._reader.pulled_bounds(watch.viewer_id)).items():
                if bound > bounds.setdefault(author_id, bound):
                    # Their list may have been read before their newest id was: then the next look has it.
                    newer = await self._reader.newer(author_id, bounds[author_id])
                    bounds[author_id] = max(newer, default=bounds[author_id])
                    ids += newer
            if new := [tweet_id for tweet_id in ids if tweet_id not in sent.item_ids]:
                messages += sent.messages(reversed(await self._reader.items(watch.viewer_id, new)))
        except UnavailableError:
            messages.append(_gap())
        return messages

    async def warm(self, viewer_id: int) -> None:
        """Make or mend a viewer's list. Raises UnavailableError.

        The context is read afresh, and before the store: what was posted before the store is read is in what it
        answers; what is posted later finds the follow in the followers that fan-out reads.
        """
        view = await self._timelines.read(lists.home(viewer_id), 2 * self._timelines.cap)
        viewer = await self._graph.viewer_context(viewer_id)
        found = core.assess(view.record if view else None, viewer, self._clock.now_ms())
        match found.verdict:
            case Verdict.SERVE if view and found.uncovered:
                await self._cover(view, viewer, found.uncovered)
            case Verdict.BUILD if view:
                await self._rebuild(viewer_id)
            case Verdict.BUILD | Verdict.REPLACE:  # Without a view there may be one that can't be read.
                await self._timelines.drop(lists.home(viewer_id))
                await self._rebuild(viewer_id)

    async def _rebuild(self, viewer_id: int) -> bool:
        async def fetch() -> Content:
            viewer = await self._graph.viewer_context(viewer_id)
            ids, down_to = await newest(self._tweets, viewer.authors(), 0, self._timelines.cap)
            return Content(viewer.version, ids, down_to)

        made = await rebuild(self._timelines, lists.home(viewer_id), fetch)
        if made:
            _REBUILT.inc()
        return made

    async def _cover(self, view: ListView, viewer: ViewerContext, uncovered: Sequence[int]) -> None:
        record = view.record
        ids, down_to = await newest(self._tweets, uncovered, record.floor, self._timelines.cap)
        await self._timelines.cover(
            lists.home(viewer.viewer_id), record.token, record.version, viewer.version, ids, down_to
        )
        _COVERED.inc()

    async def RebuildHomeTimeline(
        self, request: timeline_pb2.RebuildHomeTimelineRequest, context: Any
    ) -> timeline_pb2.RebuildHomeTimelineResponse:
        """See the proto."""
        viewer_id = checks.required_id("viewer_id", request.viewer_id)
        await self._graph.viewer_context(viewer_id)
        key = lists.home(viewer_id)
        await self._timelines.drop(key)
        if not await self._rebuild(viewer_id):
            raise AbortedError("Somebody else is rebuilding this list.", reason="REBUILD_AT_WORK")
        view = await self._timelines.read(key, self._timelines.cap)
        return timeline_pb2.RebuildHomeTimelineResponse(entries=len(view.ids) if view else 0)

    async def VerifyHomeTimeline(
        self, request: timeline_pb2.VerifyHomeTimelineRequest, context: Any
    ) -> timeline_pb2.VerifyHomeTimelineResponse:
        """See the proto."""
        found = await self.sampler.compare(checks.required_id("viewer_id", request.viewer_id))
        return timeline_pb2.VerifyHomeTimelineResponse(
            compared=found.compared, missing_item_ids=found.missing, extra_item_ids=found.extra
        )

    async def ExplainHomeTimelineItem(
        self, request: timeline_pb2.ExplainHomeTimelineItemRequest, context: Any
    ) -> timeline_pb2.ExplainHomeTimelineItemResponse:
        """See the proto."""
        caller = principals.current.get()
        own = caller.user_id if caller.kind is principals.Kind.USER else 0
        viewer_id = checks.required_id("viewer_id", request.viewer_id or own)
        if own and viewer_id != own:
            raise PermissionDeniedError("Users may ask about their own home timeline.", reason="NOT_YOURS")
        return await self._reader.explain(viewer_id, checks.required_id("tweet_id", request.tweet_id))


class _Sent:
    """What one watch was told last: an item comes once, and of an original one retweet."""

    def __init__(self, newer_than_id: int) -> None:
        self.item_ids: deque[int] = deque([newer_than_id], _SENT_MAX)
        self._originals: deque[int] = deque(maxlen=core.RETWEETS_REMEMBERED)

    def messages(self, items: Iterable[timeline_pb2.HomeTimelineItem]) -> list[timeline_pb2.WatchHomeTimelineResponse]:
        """Those that are new; and they count as sent."""
        new: list[timeline_pb2.WatchHomeTimelineResponse] = []
        for item in items:
            retweet = item.HasField("retweeted_by")
            if item.item_id in self.item_ids or (retweet and item.tweet.tweet_id in self._originals):
                continue
            self.item_ids.append(item.item_id)
            if retweet:
                self._originals.append(item.tweet.tweet_id)
            new.append(timeline_pb2.WatchHomeTimelineResponse(item=item))
        return new


def _gap() -> timeline_pb2.WatchHomeTimelineResponse:
    return timeline_pb2.WatchHomeTimelineResponse(gap=timeline_pb2.WatchGap())


def _own_tweet(token: str) -> int:
    """The tweet of a read-your-write token, 0 without one. Raises InvalidArgumentError."""
    if not token:
        return 0
    if len(token) > 20 or not (token.isascii() and token.isdecimal()) or not 0 < int(token) <= ID_MAX:
        raise InvalidArgumentError("read_your_write_token", "Not a token that CreateTweet gave.")
    return int(token)
