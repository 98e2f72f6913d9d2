"""What a member has of one partition of a log that only counts: pure.

Such a log (Kafka) keeps one number for a group and a partition: everything below it is done. Here records are worked on
side by side and end in any order, so the number may rise only to the first that isn't done. From the number on, in the
order of the partition, each record is *waiting*, *in hand*, or *done*; when `full_at` of them are held, nothing more is
to be fetched until the first is done.

A member holds a partition for a *tenure*: until it loses it, or the group is set back. What was handed out in one
tenure counts as done in that one only: another member, or this one itself, has begun again from the number.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mesh.eventlog.port import Record


@dataclass(slots=True)
class _Held:
    record: Record
    since: float
    """When it was handed out, or last said to be in work."""


class Progress:
    """One tenure of one partition, which begins at offset `begin`. `now` is a monotonic clock's, in seconds."""

    def __init__(self, tenure: int, begin: int, full_at: int) -> None:
        self.tenure = tenure
        self.committed = begin
        """What the log was told; below it all was done before."""
        self.done_below = begin
        """All below this offset are done: what may be committed."""
        self.next = begin
        """The offset after the last one held."""
        self._full_at = full_at
        self._order: deque[int] = deque()
        self._waiting: deque[Record] = deque()
        self._in_hand: dict[int, _Held] = {}
        self._done: set[int] = set()

    @property
    def is_full(self) -> bool:
        """Whether nothing more should be fetched."""
        return len(self._order) >= self._full_at

    @property
    def waiting(self) -> int:
        """How many can be handed out."""
        return len(self._waiting)

    @property
    def in_hand(self) -> int:
        """How many are handed out and not done."""
        return len(self._in_hand)

    def add(self, records: Iterable[tuple[int, Record]]) -> None:
        """What was fetched, by offset, ascending. An offset below `next` means another log: a mistake of the caller."""
        for offset, record in records:
            if offset < self.next:
                raise AssertionError(f"offset {offset} comes after {self.next}")
            self._order.append(offset)
            self._waiting.append(replace(record, tenure=self.tenure))
            self.next = offset + 1

    def take(self, count: int, now: float) -> list[Record]:
        """Hand out at most so many, the oldest first."""
        records = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        for record in records:
            self._in_hand[int(record.position)] = _Held(record, now)
        return records

    def take_idle(self, count: int, idle_seconds: float, now: float) -> list[Record]:
        """Hand out again what has been in hand for so long without a word."""
        idle = [held for held in self._in_hand.values() if now - held.since >= idle_seconds][:count]
        for held in idle:
            held.record, held.since = replace(held.record, redelivered=True), now
        return [held.record for held in idle]

    def renew(self, record: Record, now: float) -> None:
        """It is still in work."""
        if held := self._held(record):
            held.since = now

    def holds(self, record: Record) -> bool:
        """Whether it is in hand, of this tenure."""
        return self._held(record) is not None

    def finish(self, record: Record) -> None:
        """It is done; a repeat, and one of another tenure, changes nothing."""
        if self._held(record) is None:
            return
        offset = int(record.position)
        del self._in_hand[offset]
        self._done.add(offset)
        while self._order and self._order[0] in self._done:
            self._done.remove(self._order.popleft())
        self.done_below = self._order[0] if self._order else self.next

    def _held(self, record: Record) -> _Held | None:
        return self._in_hand.get(int(record.position)) if record.tenure == self.tenure else None


def share_out(partitions: Sequence[Progress], count: int, first: int, now: float) -> list[Record]:
    """Hand out at most `count`: an equal share of each partition, from number `first` on, then what is left of the
    room of those that have more."""
    if not partitions:
        return []
    order = [partitions[(first + i) % len(partitions)] for i in range(len(partitions))]
    share = max(1, count // len(partitions))
    records: list[Record] = []
    for room in (share, count):
        for progress in order:
            records += progress.take(min(room, count - len(records)), now)
    return records
