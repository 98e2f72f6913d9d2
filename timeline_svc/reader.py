"""Reads pages of home timelines: which sources serve, their merge, bodies, and what the viewer may see."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from prometheus_client import Counter

from mesh import metrics
from mesh.caches.bodies import Bodies, Body
from mesh.caches.counts import Counts
from mesh.caches.viewer_versions import ViewerVersions
from mesh.clock import Clock
from mesh.deadlines import remaining
from mesh.errors import UnavailableError
from mesh.ids import ID_MAX
from mesh.media import MediaUrls
from mesh.timelines import port as lists
from mesh.timelines.port import ListView
from mesh.timelines.valkey import ValkeyTimelines, parse_view
from mesh.valkey import Valkey
from starling.timeline.v1 import timeline_pb2
from starling.tweet.v1 import tweet_pb2
from timeline_svc import core
from timeline_svc.author_lists import AuthorLists
from timeline_svc.core import Page, Shown, Verdict, ViewerContext
from timeline_svc.peers import Graph, Tweets
from timeline_svc.pull_authors import PullAuthors
from timeline_svc.sources import HomeSources, home_ids

_READ_AHEAD = 8
"""Entries beyond the page: one shows whether more follow, the others make up for filtered ones."""
_CONTEXTS_MAX = 10_000
_CONTEXT_IDS_MAX = 20_000_000
"""Of all contexts kept: 160 MB."""
_CONTEXT_SECONDS = 15.0
"""How long a context serves without graph_svc."""
_BLOCKERS_MAX = 1_000
"""Of one viewer, kept with the context."""
_AUTHORS_MAX = 100_000
_AUTHOR_SECONDS = 60.0
_TIME_SECONDS = 10.0


_FROM_LIST, _COVERING = metrics.home_reads_by["list"], metrics.home_reads_by["covering"]
_READS: Mapping[Verdict | None, Counter] = {
    None: metrics.home_reads_by["modes_unknown"],
    Verdict.BUILD: metrics.home_reads_by["missing"],
    Verdict.REPLACE: metrics.home_reads_by["replaced"],
    Verdict.WAIT: metrics.home_reads_by["building"],
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page begins: below an id, after retweets of these originals (see `core.Page`)."""

    below_id: int = ID_MAX
    retweeted: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class HomePage:
    """A page as it was read; `after`: where the next one begins, None after the last."""

    items: Sequence[timeline_pb2.HomeTimelineItem]
    after: Place | None


class HomeReader:
    """Ports come as arguments. `missed(viewer_id)` is told whose list is to be made or mended behind the read."""

    def __init__(
        self,
        *,
        valkey: Valkey,
        timelines: ValkeyTimelines,
        versions: ViewerVersions,
        bodies: Bodies,
        counts: Counts,
        graph: Graph,
        tweets: Tweets,
        author_lists: AuthorLists,
        pull_authors: PullAuthors,
        clock: Clock,
        media: MediaUrls,
        missed: Callable[[int], None],
    ) -> None:
        self._valkey = valkey
        self._timelines = timelines
        self._versions = versions
        self._bodies = bodies
        self._counts = counts
        self._graph = graph
        self._tweets = tweets
        self._author_lists = author_lists
        self._pull_authors = pull_authors
        self._clock = clock
        self._media = media
        self._missed = missed
        self._contexts: OrderedDict[int, tuple[ViewerContext, float]] = OrderedDict()
        self._context_ids = 0
        self._authors: OrderedDict[int, tuple[timeline_pb2.Author, float]] = OrderedDict()

    async def page(
        self, viewer_id: int, size: int, place: Place = Place(), *, down_to: int = 0, own_tweet_id: int = 0
    ) -> HomePage:
        """A page of a viewer's home timeline; `down_to`: nothing below it. `own_tweet_id`: what the viewer wrote, and
        is to see if its place is here. Raises UnavailableError, and NotFoundError for an unknown viewer."""
        first = place.below_id == ID_MAX
        pulled = self._pull_authors.known()  # Before the list: whom it knows as pushed, the list has.
        view, version = await self._look(viewer_id, size + _READ_AHEAD if first else 2 * self._timelines.cap)
        viewer = await self._viewer(viewer_id, version)
        sources = self._sources(viewer, view, pulled)
        page, more = await self._page(viewer, sources, Page(size, down_to, place.retweeted), place.below_id)
        if own_tweet_id and first and page.lacks(own_tweet_id, more=more):
            sources = replace(sources, beside=[*sources.beside, viewer_id])
            page, more = await self._page(viewer, sources, Page(size, down_to, place.retweeted), place.below_id)
        return HomePage(await self._dress(page.items, viewer), Place(page.last_id, page.retweeted) if more else None)

    async def page_of_stores(self, viewer_id: int, size: int, place: Place) -> tuple[set[int], int]:
        """The ids that `page` is to hold, without lists, copies of versions, or what is known of modes; and down to
        which id they are all (0: to the end). Raises as it does."""
        viewer = await self._graph.viewer_context(viewer_id)
        page, more = await self._page(viewer, HomeSources(None), Page(size, 0, place.retweeted), place.below_id)
        return {item.item_id for item in page.items}, page.last_id if more else 0

    def recent_viewers(self) -> list[int]:
        """Who read here lately."""
        return list(self._contexts)

    async def explain(self, viewer_id: int, tweet_id: int) -> timeline_pb2.ExplainHomeTimelineItemResponse:
        """See the proto. Raises UnavailableError, and NotFoundError for an unknown viewer."""
        viewer = await self._graph.viewer_context(viewer_id)
        tweet = (await self._tweets.hydrate([tweet_id])).get(tweet_id)
        original = (await self._originals([tweet], viewer)).get(tweet.retweeted_tweet_id) if tweet else None
        hidden = core.hidden_by(tweet, original, viewer)
        view = await self._timelines.read(lists.home(viewer_id), 2 * self._timelines.cap)
        source = self._source_of(tweet, viewer, view)
        return timeline_pb2.ExplainHomeTimelineItemResponse(
            source=timeline_pb2.ItemSource.Value(f"ITEM_SOURCE_{source}"),
            filter=timeline_pb2.ItemFilter.Value(f"ITEM_FILTER_{hidden.name}"),
            list_floor=view.record.floor if view else 0,
        )

    def _source_of(self, tweet: Body, viewer: ViewerContext, view: ListView | None) -> str:
        """Where a page finds a tweet. The cases, in order: nowhere; no list serves; a follow that isn't covered; a
        pulled author; below the list; in it, or not."""
        if tweet is None or not viewer.near(tweet.author_id):
            return "NONE"
        found = core.assess(view.record if view else None, viewer, self._clock.now_ms())
        pulled = self._pull_authors.known()
        if view is None or found.verdict is not Verdict.SERVE or pulled is None:
            return "REBUILT"
        if tweet.author_id in found.uncovered:
            return "UNCOVERED"
        if tweet.author_id in pulled and tweet.author_id != viewer.viewer_id:
            return "PULLED"
        if tweet.tweet_id < view.record.floor:
            return "BELOW_LIST"
        return "PUSHED" if tweet.tweet_id in view.ids else "LACKING"

    async def items(self, viewer_id: int, tweet_ids: Sequence[int]) -> Sequence[timeline_pb2.HomeTimelineItem]:
        """Those of some tweets, newest first, that the viewer may see now, wherever they were found."""
        _, version = await self._look(viewer_id, 0)
        viewer = await self._viewer(viewer_id, version)
        page, _ = await self._fill(Page(len(tweet_ids)), _each(sorted(set(tweet_ids), reverse=True)), viewer)
        return await self._dress(page.items, viewer)

    async def pulled_bounds(self, viewer_id: int) -> Mapping[int, int]:
        """The newest ids of the authors whom the viewer must pull, as far as they are known."""
        if not self._pull_authors.known():
            return {}
        _, version = await self._look(viewer_id, 0)
        viewer = await self._viewer(viewer_id, version)
        pulled = (self._pull_authors.known() or frozenset()).intersection(viewer.followee_ids)
        bounds = await self._author_lists.bounds(sorted(pulled))
        return {author_id: bound for author_id, bound in bounds.items() if bound is not None}

    async def newer(self, author_id: int, than_id: int) -> Sequence[int]:
        """A pulled author's ids above one, as far as their list tells."""
        view = (await self._author_lists.read([author_id]))[author_id]
        return [tweet_id for tweet_id in view.ids if tweet_id > than_id] if view else []

    async def _look(self, viewer_id: int, count: int) -> tuple[ListView | None, int | None]:
        """The list and the copy of the viewer's version, in one round trip; without Valkey, neither."""
        commands = self._timelines.read_commands(lists.home(viewer_id), count)
        try:
            replies = await self._valkey.pipeline([*commands, self._versions.get_command(viewer_id)], atomic=True)
        except UnavailableError:
            return None, None
        return parse_view(replies, count), self._versions.parse(viewer_id, replies[-1])

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
            self._context_ids += viewer.size - (known[0].size if known else 0)
            self._contexts[viewer.viewer_id] = (viewer, now)
            self._contexts.move_to_end(viewer.viewer_id)
        while len(self._contexts) > _CONTEXTS_MAX or self._context_ids > _CONTEXT_IDS_MAX:
            _, (dropped, _) = self._contexts.popitem(last=False)
            self._context_ids -= dropped.size

    def _sources(self, viewer: ViewerContext, view: ListView | None, pulled: frozenset[int] | None) -> HomeSources:
        """What this viewer's page is read from; what is missing is made behind the read."""
        found = core.assess(view.record if view else None, viewer, self._clock.now_ms())
        if found.verdict in {Verdict.BUILD, Verdict.REPLACE} or found.uncovered:
            self._missed(viewer.viewer_id)
        if found.verdict is not Verdict.SERVE or pulled is None:
            _READS[found.verdict if found.verdict is not Verdict.SERVE else None].inc()
            return HomeSources(None)
        beside = viewer.shown(found.uncovered)
        to_pull = pulled.intersection(viewer.followee_ids).difference(found.uncovered) if pulled else ()
        (_COVERING if found.uncovered else _FROM_LIST).inc()
        metrics.pull_width.observe(len(to_pull))
        return HomeSources(view, beside, viewer.shown(to_pull))

    async def _page(self, viewer: ViewerContext, sources: HomeSources, page: Page, below_id: int) -> tuple[Page, bool]:
        """The page, filled, and whether ids remain below its last one."""
        sources_ids = home_ids(self._timelines, self._author_lists, self._tweets, viewer, sources, below_id)
        async with aclosing(sources_ids) as ids:
            return await self._fill(page, ids, viewer)

    async def _fill(self, page: Page, ids: AsyncIterator[int], viewer: ViewerContext) -> tuple[Page, bool]:
        end = time.monotonic() + remaining(_TIME_SECONDS) * core.DEADLINE_SHARE
        while not page.full:
            count = page.wanted()
            batch = await _take(ids, count, page.down_to)
            bodies = await self._hydrate(batch)
            originals = await self._originals(bodies.values(), viewer)
            for at, tweet_id in enumerate(batch, 1):
                body = bodies.get(tweet_id)
                page.examine(tweet_id, body, viewer, originals.get(body.retweeted_tweet_id) if body else None)
                if page.full and at < len(batch):
                    return page, True
            if len(batch) < count:
                return page, False
            if time.monotonic() > end:
                break
        return page, bool(await _take(ids, 1, page.down_to))

    async def _originals(self, bodies: Iterable[Body], viewer: ViewerContext) -> dict[int, Body]:
        """The originals of those that are retweets; and the viewer knows which of their authors block them."""
        retweets = [body for body in bodies if body is not None and body.retweeted_tweet_id]
        if not retweets:
            return {}
        originals, _ = await asyncio.gather(
            self._hydrate(sorted({retweet.retweeted_tweet_id for retweet in retweets})),
            self._learn_blockers(viewer, {retweet.retweeted_user_id for retweet in retweets}),
        )
        return originals

    async def _learn_blockers(self, viewer: ViewerContext, user_ids: Collection[int]) -> None:
        """Raises UnavailableError: then it isn't known what may be shown."""
        if unknown := viewer.unknown_blockers(user_ids):
            blockers = await self._graph.blockers(viewer.viewer_id, unknown)
            viewer.blockers.update({user_id: user_id in blockers for user_id in unknown})
            known = self._contexts.get(viewer.viewer_id)
            if len(viewer.blockers) > _BLOCKERS_MAX and known and known[0] is viewer:
                # This read still needs them; later ones begin anew, with a context that is no younger.
                self._contexts[viewer.viewer_id] = (replace(viewer, blockers={}), known[1])

    async def _dress(self, items: Sequence[Shown], viewer: ViewerContext) -> list[timeline_pb2.HomeTimelineItem]:
        """The items with all that a page shows of them."""
        referred = {item.item_id: _references(item.tweet) for item in items}
        bodies: dict[int, Body] = {}
        with suppress(UnavailableError):  # The page doesn't hang on what its tweets refer to.
            found = await self._hydrate(sorted({tweet_id for ids in referred.values() for tweet_id in ids}))
            await self._learn_blockers(viewer, {body.author_id for body in found.values() if body})
            bodies = {i: body for i, body in found.items() if body and not viewer.hides(body.author_id)}
        authors = await self._authors_of(
            {item.tweet.author_id for item in items}
            | {item.retweeter_id for item in items if item.retweeter_id}
            | {body.author_id for body in bodies.values() if body}
        )

        for tweet in (*(item.tweet for item in items), *(body for body in bodies.values() if body)):
            tweet.media_urls[:] = self._media.urls(tweet.media_ids)

        def reference(tweet_id: int) -> timeline_pb2.HomeTimelineReference:
            body = bodies.get(tweet_id)
            author = authors[body.author_id] if body else None
            return timeline_pb2.HomeTimelineReference(tweet_id=tweet_id, tweet=body, author=author)

        return [
            timeline_pb2.HomeTimelineItem(
                item_id=item.item_id,
                tweet=item.tweet,
                author=authors[item.tweet.author_id],
                retweeted_by=authors.get(item.retweeter_id),
                references=[reference(tweet_id) for tweet_id in referred[item.item_id]],
            )
            for item in items
        ]

    async def _hydrate(self, tweet_ids: Sequence[int]) -> dict[int, Body]:
        """Bodies, from the cache where it has them; None or nothing for what is deleted or missing. With counts, unless
        those are hard to get."""
        if not tweet_ids:
            return {}
        found: dict[int, Body] = {}
        counts: dict[int, tweet_pb2.TweetCounts] = {}
        with suppress(UnavailableError):
            commands = [self._bodies.get_command(tweet_ids), self._counts.get_command(tweet_ids)]
            bodies, counted = await self._valkey.pipeline(commands)
            found, counts = self._bodies.parse(tweet_ids, bodies), self._counts.parse(tweet_ids, counted)
        missed = [tweet_id for tweet_id in tweet_ids if tweet_id not in found]
        uncounted = [i for i, body in found.items() if body and not body.retweeted_tweet_id and i not in counts]
        for tweet_id, body in found.items():
            if body and tweet_id in counts:
                body.counts.CopyFrom(counts[tweet_id])
        if missed:
            metrics.bodies_missed.inc(len(missed))
            found |= await self._tweets.hydrate([*missed, *uncounted])
        elif uncounted:
            with suppress(UnavailableError):
                found |= await self._tweets.hydrate(uncounted, at_once=True)
        return found

    async def _authors_of(self, wanted: Collection[int]) -> dict[int, timeline_pb2.Author]:
        """What a page shows of its authors. Without graph_svc, those not known here come without their names."""
        now = self._clock.monotonic()
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


async def _take(ids: AsyncIterator[int], count: int, down_to: int) -> list[int]:
    """The next `count` ids, or fewer at the end: none is below `down_to`."""
    taken: list[int] = []
    while len(taken) < count:
        tweet_id = await anext(ids, None)
        if tweet_id is None or tweet_id < down_to:
            break
        taken.append(tweet_id)
    return taken


async def _each(tweet_ids: Sequence[int]) -> AsyncIterator[int]:
    for tweet_id in tweet_ids:
        yield tweet_id


def _references(tweet: tweet_pb2.Tweet) -> list[int]:
    """What a tweet answers and quotes."""
    return [tweet_id for tweet_id in (tweet.in_reply_to_tweet_id, tweet.quoted_tweet_id) if tweet_id]
