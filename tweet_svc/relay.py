"""From the outbox to the event log: at least once, in order, bounded."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

from mesh import failpoints, metrics, tracing
from mesh.clock import Clock
from mesh.errors import StarlingError
from mesh.eventlog.port import LogFullError, Producer
from mesh.eventlog.topics import FANOUT_TASKS_SLOW, TWEET_FANOUT
from tweet_svc.core import to_event
from tweet_svc.store import OutboxRow, TweetStore

log = logging.getLogger(__name__)

KEEP_MS = 3_600_000
"""Published rows are kept so long: a log that lost its last moments gets them again."""
BATCH = 500
_SWEEP_SECONDS = 1.0
_PRUNE_SECONDS = 5.0
_MEASURE_SECONDS = 2.0
_BACKOFF_SECONDS = 0.5
_TRACES_MAX = 10_000


class Relay:
    """Publishes what is unpublished: nudged by each post, and by a sweep for what a crash left.

    What may wait has a loop of its own, so that others don't wait for it.
    """

    def __init__(self, store: TweetStore, producer: Producer, clock: Clock) -> None:
        self._store = store
        self._producer = producer
        self._clock = clock
        self._nudged = {slow: asyncio.Event() for slow in (False, True)}
        self._incarnation = ""
        self._looking = asyncio.Lock()
        self._traces: OrderedDict[int, str] = OrderedDict()

    def nudge(self, *, slow: bool = False, tweet_id: int = 0) -> None:
        """Something was written; of a tweet, if it is told, whose event goes on with the trace of the call at hand."""
        traceparent = tracing.current.get()
        if tweet_id and tracing.is_sampled(traceparent):
            # Kept here, not in the outbox: what a crash forgets of a trace is nobody's loss.
            self._traces[tweet_id] = traceparent
            if len(self._traces) > _TRACES_MAX:
                self._traces.popitem(last=False)
        self._nudged[slow].set()

    async def step(self, *, slow: bool = False) -> int:
        """Publish one batch; returns its size. Raises UnavailableError and LogFullError.

        A log that was restarted may have lost its last moments, together with the lists: the last hour goes out
        again, and readers of the log bear repeats.
        """
        incarnation, rows = await asyncio.gather(
            self._producer.incarnation(), self._store.unpublished(BATCH, slow=slow)
        )
        if incarnation != self._incarnation:
            incarnation = await self._republish()
            rows = await self._store.unpublished(BATCH, slow=slow)
        if rows:
            topic = FANOUT_TASKS_SLOW if slow else TWEET_FANOUT
            records = [
                (str(row.author_id).encode(), to_event(row, self._traces.get(row.tweet_id, "")).SerializeToString())
                for row in rows
            ]
            try:
                await self._producer.publish(topic.name, records)
            except LogFullError as error:
                # The others are in: again they'd fill the partitions that have room.
                await self._mark([row for i, row in enumerate(rows) if i not in error.refused], incarnation)
                raise
            if failpoints.ARMED:
                failpoints.hit("before-mark-published")
            await self._mark(rows, incarnation)
            metrics.events_published.inc(len(rows))
            for row in rows:
                self._traces.pop(row.tweet_id, None)
        return len(rows)

    async def _republish(self) -> str:
        """What the log before may have lost counts as unpublished. Returns the log's name."""
        async with self._looking:
            incarnation = await self._producer.incarnation()
            again = await self._store.republish(incarnation, self._clock.now_ms() - KEEP_MS)
            self._incarnation = incarnation
        if again:
            log.warning("the event log, or what it fills, was restarted: %d events are published again", again)
        return incarnation

    async def _mark(self, rows: Sequence[OutboxRow], incarnation: str) -> None:
        if not await self._store.mark_published(rows, incarnation, self._clock.now_ms()):
            self._incarnation = ""  # Another relay has seen another log: look again.

    async def prune(self) -> None:
        """Forget what is published and old, and request ids past their time. Raises UnavailableError."""
        now = self._clock.now_ms()
        while await self._store.prune(now - KEEP_MS, now):  # Fewer each time.
            pass

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`."""
        await asyncio.gather(self._run(stopping, slow=False), self._run(stopping, slow=True), self._measure(stopping))

    async def _measure(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            with suppress(StarlingError):
                metrics.outbox_depth.set(await self._store.outbox_depth())
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), _MEASURE_SECONDS)

    async def _run(self, stopping: asyncio.Event, *, slow: bool) -> None:
        pruned = self._clock.monotonic()
        nudged = self._nudged[slow]
        while not stopping.is_set():
            nudged.clear()
            try:
                published = await self.step(slow=slow)
                if not slow and self._clock.monotonic() - pruned > _PRUNE_SECONDS:
                    pruned = self._clock.monotonic()
                    await self.prune()
            except (StarlingError, LogFullError) as error:
                log.warning("the relay waits: %s", error)
                metrics.relay_retries.inc()
                with suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), _BACKOFF_SECONDS)
                continue
            if published < BATCH:
                with suppress(TimeoutError):
                    await asyncio.wait_for(nudged.wait(), _SWEEP_SECONDS)
