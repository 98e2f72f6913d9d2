"""The EventLog port: topics of partitions, read by consumer groups, at least once.

Records are small (ids only). Order within a partition is that of publishing, but a consumer must not rely on
it: records are handed out concurrently, again after a crash, and after a replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class LogFullError(Exception):
    """A bounded log can't take more without losing what a group hasn't acknowledged; retry later."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record as consumed. `position` is the log's own notation within the partition.

    `redelivered`: true when it had been handed out before (a claim after a crash).
    """

    topic: str
    partition: int
    position: str
    key: bytes
    value: bytes
    redelivered: bool = False


@dataclass(frozen=True, slots=True)
class Lag:
    """How far behind a group is in one partition: unacknowledged records, and the age of the oldest (s)."""

    topic: str
    partition: int
    messages: int
    seconds: float


class Producer(Protocol):
    """Appends."""

    async def publish(self, topic: str, records: Sequence[tuple[bytes, bytes]]) -> None:
        """Append (key, value) pairs, in order, durable when it returns; equal keys share a partition.

        Raises LogFullError (those before may be in; publish all again, readers bear repeats) or
        UnavailableError (nothing is known).
        """
        ...

    async def incarnation(self) -> str:
        """Names the log's present life. When it changes, records of the last moments may be lost, and the
        caller publishes again what it must not lose. Raises UnavailableError."""
        ...


class Consumer(Protocol):
    """One member of a group, over all partitions of its topics."""

    name: str

    async def poll(self, count: int, wait_seconds: float) -> list[Record]:
        """At most `count` records new to the group, or left unacknowledged by a dead or stuck member for
        the claim time; waits up to `wait_seconds` for one. Raises UnavailableError."""
        ...

    async def renew(self, records: Sequence[Record]) -> None:
        """Say that these are still in work, so that no other member claims them. Raises UnavailableError."""
        ...

    async def ack(self, records: Sequence[Record]) -> None:
        """Done with these; a repeat is harmless. Raises UnavailableError."""
        ...

    async def dead_letter(self, record: Record, cause: str) -> None:
        """Move a record that can never succeed to the dead-letter topic, whole, with its position and the
        cause, then acknowledge it. Raises UnavailableError (a repeat may store it twice)."""
        ...

    async def replay(self, since_ms: int) -> None:
        """Hand out again what was published at or after `since_ms` and is still kept; 0: everything."""
        ...

    async def lag(self) -> list[Lag]:
        """One entry per partition of each topic, in order. Raises UnavailableError."""
        ...

    async def dead_letters(self) -> int:
        """Number of records in the dead-letter topic. Raises UnavailableError."""
        ...

    async def close(self) -> None:
        """Leave the group. What was not acknowledged goes to others at once."""
        ...
