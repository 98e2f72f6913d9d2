"""Pulled authors' lists, copied in this process: a list that millions read is read once a second by each process."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from mesh.clock import Clock
from mesh.errors import UnavailableError
from mesh.timelines import port as lists
from mesh.timelines.port import ListState, ListView, Timelines
from mesh.timelines.warming import Content, Warmer, rebuild
from timeline_svc.core import COPY_AGE_MS
from timeline_svc.peers import Tweets
from timeline_svc.sources import newest

_COPIES_MAX = 2_000
_BOUNDS_MAX = 50_000


class AuthorLists:
    """Reads author lists; those that are missing are made behind the read."""

    def __init__(self, timelines: Timelines, tweets: Tweets, clock: Clock) -> None:
        self._timelines = timelines
        self._tweets = tweets
        self._clock = clock
        self._copies: OrderedDict[int, tuple[ListView, float]] = OrderedDict()
        self._bounds: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self.warmer = Warmer(self._make)

    async def bounds(self, author_ids: Sequence[int]) -> Mapping[int, int | None]:
        """For each author an id that none of theirs is above, as of COPY_AGE_MS ago at most: their newest (0: none at
        all); None: no list serves."""
        now = self._clock.monotonic()
        oldest = now - COPY_AGE_MS / 1_000
        bounds: dict[int, int | None] = {
            author_id: known[0]
            for author_id in author_ids
            if (known := self._bounds.get(author_id)) and known[1] > oldest
        }
        if missed := [author_id for author_id in author_ids if author_id not in bounds]:
            try:
                found = await self._timelines.bounds([lists.author(author_id) for author_id in missed])
            except UnavailableError:
                return bounds | dict.fromkeys(missed)
            for author_id, bound in zip(missed, found, strict=True):
                bounds[author_id] = bound
                if bound is None:
                    self.warmer.enqueue(author_id)
                else:
                    self._bounds[author_id] = (bound, now)
                    self._bounds.move_to_end(author_id)
            while len(self._bounds) > _BOUNDS_MAX:
                self._bounds.popitem(last=False)
        return bounds

    async def read(self, author_ids: Sequence[int]) -> dict[int, ListView | None]:
        """Each author's whole list, at most COPY_AGE_MS old; None where there is none that serves."""
        now = self._clock.monotonic()
        views: dict[int, ListView | None] = {}
        for author_id in author_ids:
            copy = self._copies.get(author_id)
            if copy and now - copy[1] < COPY_AGE_MS / 1_000:
                views[author_id] = copy[0]
        missed = [author_id for author_id in author_ids if author_id not in views]
        return views | await self._read(missed, now) if missed else views

    async def _read(self, author_ids: Sequence[int], now: float) -> dict[int, ListView | None]:
        try:
            found = await self._timelines.read_many(
                [lists.author(author_id) for author_id in author_ids], 2 * self._timelines.cap
            )
        except UnavailableError:
            return dict.fromkeys(author_ids)
        views: dict[int, ListView | None] = {}
        for author_id, view in zip(author_ids, found, strict=True):
            if view is None or view.record.state is not ListState.READY:
                views[author_id] = None
                self.warmer.enqueue(author_id)
                continue
            views[author_id] = view
            self._copies[author_id] = (view, now)
            self._copies.move_to_end(author_id)
        while len(self._copies) > _COPIES_MAX:
            self._copies.popitem(last=False)
        return views

    async def _make(self, author_id: int) -> None:
        async def fetch() -> Content:
            ids, down_to = await newest(self._tweets, [author_id], 0, self._timelines.cap)
            return Content(0, ids, down_to)

        await rebuild(self._timelines, lists.author(author_id), fetch)
