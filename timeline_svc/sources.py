"""Descending streams of tweet ids, read lazily: the home list, the store, and their merge."""

import heapq
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Protocol

from mesh import metrics
from mesh.errors import UnavailableError
from mesh.ids import ID_MAX
from mesh.timelines import port as lists
from mesh.timelines.port import ListState, ListView, Timelines
from timeline_svc.core import ViewerContext
from timeline_svc.peers import Tweets

_STORE_FIRST = 64
_STORE_MOST = 1_000
_OPENED_AT_ONCE = 32
_PASSED_MAX = 64
"""Lists with newer ids than a page begins with: so many are opened for it, more are left to the store."""


Ids = AsyncGenerator[int, None]


async def stored(tweets: Tweets, author_ids: Sequence[int], below_id: int) -> Ids:
    """All ids of these authors below an id, from the store: a few first, since most pages need no more."""
    limit = _STORE_FIRST
    while author_ids:  # Each round goes further down, or ends.
        async with aclosing(tweets.author_ids(author_ids, below_id, limit)) as chunks:
            async for ids, exhausted in chunks:
                for tweet_id in ids:
                    yield tweet_id
                    below_id = tweet_id
                if exhausted:
                    return
        limit = min(limit * 4, _STORE_MOST)


async def newest(tweets: Tweets, author_ids: Sequence[int], floor: int, limit: int) -> tuple[list[int], int]:
    """The authors' newest ids from the store, at most `limit` and not below `floor`; and how far down the store was
    asked and answered."""
    ids: list[int] = []
    async with aclosing(stored(tweets, author_ids, 0)) as stream:
        async for tweet_id in stream:
            if tweet_id < floor:
                return ids, floor
            ids.append(tweet_id)
            if len(ids) == limit:
                return ids, tweet_id
    return ids, floor


async def merged(sources: Sequence[Ids]) -> Ids:
    """The sources' ids, descending, equal ones once. Reads no source further than it must, and closes them."""
    async with AsyncExitStack() as stack:
        for source in sources:
            await stack.enter_async_context(aclosing(source))
        heads = [(-head, i) for i, source in enumerate(sources) if (head := await anext(source, None)) is not None]
        heapq.heapify(heads)
        last = ID_MAX + 1
        while heads:
            negative, index = heads[0]
            if -negative != last:
                last = -negative
                yield last
            if (head := await anext(sources[index], None)) is None:
                heapq.heappop(heads)
            else:
                assert -negative > head, "a source descends strictly"
                heapq.heapreplace(heads, (-head, index))


class AuthorLists(Protocol):
    """Pulled authors' lists; see `author_lists.py`."""

    async def bounds(self, author_ids: Sequence[int]) -> Mapping[int, int | None]:
        """For each author an id that none of theirs is above: their newest (0: none at all); None: no list serves."""
        ...

    async def read(self, author_ids: Sequence[int]) -> Mapping[int, ListView | None]:
        """Each author's list; None where there is none that serves."""
        ...


async def pulled(tweets: Tweets, author_lists: AuthorLists, author_ids: Sequence[int], below_id: int) -> Ids:
    """The ids of pulled authors below an id: from each one's list, which is opened no sooner than its newest id may be
    the next, and continued by the store below what it is exact to. Where too many would have to be opened at once, and
    for those without a list, the store is read, for all of them together.

    So a viewer of thousands of them costs as many lists as their page needs, and their newest ids.
    """
    if not author_ids:
        return
    bounds = await author_lists.bounds(author_ids)
    unopened = deque(sorted(((bound, author_id) for author_id, bound in bounds.items() if bound), reverse=True))
    from_store = [author_id for author_id, bound in bounds.items() if bound is None]
    passed = [author_id for bound, author_id in unopened if bound >= below_id]
    if len(passed) > _PASSED_MAX:
        from_store += passed
        for _ in passed:
            unopened.popleft()
    async with AsyncExitStack() as stack:
        heads: list[tuple[int, int, Ids]] = []  # The author settles what can't be: no two have the same id.

        async def put(source: Ids, number: int) -> None:
            await stack.enter_async_context(aclosing(source))
            if (head := await anext(source, None)) is not None:
                heapq.heappush(heads, (-head, number, source))

        await put(stored(tweets, from_store, below_id), 0)
        while heads or unopened:
            if unopened and (not heads or min(unopened[0][0], below_id) >= -heads[0][0]):
                some = [unopened.popleft() for _ in range(min(len(unopened), _OPENED_AT_ONCE))]
                views = await author_lists.read([author_id for _, author_id in some])
                for bound, author_id in some:
                    # What came in meanwhile lies above what has been given: it is for the next read.
                    await put(_author_ids(tweets, author_id, views[author_id], min(below_id, bound + 1)), author_id)
                continue
            negative, number, source = heads[0]
            yield -negative
            if (head := await anext(source, None)) is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (-head, number, source))


async def _author_ids(tweets: Tweets, author_id: int, view: ListView | None, below_id: int) -> Ids:
    if view:
        for tweet_id in view.ids:
            if tweet_id < below_id:
                yield tweet_id
        below_id = min(below_id, view.record.floor if view.complete else view.ids[-1])
    if below_id:
        async with aclosing(stored(tweets, [author_id], below_id)) as rest:
            async for tweet_id in rest:
                yield tweet_id


@dataclass(frozen=True, slots=True)
class HomeSources:
    """What a home timeline is read from. `view`: the list as it was read, if it may serve; `beside`: authors to read
    from the store beside it (not covered yet; and oneself, to read what one wrote); `pulled`: authors to read from
    their own lists."""

    view: ListView | None
    beside: Sequence[int] = ()
    pulled: Sequence[int] = ()


async def home_ids(
    timelines: Timelines,
    author_lists: AuthorLists,
    tweets: Tweets,
    viewer: ViewerContext,
    sources: HomeSources,
    below_id: int,
) -> Ids:
    """The ids of one viewer's home timeline below an id."""
    view = sources.view
    if view is not None and view.record.floor < below_id:
        from_list = _FromList(timelines, viewer.viewer_id, view, below_id)
        all_sources = [
            aiter(from_list),
            stored(tweets, sources.beside, below_id),
            pulled(tweets, author_lists, sources.pulled, below_id),
        ]
        async with aclosing(merged(all_sources)) as upper:
            async for tweet_id in upper:
                if tweet_id < from_list.exact_to:
                    break
                yield tweet_id
        if from_list.exact_to == 0:
            return
        below_id = from_list.exact_to
        metrics.fall_throughs.inc()
    async with aclosing(stored(tweets, viewer.shown(viewer.authors()), below_id)) as lower:
        async for tweet_id in lower:
            yield tweet_id


class _FromList:
    """The ids in the home list below an id. At its end `exact_to` says how far down it was exact: below, nothing of
    this source counts."""

    def __init__(self, timelines: Timelines, viewer_id: int, view: ListView, below_id: int) -> None:
        self._timelines = timelines
        self._key = lists.home(viewer_id)
        self._view = view
        self._below_id = below_id
        self.exact_to = view.record.floor

    async def __aiter__(self) -> Ids:
        below = self._below_id
        for tweet_id in self._view.ids:
            if tweet_id < below:
                yield tweet_id
                below = tweet_id
        if self._view.complete:
            return
        rest = await self._reread()
        if rest is None:
            self.exact_to = below
            return
        # Trimmed meanwhile, its floor may lie above what was taken from the first view, which is exact so far down.
        self.exact_to = min(below, rest.record.floor)
        for tweet_id in rest.ids:
            if tweet_id < below:
                yield tweet_id

    async def _reread(self) -> ListView | None:
        """The whole list, if it still is the one that was judged: the same life, covering no less."""
        before = self._view.record
        try:
            view = await self._timelines.read(self._key, self._timelines.cap * 2)
        except UnavailableError:
            return None
        if view is None or not view.complete or view.record.state is not ListState.READY:
            return None
        same = view.record.token == before.token and view.record.version >= before.version
        return view if same else None
