"""From the outbox to the event log: at least once, in order, bounded."""

import asyncio
import logging
from contextlib import suppress

from mesh import failpoints
from mesh.clock import Clock
from mesh.errors import StarlingError
from mesh.eventlog.port import LogFullError, Producer
from mesh.eventlog.topics import FANOUT_TASKS_SLOW, TWEET_FANOUT
from tweet_svc.core import to_event
from tweet_svc.store import TweetStore

log = logging.getLogger(__name__)

KEEP_MS = 3_600_000
"""Published rows are kept so long: a log that lost its last moments gets them again."""
BATCH = 500
_SWEEP_SECONDS = 1.0
_PRUNE_SECONDS = 5.0
_BACKOFF_SECONDS = 0.5


class Relay:
    """Publishes what is unpublished: nudged by each post, and by a sweep for what a crash left."""

    def __init__(self, store: TweetStore, producer: Producer, clock: Clock) -> None:
        self._store = store
        self._producer = producer
        self._clock = clock
        self._nudged = asyncio.Event()
        self._slow_again = 0.0

    def nudge(self) -> None:
        """Something was written."""
        self._nudged.set()

    async def step(self) -> int:
        """Publish one batch, and one of what may wait; returns their size. Raises UnavailableError and LogFullError.

        A log that was restarted may have lost its last moments, together with the lists: the last hour goes out
        again, and readers of the log bear repeats.
        """
        incarnation = await self._producer.incarnation()
        again = await self._store.republish(incarnation, self._clock.now_ms() - KEEP_MS)
        if again:
            log.warning("the event log, or what it fills, was restarted: %d events are published again", again)
        return await self._publish(incarnation) + await self._publish_slow(incarnation)

    async def _publish_slow(self, incarnation: str) -> int:
        """What may wait: its topic may be full, and then it is left alone for a while."""
        if self._clock.monotonic() < self._slow_again:
            return 0
        try:
            return await self._publish(incarnation, slow=True)
        except LogFullError as error:
            log.warning("what may wait waits: %s", error)
            self._slow_again = self._clock.monotonic() + _BACKOFF_SECONDS
            return 0

    async def _publish(self, incarnation: str, *, slow: bool = False) -> int:
        rows = await self._store.unpublished(BATCH, slow=slow)
        if rows:
            topic = FANOUT_TASKS_SLOW if slow else TWEET_FANOUT
            records = [(str(row.author_id).encode(), to_event(row).SerializeToString()) for row in rows]
            try:
                await self._producer.publish(topic.name, records)
            except LogFullError as error:
                # The others are in: again they'd fill the partitions that have room.
                rows = [row for number, row in enumerate(rows) if number not in error.refused]
                await self._store.mark_published(rows, incarnation, self._clock.now_ms())
                raise
            if failpoints.ARMED:
                failpoints.hit("before-mark-published")
            await self._store.mark_published(rows, incarnation, self._clock.now_ms())
        return len(rows)

    async def prune(self) -> None:
        """Forget what is published and old, and request ids past their time. Raises UnavailableError."""
        now = self._clock.now_ms()
        while await self._store.prune(now - KEEP_MS, now):  # Fewer each time.
            pass

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`."""
        pruned = self._clock.monotonic()
        while not stopping.is_set():
            self._nudged.clear()
            try:
                published = await self.step()
                if self._clock.monotonic() - pruned > _PRUNE_SECONDS:
                    pruned = self._clock.monotonic()
                    await self.prune()
            except (StarlingError, LogFullError) as error:
                log.warning("the relay waits: %s", error)
                with suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), _BACKOFF_SECONDS)
                continue
            if published < BATCH:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._nudged.wait(), _SWEEP_SECONDS)
