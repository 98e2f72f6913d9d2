"""What the timeline functions do, in plain Python: the specification of `mesh/timelines/timelines.lua`.

A property test holds the functions to it, and protocol simulations run on it. Each method is one atomic
step. It is the Timelines port without the await, with the caller's clock in `now_ms`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mesh.timelines.port import ListKey, ListState, ListView, TailRecord

UNKNOWN_RECORD = b"of a later release"


@dataclass
class Life:
    """One list: its ids, descending, and its record; None: a record that this release doesn't know."""

    ids: list[int]
    record: TailRecord | None


class TimelinesReference:
    """All lists, by key."""

    def __init__(self, *, cap: int, slack: int, now_ms: int = 0) -> None:
        self.cap = cap
        self.slack = slack
        self.now_ms = now_ms
        self.lists: dict[ListKey, Life] = {}

    def read(self, key: ListKey, count: int) -> ListView | None:
        life = self.lists.get(key)
        if life is None or life.record is None:
            return None
        return ListView(life.ids[:count], life.record, complete=len(life.ids) <= count)

    def push(self, keys: Sequence[ListKey], ids: Sequence[int]) -> int:
        return sum(self._push_into(key, ids) for key in keys)

    def _push_into(self, key: ListKey, ids: Sequence[int]) -> bool:
        life = self.lists.get(key)
        if life is None:
            return False
        all_newer = all(life.ids and id_ > life.ids[0] for id_ in ids)
        if life.record is None and not all_newer:
            return False
        # Where all are newer than the head, the functions don't look at the record.
        floor = life.record.floor if life.record else 0
        life.ids = descending([*life.ids, *(id_ for id_ in ids if id_ >= floor)])
        if len(life.ids) > self.cap + self.slack:
            if life.record is None:
                del self.lists[key]
            else:
                self._cut(life, life.record)
        return True

    def create(self, key: ListKey, token: str, lease_ms: int) -> bool:
        life = self.lists.get(key)
        record = life.record if life else None
        if record and (record.state is ListState.READY or self.now_ms < record.lease_until_ms):
            return False
        self.lists[key] = Life([], TailRecord(ListState.BUILDING, 0, 0, token, self.now_ms + lease_ms))
        return True

    def finish(self, key: ListKey, token: str, version: int, ids: Sequence[int], down_to: int) -> bool:
        life = self.lists.get(key)
        record = life.record if life else None
        if not life or not record or record.state is not ListState.BUILDING or record.token != token:
            return False
        self._take_in(life, replace(record, state=ListState.READY, version=version, lease_until_ms=0), ids, down_to)
        return True

    def cover(
        self,
        key: ListKey,
        token: str,
        from_version: int,
        to_version: int,
        ids: Sequence[int],
        down_to: int,
    ) -> bool:
        life = self.lists.get(key)
        record = life.record if life else None
        if not life or not record or record.state is not ListState.READY:
            return False
        if record.token != token or record.version != from_version:
            return False
        self._take_in(life, replace(record, version=to_version), ids, down_to)
        return True

    def merge(self, keys: Sequence[ListKey], ids: Sequence[int], down_to: int) -> int:
        existing = [life for key in keys if (life := self.lists.get(key)) and life.record]
        for life in existing:
            assert life.record
            self._take_in(life, life.record, ids, down_to)
        return len(existing)

    def remove(self, key: ListKey, ids: Sequence[int]) -> int:
        life = self.lists.get(key)
        if not life:
            return 0
        left = [id_ for id_ in life.ids if id_ not in ids]
        removed, life.ids = len(life.ids) - len(left), left
        return removed

    def drop(self, key: ListKey) -> None:
        self.lists.pop(key, None)

    def raw(self, key: ListKey) -> list[bytes]:
        """The list as Valkey stores it; [] where it is missing."""
        life = self.lists.get(key)
        return [*(str(id_).encode() for id_ in life.ids), render(life.record)] if life else []

    def _take_in(self, life: Life, record: TailRecord, ids: Sequence[int], down_to: int) -> None:
        floor = max(record.floor, down_to)
        life.ids = [id_ for id_ in descending([*life.ids, *ids]) if id_ >= floor]
        life.record = replace(record, floor=floor)
        if len(life.ids) > self.cap:
            self._cut(life, life.record)

    def _cut(self, life: Life, record: TailRecord) -> None:
        life.ids = life.ids[: self.cap]
        assert life.ids[-1] >= record.floor, "the floor only rises"
        life.record = replace(record, floor=life.ids[-1])


def descending(ids: Iterable[int]) -> list[int]:
    """Each id once, the newest first."""
    return sorted(set(ids), reverse=True)


def render(record: TailRecord | None) -> bytes:
    """A tail record as it is stored."""
    if record is None:
        return UNKNOWN_RECORD
    fields = (record.state.value, record.floor, record.version, record.token, record.lease_until_ms)
    return ":".join(map(str, fields)).encode()
