"""The promise, watched: homes as readers get them are held against what the stores say."""

import asyncio
import logging
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from mesh import metrics
from mesh.clock import Clock
from mesh.errors import StarlingError
from mesh.ids import first_id_of
from timeline_svc.reader import HomeReader, Place

log = logging.getLogger(__name__)

IN_FLIGHT_MS = 60_000
"""What is younger may be on its way."""
PAGE_SIZE = 100
PAGES = 3
_AGAIN_SECONDS = 2.0
_SHOWN_MAX = 100


@dataclass(frozen=True, slots=True)
class Compared:
    """Ids that the stores say, in number; those missing in the pages, and those that have no place there."""

    compared: int
    missing: Sequence[int] = ()
    extra: Sequence[int] = ()

    @property
    def exact(self) -> bool:
        """Whether the promise is kept."""
        return not self.missing and not self.extra


class Sampler:
    """Compares. Bodies may come from the cache on both sides: it watches which ids there are, and their filters."""

    def __init__(self, reader: HomeReader, clock: Clock, again_seconds: float = _AGAIN_SECONDS) -> None:
        self._reader = reader
        self._clock = clock
        self._again_seconds = again_seconds

    async def compare(self, viewer_id: int) -> Compared:
        """The first pages, twice where they differ: what changes in between wasn't a fault. Raises UnavailableError,
        and NotFoundError for an unknown viewer."""
        first = await self._compare(viewer_id)
        if first.exact:
            return first
        await asyncio.sleep(self._again_seconds)
        second = await self._compare(viewer_id)
        return Compared(
            second.compared,
            sorted(set(first.missing) & set(second.missing), reverse=True)[:_SHOWN_MAX],
            sorted(set(first.extra) & set(second.extra), reverse=True)[:_SHOWN_MAX],
        )

    async def _compare(self, viewer_id: int) -> Compared:
        settled = first_id_of(self._clock.now_ms() - IN_FLIGHT_MS)
        shown: set[int] = set()
        stored: set[int] = set()
        place: Place | None = Place()
        for _ in range(PAGES):
            assert place is not None
            page = await self._reader.page(viewer_id, PAGE_SIZE, place)
            truth, exact_to = await self._reader.page_of_stores(viewer_id, PAGE_SIZE, place)
            items = {item.item_id for item in page.items}
            # As far down as both looked: one may be full sooner, by what is in flight.
            down_to = max(page.after.below_id if page.after else 0, exact_to)
            shown |= {item_id for item_id in items if down_to <= item_id < settled}
            stored |= {item_id for item_id in truth if down_to <= item_id < settled}
            place = page.after
            if place is None:
                break
        return Compared(len(stored), sorted(stored - shown), sorted(shown - stored))

    async def run(self, stopping: asyncio.Event, viewers_per_minute: float) -> None:
        """Until `stopping`; 0: nobody is looked at."""
        while not stopping.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), 60 / viewers_per_minute if viewers_per_minute else None)
                return
            if viewers := self._reader.recent_viewers():
                try:
                    await self._sample(random.choice(viewers))  # noqa: S311 - no secret
                except StarlingError as error:
                    log.debug("a home isn't compared: %s", error)

    async def _sample(self, viewer_id: int) -> None:
        found = await self.compare(viewer_id)
        metrics.samples.inc()
        if not found.exact:
            metrics.mismatches.inc()
            log.error(
                "the home of %d isn't what the stores say: missing %s, extra %s",
                viewer_id,
                list(found.missing),
                list(found.extra),
            )
