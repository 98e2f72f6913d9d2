"""The worker: takes events from the log, acts as `core.plan` says, and only then acknowledges.

Every effect may be repeated, so that is all there is to a crash: the event comes again. What is unavailable is
tried without end, in place; only what can never succeed goes to the dead letters.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from fanout_svc import core
from fanout_svc.core import Action, Decision, InvalidEventError
from mesh.caches.bodies import Bodies
from mesh.clock import Clock
from mesh.errors import NotFoundError, UnavailableError
from mesh.eventlog.port import Consumer, Record
from mesh.ids import time_ms_of
from mesh.timelines import port as lists
from mesh.timelines.port import Timelines

log = logging.getLogger(__name__)

IN_HAND_MAX = 32
_POLL_SECONDS = 0.5
_RENEW_SECONDS = 3.0
_BACKOFF_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
_DELAYS_KEPT = 10_000

Followers = Callable[[int], AsyncIterator[Sequence[int]]]
"""All followers of an author, chunk by chunk. Raises NotFoundError and UnavailableError."""


@dataclass(slots=True)
class Figures:
    """What one worker did since it started. `delays`: (seconds, deliveries) of its last pushes."""

    events: int = 0
    deliveries: int = 0
    deliveries_to_lists: int = 0
    retries: int = 0
    delay_max_seconds: float = 0.0
    delays: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_DELAYS_KEPT))

    def delivered(self, followers: int, lists_hit: int, delay_seconds: float) -> None:
        """One push to some followers came through."""
        self.deliveries += followers
        self.deliveries_to_lists += lists_hit
        self.delay_max_seconds = max(self.delay_max_seconds, delay_seconds)
        self.delays.append((delay_seconds, followers))

    def percentiles(self, *shares: float) -> list[float]:
        """Delays in seconds below which these shares (ascending, 0 to 1) of the deliveries lie; 0 without any."""
        ordered = sorted(self.delays)
        total = sum(weight for _, weight in ordered)
        found: list[float] = []
        seen = 0
        for delay, weight in ordered:
            seen += weight
            while len(found) < len(shares) and seen >= shares[len(found)] * total:
                found.append(delay)
        return found or [0.0] * len(shares)


class Worker:
    """One member of the group. Memory is bounded: IN_HAND_MAX events, one chunk of followers each."""

    def __init__(
        self, *, consumer: Consumer, timelines: Timelines, bodies: Bodies, followers: Followers, clock: Clock
    ) -> None:
        self._consumer = consumer
        self._timelines = timelines
        self._bodies = bodies
        self._followers = followers
        self._clock = clock
        self._in_hand: dict[asyncio.Task[None], Record] = {}
        self.figures = Figures()

    async def process(self, record: Record) -> None:
        """Act on one record, then acknowledge it. Raises UnavailableError: it is to be tried again."""
        try:
            decision = core.plan(core.read(record.value))
            await self._act(decision)
        except InvalidEventError as error:
            await self._bury(record, str(error))
        except NotFoundError as error:
            await self._bury(record, f"unknown author: {error}")
        else:
            await self._consumer.ack([record])
            self.figures.events += 1

    async def _act(self, decision: Decision) -> None:
        if decision.action is Action.ERASE:
            await self._bodies.put_deleted(decision.tweet_id, decision.version)
            return
        # What tweet_svc did inline, again, before anything else and before the event is acknowledged: an outage
        # during the post heals itself here.
        own = [lists.home(decision.author_id), lists.author(decision.author_id)]
        await self._timelines.push(own, [decision.tweet_id])
        async for chunk in self._followers(decision.author_id):
            keys = [lists.home(follower_id) for follower_id in chunk]
            hit = await self._timelines.push(keys, [decision.tweet_id])
            delay_ms = self._clock.now_ms() - time_ms_of(decision.tweet_id)
            self.figures.delivered(len(keys), hit, max(0, delay_ms) / 1_000)

    async def _bury(self, record: Record, cause: str) -> None:
        log.error("dead letter from %s/%d at %s: %s", record.topic, record.partition, record.position, cause)
        await self._consumer.dead_letter(record, cause)

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`; then what is in hand is finished, or left to others when this is cancelled."""
        renewing = asyncio.create_task(self._renew())
        try:
            while not stopping.is_set():
                if not await self._take(stopping):
                    await asyncio.wait(self._in_hand, return_when=asyncio.FIRST_COMPLETED)
            if self._in_hand:
                await asyncio.wait(self._in_hand)
        finally:
            renewing.cancel()
            for task in self._in_hand:
                task.cancel()

    async def _take(self, stopping: asyncio.Event) -> bool:
        """Poll for as many as there is room for; False when there is none."""
        room = IN_HAND_MAX - len(self._in_hand)
        if room == 0:
            return False
        try:
            records = await self._consumer.poll(room, _POLL_SECONDS)
        except UnavailableError as error:
            log.warning("the event log is away: %s", error)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), _POLL_SECONDS)
            return True
        for record in records:
            task = asyncio.create_task(self._until_done(record, stopping))
            self._in_hand[task] = record
            task.add_done_callback(self._done)
        return True

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._in_hand[task]
        if not task.cancelled() and (error := task.exception()):
            # A fault of ours: the record stays unacknowledged and comes again.
            log.error("a record failed", exc_info=error)

    async def _until_done(self, record: Record, stopping: asyncio.Event) -> None:
        attempt = 0
        while True:
            try:
                return await self.process(record)
            except UnavailableError as error:
                self.figures.retries += 1
                log.warning("again: %s", error)
            if stopping.is_set():
                return None  # unacknowledged: another member takes it
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), _BACKOFF_SECONDS[min(attempt, len(_BACKOFF_SECONDS) - 1)])
            attempt += 1

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            with suppress(UnavailableError):
                await self._consumer.renew(list(self._in_hand.values()))
