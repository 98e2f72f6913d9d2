"""The EventLog port: topics of partitions, read by consumer groups, at least once.

Records are small (ids only). Order within a partition is that of publishing, but a consumer must not rely on
it: records are handed out concurrently, again after a crash, and after a replay.

There are two kinds of log behind it. One keeps each record's state (Valkey Streams): any member takes any record, and
takes over single ones. The other only counts (Kafka): a partition belongs to one member at a time, and goes to another
as a whole, with what isn't done of it. The contract is what both keep; where it says "may", they differ.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from starling.event.v1.event_pb2 import DeadLetter

# Of a record's key, and of its value; more is a ValueError.
PART_BYTES_MAX = 64 * 1024
# Of one publish; more is a ValueError.
PUBLISH_RECORDS_MAX = 1_000
# Of one poll; more is a ValueError.
POLL_RECORDS_MAX = 1_000
_CAUSE_CHARS_MAX = 1_000


class LogFullError(Exception):
    """A bounded log can't take more without losing what a group hasn't acknowledged; retry later.

    `refused`: which of the records given (by number, from 0) didn't go in; the others did.
    """

    def __init__(self, message: str, refused: Iterable[int]) -> None:
        super().__init__(message)
        self.refused = frozenset(refused)


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic's shape. It never changes: another number of partitions is another topic.

    `records_max`: kept per partition, where the adapter bounds a log by records. A record is kept after it
    was acknowledged, for replays, until its room is needed.
    `keep_seconds`: how long a record is kept, where the adapter bounds a log by time: acknowledged or not, so it must
    be far more than any lag.
    """

    name: str
    partitions: int
    records_max: int
    keep_seconds: float = 7 * 86_400.0

    def __post_init__(self) -> None:
        if not self.name or self.partitions < 1 or self.records_max < 1 or self.keep_seconds < 1:
            raise ValueError(f"no such topic can be: {self}")


@dataclass(frozen=True, slots=True)
class Record:
    """One record as consumed. `position` is the log's own notation within the partition.

    `redelivered`: it is known to have been handed out before, to a member that crashed, got stuck or left. A log that
    only counts doesn't know it of other members.
    `tenure`: which of the member's times of holding the partition it comes from, where a member holds partitions.
    """

    topic: str
    partition: int
    position: str
    key: bytes
    value: bytes
    redelivered: bool = False
    tenure: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Lag:
    """How far behind a group is in one partition: unacknowledged records, and the age of the oldest (s).

    A log that only counts has all records from the oldest unacknowledged one on as unacknowledged.
    """

    topic: str
    partition: int
    messages: int
    seconds: float


def check_bounds(records: Sequence[tuple[bytes, bytes]]) -> None:
    """Raises ValueError for a batch that exceeds the bounds above."""
    if len(records) > PUBLISH_RECORDS_MAX:
        raise ValueError(f"at most {PUBLISH_RECORDS_MAX} records at once, not {len(records)}")
    if any(len(part) > PART_BYTES_MAX for record in records for part in record):
        raise ValueError(f"a record's key and value have at most {PART_BYTES_MAX} bytes each")


def letter_of(record: Record, cause: str) -> bytes:
    """A dead letter's value: the record, whole, with its place and the cause."""
    letter = DeadLetter(
        topic=record.topic,
        partition=record.partition,
        position=record.position,
        cause=cause[:_CAUSE_CHARS_MAX],
        value=record.value,
    )
    return letter.SerializeToString()


class Producer(Protocol):
    """Appends."""

    async def publish(self, topic: str, records: Sequence[tuple[bytes, bytes]]) -> None:
        """Append (key, value) pairs, in order, durable when it returns; equal keys share a partition.

        Raises LogFullError (it says which are not in), UnavailableError (nothing is known; publish all again, readers
        bear repeats) or, for what exceeds the bounds above, ValueError.
        """
        ...

    async def incarnation(self) -> str:
        """Names the present life of the log, and of the lists that its records fill. When it changes, records of the
        last moments, or what became of them, may be lost, and the caller publishes again what it must not lose. Raises
        UnavailableError."""
        ...


class LagReader(Protocol):
    """Sees how far behind a group is, over all partitions of some topics. It is no member, and changes nothing."""

    async def lag(self) -> list[Lag]:
        """One entry per partition of each topic, in order. Raises UnavailableError."""
        ...


class Consumer(LagReader, Protocol):
    """One member of a group, over all partitions of its topics.

    `name`: unique among the members alive. A member that comes back under its name gets back what it had held, and may
    get it at once. A new group begins with the oldest record kept.
    """

    name: str

    async def poll(self, count: int, wait_seconds: float) -> list[Record]:
        """At most `count` records new to the group, or left unacknowledged by a dead, stuck or closed
        member, this one included, for the claim time; no record twice, but for those of a partition that goes from
        one member to another, which may be in hand at both. Waits about `wait_seconds` for one (0: for none to come,
        only for what is there and this member's to be looked up), and may return none a little earlier. Raises
        UnavailableError."""
        ...

    async def renew(self, records: Sequence[Record]) -> None:
        """Say that these are still in work, so that they aren't handed out again, here or to another member. Those
        that another has claimed meanwhile stay the other's. Raises UnavailableError."""
        ...

    async def ack(self, records: Sequence[Record]) -> None:
        """Done with these; a repeat is harmless. Of those that another member holds by now, a log that keeps each
        record's state counts it, and one that only counts doesn't: there the other does them, too. A crash within
        moments after it returned may forget it. Raises UnavailableError."""
        ...

    async def dead_letter(self, record: Record, cause: str) -> None:
        """Move a record that can never succeed to the dead-letter topic, whole, with its position and the
        cause, then acknowledge it; nothing, if this member holds it no more. There it keeps its key, and its value is
        a starling.event.v1.DeadLetter. Raises UnavailableError (a repeat may store it twice)."""
        ...

    async def replay(self, since_ms: int) -> None:
        """Hand out again what was published at or after `since_ms` (ms since the Unix epoch, by the log's
        clock) and is still kept; 0: everything. Never skips what wasn't handed out. It is committed when
        this returns. A record in hand may come a second time, to another member, and then the first time may not count.
        Raises UnavailableError."""
        ...

    async def dead_letters(self) -> int:
        """Number of records in the dead-letter topic. Raises UnavailableError."""
        ...

    async def close(self) -> None:
        """Leave the group. What was not acknowledged goes to others at once; where the log doesn't answer,
        after the claim time. Raises nothing; the consumer is of no further use."""
        ...
