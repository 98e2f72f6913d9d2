"""The background job that moves authors between modes as their counts change, and has lists drained."""

import asyncio
import logging
from contextlib import suppress

from graph_svc.core import drain_event, push_below
from graph_svc.store import AuthorModes
from mesh.clock import Clock
from mesh.errors import StarlingError
from mesh.eventlog.port import LogFullError, Producer
from mesh.eventlog.topics import FANOUT_TASKS_SLOW

log = logging.getLogger(__name__)

KEEP_MS = 3_600_000
"""Drain tasks are kept so long after they were published: a log that lost its last moments gets them again."""
BATCH = 500
_STEP_SECONDS = 1.0
_PRUNE_EVERY = 60


class ModeMover:
    """One step: move who is to be moved, then publish the drain tasks that aren't in the log."""

    def __init__(self, store: AuthorModes, producer: Producer, clock: Clock, pull_threshold: int) -> None:
        self._store = store
        self._producer = producer
        self._clock = clock
        self._pull_threshold = pull_threshold

    async def threshold(self) -> int:
        """The operator's threshold, or the configured one. Raises UnavailableError."""
        return await self._store.pull_threshold() or self._pull_threshold

    async def step(self) -> int:
        """Returns how many authors moved and tasks went out: 0 when all is as it should be.

        Raises UnavailableError and LogFullError; authors may have moved then, and the next step goes on.
        """
        threshold = await self.threshold()
        moved = await self._store.move_modes(threshold, push_below(threshold), self._clock.now_ms())
        return moved + await self._publish()

    async def _publish(self) -> int:
        now = self._clock.now_ms()
        incarnation = await self._producer.incarnation()
        await self._store.republish_drains(incarnation, now - KEEP_MS)
        tasks = await self._store.unpublished_drains(BATCH)
        if tasks:
            records = [(f"{task.author_id}:{task.bucket}".encode(), drain_event(task)) for task in tasks]
            await self._producer.publish(FANOUT_TASKS_SLOW.name, records)
            await self._store.mark_drains_published(tasks, incarnation, now)
        return len(tasks)

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`."""
        rounds = 0
        while not stopping.is_set():
            rounds += 1
            try:
                done = await self.step()
                if rounds % _PRUNE_EVERY == 0:
                    await self._store.prune_drains(self._clock.now_ms() - KEEP_MS)
            except (StarlingError, LogFullError) as error:
                log.warning("authors' modes wait: %s", error)
                done = 0
            if not done:
                with suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), _STEP_SECONDS)
