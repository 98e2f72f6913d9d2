"""What the processes of `protocol.py` share: the stores, the log, Valkey, and what readers remember.

Each method is one atomic step. Time is a logical clock in ms, which only the scheduler moves.
"""

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from random import Random
from typing import NamedTuple

from mesh.timelines.port import ListKey, ListState, TailRecord
from tests.sim.rules import Rules
from tests.timelines_reference import Life, TimelinesReference
from timeline_svc.core import MODES_AGE_MS, ViewerContext

Steps = Generator[str, None, None]
"""A process: what it did up to each point where anything else may run."""

BUCKET = 2
"""Followers to a bucket."""
STALENESS_MS = 10_000
"""A replica is at most so far behind its primary."""
COPY_TTL_MS = 60_000
COPY_LEASE_MS = 5_000
BUILD_LEASE_MS = 30_000


class Failure(Exception):  # noqa: N818 - of the promise, not an error of this code
    """The promise is broken."""


class Choices:
    """All free choices of a run: drawn from a seed and noted, or replayed. 0 is always the plainest one."""

    def __init__(self, seed: int | None = None, replayed: Sequence[int] = (), focus: Collection[str] = ()) -> None:
        self.random = Random(seed) if seed is not None else None
        self.focus = focus
        """Actions that a search confines itself to (empty: all), words about the world that it prefers, and points at
        which a process is to be slow."""
        self.taken: list[int] = []
        self._replayed = replayed
        self.over = False
        """From here on everything is plain."""

    def __call__(self, count: int, weights: Sequence[float] | None = None) -> int:
        """A number below `count`."""
        if self.over or count < 2:
            return 0
        if self.random is None:
            at = len(self.taken)
            choice = min(self._replayed[at], count - 1) if at < len(self._replayed) else 0
        elif weights is None:
            choice = int(self.random.random() * count)
        else:
            rest = self.random.random() * sum(weights)
            choice = 0
            while choice < count - 1 and rest >= weights[choice]:
                rest -= weights[choice]
                choice += 1
        self.taken.append(choice)
        return choice

    @property
    def left(self) -> bool:
        """Whether choices to be replayed are left; a seed has them without end."""
        return self.random is not None or len(self.taken) < len(self._replayed)


class Lists(TimelinesReference):
    """The list functions, with their rules, and with what they change noted for a failover."""

    def __init__(self, rules: Rules, cap: int, slack: int, note: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(cap=cap, slack=slack)
        self.rules = rules
        self._note = note

    def _change(self, keys: Sequence[ListKey]) -> None:
        for key in keys:
            life = self.lists.get(key)
            self._note(partial(self._restore, key, Life(life.ids, life.record) if life else None))

    def _restore(self, key: ListKey, life: Life | None) -> None:
        if life is None:
            self.lists.pop(key, None)
        else:
            self.lists[key] = life

    def record(self, key: ListKey) -> TailRecord | None:
        """A list's record."""
        life = self.lists.get(key)
        return life.record if life else None

    def push(self, keys: Sequence[ListKey], ids: Sequence[int]) -> int:
        keys = [key for key in keys if key in self.lists]
        self._change(keys)
        if not self.rules.push_in_any_state:
            keys = [key for key in keys if (record := self.record(key)) and record.state is ListState.READY]
        if not self.rules.insert_never_lowers_floor:
            for life in (self.lists[key] for key in keys):
                assert life.record
                life.record = replace(life.record, floor=min(life.record.floor, *ids))
        return super().push(keys, ids)

    def create(self, key: ListKey, token: str, lease_ms: int) -> bool:
        self._change([key])
        return super().create(key, token, lease_ms)

    def finish(self, key: ListKey, token: str, version: int, ids: Sequence[int], down_to: int) -> bool:
        self._change([key])
        record = self.record(key)
        if record and not self.rules.finish_needs_token:
            token = record.token
        return super().finish(key, token, version, ids, down_to)

    def cover(
        self, key: ListKey, token: str, from_version: int, to_version: int, ids: Sequence[int], down_to: int
    ) -> bool:
        self._change([key])
        record = self.record(key)
        if record and not self.rules.cover_compares_version:
            from_version = record.version
        return super().cover(key, token, from_version, to_version, ids, down_to)

    def merge(self, keys: Sequence[ListKey], ids: Sequence[int], down_to: int) -> int:
        self._change(keys)
        if not self.rules.merge_leaves_missing:
            for key in keys:
                self.lists.setdefault(key, Life([], TailRecord(ListState.READY, 0, 0, "merged", 0)))
        return super().merge(keys, ids, down_to)

    def drop(self, key: ListKey) -> None:
        self._change([key])
        super().drop(key)

    def _take_in(self, life: Life, record: TailRecord, ids: Sequence[int], down_to: int) -> None:
        if not self.rules.floor_only_rises:
            record = replace(record, floor=0)
        super()._take_in(life, record, ids, down_to)

    def _cut(self, life: Life, record: TailRecord) -> None:
        if self.rules.trim_sets_floor:
            super()._cut(life, record)
        else:
            life.ids = life.ids[: self.cap]


class Copy(NamedTuple):
    """A viewer's version in Valkey, or (`version` 0) a reader's lease to fetch it."""

    run_id: int
    version: int
    token: int
    until_ms: int


def is_drain(task: Sequence[int]) -> bool:
    """(author, epoch, bucket), or (author, 0, bucket, tweet): a part of a delivery."""
    return len(task) == 3


class Log:
    """A topic. In Kafka it outlives Valkey, and is rewound; in Valkey's streams its end is lost with the lists'."""

    def __init__(self, w: "World") -> None:
        self._w = w
        self.records: dict[int, tuple[int, ...]] = {}
        self.acked_ms: dict[int, int] = {}
        self.generation = 0
        self._last = 0

    def publish(self, *record: int) -> None:
        self._last += 1
        self.records[self._last] = record
        if self._w.log_in_valkey:
            self._w.valkey.note(partial(self.records.pop, self._last, None))

    def ack(self, position: int, generation: int) -> None:
        """Work taken before a rewind isn't done by its acknowledgement."""
        if position in self.records and generation == self.generation and position not in self.acked_ms:
            self.acked_ms[position] = self._w.now
            if self._w.log_in_valkey:
                self._w.valkey.note(partial(self.acked_ms.pop, position, None))

    def acked_since(self, since_ms: int) -> list[int]:
        return [position for position, acked in self.acked_ms.items() if acked >= since_ms]

    def rewind(self, since_ms: int, *, all_kinds: bool = True) -> None:
        """Committed in one step. Work in hand is taken again."""
        for position in self.acked_since(since_ms):
            if all_kinds or not is_drain(self.records[position]):
                del self.acked_ms[position]
        if self._w.rules.work_in_hand_again:
            self.generation += 1

    def waiting(self) -> list[int]:
        return [position for position in self.records if position not in self.acked_ms]


class Valkey:
    """Lists and copies of versions; all that changes is noted, since a failover loses the latest of it."""

    def __init__(self, w: "World", cap: int, slack: int) -> None:
        self._w = w
        self.run_id = 1
        self.lists = Lists(w.rules, cap, slack, self.note)
        self._copies: dict[int, Copy] = {}
        self._undo: list[tuple[int, Callable[[], object]]] = []

    def note(self, undo: Callable[[], object]) -> None:
        self._undo.append((self._w.now, undo))

    def fail_over(self) -> None:
        """To a replica that lacks some of the latest changes: the last ones, in the order of their writing."""
        exposed = sum(at >= self._w.now - STALENESS_MS for at, _ in self._undo)
        for _ in range(self._w.choose(exposed + 1)):
            self._undo.pop()[1]()
        self._undo.clear()
        self.run_id += 1

    def _put(self, viewer: int, copy: Copy | None) -> None:
        self.note(partial(self._restore, viewer, self._copies.get(viewer)))
        self._restore(viewer, copy)

    def _restore(self, viewer: int, copy: Copy | None) -> None:
        self._copies.pop(viewer, None)
        if copy:
            self._copies[viewer] = copy

    def _copy(self, viewer: int) -> Copy | None:
        copy = self._copies.get(viewer)
        if copy is None or copy.until_ms <= self._w.now:
            return None
        is_others = copy.version and copy.run_id != self.run_id
        return None if is_others and self._w.rules.copy_names_run_id else copy

    def version_copy(self, viewer: int) -> int | None:
        copy = self._copy(viewer)
        return copy.version if copy and copy.version else None

    def lease(self, viewer: int) -> Copy | None:
        """The right to fill a copy; None when another reader has it."""
        if self._copy(viewer):
            return None
        lease = Copy(self.run_id, 0, self._w.next_number(), self._w.now + COPY_LEASE_MS)
        self._put(viewer, lease)
        return lease

    def fill(self, viewer: int, lease: Copy, version: int) -> None:
        if self._copy(viewer) == lease or not self._w.rules.copy_filled_with_lease:
            self._put(viewer, Copy(lease.run_id, version, 0, self._w.now + COPY_TTL_MS))

    def forget(self, viewer: int) -> None:
        self._put(viewer, None)


class Mode(Enum):
    PUSH = "push"
    PULL = "pull"
    DRAIN = "drain"


class AuthorMode(NamedTuple):
    mode: Mode = Mode.PUSH
    epoch: int = 0
    since_ms: int = 0


class Row(NamedTuple):
    """A row of `following`. `stamp`: the version at which it became pending, or ended."""

    state: str
    stamp: int
    since: int = 0


@dataclass(slots=True)
class Drain:
    """The repair of one bucket's lists."""

    published: bool = False
    done: bool = False


class Graph:
    """graph_svc's store. Following rows, versions and modes are compare-and-set."""

    def __init__(self, w: "World", users: Sequence[int]) -> None:
        self._w = w
        self.version = dict.fromkeys(users, 1)
        self.following: dict[tuple[int, int], Row] = {}
        self.mutes: set[tuple[int, int]] = set()
        self.bucket_count = dict.fromkeys(users, 1)
        self.modes = dict.fromkeys(users, AuthorMode())
        self.drains: dict[tuple[int, int, int], Drain] = {}
        self._bucket_of: dict[tuple[int, int], int] = {}
        self._legs: dict[tuple[int, int], tuple[bool, int]] = {}

    def next_version(self, viewer: int) -> int:
        self.version[viewer] += 1
        return self.version[viewer]

    def followees(self, viewer: int) -> list[tuple[int, int]]:
        """(followee, since), active ones."""
        rows = ((author, self.following.get((viewer, author))) for author in self.version)
        return [(author, row.since) for author, row in rows if row and row.state == "active"]

    def bucket_for(self, author: int, viewer: int) -> int:
        """Filled one after the other; a follower never moves."""
        rows = sum(followee == author for followee, _ in self._bucket_of)
        return self._bucket_of.setdefault((author, viewer), rows // BUCKET)

    def write_leg(self, author: int, viewer: int, stamp: int, *, alive: bool) -> None:
        known = self._legs.get((author, viewer))
        if known is None or known[1] < stamp or not self._w.rules.legs_have_timestamps:
            self._legs[author, viewer] = (alive, stamp)

    def followers(self, author: int, bucket: int) -> list[int]:
        legs = ((viewer, self._legs.get((author, viewer))) for viewer in self.version)
        return [viewer for viewer, leg in legs if leg and leg[0] and self._bucket_of[author, viewer] == bucket]

    def set_mode(self, author: int, mode: Mode) -> None:
        """The next epoch; a drain's tasks are part of the same write."""
        epoch = self.modes[author].epoch + 1
        self.modes[author] = AuthorMode(mode, epoch, self._w.now)
        if mode is Mode.DRAIN:
            self.drains |= {(author, epoch, bucket): Drain() for bucket in range(self.bucket_count[author])}

    def complete_drain(self, author: int, epoch: int, bucket: int) -> None:
        self.drains[author, epoch, bucket].done = True
        left = any(not drain.done for at, drain in self.drains.items() if at[:2] == (author, epoch))
        if left and self._w.rules.complete_when_all_drained:
            return
        mode = self.modes[author]
        if mode.mode is Mode.DRAIN and (mode.epoch == epoch or not self._w.rules.complete_drain_checks_epoch):
            self.set_mode(author, Mode.PUSH)


class Tweets:
    """tweet_svc's store, by author."""

    def __init__(self, users: Sequence[int]) -> None:
        self.author_of: dict[int, int] = {}
        self._by_author: dict[int, list[int]] = {user: [] for user in users}

    def put(self, tweet: int, author: int) -> None:
        if tweet not in self.author_of:
            self.author_of[tweet] = author
            self._by_author[author] = sorted([*self._by_author[author], tweet], reverse=True)

    def of(self, author: int) -> list[int]:
        """All ids, newest first."""
        return self._by_author[author]


@dataclass(slots=True)
class OutboxRow:
    """The whole write. `done`: the tweet is in the store."""

    author: int
    done: bool = False
    published: bool = False


@dataclass(frozen=True, slots=True)
class Context:
    """A viewer at one version."""

    viewer: ViewerContext
    muted: frozenset[int] = frozenset()

    def sees(self, author: int | None) -> bool:
        if author is None or author in self.muted:
            return False
        return author == self.viewer.viewer_id or self.viewer.follows(author)


@dataclass(slots=True)
class Reader:
    """A process of timeline_svc: the contexts at hand, and whom to pull, as graph_svc said last."""

    contexts: dict[int, Context] = field(default_factory=dict)
    pull: frozenset[int] = frozenset()
    pull_as_of_ms: int = 0

    def hear(self, w: "World") -> None:
        pulled = {Mode.PULL, Mode.DRAIN} if w.rules.pull_while_draining else {Mode.PULL}
        self.pull = frozenset(author for author, mode in w.graph.modes.items() if mode.mode in pulled)
        self.pull_as_of_ms = w.now

    def pulled(self, w: "World") -> frozenset[int] | None:
        """Whom to pull; None: unknown."""
        known = w.now - self.pull_as_of_ms < MODES_AGE_MS or not w.rules.modes_unknown_after_15_s
        return self.pull if known else None


class World:
    """Everything, as one run finds it."""

    def __init__(self, rules: Rules, choose: Choices) -> None:
        self.rules = rules
        self.choose = choose
        self.now = 1_000_000
        self.log_in_valkey = choose(2) == 1
        self.users = range(1, 3 + choose(3, (9, 1, 1) if "two users" in choose.focus else None))
        self._last_number = 0
        self.valkey = Valkey(self, cap=3 + choose(3), slack=choose(3))
        self.lists = self.valkey.lists
        self.tweets = Tweets(self.users)
        self.graph = Graph(self, self.users)
        self.outbox: dict[int, OutboxRow] = {}
        self.events = Log(self)
        self.tasks = Log(self)
        self.readers = [Reader(pull_as_of_ms=self.now), Reader(pull_as_of_ms=self.now)]
        self.worker_modes = dict(self.graph.modes)
        """What a worker would go by that didn't read modes afresh."""
        self.handled_run_id = self.valkey.run_id
        self.failed_at_ms = 0
        """When the oldest failover not yet handled happened."""
        self.replied_version = dict.fromkeys(self.users, 0)
        """The version of the last change that the viewer was told is done."""
        self.replied_tweet: dict[int, int] = {}
        self.given_up = False
        """Somebody never retried a change that died."""
        self.pass_time(0)

    def next_number(self) -> int:
        """Ids of tweets, and tokens: ordered, like Snowflakes, by when they are made, not when they are committed."""
        self._last_number += 1
        return self._last_number

    def pass_time(self, ms: int) -> None:
        self.now += ms
        self.lists.now_ms = self.now

    def away(self) -> bool:
        """Whether Valkey can't be reached just now."""
        return self.choose(2, (9, 1)) == 1

    def settled(self) -> set[int]:
        """Tweets whose delivery is over and not in question: no read may lack them, whatever is in flight."""
        if self.handled_run_id != self.valkey.run_id:
            return set()
        waiting = [self.tasks.records[position] for position in self.tasks.waiting()]
        draining = {
            at for at, drain in self.graph.drains.items() if drain.done and (not drain.published or at in waiting)
        }
        in_question = {author for author, _, _ in draining}
        under_way = {tweet for tweet, row in self.outbox.items() if not row.published}
        under_way |= {self.events.records[position][1] for position in self.events.waiting()}
        under_way |= {task[3] for task in waiting if not is_drain(task)}
        delivered = (self.events.records[position] for position in self.events.acked_ms)
        return {tweet for author, tweet in delivered if author not in in_question} - under_way
