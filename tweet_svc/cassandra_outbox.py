"""The outbox on Cassandra: rows by (shard, lane, minute), and in memory those that this process has to publish.

A row comes before the rest of its write, and carries it whole. Its process keeps it in mind when the write is done, and
publishes from there. What a process that died has left is found by the sweep of any other: rows that are some seconds
old and not published. It completes their write, and only then lets them be published.

Nothing is deleted row by row, and no partition is read that is old: `outbox_minutes` tells which there are, from
`outbox_lows` on. The clocks only choose partitions; a clock that is wrong by less than ten minutes loses nothing.

A row is published when it says so in the log's present incarnation, or says that it was before `since_ms` of the last
change. So a new incarnation is one conditional write, and marks that come late, of the log that is gone, count for
nothing.
"""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mesh.cassandra import Cassandra, Statement, each
from mesh.clock import Clock
from mesh.errors import ResourceExhaustedError
from tweet_svc.store import OutboxRow

SHARDS = 8
_TAG_BITS = 12
_TAGS = 1 << (_TAG_BITS - 1)
_MINUTE_US = 60_000_000
_VOID = "void"
"""Marks a row whose write was overtaken: there is nothing to publish."""
_STALE_MS = 60_000
"""An event that isn't written so long after it got its number gets another."""
_CLOSED_MS = 600_000
"""A minute gets no rows any more so long after it."""
_SETTLED_MS = 15_000
_ADOPT_MAX = 10_000
_PRUNE_MAX = 20
assert _STALE_MS < _SETTLED_MS + _CLOSED_MS

_PUT = Statement("INSERT INTO outbox (shard, slow, minute, event_id, body) VALUES (?, ?, ?, ?, ?)")
_GET = Statement("SELECT body FROM outbox WHERE shard = ? AND slow = ? AND minute = ? AND event_id = ?")
_MARK = Statement("UPDATE outbox SET published = ? WHERE shard = ? AND slow = ? AND minute = ? AND event_id = ?")
_MINUTE = Statement(
    "SELECT event_id, published, body FROM outbox WHERE shard = ? AND slow = ? AND minute = ? AND event_id > ?"
)
_DROP = Statement("DELETE FROM outbox WHERE shard = ? AND slow = ? AND minute = ?")
_REGISTER = Statement("INSERT INTO outbox_minutes (shard, slow, minute, writer) VALUES (?, ?, ?, ?)")
_MINUTES = Statement("SELECT minute, writer FROM outbox_minutes WHERE shard = ? AND slow = ? AND minute >= ?")
_LOW = Statement("SELECT minute FROM outbox_lows WHERE shard = ? AND slow = ?")
_RAISE_LOW = Statement("INSERT INTO outbox_lows (shard, slow, minute) VALUES (?, ?, ?) USING TIMESTAMP ?")
_LOG = Statement("SELECT incarnation, since_ms FROM log_incarnations WHERE only = 1")
_LOG_FIRST = Statement(
    "INSERT INTO log_incarnations (only, incarnation, since_ms) VALUES (1, ?, ?) IF NOT EXISTS", conditional=True
)
_LOG_NEXT = Statement(
    "UPDATE log_incarnations SET incarnation = ?, since_ms = ? WHERE only = 1 IF incarnation = ?", conditional=True
)
STATEMENTS = (*(_PUT, _GET, _MARK, _MINUTE, _DROP, _REGISTER, _MINUTES, _LOW, _RAISE_LOW, _LOG, _LOG_FIRST, _LOG_NEXT),)

Complete = Callable[[int, dict[str, Any]], Awaitable[OutboxRow | None]]
"""Does a row's write, or does it again."""


@dataclass(frozen=True, slots=True)
class _Partition:
    shard: int
    slow: bool
    minute: int

    @property
    def key(self) -> tuple[int, bool, int]:
        return self.shard, self.slow, self.minute


def _partition(event_id: int) -> _Partition:
    """An event's number holds all: µs, the writer's tag, the lane."""
    tag = (event_id % (1 << _TAG_BITS)) >> 1
    return _Partition(tag % SHARDS, bool(event_id & 1), (event_id >> _TAG_BITS) // _MINUTE_US)


class Outbox:
    """`complete` does a row's write again: it gives what is to be published, None when the write was overtaken. `told`
    gives the same of a write that is done.

    `adopt_after_ms`: how old a row of others must be; 0 is right, too, and does much twice.
    """

    def __init__(
        self,
        database: Cassandra,
        clock: Clock,
        complete: Complete,
        told: Complete,
        *,
        sweep_seconds: float,
        adopt_after_ms: int,
    ) -> None:
        self._database = database
        self._clock = clock
        self._complete = complete
        self._told = told
        self._sweep_seconds = sweep_seconds
        self._adopt_after_ms = adopt_after_ms
        self._tag = secrets.randbelow(_TAGS)
        self._last_us = 0
        self._registered: set[_Partition] = set()
        self._waiting: dict[bool, dict[int, OutboxRow]] = {False: {}, True: {}}
        self._again: dict[bool, set[int]] = {False: set(), True: set()}
        self._unsorted = False
        self._log: tuple[str | None, int] = (None, 0)
        self._forgotten_before_ms = 0
        self._swept = float("-inf")
        self._sweeping = asyncio.Lock()
        self._drained: dict[_Partition, frozenset[int]] = {}
        self._read_to: dict[_Partition, int] = {}

    def next_event_id(self, *, slow: bool) -> int:
        """Of an event that happens now; greater than all before."""
        self._last_us = max(self._last_us + 1, self._clock.now_ms() * 1_000)
        return self._last_us << _TAG_BITS | self._tag << 1 | slow

    def is_stale(self, event_id: int) -> bool:
        """Whether it got its number so long ago that it needs another."""
        return (event_id >> _TAG_BITS) // 1_000 < self._clock.now_ms() - _STALE_MS

    def require_room(self, outbox_max: int, *, slow: bool) -> None:
        """Raises ResourceExhaustedError when so many rows wait here that were never published."""
        if len(self._waiting[slow]) - len(self._again[slow]) >= outbox_max:
            raise ResourceExhaustedError(
                "Fan-out has been away for too long; try again later.", retry_after_seconds=5.0, reason="OUTBOX_FULL"
            )

    async def put(self, event_id: int, body: dict[str, Any]) -> None:
        """Write a row, before anything else of its write. The same again changes nothing."""
        partition = _partition(event_id)
        if partition not in self._registered:
            await self._database.write(_REGISTER, *partition.key, self._tag)
            self._registered = {known for known in self._registered if known.minute >= partition.minute - 60}
            self._registered.add(partition)
        await self._database.write(_PUT, *partition.key, event_id, json.dumps(body))

    async def body(self, event_id: int) -> dict[str, Any] | None:
        """What was put."""
        row = await self._database.row(_GET, *_partition(event_id).key, event_id)
        return json.loads(row[0]) if row and row[0] else None

    def done(self, row: OutboxRow) -> None:
        """Its write is done: it may be published."""
        waiting = self._waiting[row.slow]
        self._unsorted |= bool(waiting) and next(reversed(waiting)) > row.event_id
        waiting[row.event_id] = row

    async def void(self, event_id: int) -> None:
        """Its write was overtaken."""
        await self._database.write(_MARK, _VOID, *_partition(event_id).key, event_id)

    async def unpublished(self, limit: int, *, slow: bool) -> list[OutboxRow]:
        """See the port."""
        if self._clock.monotonic() - self._swept >= self._sweep_seconds:
            await self.sweep()
        if self._unsorted:
            self._waiting = {lane: dict(sorted(rows.items())) for lane, rows in self._waiting.items()}
            self._unsorted = False
        return list(islice(self._waiting[slow].values(), limit))

    @property
    def depth(self) -> int:
        """Number of rows that wait here."""
        return sum(map(len, self._waiting.values()))

    async def mark_published(self, rows: Sequence[OutboxRow], incarnation: str, now_ms: int) -> bool:
        """See the port. Should the log change while this runs, the marks name the one that is gone."""
        self._learn(await self._read_log())
        if self._log[0] != incarnation:
            return False
        mark = f"{incarnation} {now_ms}"

        async def one(row: OutboxRow) -> None:
            await self._database.write(_MARK, mark, *_partition(row.event_id).key, row.event_id)
            self._waiting[row.slow].pop(row.event_id, None)
            self._again[row.slow].discard(row.event_id)

        await each(one, rows)
        return True

    async def _read_log(self, *, serially: bool = False) -> tuple[str | None, int]:
        row = await self._database.row(_LOG, serially=serially)
        return (row[0], row[1]) if row else (None, 0)

    async def republish(self, incarnation: str, since_ms: int) -> int:
        """See the port. Whoever changes the incarnation takes the rows in hand; should it die, the sweeps do."""

        async def attempt(serially: bool) -> bool | None:
            seen = await self._read_log(serially=serially)
            if seen[0] == incarnation:
                self._learn(seen)
                return serially  # After an unknown outcome it may have been this call: once more does no harm.
            first = (_LOG_FIRST, (incarnation, since_ms))
            step = first if seen[0] is None else (_LOG_NEXT, (incarnation, since_ms, seen[0]))
            return await self._database.apply(step) or None

        if not await self._database.settled("log", attempt):
            return 0
        async with self._sweeping:
            self._learn((incarnation, since_ms))
            return await self._sweep(again=True)

    def _learn(self, log: tuple[str | None, int]) -> None:
        """Of another incarnation: what was published may have to be published again."""
        if log != self._log:
            self._log = log
            self._drained.clear()
            self._read_to.clear()

    async def sweep(self) -> None:
        """Find, and complete, what others have left. One at a time."""
        async with self._sweeping:
            self._learn(await self._read_log())
            taken = await self._sweep(again=False)
            self._swept = self._clock.monotonic() if taken < _ADOPT_MAX else float("-inf")

    async def _sweep(self, *, again: bool) -> int:
        """`again`: what was published before only. Returns how many were taken in hand."""
        partitions = await self._partitions()
        taken = 0
        for partition, writers in partitions.items():
            if self._drained.get(partition) != writers and taken < _ADOPT_MAX:
                taken += await self._sweep_partition(partition, writers, again=again)
        self._drained = {known: writers for known, writers in self._drained.items() if known in partitions}
        self._read_to = {known: last for known, last in self._read_to.items() if known in partitions}
        return taken

    async def _partitions(self) -> dict[_Partition, frozenset[int]]:
        """All that are still of interest, and who writes there."""

        async def lane(shard_and_slow: tuple[int, bool]) -> list[tuple[_Partition, int]]:
            low = await self._database.row(_LOW, *shard_and_slow)
            rows = await self._database.rows(_MINUTES, *shard_and_slow, low[0] if low else 0)
            return [(_Partition(*shard_and_slow, minute), writer) for minute, writer in rows]

        found: dict[_Partition, frozenset[int]] = {}
        for lanes in await each(lane, [(shard, slow) for shard in range(SHARDS) for slow in (False, True)]):
            for partition, writer in lanes:
                found[partition] = found.get(partition, frozenset()) | {writer}
        return found

    async def _sweep_partition(self, partition: _Partition, writers: frozenset[int], *, again: bool) -> int:
        now_ms, log = self._clock.now_ms(), self._log
        closed = (partition.minute + 1) * _MINUTE_US // 1_000 < now_ms - _CLOSED_MS
        # Until a minute is closed only its end is looked at, again and again; then once more all of it.
        after = 0 if closed or again else self._read_to.get(partition, 0)
        left, all_before = 0, True
        todo: list[tuple[int, str, bool]] = []
        for event_id, published, body in await self._database.rows(_MINUTE, *partition.key, after):
            age_ms = now_ms - (event_id >> _TAG_BITS) // 1_000
            if body is None or self._is_over(published):
                all_before = all_before and age_ms > _SETTLED_MS
                if all_before and log == self._log:
                    self._read_to[partition] = event_id
                continue
            left, all_before = left + 1, False
            if bool(published) < again or event_id in self._waiting[partition.slow] or len(todo) >= _ADOPT_MAX:
                continue
            if published or age_ms >= self._adopt_after_ms:
                todo.append((event_id, body, bool(published)))

        async def adopt(row: tuple[int, str, bool]) -> bool:
            event_id, body, published = row
            return await self._adopt(event_id, json.loads(body), again=published)

        taken = sum(await each(adopt, todo))
        if closed and not left and log == self._log:
            self._drained[partition] = writers
        return taken

    def _is_over(self, published: str | None) -> bool:
        if not published or published == _VOID:
            return bool(published)
        incarnation, _, ms = published.rpartition(" ")
        return int(ms) < self._forgotten_before_ms or incarnation == self._log[0] or int(ms) < self._log[1]

    async def _adopt(self, event_id: int, body: dict[str, Any], *, again: bool) -> bool:
        row = await (self._told if again else self._complete)(event_id, body)
        if row is None:
            await self.void(event_id)
            return False
        if again:
            self._again[row.slow].add(event_id)
        self.done(row)
        return True

    async def prune(self, published_before_ms: int) -> bool:
        """Forget rows published before then, and drop partitions of which nothing else is left; True: some more may."""
        self._forgotten_before_ms = max(self._forgotten_before_ms, published_before_ms)
        lanes: dict[tuple[int, bool], list[int]] = {}
        for partition in await self._partitions():
            lanes.setdefault((partition.shard, partition.slow), []).append(partition.minute)
        dropped = 0
        for lane, minutes in lanes.items():
            for minute in sorted(minutes):
                if dropped == _PRUNE_MAX:
                    return True
                if not await self._drop(_Partition(*lane, minute)):
                    break
                dropped += 1
        return False

    async def _drop(self, partition: _Partition) -> bool:
        """Oldest first: then nothing older than the low is of interest."""
        if (partition.minute + 1) * _MINUTE_US // 1_000 >= self._forgotten_before_ms:
            return False
        for _, published, body in await self._database.rows(_MINUTE, *partition.key, 0):
            void = published == _VOID
            if body is not None and not void and not (published and self._is_forgotten(published)):
                return False
        await self._database.write(_DROP, *partition.key)
        await self._database.write(
            _RAISE_LOW, partition.shard, partition.slow, partition.minute + 1, partition.minute + 1
        )
        return True

    def _is_forgotten(self, published: str) -> bool:
        return int(published.rpartition(" ")[2]) < self._forgotten_before_ms
