"""The background job that moves authors between modes as counts and lag change, and has lists drained."""

import asyncio
import logging
from contextlib import suppress

from graph_svc.core import drain_event, push_below
from graph_svc.pressure import Pressure, Traffic, lag_that_counts, observe
from graph_svc.store import AuthorModes, Busy, FanoutPolicy
from mesh import metrics
from mesh.clock import Clock
from mesh.errors import StarlingError, UnavailableError
from mesh.eventlog.port import LagReader, LogFullError, Producer
from mesh.eventlog.topics import FANOUT_TASKS_SLOW

log = logging.getLogger(__name__)

KEEP_MS = 3_600_000
"""Drain tasks are kept so long after they were published: a log that lost its last moments gets them again."""
BATCH = 500
_STEP_SECONDS = 1.0
_LOOK_SECONDS = 0.5
_PRUNE_EVERY = 60


class ModeMover:
    """One step: look at the lag, move who is to be moved, then publish the drain tasks that aren't in the log.

    `fanout_lag`: of all topics with deliveries. `pull_threshold`: until an operator sets a policy.
    """

    def __init__(
        self, store: AuthorModes, producer: Producer, fanout_lag: LagReader, clock: Clock, pull_threshold: int
    ) -> None:
        self._store = store
        self._producer = producer
        self._fanout_lag = fanout_lag
        self._clock = clock
        self._configured = FanoutPolicy(pull_threshold)
        self._looked = float("-inf")
        self._traffic = Traffic()
        self.pressure = Pressure()
        """What lag makes of the policy now."""

    async def policy(self) -> FanoutPolicy:
        """The operator's policy, or the configured one. Raises UnavailableError."""
        return await self._store.fanout_policy() or self._configured

    def asked(self, author_id: int) -> None:
        """Fan-out asks for an author's mode: the author posts."""
        self._traffic.asked(author_id, self._clock.monotonic())

    async def step(self) -> int:
        """Returns how many authors moved and tasks went out: 0 when all is as it should be.

        Raises UnavailableError and LogFullError; authors may have moved then, and the next step goes on.
        """
        policy = await self.policy()
        await self._look(policy)
        now = self._clock.monotonic()
        in_force = self.pressure.threshold(policy)
        busy = Busy(self._traffic.authors(now), in_force)
        moved = await self._store.move_modes(
            policy.pull_threshold,
            push_below(self.pressure.push_threshold(policy, now)),
            self._clock.now_ms(),
            busy if in_force < policy.pull_threshold else None,
        )
        done = moved + await self._publish()
        metrics.mode_moves.inc(done)
        return done

    async def _look(self, policy: FanoutPolicy) -> None:
        now = self._clock.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        lag_seconds: float | None = None
        with suppress(UnavailableError):
            draining = self.pressure.slow and await self._store.is_draining()
            lags = await self._fanout_lag.lag()
            lag_seconds = lag_that_counts(self.pressure, lags, draining)
            for lag in lags:
                metrics.lag_messages.labels(lag.topic, lag.partition).set(lag.messages)
                metrics.lag_seconds.labels(lag.topic, lag.partition).set(lag.seconds)
        before, self.pressure = self.pressure, observe(self.pressure, now, lag_seconds, policy)
        metrics.pull_threshold.set(self.pressure.threshold(policy))
        metrics.pressure_stage.set(self.pressure.slow + self.pressure.halvings)
        if (before.slow, before.halvings) != (self.pressure.slow, self.pressure.halvings):
            log.warning(
                "fan-out is %.1f s behind: big authors' tasks are %s, the pull threshold in force is %d",
                self.pressure.lag_seconds,
                "slow" if self.pressure.slow else "as usual",
                self.pressure.threshold(policy),
            )

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
