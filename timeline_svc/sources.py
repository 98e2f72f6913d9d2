"""Descending streams of tweet ids, read lazily: the home list, the store, and their merge."""

import heapq
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing

from mesh.errors import UnavailableError
from mesh.ids import ID_MAX
from mesh.timelines import port as lists
from mesh.timelines.port import ListState, ListView, Timelines
from timeline_svc.core import ViewerContext
from timeline_svc.peers import Tweets

_STORE_FIRST = 64
_STORE_MOST = 1_000


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


class HomeIds:
    """The ids of one viewer's home timeline below an id, as an async iterator.

    `view`: the list as it was read, if it may serve; `uncovered`: followees that it doesn't cover.
    `own`: take the viewer's own ids from the store too (read-your-write).
    """

    def __init__(
        self,
        *,
        timelines: Timelines,
        tweets: Tweets,
        viewer: ViewerContext,
        view: ListView | None,
        uncovered: Sequence[int],
        below_id: int,
        own: bool = False,
    ) -> None:
        self._timelines = timelines
        self._tweets = tweets
        self._viewer = viewer
        self._view = view
        self._uncovered = uncovered
        self._below_id = below_id
        self._own = own

    async def __aiter__(self) -> Ids:
        below = self._below_id
        view = self._view
        if view is not None and view.record.floor < below:
            from_list = _FromList(self._timelines, self._viewer.viewer_id, view, below)
            beside = [*self._uncovered, self._viewer.viewer_id] if self._own else self._uncovered
            sources = [aiter(from_list), stored(self._tweets, beside, below)]
            async with aclosing(merged(sources)) as upper:
                async for tweet_id in upper:
                    if tweet_id < from_list.exact_to:
                        break
                    yield tweet_id
            if from_list.exact_to == 0:
                return
            below = from_list.exact_to
        async with aclosing(stored(self._tweets, self._viewer.authors(), below)) as lower:
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
        self.exact_to = rest.record.floor
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
