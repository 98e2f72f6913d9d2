"""Authors' modes (`graph_svc.store.AuthorModes`) on Cassandra.

All authors that ever changed mode, and their drain tasks, are one partition (some thousands of rows), so that each step
is one conditional write on its revision, and changes have one order. A copy of it is kept as long as the revision
stands. Whom to look at comes from `big_authors`: who ever had 2^n follower rows. A follow that died may have left a
count behind by one; its retry, or the bucket's next follower, puts that right.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

from graph_svc.store import AuthorState, Busy, DrainTask, FanoutPolicy, Mode, ModeChange
from mesh.cassandra import Cassandra, Statement, each, key

T = TypeVar("T")
_STATICS = "revision, last_sequence, waiting, draining, incarnation, pull_threshold, pull_threshold_min, bucket_size"
_HEAD = Statement(f"SELECT DISTINCT only, {_STATICS} FROM author_modes WHERE only = 1")
_ALL = Statement(
    f"SELECT author_id, mode, epoch, since_ms, sequence, drains, {_STATICS} FROM author_modes WHERE only = 1"
)
_ONE = Statement("SELECT mode, epoch, since_ms FROM author_modes WHERE only = 1 AND author_id = ?")
_SET = ", ".join(f"{name.strip()} = ?" for name in _STATICS.split(","))
_FIRST = Statement(f"UPDATE author_modes SET {_SET} WHERE only = 1 IF revision = null", conditional=True)
_NEXT = Statement(f"UPDATE author_modes SET {_SET} WHERE only = 1 IF revision = ?", conditional=True)
_PUT = Statement(
    "UPDATE author_modes SET mode = ?, epoch = ?, since_ms = ?, sequence = ?, drains = ?"
    " WHERE only = 1 AND author_id = ?"
)
_BIG = Statement("SELECT author_id FROM big_authors WHERE size_class = ?")
_COUNTS = Statement("SELECT followers FROM follower_counts WHERE followee_id = ?")
_BUCKETS = Statement("SELECT bucket_count FROM users WHERE user_id = ? AND kind = 0 AND other_id = 0")
STATEMENTS = (_HEAD, _ALL, _ONE, _FIRST, _NEXT, _PUT, _BIG, _COUNTS, _BUCKETS)

SIZE_CLASSES = 32
_LOOKED_AT_MAX = 500
"""In one step; the next step goes on behind them."""

Drains = dict[int, dict[int, tuple[int | None, bool]]]
"""Of an author: by epoch and bucket, when it was published, and whether it is done."""


@dataclass(frozen=True, slots=True)
class _Author:
    mode: Mode = Mode.PUSH
    epoch: int = 0
    since_ms: int = 0
    sequence: int = 0
    drains: Drains = field(default_factory=dict)

    def tasks(self, author_id: int) -> list[tuple[DrainTask, int | None]]:
        """With the time of publication."""
        return [
            (DrainTask(author_id, epoch, bucket), published)
            for epoch, buckets in sorted(self.drains.items())
            for bucket, (published, _) in sorted(buckets.items())
        ]


@dataclass(frozen=True, slots=True)
class _Modes:
    revision: int | None = None
    last_sequence: int = 0
    incarnation: str = ""
    policy: FanoutPolicy | None = None
    bucket_size: int = 0
    authors: dict[int, _Author] = field(default_factory=dict)

    def moved(self, author_id: int, mode: Mode, now_ms: int, buckets: int) -> "_Modes":
        """With the author in a new epoch; tasks of those before are over."""
        before = self.authors.get(author_id, _Author())
        epoch, sequence = before.epoch + 1, self.last_sequence + 1
        drains = dict(before.drains)
        if mode is Mode.DRAIN:
            drains[epoch] = dict.fromkeys(range(buckets), (None, False))
        return replace(
            self.with_author(author_id, _Author(mode, epoch, now_ms, sequence, drains)), last_sequence=sequence
        )

    def with_author(self, author_id: int, author: _Author) -> "_Modes":
        return replace(self, authors=self.authors | {author_id: author})

    def with_task(self, task: DrainTask, state: tuple[int | None, bool]) -> "_Modes":
        author = self.authors[task.author_id]
        drains = author.drains | {task.epoch: author.drains[task.epoch] | {task.bucket: state}}
        return self.with_author(task.author_id, replace(author, drains=drains))

    def task(self, task: DrainTask) -> tuple[int | None, bool] | None:
        author = self.authors.get(task.author_id)
        return author.drains.get(task.epoch, {}).get(task.bucket) if author else None


def size_class(members: int) -> int:
    """The greatest n with 2^n <= members."""
    return members.bit_length() - 1


class CassandraAuthorModes:
    """See the port. `bucket_size`: followers to a bucket. Thresholds below `indexed_from` find who has that many."""

    def __init__(self, database: Cassandra, bucket_size: int) -> None:
        self._modes_database = database
        self._bucket_size = bucket_size
        self.indexed_from = min(1_024, bucket_size)
        self._copy = _Modes(revision=-1)
        self._looked_at = 0

    async def settled_bucket_size(self) -> int:
        """The size of buckets that the keyspace was made with."""
        size = (await self._fresh()).bucket_size

        def decide(modes: _Modes) -> tuple[int, _Modes]:
            first = modes if modes.bucket_size else replace(modes, bucket_size=self._bucket_size)
            return first.bucket_size, first

        return size or await self._change_modes(decide)

    async def author_state(self, author_id: int) -> AuthorState | None:
        """See the port."""
        buckets = await self._buckets(author_id)
        if not buckets:
            return None
        row = await self._modes_database.row(_ONE, key(author_id))
        if row is None:
            return AuthorState(Mode.PUSH, 0, 0, buckets)
        return AuthorState(Mode(row[0]), row[1], row[2], buckets)

    async def _buckets(self, author_id: int) -> int:
        row = await self._modes_database.row(_BUCKETS, key(author_id))
        return row[0] if row else 0

    async def follower_count(self, author_id: int) -> int:
        """Over all buckets."""
        return sum(row[0] for row in await self._modes_database.rows(_COUNTS, key(author_id)))

    async def move_modes(self, pull_from: int, push_below: int, now_ms: int, busy: Busy | None = None) -> int:
        """See the port. Looks at a bounded number of authors, in turn."""
        modes = await self._fresh()
        posting = frozenset(busy.author_ids) if busy else frozenset()
        authors = {author_id for author_id, author in modes.authors.items() if author.mode is not Mode.PUSH}
        least = max(self.indexed_from, min(pull_from, busy.pull_from if busy else pull_from))
        for found in await each(self._big, range(size_class(least), SIZE_CLASSES)):
            authors |= set(found)
        # In turn: those behind the last one looked at come first.
        turn = sorted(authors, key=lambda author_id: (author_id <= self._looked_at, author_id))[:_LOOKED_AT_MAX]
        if not turn:
            return 0
        self._looked_at = turn[-1]
        counts = dict(zip(turn, await each(self.follower_count, turn), strict=True))

        def wanted(author_id: int, mode: Mode) -> Mode | None:
            bound = min(pull_from, busy.pull_from) if busy and author_id in posting else pull_from
            if mode is not Mode.PULL:
                return Mode.PULL if counts[author_id] >= bound else None
            return Mode.DRAIN if counts[author_id] < push_below else None

        moving = [i for i in turn if wanted(i, modes.authors.get(i, _Author()).mode) is not None]
        buckets = dict(zip(moving, await each(self._buckets, moving), strict=True))

        def decide(now: _Modes) -> tuple[int, _Modes]:
            moved = 0
            for author_id in moving:
                mode = wanted(author_id, now.authors.get(author_id, _Author()).mode)
                if mode is not None:
                    now, moved = now.moved(author_id, mode, now_ms, buckets[author_id]), moved + 1
            return moved, now

        return await self._change_modes(decide) if moving else 0

    async def _big(self, number: int) -> list[int]:
        return [row[0] for row in await self._modes_database.rows(_BIG, number)]

    async def is_draining(self) -> bool:
        """See the port."""
        row = await self._modes_database.row(_HEAD)
        return bool(row and row[4])

    async def unpublished_drains(self, limit: int) -> list[DrainTask]:
        """See the port."""
        row = await self._modes_database.row(_HEAD)
        if row is None or not row[3]:
            return []
        modes = await self._fresh()
        tasks = (task for author_id, author in sorted(modes.authors.items()) for task in author.tasks(author_id))
        return list(islice((task for task, published in tasks if published is None), limit))

    async def mark_drains_published(self, tasks: Sequence[DrainTask], incarnation: str, now_ms: int) -> None:
        """See the port."""

        def decide(modes: _Modes) -> tuple[bool, _Modes]:
            if modes.incarnation == incarnation:
                for task in tasks:
                    if state := modes.task(task):
                        modes = modes.with_task(task, (now_ms, state[1]))
            return True, modes

        await self._change_modes(decide)

    async def republish_drains(self, incarnation: str, since_ms: int) -> int:
        """See the port."""
        if (await self._fresh()).incarnation == incarnation:
            return 0

        def decide(modes: _Modes) -> tuple[int, _Modes]:
            if modes.incarnation == incarnation:
                return 0, modes
            again = [
                task
                for author_id, author in modes.authors.items()
                for task, published in author.tasks(author_id)
                if published is not None and published >= since_ms
            ]
            for task in again:
                state = modes.task(task)
                assert state is not None
                modes = modes.with_task(task, (None, state[1]))
            return len(again), replace(modes, incarnation=incarnation)

        return await self._change_modes(decide)

    async def complete_drain(self, task: DrainTask, now_ms: int) -> bool:
        """See the port. A bucket that is newer than the epoch's tasks, which were made by a count read before, gets one
        now: its first followers may have come while the author was still pulled."""
        buckets = await self._buckets(task.author_id)

        def decide(modes: _Modes) -> tuple[bool, _Modes]:
            state = modes.task(task)
            if state is None:
                return False, modes
            modes = modes.with_task(task, (state[0], True))
            author = modes.authors[task.author_id]
            if author.mode is not Mode.DRAIN or author.epoch != task.epoch:
                return False, modes
            for bucket in range(buckets):
                new = DrainTask(task.author_id, task.epoch, bucket)
                if modes.task(new) is None:
                    modes = modes.with_task(new, (None, False))
            left = any(not done for _, done in modes.authors[task.author_id].drains[task.epoch].values())
            return (False, modes) if left else (True, modes.moved(task.author_id, Mode.PUSH, now_ms, 0))

        return await self._change_modes(decide)

    async def prune_drains(self, published_before_ms: int) -> None:
        """See the port."""

        def decide(modes: _Modes) -> tuple[bool, _Modes]:
            for author_id, author in modes.authors.items():
                kept = {
                    epoch: buckets
                    if author.mode is Mode.DRAIN and author.epoch == epoch
                    else {
                        bucket: state
                        for bucket, state in buckets.items()
                        if state[0] is None or state[0] >= published_before_ms
                    }
                    for epoch, buckets in author.drains.items()
                }
                kept = {epoch: buckets for epoch, buckets in kept.items() if buckets}
                if kept != author.drains:
                    modes = modes.with_author(author_id, replace(author, drains=kept))
            return True, modes

        await self._change_modes(decide)

    async def pulled_authors(self, after_id: int, limit: int) -> list[int]:
        """See the port."""
        authors = (await self._fresh()).authors
        return sorted(i for i, author in authors.items() if author.mode is not Mode.PUSH and i > after_id)[:limit]

    async def mode_changes(self, after_sequence: int, limit: int) -> list[ModeChange]:
        """See the port."""
        modes = await self._fresh()
        if modes.last_sequence <= after_sequence:
            return []
        # One that is later than the head that was read is told with those before it.
        changes = sorted((author.sequence, author_id, author.mode) for author_id, author in modes.authors.items())
        return [ModeChange(*change) for change in changes if max(after_sequence, 0) < change[0] <= modes.last_sequence][
            :limit
        ]

    async def mode_sequence(self) -> int:
        """See the port."""
        return (await self._fresh()).last_sequence

    async def fanout_policy(self) -> FanoutPolicy | None:
        """See the port."""
        return (await self._fresh()).policy

    async def set_fanout_policy(self, policy: FanoutPolicy) -> None:
        """See the port."""
        await self._change_modes(lambda modes: (True, replace(modes, policy=policy)))

    async def _fresh(self) -> _Modes:
        """All, as it is now: read again when the revision isn't the copy's."""
        row = await self._modes_database.row(_HEAD)
        if (row[1] if row else None) != self._copy.revision:
            self._copy = await self._read()
        return self._copy

    async def _read(self, *, serially: bool = False) -> _Modes:
        rows = await self._modes_database.rows(_ALL, serially=serially)
        if not rows or rows[0][6] is None:
            return _Modes()
        revision, sequence, _, _, incarnation, threshold, threshold_min, bucket_size = rows[0][6:]
        authors = {
            author_id: _Author(Mode(mode), epoch, since_ms, number, _from_json(drains))
            for author_id, mode, epoch, since_ms, number, drains, *_ in rows
            if author_id is not None
        }
        policy = FanoutPolicy(threshold, threshold_min) if threshold else None
        return _Modes(revision, sequence, incarnation, policy, bucket_size, authors)

    async def _change_modes(self, decide: Callable[[_Modes], tuple[T, _Modes]]) -> T:
        """What `decide` gives, once what it makes of the modes is written. It may run again, on what others made."""

        async def attempt(serially: bool) -> tuple[T] | None:
            before = await self._read(serially=serially)
            result, after = decide(before)
            return (result,) if after is before or await self._write_modes(before, after) else None

        (result,) = await self._modes_database.settled("author_modes", attempt)
        return result

    async def _write_modes(self, before: _Modes, after: _Modes) -> bool:
        waiting = sum(task[1] is None for i, author in after.authors.items() for task in author.tasks(i))
        draining = sum(author.mode is Mode.DRAIN for author in after.authors.values())
        policy = (after.policy.pull_threshold, after.policy.pull_threshold_min) if after.policy else (0, 0)
        revision = (before.revision or 0) + 1
        statics = (revision, after.last_sequence, waiting, draining, after.incarnation, *policy, after.bucket_size)
        step = (_FIRST, statics) if before.revision is None else (_NEXT, (*statics, before.revision))
        changed = [
            (_PUT, (a.mode, a.epoch, a.since_ms, a.sequence, _to_json(a.drains), author_id))
            for author_id, a in after.authors.items()
            if before.authors.get(author_id) is not a
        ]
        return await self._modes_database.apply(step, *changed)


def _to_json(drains: Drains) -> str:
    return json.dumps(drains)


def _from_json(text: str | None) -> Drains:
    return {
        int(epoch): {int(bucket): (published, done) for bucket, (published, done) in buckets.items()}
        for epoch, buckets in json.loads(text or "{}").items()
    }
