"""GraphStore on Cassandra. All that one user's reads must see at one moment is one partition of `users`: the user's own
row, whom it follows, blocks and mutes, and who blocks it. Each change there is one conditional write on the partition's
revision, read first: a small transaction. What spans partitions is a protocol of such steps, each of which may be done
again by anybody, and each step's row keeps the number of the one that it follows, so that a late one is refused.

Follow (a, b): 1. a: pending, number n, the bucket that it will be in. 2. b's bucket: active, n. 3. a: active, `since` =
++version, if it is still pending with n. Unfollow: 1. a: ended, number n, ++version. 2. b's bucket: not active, n. So
whoever is active in step 3 has an active row in the bucket, and only a greater number takes that away: following ⊆
followers. Of a follow and an unfollow at once the greater number stays, on both sides, in whatever order the buckets
hear of them. A bucket that is full stays full: whoever was to be put there, and isn't, never will be, and takes the
next (step 1 again). The number of buckets is raised before a bucket's first row.

Block (a, b): 1. a: begun, n (no effect). 2. b: blocked by a, n; its follow of a ended; ++version. 3. a: blocked; its
follow of b ended; ++version. 4. both buckets. Unblock: 1. a: ending, n; ++version. 2. b: not blocked, n; ++version.
3. a: ended. So at any moment, whom somebody blocks knows of it, and neither follows the other. A death in between
leaves `a` begun or ending; whoever is refused by what b's partition says looks at a's first, and finishes it.
"""

import heapq
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import NamedTuple, TypeVar

from graph_svc.cassandra_modes import STATEMENTS as MODES_STATEMENTS
from graph_svc.cassandra_modes import CassandraAuthorModes, size_class
from graph_svc.store import ImportCounts, Limits, User, ViewerContext
from mesh.cassandra import PAGE_ROWS, PARTITIONS_AT_ONCE, Cassandra, Statement, each, key, parts
from mesh.cassandra_leases import STATEMENTS as LEASES_STATEMENTS
from mesh.cassandra_leases import CassandraWorkerLeases
from mesh.errors import (
    ConfigurationError,
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    StarlingError,
    UnavailableError,
)

T = TypeVar("T")


class _Kind(IntEnum):
    """Of a row in a user's partition, in the order that they lie there."""

    SELF = 0
    FOLLOWS = 1
    BLOCKS = 2
    MUTES = 3
    BLOCKED_BY = 4


class _State(IntEnum):
    """`BEGUN`: a step before it has effect. `ENDING`: of a block, without effect, but the other side isn't told yet."""

    ENDED = 0
    BEGUN = 1
    ACTIVE = 2
    ENDING = 3


class Leftover(StrEnum):
    """What the reconciliation finds and mends."""

    FOLLOW = "follows begun"
    UNFOLLOW = "unfollows begun"
    BLOCK = "blocks or unblocks begun"
    COUNT = "wrong counts"


_ME = ("revision", "version", "bucket_count", "followees", "pending", "blocks", "mutes")
_ROW = ("state", "number", "since", "bucket", "op")
_COLUMNS = f"kind, other_id, {', '.join(_ME)}, {', '.join(_ROW)}"
_READ = Statement(f"SELECT {_COLUMNS} FROM users WHERE user_id = ? AND (kind, other_id) IN ?")
_CONTEXT = Statement(f"SELECT {_COLUMNS} FROM users WHERE user_id = ? AND kind < {_Kind.BLOCKED_BY}")
_REVISION = Statement("SELECT revision FROM users WHERE user_id = ? AND kind = 0 AND other_id = 0")
_LIST = Statement("SELECT other_id, state FROM users WHERE user_id = ? AND kind = ? AND other_id > ? LIMIT ?")
_STEP = Statement(
    f"UPDATE users SET {', '.join(f'{name} = ?' for name in _ME)}"
    " WHERE user_id = ? AND kind = 0 AND other_id = 0 IF revision = ?",
    conditional=True,
)
_PUT = Statement(
    f"UPDATE users SET {', '.join(f'{name} = ?' for name in _ROW)} WHERE user_id = ? AND kind = ? AND other_id = ?"
)
_USERS = Statement(
    "SELECT user_id, handle, display_name, created_ms, followees FROM users"
    " WHERE user_id IN ? AND kind = 0 AND other_id = 0"
)
_COUNTS = Statement("SELECT followee_id, followers FROM follower_counts WHERE followee_id IN ?")
_BUCKET_COUNTS = Statement("SELECT user_id, bucket_count FROM users WHERE user_id IN ? AND kind = 0 AND other_id = 0")
_NEW_USER = Statement(
    "INSERT INTO users (user_id, kind, other_id, handle, display_name, created_ms, revision, version, bucket_count,"
    " followees, pending, blocks, mutes) VALUES (?, 0, 0, ?, ?, ?, 0, 0, 1, 0, 0, 0, 0) IF NOT EXISTS",
    conditional=True,
)
_HANDLE = Statement("SELECT user_id, shown, display_name, created_ms FROM users_by_handle WHERE handle = ?")
_NEW_HANDLE = Statement(
    "INSERT INTO users_by_handle (handle, user_id, shown, display_name, created_ms) VALUES (?, ?, ?, ?, ?)"
    " IF NOT EXISTS",
    conditional=True,
)
_BUCKET = Statement(
    "SELECT follower_id, active, number, revision, members, followers FROM followers"
    " WHERE followee_id = ? AND bucket = ? AND follower_id IN ?"
)
_FIRST_OF_BUCKET = Statement(
    "UPDATE followers SET revision = ?, members = ?, followers = ?"
    " WHERE followee_id = ? AND bucket = ? AND follower_id = 0 IF revision = null",
    conditional=True,
)
_NEXT_OF_BUCKET = Statement(
    "UPDATE followers SET revision = ?, members = ?, followers = ?"
    " WHERE followee_id = ? AND bucket = ? AND follower_id = 0 IF revision = ?",
    conditional=True,
)
_WHOLE_BUCKET = Statement(
    "SELECT follower_id, active, number, revision, members, followers FROM followers"
    " WHERE followee_id = ? AND bucket = ?"
)
_WHOLE_USER = Statement(f"SELECT {_COLUMNS} FROM users WHERE user_id = ?")
_COUNTED = Statement("SELECT followers FROM follower_counts WHERE followee_id = ? AND bucket = ?")
_PUT_FOLLOWER = Statement(
    "UPDATE followers SET active = ?, number = ? WHERE followee_id = ? AND bucket = ? AND follower_id = ?"
)
_FOLLOWERS = Statement(
    "SELECT follower_id, active FROM followers WHERE followee_id = ? AND bucket = ? AND follower_id > ? LIMIT ?"
)
_COUNT = Statement("INSERT INTO follower_counts (followee_id, bucket, followers) VALUES (?, ?, ?) USING TIMESTAMP ?")
_BIG = Statement("INSERT INTO big_authors (size_class, author_id) VALUES (?, ?)")
_STATEMENTS = (
    *(
        _READ,
        _CONTEXT,
        _REVISION,
        _LIST,
        _STEP,
        _PUT,
        _USERS,
        _COUNTS,
        _BUCKET_COUNTS,
        _NEW_USER,
        _HANDLE,
        _NEW_HANDLE,
        _BUCKET,
    ),
    *(_FIRST_OF_BUCKET, _NEXT_OF_BUCKET, _PUT_FOLLOWER, _FOLLOWERS, _COUNT, _BIG),
    *(_WHOLE_BUCKET, _WHOLE_USER, _COUNTED),
    *LEASES_STATEMENTS,
    *MODES_STATEMENTS,
)
_SELF = (int(_Kind.SELF), 0)
_FOLLOWS_AT_ONCE = 100
"""In one step of one follower."""
_IMPORTERS_AT_ONCE = 16
_ROUNDS_MAX = 20
_CONTEXT_TRIES = 6
_BIG_MARGIN = 16
"""So many followers after a power of two write it down: one that dies is made good by the next."""
_KNOWN_MAX = 100_000
_LIST_MAX = 5_000


_NO_BUCKET = -1


class _Row(NamedTuple):
    """What a user is to another."""

    state: int = _State.ENDED
    number: int = 0
    since: int = 0
    bucket: int = _NO_BUCKET
    op: int = 0


@dataclass(frozen=True, slots=True)
class _Me:
    """A user's partition, as far as it was read; and as a step makes it, with the rows that it `puts`."""

    user_id: int
    revision: int
    version: int
    bucket_count: int
    followees: int
    pending: int
    blocks: int
    mutes: int
    rows: Mapping[tuple[int, int], _Row] = field(default_factory=dict)
    puts: Mapping[tuple[int, int], _Row] = field(default_factory=dict)

    def row(self, kind: _Kind, other_id: int) -> _Row:
        return self.rows.get((kind, other_id), _Row())

    def put(self, kind: _Kind, other_id: int, row: _Row) -> "_Me":
        at = (int(kind), other_id)
        return replace(self, rows={**self.rows, at: row}, puts={**self.puts, at: row})

    def end_follow(self, other_id: int, op: int) -> "_Me":
        """It follows the other no more. The version is the caller's."""
        row = self.row(_Kind.FOLLOWS, other_id)
        if row.state == _State.ENDED:
            return self
        ended = row._replace(state=_State.ENDED, number=self.revision + 1, op=op)
        if row.state == _State.ACTIVE:
            return replace(self, followees=self.followees - 1).put(_Kind.FOLLOWS, other_id, ended)
        return replace(self, pending=self.pending - 1).put(_Kind.FOLLOWS, other_id, ended)

    def next_version(self) -> "_Me":
        return replace(self, version=self.version + 1)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A follow after step 1."""

    number: int
    bucket: int


_UNSETTLED = object()
"""Of a follow after step 1: a block, one way or the other, has to be looked at first."""
_Outcome = bool | StarlingError | _Begun | object


def _op() -> int:
    return secrets.randbits(62)


class CassandraGraphStore(CassandraWorkerLeases, CassandraAuthorModes):
    """See the port. `bucket_size`: followers to a bucket."""

    def __init__(self, database: Cassandra, *, bucket_size: int = 10_000, limits: Limits | None = None) -> None:
        assert bucket_size >= 1
        self._database = database
        self._limits = limits or Limits()
        self._known: set[int] = set()
        CassandraWorkerLeases.__init__(self, database, "graph_svc")
        CassandraAuthorModes.__init__(self, database, bucket_size)

    async def open(self) -> None:
        """Connect, and prepare. Raises UnavailableError; and ConfigurationError where the schema isn't there, and for
        another size of buckets than the keyspace was made with: followers would be out of reach."""
        await self._database.open(_STATEMENTS)
        made_with = await self.settled_bucket_size()
        if made_with != self._bucket_size:
            raise ConfigurationError(f"STARLING_BUCKET_SIZE: this keyspace was made with {made_with}, and keeps it")

    async def close(self) -> None:
        """See the port."""
        await self._database.close()

    # Users.

    async def create_user(self, user: User) -> bool:
        """See the port. A handle that was claimed by one who died is completed by whoever finds it."""
        handle = user.handle.lower()
        claim = (key(user.user_id), user.handle, user.display_name, user.created_ms)

        async def attempt(serially: bool) -> bool | None:
            row = await self._database.row(_HANDLE, handle, serially=serially)
            if row:
                return bool(row[0] == claim[0])
            return await self._database.apply((_NEW_HANDLE, (handle, *claim))) or None

        if not await self._database.settled(("handle", handle), attempt):
            return False
        await self._put_user(*claim)
        return True

    async def _put_user(self, user_id: int, handle: str, display_name: str, created_ms: int) -> None:
        async def attempt(serially: bool) -> bool:
            return await self._database.apply((_NEW_USER, (user_id, handle, display_name, created_ms))) or True

        await self._database.settled(("user", user_id), attempt)

    async def users(self, user_ids: Sequence[int]) -> list[User]:
        """See the port."""

        async def some(ids: Sequence[int]) -> dict[int, User]:
            keys = [key(user_id) for user_id in ids]
            own = {user_id: row for user_id, *row in await self._database.rows(_USERS, keys)}
            followers: Counter[int] = Counter()
            for user_id, count in await self._database.rows(_COUNTS, list(own)):
                followers[user_id] += count
            return {
                user_id: User(user_id, handle, name, created_ms, followers[user_id], followees)
                for user_id, (handle, name, created_ms, followees) in own.items()
            }

        found: dict[int, User] = {}
        for part in await each(some, parts(user_ids, PARTITIONS_AT_ONCE)):
            found |= part
        return [found[user_id] for user_id in user_ids if user_id in found]

    async def user_by_handle(self, handle: str) -> User | None:
        """See the port."""
        row = await self._database.row(_HANDLE, handle.lower())
        if row is None:
            return None
        if not (found := await self.users([row[0]])):
            await self._put_user(*row)
            found = await self.users([row[0]])
        return found[0]

    async def _require_user(self, user_id: int) -> None:
        """Users never go, so those that were seen are known."""
        if user_id in self._known:
            return
        if await self._database.row(_REVISION, user_id) is None:
            raise _no_such_user(user_id)
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        self._known.add(user_id)

    # A user's partition.

    async def _step(
        self, user_id: int, wanted: Iterable[tuple[int, int]], decide: Callable[[_Me], tuple[T, _Me]]
    ) -> tuple[T, _Me]:
        """One step on a user's partition: what `decide` makes of it is written if nobody was there in between. It may
        be asked again, also after its own write, which it must tell by `op`. Raises NotFoundError."""
        asked = [_SELF, *((int(kind), other_id) for kind, other_id in wanted)]

        async def attempt(serially: bool) -> tuple[T, _Me] | None:
            me = _parsed(user_id, await self._database.rows(_READ, user_id, asked, serially=serially))
            if me is None:
                raise _no_such_user(user_id)
            result, after = decide(me)
            if after is me or await self._write(me, after):
                return result, after
            return None

        return await self._database.settled(("user", user_id), attempt)

    async def _write(self, before: _Me, after: _Me) -> bool:
        columns = (before.revision + 1, *(getattr(after, name) for name in _ME[1:]))
        puts = [(_PUT, (*row, after.user_id, kind, other_id)) for (kind, other_id), row in after.puts.items()]
        return await self._database.apply((_STEP, (*columns, after.user_id, before.revision)), *puts)

    # Follows.

    async def follow(self, follower_id: int, followee_id: int) -> bool:
        """See the port."""
        follower_id, followee_id = key(follower_id), key(followee_id)
        outcome = (await self._follow(follower_id, [followee_id]))[followee_id]
        if isinstance(outcome, StarlingError):
            raise outcome
        return bool(outcome)

    async def import_follows(self, edges: Sequence[tuple[int, int]]) -> ImportCounts:
        """See the port."""
        by_follower: dict[int, list[int]] = {}
        for follower_id, followee_id in edges:
            if follower_id != followee_id:
                by_follower.setdefault(key(follower_id), []).append(key(followee_id))

        async def one(follower_id: int) -> tuple[int, int]:
            created = existing = 0
            asked = list(dict.fromkeys(by_follower[follower_id]))
            outcomes: dict[int, bool | StarlingError] = {}
            for start in range(0, len(asked), _FOLLOWS_AT_ONCE):
                outcomes |= await self._follow(follower_id, asked[start : start + _FOLLOWS_AT_ONCE])
            for followee_id in by_follower[follower_id]:
                outcome = outcomes[followee_id]
                if not isinstance(outcome, StarlingError):
                    created += outcome
                    existing += not outcome
                    outcomes[followee_id] = False
            return created, existing

        counted = await each(one, list(by_follower), _IMPORTERS_AT_ONCE)
        created, existing = sum(c for c, _ in counted), sum(e for _, e in counted)
        return ImportCounts(created, existing, len(edges) - created - existing)

    async def _follow(self, follower_id: int, followee_ids: Sequence[int]) -> dict[int, bool | StarlingError]:
        """What became of each. Raises UnavailableError."""
        op = _op()
        outcomes: dict[int, bool | StarlingError] = {}
        left = list(followee_ids)
        for _ in range(_ROUNDS_MAX):  # Another round for those whom an unfollow, a block or a full bucket overtook.
            begun: dict[int, _Begun] = {}
            for followee_id, outcome in (await self._begin(follower_id, left, op)).items():
                if isinstance(outcome, _Begun):
                    begun[followee_id] = outcome
                elif isinstance(outcome, bool | StarlingError):
                    outcomes[followee_id] = outcome
                elif await self._are_blocked(follower_id, followee_id):
                    outcomes[followee_id] = _blocked()
            outcomes |= await self._join(follower_id, begun, op)
            left = [followee_id for followee_id in left if followee_id not in outcomes]
            if not left:
                return outcomes
        raise UnavailableError("Too many change the same follow at once.", reason="STORE_BUSY")

    async def _join(self, follower_id: int, begun: Mapping[int, _Begun], op: int) -> dict[int, bool]:
        """Steps 2 and 3: of those that weren't overtaken, whether it was this call that made the follow."""

        async def join(followee_id: int) -> bool:
            number, bucket = begun[followee_id].number, begun[followee_id].bucket
            put = await self._put_follower(follower_id, followee_id, bucket, number, active=True)
            if put is None:  # The bucket is full.
                await self._next_bucket(follower_id, followee_id, begun[followee_id])
            return bool(put)

        joined = zip(begun, await each(join, list(begun)), strict=True)
        active = {followee_id: begun[followee_id] for followee_id, is_in in joined if is_in}
        outcomes = await self._activate(follower_id, active, op) if active else {}
        return {followee_id: done for followee_id, done in outcomes.items() if done is not None}

    async def _begin(self, follower_id: int, followee_ids: Sequence[int], op: int) -> dict[int, _Outcome]:
        """Step 1, of many."""
        buckets = dict.fromkeys(followee_ids, 0)
        for some in parts(followee_ids, PARTITIONS_AT_ONCE):
            buckets |= dict(await self._database.rows(_BUCKET_COUNTS, some))
        known = [followee_id for followee_id in followee_ids if buckets[followee_id]]
        kinds = (_Kind.FOLLOWS, _Kind.BLOCKS, _Kind.BLOCKED_BY)

        def decide(me: _Me) -> tuple[dict[int, _Outcome], _Me]:
            outcomes: dict[int, _Outcome] = {}
            for followee_id in known:
                outcomes[followee_id], me = self._begun(me, followee_id, buckets[followee_id] - 1, op)
            return outcomes, me

        unknown: dict[int, _Outcome] = {i: _no_such_user(i) for i in followee_ids if not buckets[i]}
        try:
            outcomes, _ = await self._step(follower_id, [(kind, i) for kind in kinds for i in known], decide)
        except NotFoundError as error:
            return dict.fromkeys(followee_ids, error)
        return outcomes | unknown

    def _begun(self, me: _Me, followee_id: int, last_bucket: int, op: int) -> tuple[_Outcome, _Me]:
        row, block = me.row(_Kind.FOLLOWS, followee_id), me.row(_Kind.BLOCKS, followee_id)
        if row.state == _State.ACTIVE:
            return False, me
        if block.state == _State.ACTIVE:
            return _blocked(), me
        if block.state != _State.ENDED or me.row(_Kind.BLOCKED_BY, followee_id).state != _State.ENDED:
            return _UNSETTLED, me
        if row.state == _State.BEGUN and row.bucket != _NO_BUCKET:  # Somebody's who died, or this one's again.
            return _Begun(row.number, row.bucket), me
        if me.followees + me.pending >= self._limits.followees:
            text = f"At most {self._limits.followees:,} accounts can be followed."
            return FailedPreconditionError(text, reason="FOLLOW_LIMIT_REACHED"), me
        bucket = last_bucket if row.bucket == _NO_BUCKET else row.bucket
        begun = _Row(_State.BEGUN, me.revision + 1, 0, bucket, op)
        me = replace(me, pending=me.pending + 1).put(_Kind.FOLLOWS, followee_id, begun)
        return _Begun(begun.number, bucket), me

    async def _next_bucket(self, follower_id: int, followee_id: int, begun: _Begun) -> None:
        """The bucket is full: there is another from now on, and the follow is begun again for the last one."""

        def raised(me: _Me) -> tuple[int, _Me]:
            count = max(me.bucket_count, begun.bucket + 2)
            return count, me if count == me.bucket_count else replace(me, bucket_count=count)

        buckets, _ = await self._step(followee_id, [], raised)

        def again(me: _Me) -> tuple[bool, _Me]:
            row = me.row(_Kind.FOLLOWS, followee_id)
            if row.state != _State.BEGUN or row.number != begun.number:
                return False, me
            return True, me.put(_Kind.FOLLOWS, followee_id, row._replace(number=me.revision + 1, bucket=buckets - 1))

        await self._step(follower_id, [(_Kind.FOLLOWS, followee_id)], again)

    async def _activate(self, follower_id: int, begun: Mapping[int, _Begun], op: int) -> dict[int, bool | None]:
        """Step 3, of many: whether it was this call's; None: it was overtaken."""

        def decide(me: _Me) -> tuple[dict[int, bool | None], _Me]:
            outcomes: dict[int, bool | None] = {}
            for followee_id, pending in begun.items():
                row = me.row(_Kind.FOLLOWS, followee_id)
                if row.state == _State.BEGUN and row.number == pending.number:
                    me = replace(me.next_version(), followees=me.followees + 1, pending=me.pending - 1)
                    row = row._replace(state=_State.ACTIVE, since=me.version, op=op)
                    me = me.put(_Kind.FOLLOWS, followee_id, row)
                active = row.state == _State.ACTIVE
                outcomes[followee_id] = row.op == op if active else None
            return outcomes, me

        outcomes, _ = await self._step(follower_id, [(_Kind.FOLLOWS, i) for i in begun], decide)
        return outcomes

    async def _put_follower(
        self, follower_id: int, followee_id: int, bucket: int, number: int, *, active: bool
    ) -> bool | None:
        """The other side, unless it has a greater number (False) or no room (None). Who ends a follow whose row isn't
        there takes a place, so that the row can't come later with a smaller number."""
        where = (followee_id, bucket)

        async def attempt(serially: bool) -> tuple[bool | None, int, int, int] | None:
            asked = [0, follower_id]
            rows = {i: row for i, *row in await self._database.rows(_BUCKET, *where, asked, serially=serially)}
            is_new_bucket = 0 not in rows or rows[0][2] is None
            revision, members, followers = (0, 0, 0) if is_new_bucket else rows[0][2:]
            row = rows.get(follower_id)
            if row and row[1] >= number:
                return bool(row[1] == number), revision, members, followers
            if row is None and members >= self._bucket_size:
                return None, revision, members, followers
            was_active = bool(row and row[0])
            members, followers = members + (row is None), followers + active - was_active
            columns = (revision + 1, members, followers, *where)
            step = (_FIRST_OF_BUCKET, columns) if is_new_bucket else (_NEXT_OF_BUCKET, (*columns, revision))
            put = (_PUT_FOLLOWER, (active, number, *where, follower_id))
            return (True, revision + 1, members, followers) if await self._database.apply(step, put) else None

        put, revision, members, followers = await self._database.settled(("bucket", *where), attempt)
        if put:
            # Told also when the row stood: who wrote it may have got no further.
            await self._database.write(_COUNT, *where, followers, revision)
            await self._note_size(followee_id, bucket * self._bucket_size + members)
        return put

    async def _note_size(self, author_id: int, members: int) -> None:
        if members >= self.indexed_from:
            over = min(members - (1 << size_class(members)), members - self.indexed_from)
            if over < _BIG_MARGIN:
                await self._database.write(_BIG, size_class(members), author_id)

    async def unfollow(self, follower_id: int, followee_id: int) -> bool:
        """See the port."""
        follower_id, followee_id = key(follower_id), key(followee_id)
        await self._require_user(followee_id)
        op, was_active = _op(), False

        def decide(me: _Me) -> tuple[bool, _Me]:
            nonlocal was_active
            row = me.row(_Kind.FOLLOWS, followee_id)
            if row.state == _State.ENDED:
                return row.op == op and was_active, me
            was_active = row.state == _State.ACTIVE
            me = me.end_follow(followee_id, op)
            return was_active, me.next_version() if was_active else me

        ended, me = await self._step(follower_id, [(_Kind.FOLLOWS, followee_id)], decide)
        await self._end_follower(me, followee_id)
        return ended

    async def _end_follower(self, follower: _Me, followee_id: int) -> None:
        """The other side of a follow that has ended, also when it was another call that ended it, and died."""
        row = follower.row(_Kind.FOLLOWS, followee_id)
        if row.state == _State.ENDED and row.bucket != _NO_BUCKET:
            await self._put_follower(follower.user_id, followee_id, row.bucket, row.number, active=False)

    # Blocks and mutes.

    async def block(self, blocker_id: int, blocked_id: int) -> bool:
        """See the port."""
        blocker_id, blocked_id = key(blocker_id), key(blocked_id)
        await self._require_user(blocked_id)
        op = _op()

        def begin(me: _Me) -> tuple[_Row, _Me]:
            row = me.row(_Kind.BLOCKS, blocked_id)
            if row.state in {_State.ACTIVE, _State.BEGUN}:
                return row, me
            if me.blocks >= self._limits.blocks:
                raise _too_many(self._limits.blocks, "BLOCK_LIMIT_REACHED")
            row = _Row(_State.BEGUN, me.revision + 1, op=op)
            return row, replace(me, blocks=me.blocks + 1).put(_Kind.BLOCKS, blocked_id, row)

        row, _ = await self._step(blocker_id, [(_Kind.BLOCKS, blocked_id)], begin)
        return await self._finish_block(blocker_id, blocked_id, row.number, op)

    async def _finish_block(self, blocker_id: int, blocked_id: int, number: int, op: int) -> bool:
        """Steps 2 to 4, which may all be done again; whether it was this call that gave it effect."""

        def told(me: _Me) -> tuple[None, _Me]:
            row = me.row(_Kind.BLOCKED_BY, blocker_id)
            if row.number >= number:
                return None, me
            me = me.next_version() if row.state != _State.ACTIVE else me
            me = me.put(_Kind.BLOCKED_BY, blocker_id, _Row(_State.ACTIVE, number, op=op))
            return None, me.end_follow(blocker_id, op)

        def effective(me: _Me) -> tuple[bool, _Me]:
            row = me.row(_Kind.BLOCKS, blocked_id)
            if row.state != _State.BEGUN or row.number != number:
                return row.state == _State.ACTIVE and row.op == op, me
            me = me.put(_Kind.BLOCKS, blocked_id, row._replace(state=_State.ACTIVE, op=op))
            return True, me.end_follow(blocked_id, op).next_version()

        _, blocked = await self._step(blocked_id, [(_Kind.BLOCKED_BY, blocker_id), (_Kind.FOLLOWS, blocker_id)], told)
        changed, blocker = await self._step(
            blocker_id, [(_Kind.BLOCKS, blocked_id), (_Kind.FOLLOWS, blocked_id)], effective
        )
        await self._end_follower(blocked, blocker_id)
        await self._end_follower(blocker, blocked_id)
        return changed

    async def unblock(self, blocker_id: int, blocked_id: int) -> bool:
        """See the port."""
        blocker_id, blocked_id = key(blocker_id), key(blocked_id)
        await self._require_user(blocked_id)
        op, was_active = _op(), False

        def begin(me: _Me) -> tuple[tuple[bool, _Row], _Me]:
            nonlocal was_active
            row = me.row(_Kind.BLOCKS, blocked_id)
            if row.state in {_State.ENDED, _State.ENDING}:
                return (row.op == op and was_active, row), me
            was_active = row.state == _State.ACTIVE
            row = _Row(_State.ENDING, me.revision + 1, op=op)
            me = replace(me, blocks=me.blocks - 1).put(_Kind.BLOCKS, blocked_id, row)
            return (was_active, row), me.next_version() if was_active else me

        (changed, row), _ = await self._step(blocker_id, [(_Kind.BLOCKS, blocked_id)], begin)
        if row.state == _State.ENDING:
            await self._finish_unblock(blocker_id, blocked_id, row.number)
        return changed

    async def _finish_unblock(self, blocker_id: int, blocked_id: int, number: int) -> None:
        def told(me: _Me) -> tuple[None, _Me]:
            row = me.row(_Kind.BLOCKED_BY, blocker_id)
            if row.number >= number:
                return None, me
            me = me.next_version() if row.state == _State.ACTIVE else me
            return None, me.put(_Kind.BLOCKED_BY, blocker_id, _Row(_State.ENDED, number))

        def over(me: _Me) -> tuple[None, _Me]:
            row = me.row(_Kind.BLOCKS, blocked_id)
            if row.state != _State.ENDING or row.number != number:
                return None, me
            return None, me.put(_Kind.BLOCKS, blocked_id, row._replace(state=_State.ENDED))

        follows = (_Kind.FOLLOWS, blocked_id)
        _, blocked = await self._step(blocked_id, [(_Kind.BLOCKED_BY, blocker_id), (_Kind.FOLLOWS, blocker_id)], told)
        _, blocker = await self._step(blocker_id, [follows], lambda me: (None, me))
        # The block may have died before it came to this.
        await self._end_follower(blocked, blocker_id)
        await self._end_follower(blocker, blocked_id)
        await self._step(blocker_id, [(_Kind.BLOCKS, blocked_id)], over)

    async def _are_blocked(self, one_id: int, other_id: int) -> bool:
        """Whether either blocks the other, by the blocker's own partition; what was left half-way is finished."""
        for blocker_id, blocked_id in ((one_id, other_id), (other_id, one_id)):
            row, _ = await self._step(
                blocker_id,
                [(_Kind.BLOCKS, blocked_id)],
                lambda me, other=blocked_id: (me.row(_Kind.BLOCKS, other), me),  # type: ignore[misc]
            )
            if row.state == _State.BEGUN:
                await self._finish_block(blocker_id, blocked_id, row.number, _op())
            elif row.state == _State.ENDING:
                await self._finish_unblock(blocker_id, blocked_id, row.number)
            if row.state in {_State.ACTIVE, _State.BEGUN}:
                return True
        return False

    async def mute(self, muter_id: int, muted_id: int) -> bool:
        """See the port."""
        return await self._set_mute(key(muter_id), key(muted_id), _State.ACTIVE)

    async def unmute(self, muter_id: int, muted_id: int) -> bool:
        """See the port."""
        return await self._set_mute(key(muter_id), key(muted_id), _State.ENDED)

    async def _set_mute(self, muter_id: int, muted_id: int, state: _State) -> bool:
        """The row and the version in one write."""
        await self._require_user(muted_id)
        op = _op()

        def decide(me: _Me) -> tuple[bool, _Me]:
            row = me.row(_Kind.MUTES, muted_id)
            if row.state == state:
                return row.op == op, me
            if state == _State.ACTIVE and me.mutes >= self._limits.mutes:
                raise _too_many(self._limits.mutes, "MUTE_LIMIT_REACHED")
            me = replace(me.next_version(), mutes=me.mutes + (1 if state == _State.ACTIVE else -1))
            return True, me.put(_Kind.MUTES, muted_id, _Row(state, me.revision + 1, op=op))

        changed, _ = await self._step(muter_id, [(_Kind.MUTES, muted_id)], decide)
        return changed

    async def check_blocks(self, user_id: int, other_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """See the port. Both are told by the user's own partition, whose version counts what it says."""
        others = sorted({key(other_id) for other_id in other_ids})
        asked = [_SELF, *((int(kind), i) for kind in (_Kind.BLOCKS, _Kind.BLOCKED_BY) for i in others)]
        me = _parsed(key(user_id), await self._database.rows(_READ, key(user_id), asked))
        if me is None:
            raise _no_such_user(user_id)
        blocked_by, blocked = (
            [i for i in others if me.row(kind, i).state == _State.ACTIVE] for kind in (_Kind.BLOCKED_BY, _Kind.BLOCKS)
        )
        return blocked_by, blocked

    # Lists.

    async def followers(self, author_id: int, bucket: int, after_id: int, limit: int) -> list[int]:
        """See the port."""
        found: list[int] = []
        while len(found) < limit:  # Each round goes further up, or ends: who left is left out here.
            asked = min(_LIST_MAX, limit - len(found))
            rows = await self._database.rows(_FOLLOWERS, key(author_id), bucket, key(after_id), asked)
            found += [follower_id for follower_id, active in rows if active]
            if len(rows) < asked:
                break
            after_id = rows[-1][0]
        return found

    async def list_followers(self, user_id: int, after_id: int, limit: int) -> list[int]:
        """See the port. A bucket is asked for more where its first part was used up."""
        buckets = await self._buckets(user_id)
        part = min(limit, 8 + 2 * limit // max(1, buckets))
        pages = await each(lambda bucket: self.followers(user_id, bucket, after_id, part), range(buckets))
        heads = [(ids[0], bucket, 0) for bucket, ids in enumerate(pages) if ids]
        heapq.heapify(heads)
        found: list[int] = []
        while heads and len(found) < limit:
            follower_id, bucket, at = heapq.heappop(heads)
            found.append(follower_id)
            at += 1
            if at == part:
                pages[bucket], at = await self.followers(user_id, bucket, follower_id, part), 0
            if at < len(pages[bucket]):
                heapq.heappush(heads, (pages[bucket][at], bucket, at))
        return found

    async def list_following(self, user_id: int, after_id: int, limit: int) -> list[int]:
        """See the port."""
        return await self._list(user_id, _Kind.FOLLOWS, after_id, limit)

    async def list_blocked(self, user_id: int, after_id: int, limit: int) -> list[int]:
        """See the port."""
        return await self._list(user_id, _Kind.BLOCKS, after_id, limit)

    async def list_muted(self, user_id: int, after_id: int, limit: int) -> list[int]:
        """See the port."""
        return await self._list(user_id, _Kind.MUTES, after_id, limit)

    async def _list(self, user_id: int, kind: _Kind, after_id: int, limit: int) -> list[int]:
        found: list[int] = []
        while len(found) < limit:  # As above.
            asked = min(_LIST_MAX, limit - len(found))
            rows = await self._database.rows(_LIST, key(user_id), kind, key(after_id), asked)
            found += [other_id for other_id, state in rows if state == _State.ACTIVE]
            if len(rows) < asked:
                break
            after_id = rows[-1][0]
        return found

    async def viewer_context(self, viewer_id: int) -> ViewerContext | None:
        """See the port. One read of one partition is one moment, but for two things: pages are read one after the
        other, and of two replicas one may lack a write in progress that the other has the successor of. The user's own
        row has the numbers of the others, and tells: what doesn't fit is read again, serially."""
        for number in range(_CONTEXT_TRIES):
            rows = await self._database.rows(_CONTEXT, key(viewer_id), serially=number > 0)
            me = _parsed(key(viewer_id), rows)
            if me is None:
                return None
            if not _fits(me):
                continue
            if len(rows) >= PAGE_ROWS:
                last = await self._database.row(_REVISION, key(viewer_id))
                if last is None or last[0] != me.revision:
                    continue
            return _context(me)
        raise UnavailableError("The user changes faster than it can be read.", reason="STORE_BUSY")

    # What calls that died have left: see `graph_svc.reconcile`.

    async def reconcile_bucket(self, followee_id: int, bucket: int) -> tuple[int, "Counter[Leftover]"]:
        """Each active row's follow is asked for: one that was begun is finished, with a fresh `since`; one that has
        ended is ended here. Then the counts. Returns the number of rows, and what was mended."""
        rows = await self._database.rows(_WHOLE_BUCKET, followee_id, bucket)
        active = [follower_id for follower_id, is_active, *_ in rows if follower_id and is_active]

        async def one(follower_id: int) -> Leftover | None:
            follows = (_Kind.FOLLOWS, followee_id)
            row, me = await self._step(follower_id, [follows], lambda me: (me.row(*follows), me))
            if row.state == _State.ACTIVE:
                return None
            if row.state == _State.BEGUN:
                await self._follow(follower_id, [followee_id])
                return Leftover.FOLLOW
            await self._end_follower(me, followee_id)
            return Leftover.UNFOLLOW

        mended = Counter(found for found in await each(one, active) if found)
        if await self._recount_bucket(followee_id, bucket):
            mended[Leftover.COUNT] += 1
        return len(rows), mended

    async def _recount_bucket(self, followee_id: int, bucket: int) -> bool:
        """Whether a count was wrong: the bucket's own, which changes with its rows, or its copy, which comes after."""
        where = (followee_id, bucket)

        async def attempt(serially: bool) -> tuple[bool, int, int] | None:
            rows = await self._database.rows(_WHOLE_BUCKET, *where, serially=serially)
            head = next((row for row in rows if row[0] == 0), None)
            if head is None:
                return False, 0, 0
            *_, revision, members, followers = head
            counted = len(rows) - 1, sum(bool(is_active) for _, is_active, *_ in rows)
            if counted == (members, followers):
                return False, revision, followers
            columns = (revision + 1, *counted, *where, revision)
            return (True, revision + 1, counted[1]) if await self._database.apply((_NEXT_OF_BUCKET, columns)) else None

        wrong, revision, followers = await self._database.settled(("bucket", *where), attempt)
        copy = await self._database.row(_COUNTED, *where)
        if revision and (copy is None or copy[0] != followers):
            await self._database.write(_COUNT, *where, followers, revision)
            return True
        return wrong

    async def reconcile_user(self, user_id: int) -> tuple[int, "Counter[Leftover]"]:
        """What the user has begun is finished; then the counts, which are in its own row. Returns as above."""
        rows = await self._database.rows(_WHOLE_USER, user_id)
        me = _parsed(user_id, rows)
        mended: Counter[Leftover] = Counter()
        if me is None:
            return len(rows), mended
        for (kind, other_id), row in me.rows.items():
            if kind == _Kind.FOLLOWS and row.state == _State.BEGUN:
                await self._follow(user_id, [other_id])
                mended[Leftover.FOLLOW] += 1
            elif kind == _Kind.BLOCKS and row.state in {_State.BEGUN, _State.ENDING}:
                await self._are_blocked(user_id, other_id)
                mended[Leftover.BLOCK] += 1
        if await self._recount_user(user_id):
            mended[Leftover.COUNT] += 1
        return len(rows), mended

    async def _recount_user(self, user_id: int) -> bool:
        async def attempt(serially: bool) -> tuple[bool] | None:
            me = _parsed(user_id, await self._database.rows(_WHOLE_USER, user_id, serially=serially))
            if me is None:
                return (False,)
            states = Counter((kind, row.state) for (kind, _), row in me.rows.items())
            counted = replace(
                me,
                followees=states[_Kind.FOLLOWS, _State.ACTIVE],
                pending=states[_Kind.FOLLOWS, _State.BEGUN],
                blocks=states[_Kind.BLOCKS, _State.ACTIVE] + states[_Kind.BLOCKS, _State.BEGUN],
                mutes=states[_Kind.MUTES, _State.ACTIVE],
            )
            if counted == me:
                return (False,)
            return (True,) if await self._write(me, counted) else None

        (wrong,) = await self._database.settled(("user", user_id), attempt)
        return wrong


def _parsed(user_id: int, rows: Sequence[tuple[int, ...]]) -> _Me | None:
    """A partition from its rows; None without the user's own."""
    own: Sequence[int] | None = None
    relations: dict[tuple[int, int], _Row] = {}
    for kind, other_id, *columns in rows:
        if kind == _Kind.SELF:
            own = columns[: len(_ME)]
        else:
            relations[kind, other_id] = _Row(*columns[len(_ME) :])
    if own is None:
        return None
    revision, version, bucket_count, followees, pending, blocks, mutes = own
    return _Me(user_id, revision, version, bucket_count, followees, pending, blocks, mutes, relations)


def _fits(me: _Me) -> bool:
    active = [(kind, row) for (kind, _), row in me.rows.items() if row.state == _State.ACTIVE]
    follows = [row.since for kind, row in active if kind == _Kind.FOLLOWS]
    blocks = [
        row for (kind, _), row in me.rows.items() if kind == _Kind.BLOCKS and row.state in {_State.ACTIVE, _State.BEGUN}
    ]
    mutes = [row for kind, row in active if kind == _Kind.MUTES]
    return (len(follows), len(blocks), len(mutes)) == (me.followees, me.blocks, me.mutes) and max(
        follows, default=0
    ) <= me.version


def _context(me: _Me) -> ViewerContext:
    of: dict[int, tuple[array[int], array[int]]] = {kind: (array("Q"), array("Q")) for kind in _Kind}
    for (kind, other_id), row in me.rows.items():  # In the partition's order, by kind and id.
        if row.state == _State.ACTIVE:
            of[kind][0].append(other_id)
            of[kind][1].append(row.since)
    followees, since = of[_Kind.FOLLOWS]
    return ViewerContext(me.version, followees, since, of[_Kind.BLOCKS][0], of[_Kind.MUTES][0])


def _no_such_user(user_id: int) -> NotFoundError:
    return NotFoundError("No such user.", reason="USER_NOT_FOUND", user_id=str(user_id))


def _blocked() -> PermissionDeniedError:
    return PermissionDeniedError("One of the two blocks the other.", reason="BLOCKED")


def _too_many(most: int, reason: str) -> FailedPreconditionError:
    return FailedPreconditionError(f"At most {most:,} accounts.", reason=reason)
