"""Snowflake ids (after Twitter's, 2010): 41 bits of ms since our epoch, 10 bits worker, 12 bits sequence.

Unique, and ordered by time; ties within a millisecond are settled by worker and sequence. The worker number
is leased from the durable store; its deadline is checked at *each* id, on the monotonic clock, so that
a process that was stopped for long can't go on with a number that somebody else has by now. The store keeps
an upper bound of the times used with each number, and its next holder starts above.
"""

from dataclasses import dataclass
from typing import Protocol

from mesh.clock import Clock
from mesh.errors import UnavailableError

EPOCH_MS = 1_735_689_600_000  # 2025-01-01T00:00:00Z
WORKER_BITS = 10
SEQUENCE_BITS = 12
WORKERS = 1 << WORKER_BITS
_SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1
ID_MAX = (1 << 64) - 1

LEASE_MS = 30_000
REST_MS = 2 * LEASE_MS
"""A released or lapsed number rests so long before somebody else gets it."""
_MARGIN_SECONDS = 5.0
BACKWARDS_MS_MAX = 1_000
"""A clock that steps back by at most this is waited out: ids go on from the highest time used."""

assert WORKER_BITS + SEQUENCE_BITS == 22
assert _MARGIN_SECONDS * 1_000 < LEASE_MS / 2


def time_ms_of(snowflake: int) -> int:
    """When an id was made, ms since the Unix epoch."""
    return (snowflake >> (WORKER_BITS + SEQUENCE_BITS)) + EPOCH_MS


def first_id_of(time_ms: int) -> int:
    """The smallest id of a millisecond; 0 before our epoch."""
    return max(0, time_ms - EPOCH_MS) << (WORKER_BITS + SEQUENCE_BITS)


@dataclass(frozen=True, slots=True)
class WorkerLease:
    """A worker number. `high_ms`: the highest time that may have been used with it; start above."""

    worker: int
    high_ms: int


class WorkerLeases(Protocol):
    """Worker numbers in the durable store. Both raise UnavailableError."""

    async def acquire_worker(self, holder: str, now_ms: int, high_ms: int) -> WorkerLease | None:
        """A number that nobody holds and that has rested, for LEASE_MS; None when all are taken.

        `high_ms`: no time above it will be used within this lease; the lease given back has the one before.
        """
        ...

    async def renew_worker(self, holder: str, worker: int, now_ms: int, high_ms: int) -> bool:
        """Hold it for another LEASE_MS and raise the bound to `high_ms`; False when it is lost."""
        ...

    async def release_worker(self, holder: str, worker: int, now_ms: int, high_ms: int) -> None:
        """Give it back; it rests first."""
        ...


class Snowflakes:
    """Makes ids with a leased worker number. Call `renew` several times a lease."""

    def __init__(self, leases: WorkerLeases, clock: Clock, holder: str) -> None:
        self._leases = leases
        self._clock = clock
        self._holder = holder
        self._worker = -1
        self._deadline = float("-inf")
        self._high_ms = 0
        self._last_ms = 0
        self._sequence = 0

    async def renew(self) -> None:
        """Renew the lease, or take another number when it is lost. Raises UnavailableError.

        The deadline counts from before the store was asked, so that it never ends after the store's.
        """
        asked = self._clock.monotonic()
        now = self._clock.now_ms()
        high = max(self._last_ms, now) + LEASE_MS
        if self._worker >= 0 and not await self._leases.renew_worker(self._holder, self._worker, now, high):
            self._worker, self._deadline = -1, float("-inf")
        if self._worker < 0:
            lease = await self._leases.acquire_worker(self._holder, now, high)
            if lease is None:
                raise UnavailableError("All worker numbers are taken.", reason="NO_WORKER_NUMBER")
            self._worker = lease.worker
            self._last_ms, self._sequence = max(self._last_ms, lease.high_ms), _SEQUENCE_MASK
        self._high_ms = high
        self._deadline = asked + LEASE_MS / 1_000 - _MARGIN_SECONDS

    async def release(self) -> None:
        """Give the number back. Raises UnavailableError."""
        if self._worker >= 0:
            worker, self._worker, self._deadline = self._worker, -1, float("-inf")
            now = self._clock.now_ms()
            await self._leases.release_worker(self._holder, worker, now, max(self._last_ms, now))

    def next_id(self) -> int:
        """A new id. Raises UnavailableError without a lease in force, or when the clock went far back."""
        if self._clock.monotonic() >= self._deadline:
            raise UnavailableError("The lease on the worker number has run out.", reason="NO_WORKER_NUMBER")
        now = self._clock.now_ms()
        if max(now, self._last_ms + 1) > self._high_ms:
            raise UnavailableError("The clock ran ahead of the lease.", reason="NO_WORKER_NUMBER")
        if now < self._last_ms - BACKWARDS_MS_MAX:
            raise UnavailableError("The clock went back.", reason="CLOCK_WENT_BACK")
        if now > self._last_ms:
            self._last_ms, self._sequence = now, 0
        elif self._sequence < _SEQUENCE_MASK:
            self._sequence += 1
        else:  # More than 4,096 in a ms, or a clock that stands: go on in the next ms.
            self._last_ms, self._sequence = self._last_ms + 1, 0
        return (
            (self._last_ms - EPOCH_MS) << (WORKER_BITS + SEQUENCE_BITS) | self._worker << SEQUENCE_BITS | self._sequence
        )
