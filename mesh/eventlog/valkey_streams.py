"""The EventLog on Valkey Streams (Valkey or Redis ≥ 7): the embedded default, for one server.

A partition is a stream, `<key_prefix>log:<topic>:<partition>`; a group is the stream's consumer group, made
by whoever asks first, from the first record on. All that must be decided at one moment is decided in the
functions of `valkey_streams.lua`; this side does bounds, scheduling and shapes.

- **Bound.** A full partition trims what every group has acknowledged, exactly as much as it needs, or
  refuses the whole batch: `LogFullError`. Without a group nothing counts as acknowledged.
- **Claims.** Whoever polls takes what has been idle (not polled, not renewed) for the claim time, looking
  every third of it; what a leaving member gave back, it takes in its next poll.
- **Dead letters** are a topic like others, but bounded by trimming their oldest, acknowledged or not.
- **Loss.** When all data is gone, the next poll makes the groups anew, from the first record on. Producers
  see it in `incarnation()`.

Not for a cluster: `dead_letter` writes to two keys. There the log is Kafka.
"""

import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

from redis.exceptions import ResponseError

from mesh.clock import Clock, SystemClock
from mesh.errors import UnavailableError
from mesh.eventlog.port import (
    POLL_RECORDS_MAX,
    Lag,
    LogFullError,
    Record,
    Topic,
    check_bounds,
    letter_of,
)
from mesh.valkey import Valkey

LIBRARY = Path(__file__).with_suffix(".lua").read_text(encoding="utf-8")

CLAIM_IDLE_MS = 15_000
FORGET_AFTER_MS = 3_600_000

# A blocking read must return before the client's time-out (1 s unless configured; never set it below this).
_BLOCK_MS = 500
# How often to look for names that can be dropped.
_FORGET_EVERY_SECONDS = 600.0
_IDS_PER_CALL_MAX = 1_000
_STREAMS_MAX = 256

_CURSOR_START = "0-0"
_CURSOR_END = ""
# In valkey_streams.lua: who owns what was given back.
_RELEASED = "-"

_Entry = tuple[int, bytes, bytes, bytes, int]


class StreamsProducer:
    """Appends. `topics`: those that may be published to; `valkey` must have LIBRARY."""

    def __init__(self, valkey: Valkey, topics: Sequence[Topic]) -> None:
        self._valkey = valkey
        self._topics = {topic.name: topic for topic in topics}

    async def publish(self, topic: str, records: Sequence[tuple[bytes, bytes]]) -> None:
        """Append, in one round trip. A partition takes its part of the batch whole or not at all (so one
        of more than `records_max` never fits).

        Raises LogFullError, UnavailableError (also when the server has no memory left) or ValueError.
        """
        shape = self._topics[topic]
        calls: list[tuple[str, Sequence[str], Sequence[str | bytes | int | float]]] = []
        batches = _by_partition(shape, records)
        for partition, numbers in batches.items():
            stream = _stream(self._valkey, topic, partition)
            parts = [part for number in numbers for part in records[number]]
            calls.append(("starling_eventlog_append_v1", [stream], [shape.records_max, *parts]))
        if not calls:
            return
        appended = await self._valkey.fcalls(calls)
        refused = [n for numbers, done in zip(batches.values(), appended, strict=True) if not done for n in numbers]
        if refused:
            text = f"{topic} holds {shape.records_max} records that a group hasn't acknowledged"
            raise LogFullError(text, refused)

    async def incarnation(self) -> str:
        """The server process's run_id."""
        return await self._valkey.life()


class StreamsLagReader:
    """Sees a group's lag, without being in it. `valkey` must have LIBRARY."""

    def __init__(self, valkey: Valkey, topics: Sequence[Topic], group: str) -> None:
        self._valkey = valkey
        self._group = group
        self._partitions = [(topic.name, p) for topic in topics for p in range(topic.partitions)]

    async def lag(self) -> list[Lag]:
        """Exact; what is both pending and to be handed out again counts once."""
        streams = [_stream(self._valkey, topic, partition) for topic, partition in self._partitions]
        counts = await self._valkey.fcalls([("starling_eventlog_lag_v1", [key], [self._group]) for key in streams])
        return [
            Lag(topic, partition, messages, age_ms / 1000)
            for (topic, partition), (messages, age_ms) in zip(self._partitions, counts, strict=True)
        ]


class StreamsConsumer:
    """One member of a group. `valkey` must have LIBRARY; its time-out must exceed half a second.

    `claim_idle_ms`: the claim time; 0: each poll hands out again all that is pending.
    `forget_after_ms`: how long a member that holds nothing may be unseen before its name is dropped.
    """

    def __init__(
        self,
        valkey: Valkey,
        *,
        topics: Sequence[Topic],
        group: str,
        name: str,
        dead_letters: Topic,
        claim_idle_ms: int = CLAIM_IDLE_MS,
        forget_after_ms: int = FORGET_AFTER_MS,
        clock: Clock | None = None,
    ) -> None:
        if name in {"", _RELEASED}:
            raise ValueError(f"a consumer can't be called {name!r}")
        self.name = name
        self._valkey = valkey
        self._group = group
        self._partitions = [(topic.name, p) for topic in topics for p in range(topic.partitions)]
        self._streams = [_stream(valkey, topic, partition) for topic, partition in self._partitions]
        if not 1 <= len(self._streams) <= _STREAMS_MAX:
            raise ValueError(f"a consumer reads 1 to {_STREAMS_MAX} partitions, not {len(self._streams)}")
        self._lag_reader = StreamsLagReader(valkey, topics, group)
        self._dead_letters = dead_letters
        self._dead_stream = _stream(valkey, dead_letters.name, 0)
        self._claim_idle_ms = claim_idle_ms
        self._forget_after_ms = forget_after_ms
        self._clock = clock or SystemClock()
        # One pass of claiming is a walk over each partition's pending records, by cursor, over several polls.
        self._cursors = [_CURSOR_END] * len(self._streams)
        self._next_pass = self._next_forget = self._clock.monotonic()
        self._first = 0
        self._joined = False

    async def poll(self, count: int, wait_seconds: float) -> list[Record]:
        """Records to work on; see the port. Partitions share `count` fairly, from another first each time."""
        if not 1 <= count <= POLL_RECORDS_MAX:
            raise ValueError(f"count is 1 to {POLL_RECORDS_MAX}, not {count}")
        await self._join()
        await self._forget_when_due()
        for block_ms in _slices(wait_seconds):
            if records := await self._take(count):
                return records
            if records := await self._wait(count, block_ms):
                return records
        return await self._take(count)

    async def renew(self, records: Sequence[Record]) -> None:
        """Reset the idle time of those that are still this consumer's."""
        await self._valkey.fcalls(
            [
                ("starling_eventlog_renew_v1", [stream], [self._group, self.name, *ids])
                for stream, ids in self._ids(records)
            ]
        )

    async def ack(self, records: Sequence[Record]) -> None:
        """Done with these."""
        await self._valkey.pipeline([("XACK", stream, self._group, *ids) for stream, ids in self._ids(records)])

    async def dead_letter(self, record: Record, cause: str) -> None:
        """Move it, at one moment. A repeat stores nothing: the record isn't pending any more."""
        await self._valkey.fcall(
            "starling_eventlog_dead_letter_v1",
            [_stream(self._valkey, record.topic, record.partition), self._dead_stream],
            *(self._group, record.position, self._dead_letters.records_max),
            *(record.key, letter_of(record, cause)),
        )

    async def replay(self, since_ms: int) -> None:
        """Set the group back in every partition. What is pending stays so."""
        if since_ms < 0:
            raise ValueError(f"since_ms is a time, not {since_ms}")
        await self._on_each_stream("starling_eventlog_rewind_v1", self._group, since_ms)

    async def lag(self) -> list[Lag]:
        """See StreamsLagReader."""
        return await self._lag_reader.lag()

    async def dead_letters(self) -> int:
        """Number of records in the dead-letter topic."""
        return int(await self._valkey.call("XLEN", self._dead_stream))

    async def close(self) -> None:
        """Give back what it holds, and leave."""
        with suppress(UnavailableError):
            await self._release()

    async def _join(self) -> None:
        """Give back what a former process held under this name: it is gone, and nobody else will renew it."""
        if not self._joined:
            await self._release()
            self._joined = True

    async def _release(self) -> None:
        await self._on_each_stream("starling_eventlog_release_v1", self._group, self.name)

    async def _forget_when_due(self) -> None:
        now = self._clock.monotonic()
        if now >= self._next_forget:
            self._next_forget = now + _FORGET_EVERY_SECONDS
            await self._on_each_stream("starling_eventlog_forget_v1", self._group, self._forget_after_ms)

    async def _take(self, count: int) -> list[Record]:
        """What can be had now: what was idle for the claim time, or given back, or is new."""
        self._begin_pass_when_due()
        self._first = (self._first + 1) % len(self._streams)
        cursors, entries = await self._valkey.fcall(
            "starling_eventlog_take_v1",
            self._streams,
            *(self._group, self.name, count, self._first, self._claim_idle_ms),
            *self._cursors,
        )
        self._cursors = [cursor.decode() for cursor in cursors]
        return self._records(entries, count)

    def _begin_pass_when_due(self) -> None:
        now = self._clock.monotonic()
        is_over = all(cursor == _CURSOR_END for cursor in self._cursors)
        if is_over and now >= self._next_pass:
            self._cursors = [_CURSOR_START] * len(self._streams)
            self._next_pass = now + self._claim_idle_ms / 3000

    async def _wait(self, count: int, block_ms: int) -> list[Record]:
        """Block until something new comes; nothing if a claim or a recovery is due first.

        With more partitions than `count` it listens to some only: others are asked after this wait.
        """
        indexes = [(self._first + i) % len(self._streams) for i in range(min(count, len(self._streams)))]
        try:
            reply: Any = await self._valkey.call_blocking(
                *("XREADGROUP", "GROUP", self._group, self.name),
                *("COUNT", count // len(indexes), "BLOCK", block_ms, "STREAMS"),
                *(self._streams[i] for i in indexes),
                *(">" for _ in indexes),
            )
        except ResponseError as error:
            # The streams were dropped before or while it waited; the next take makes them anew.
            if str(error).startswith(("NOGROUP", "UNBLOCKED")):
                return []
            raise
        read = {key.decode(): entries for key, entries in dict(reply or ()).items()}
        return self._records(
            [
                (i + 1, position, fields[1], fields[3], 0)
                for i in indexes
                for position, fields in read.get(self._streams[i], ())
            ],
            count,
        )

    def _records(self, entries: Sequence[_Entry], count: int) -> list[Record]:
        if len(entries) > count:
            raise AssertionError(f"{len(entries)} records where {count} were asked for")
        return [
            Record(*self._partitions[index - 1], position.decode(), key, value, redelivered == 1)
            for index, position, key, value, redelivered in entries
        ]

    def _ids(self, records: Sequence[Record]) -> list[tuple[str, list[str]]]:
        """Their ids by stream, in bounded lists."""
        place = {(r.topic, r.partition, r.position): None for r in records}
        return [
            (_stream(self._valkey, topic, partition), chunk)
            for (topic, partition), group in groupby(sorted(place), key=lambda at: at[:2])
            for chunk in _chunks([position for _, _, position in group])
        ]

    async def _on_each_stream(self, function: str, *args: str | int) -> list[Any]:
        return await self._valkey.fcalls([(function, [stream], args) for stream in self._streams])


def _slices(wait_seconds: float) -> list[int]:
    """The wait cut in pieces, in ms. Counted, not timed: a piece that ends early shortens the whole."""
    pieces, rest_ms = divmod(ceil(wait_seconds * 1000), _BLOCK_MS)
    return [_BLOCK_MS] * pieces + ([rest_ms] if rest_ms else [])


def _stream(valkey: Valkey, topic: str, partition: int) -> str:
    return f"{valkey.key_prefix}log:{topic}:{partition}"


def _by_partition(topic: Topic, records: Sequence[tuple[bytes, bytes]]) -> dict[int, list[int]]:
    """The batch by partition, as record numbers in order. Raises ValueError for what exceeds the port's bounds."""
    check_bounds(records)
    batches: dict[int, list[int]] = {}
    for number, record in enumerate(records):
        # A checksum, not hash(): processes must agree.
        batches.setdefault(zlib.crc32(record[0]) % topic.partitions, []).append(number)
    return batches


def _chunks(ids: Sequence[str]) -> Iterable[list[str]]:
    for start in range(0, len(ids), _IDS_PER_CALL_MAX):
        yield list(ids[start : start + _IDS_PER_CALL_MAX])


if POLL_RECORDS_MAX > _IDS_PER_CALL_MAX or _IDS_PER_CALL_MAX > 4_000:
    raise AssertionError("Lua's unpack() takes fewer than 8,000 values")
