"""TimelineService: reads a page of a home timeline, and has lists made and mended behind the reads."""

import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from mesh import checks, principals
from mesh.caches.bodies import Bodies
from mesh.caches.viewer_versions import ViewerVersions
from mesh.clock import Clock
from mesh.deadlines import remaining
from mesh.errors import AbortedError, InvalidArgumentError, UnavailableError
from mesh.ids import ID_MAX
from mesh.page_tokens import PageTokens
from mesh.server import OPERATORS, USERS, Allowed
from mesh.timelines import port as lists
from mesh.timelines.port import ListView
from mesh.timelines.valkey import ValkeyTimelines, parse_view
from mesh.timelines.warming import Content, Warmer, rebuild
from mesh.valkey import Valkey
from starling.timeline.v1 import timeline_pb2, timeline_pb2_grpc
from starling.tweet.v1 import tweet_pb2
from timeline_svc import core
from timeline_svc.author_lists import AuthorLists
from timeline_svc.core import Page, Verdict, ViewerContext
from timeline_svc.peers import Graph, Tweets
from timeline_svc.pull_authors import PullAuthors
from timeline_svc.sources import HomeSources, home_ids, newest

log = logging.getLogger(__name__)

_SERVICE = "/starling.timeline.v1.TimelineService/"
ALLOWED: Allowed = {_SERVICE + "ListHomeTimeline": USERS, _SERVICE + "RebuildHomeTimeline": OPERATORS}

_RPC = "ListHomeTimeline"
_READ_AHEAD = 8
"""Entries beyond the page: one shows whether more follow, the others make up for filtered ones."""
_CONTEXTS_MAX = 10_000
_CONTEXT_SECONDS = 15.0
"""How long a context serves without graph_svc."""
_AUTHORS_MAX = 100_000
_AUTHOR_SECONDS = 60.0
_TIME_SECONDS = 10.0


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
        clock: Clock,
    ) -> None:
        self._pull_authors = pull_authors
        self._author_lists = AuthorLists(timelines, tweets, clock)
        self._valkey = valkey
        self._timelines = timelines
        self._versions = versions
        self._bodies = bodies
        self._graph = graph
        self._tweets = tweets
        self._page_tokens = page_tokens
        self._clock = clock
        self._contexts: OrderedDict[int, tuple[ViewerContext, float]] = OrderedDict()
        self._authors: OrderedDict[int, tuple[timeline_pb2.Author, float]] = OrderedDict()
        self.warmer = Warmer(self.warm)
        self.author_warmer = self._author_lists.warmer

    async def ListHomeTimeline(
        self, request: timeline_pb2.ListHomeTimelineRequest, context: Any
    ) -> timeline_pb2.ListHomeTimelineResponse:
        """See the proto."""
        viewer_id = principals.current.get().user_id
        size = checks.page_size(request.page_size)
        down_to = core.catch_up_bound(request.newer_than_id) if request.newer_than_id else 0
        binding = (viewer_id, request.newer_than_id)
        below = ID_MAX
        if request.page_token:
            below = self._page_tokens.decode(_RPC, binding, request.page_token)
        own_tweet_id = _own_tweet(request.read_your_write_token)
        count = 2 * self._timelines.cap if request.page_token else size + _READ_AHEAD
        pulled = self._pull_authors.known()  # Before the list: whom it knows as pushed, the list has.
        view, version = await self._look(viewer_id, count)
        viewer = await self._viewer(viewer_id, version)
        sources = await self._sources(viewer, view, pulled)
        page, more = await self._page(viewer, sources, Page(size, down_to), below)
        if own_tweet_id and not request.page_token and page.lacks(own_tweet_id, more=more):
            sources = replace(sources, beside=[*sources.beside, viewer_id])
            page, more = await self._page(viewer, sources, Page(size, down_to), below)
        authors = await self._authors_of(page.items)
        return timeline_pb2.ListHomeTimelineResponse(
            items=[timeline_pb2.HomeTimelineItem(tweet=tweet, author=authors[tweet.author_id]) for tweet in page.items],
            next_page_token=self._page_tokens.encode(_RPC, binding, page.last_id) if more else "",
        )

    async def _look(self, viewer_id: int, count: int) -> tuple[ListView | None, int | None]:
        """The list and the copy of the viewer's version, in one round trip; without Valkey, neither."""
        commands = self._timelines.read_commands(lists.home(viewer_id), count)
        try:
            replies = await self._valkey.pipeline([*commands, self._versions.get_command(viewer_id)], atomic=True)
        except UnavailableError:
            return None, None
        return parse_view(replies, count), self._versions.parse(replies[-1])

    async def _viewer(self, viewer_id: int, version: int | None) -> ViewerContext:
        """The viewer's context: the one at hand while the copy of the version says that it's right, else afresh."""
        now = self._clock.monotonic()
        known = self._contexts.get(viewer_id)
        if known and known[0].version == version:
            self._remember(known[0], now)
            return known[0]
        lease = None
        if version is None:
            with suppress(UnavailableError):
                lease = await self._versions.lease(viewer_id)
        # Not one that is known to be over.
        fallback = known[0] if known and now - known[1] < _CONTEXT_SECONDS else None
        if fallback and version is not None and version > fallback.version:
            fallback = None
        try:
            viewer = await self._graph.viewer_context(viewer_id, wait=fallback is None)
        except UnavailableError:
            if fallback:
                return fallback
            raise
        self._remember(viewer, now)
        if lease:
            with suppress(UnavailableError):
                await self._versions.fill(lease, viewer.version)
        return viewer

    def _remember(self, viewer: ViewerContext, now: float) -> None:
        known = self._contexts.get(viewer.viewer_id)
        if known is None or known[0].version <= viewer.version:
            self._contexts[viewer.viewer_id] = (viewer, now)
            self._contexts.move_to_end(viewer.viewer_id)
        if len(self._contexts) > _CONTEXTS_MAX:
            self._contexts.popitem(last=False)

    async def _sources(
        self, viewer: ViewerContext, view: ListView | None, pulled: frozenset[int] | None
    ) -> HomeSources:
        """What this viewer's page is read from; what is missing is made behind the read."""
        found = core.assess(view.record if view else None, viewer, self._clock.now_ms())
        if found.verdict in {Verdict.BUILD, Verdict.REPLACE} or found.uncovered:
            self.warmer.enqueue(viewer.viewer_id)
        if found.verdict is not Verdict.SERVE or pulled is None:
            return HomeSources(None)
        beside = set(found.uncovered)
        to_pull = [f for f in viewer.followee_ids if f in pulled and f not in beside] if pulled else []
        return HomeSources(view, found.uncovered, await self._author_lists.read(to_pull))

    async def _page(self, viewer: ViewerContext, sources: HomeSources, page: Page, below_id: int) -> tuple[Page, bool]:
        """The page, filled, and whether ids remain below its last one."""
        async with aclosing(home_ids(self._timelines, self._tweets, viewer, sources, below_id)) as ids:
            return await self._fill(page, ids, viewer)

    async def _fill(self, page: Page, ids: AsyncIterator[int], viewer: ViewerContext) -> tuple[Page, bool]:
        end = time.monotonic() + remaining(_TIME_SECONDS) * core.DEADLINE_SHARE
        while not page.full:
            count = page.wanted()
            batch = await _take(ids, count, page.down_to)
            bodies = await self._hydrate(batch)
            for at, tweet_id in enumerate(batch, 1):
                page.examine(tweet_id, bodies.get(tweet_id), viewer)
                if page.full and at < len(batch):
                    return page, True
            if len(batch) < count:
                return page, False
            if time.monotonic() > end:
                break
        return page, bool(await _take(ids, 1, page.down_to))

    async def _hydrate(self, tweet_ids: Sequence[int]) -> dict[int, tweet_pb2.Tweet | None]:
        """Bodies, from the cache where it has them; None or nothing for what is deleted or missing."""
        found: dict[int, tweet_pb2.Tweet | None] = {}
        with suppress(UnavailableError):
            found |= await self._bodies.get(tweet_ids)
        if missed := [tweet_id for tweet_id in tweet_ids if tweet_id not in found]:
            found |= await self._tweets.hydrate(missed)
        return found

    async def _authors_of(self, tweets: Sequence[tweet_pb2.Tweet]) -> dict[int, timeline_pb2.Author]:
        """What a page shows of its authors. Without graph_svc, those not known here come without their names."""
        now = self._clock.monotonic()
        wanted = {tweet.author_id for tweet in tweets}
        known = {user_id: self._authors[user_id] for user_id in wanted if user_id in self._authors}
        if stale := sorted(u for u in wanted if u not in known or now - known[u][1] > _AUTHOR_SECONDS):
            with suppress(UnavailableError):
                for user in await self._graph.users(stale):
                    author = timeline_pb2.Author(
                        user_id=user.user_id, handle=user.handle, display_name=user.display_name
                    )
                    known[user.user_id] = self._authors[user.user_id] = (author, now)
                    self._authors.move_to_end(user.user_id)
            while len(self._authors) > _AUTHORS_MAX:
                self._authors.popitem(last=False)
        return {u: known[u][0] if u in known else timeline_pb2.Author(user_id=u) for u in wanted}

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

        return await rebuild(self._timelines, lists.home(viewer_id), fetch)

    async def _cover(self, view: ListView, viewer: ViewerContext, uncovered: Sequence[int]) -> None:
        record = view.record
        ids, down_to = await newest(self._tweets, uncovered, record.floor, self._timelines.cap)
        await self._timelines.cover(
            lists.home(viewer.viewer_id), record.token, record.version, viewer.version, ids, down_to
        )

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


async def _take(ids: AsyncIterator[int], count: int, down_to: int) -> list[int]:
    """The next `count` ids, or fewer at the end: none is below `down_to`."""
    taken: list[int] = []
    while len(taken) < count:
        tweet_id = await anext(ids, None)
        if tweet_id is None or tweet_id < down_to:
            break
        taken.append(tweet_id)
    return taken


def _own_tweet(token: str) -> int:
    """The tweet of a read-your-write token, 0 without one. Raises InvalidArgumentError."""
    if not token:
        return 0
    if len(token) > 20 or not (token.isascii() and token.isdecimal()) or not 0 < int(token) <= ID_MAX:
        raise InvalidArgumentError("read_your_write_token", "Not a token that CreateTweet gave.")
    return int(token)
