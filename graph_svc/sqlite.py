"""GraphStore on SQLite: each change is one transaction, so both sides of a follow stand or fall together.

A row in `followers` keeps its bucket for ever (a follower never moves): an unfollow only marks it. Buckets are
filled one after the other, up to `bucket_size` rows, by the number of rows that the author ever had.
"""

import sqlite3
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graph_svc.sqlite_modes import SCHEMA as MODES_SCHEMA
from graph_svc.sqlite_modes import USER_COLUMNS as MODES_USER_COLUMNS
from graph_svc.sqlite_modes import SqliteAuthorModes
from graph_svc.store import BLOCKS_MAX, FOLLOWEES_MAX, MUTES_MAX, ImportCounts, User, ViewerContext
from mesh.errors import ConfigurationError, FailedPreconditionError, NotFoundError, PermissionDeniedError
from mesh.sqlite import Database, key
from mesh.sqlite_leases import SCHEMA as LEASES_SCHEMA
from mesh.sqlite_leases import SqliteWorkerLeases

_SCHEMA = (
    LEASES_SCHEMA
    + """
CREATE TABLE IF NOT EXISTS users (
    user_id INTEGER PRIMARY KEY,
    handle TEXT NOT NULL UNIQUE COLLATE NOCASE,
    display_name TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    follower_count INTEGER NOT NULL DEFAULT 0,
    following_count INTEGER NOT NULL DEFAULT 0,
    version INTEGER NOT NULL DEFAULT 0,
    follower_rows INTEGER NOT NULL DEFAULT 0,"""
    + MODES_USER_COLUMNS
    + """
);
CREATE TABLE IF NOT EXISTS following (
    follower_id INTEGER NOT NULL,
    followee_id INTEGER NOT NULL,
    since INTEGER NOT NULL,
    PRIMARY KEY (follower_id, followee_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS followers (
    followee_id INTEGER NOT NULL,
    follower_id INTEGER NOT NULL,
    bucket INTEGER NOT NULL,
    active INTEGER NOT NULL,
    PRIMARY KEY (followee_id, follower_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS followers_by_bucket
    ON followers (followee_id, bucket, follower_id) WHERE active = 1;
CREATE TABLE IF NOT EXISTS blocks (
    blocker_id INTEGER NOT NULL,
    blocked_id INTEGER NOT NULL,
    PRIMARY KEY (blocker_id, blocked_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS mutes (
    muter_id INTEGER NOT NULL,
    muted_id INTEGER NOT NULL,
    PRIMARY KEY (muter_id, muted_id)
) WITHOUT ROWID;
"""
    + MODES_SCHEMA
)
_USER = "user_id, handle, display_name, created_ms, follower_count, following_count"


@dataclass(frozen=True, slots=True)
class _Hiding:
    """How blocks or mutes are kept."""

    table: str
    who: str
    whom: str
    most: int
    limit_reached: str


_BLOCKS = _Hiding("blocks", "blocker_id", "blocked_id", BLOCKS_MAX, "BLOCK_LIMIT_REACHED")
_MUTES = _Hiding("mutes", "muter_id", "muted_id", MUTES_MAX, "MUTE_LIMIT_REACHED")


class SqliteGraphStore(SqliteWorkerLeases, SqliteAuthorModes):
    """See the port. `bucket_size`: followers to a bucket."""

    def __init__(self, path: str | Path, *, bucket_size: int = 10_000, synchronous: str = "FULL") -> None:
        assert bucket_size >= 1
        self._database = Database(path, _SCHEMA, synchronous=synchronous)
        SqliteWorkerLeases.__init__(self, self._database)
        SqliteAuthorModes.__init__(self, self._database, bucket_size)

    async def open(self) -> None:
        """Open the file, making it where it is missing. Raises ConfigurationError for another size of buckets than it
        was made with: followers would be out of reach."""
        await self._database.open()
        made_with = await self.settled_bucket_size()
        if made_with != self._bucket_size:
            raise ConfigurationError(f"STARLING_BUCKET_SIZE: this database was made with {made_with}, and keeps it")

    async def close(self) -> None:
        """See the port."""
        await self._database.close()

    async def create_user(self, user: User) -> bool:
        """See the port."""

        def work(connection: sqlite3.Connection) -> bool:
            connection.execute(
                "INSERT OR IGNORE INTO users (user_id, handle, display_name, created_ms) VALUES (?, ?, ?, ?)",
                (user.user_id, user.handle, user.display_name, user.created_ms),
            )
            row = connection.execute("SELECT user_id FROM users WHERE handle = ?", (user.handle,)).fetchone()
            return bool(row) and row[0] == user.user_id

        return await self._database.write(work)

    async def users(self, user_ids: Sequence[int]) -> list[User]:
        """See the port."""
        marks = ",".join("?" * len(user_ids))
        keys = [key(user_id) for user_id in user_ids]

        def work(connection: sqlite3.Connection) -> list[User]:
            rows = connection.execute(f"SELECT {_USER} FROM users WHERE user_id IN ({marks})", keys)
            found = {row[0]: User(*row) for row in rows}
            return [found[user_id] for user_id in user_ids if user_id in found]

        return await self._database.look(work)

    async def user_by_handle(self, handle: str) -> User | None:
        """See the port."""

        def work(connection: sqlite3.Connection) -> User | None:
            row = connection.execute(f"SELECT {_USER} FROM users WHERE handle = ?", (handle,)).fetchone()
            return User(*row) if row else None

        return await self._database.look(work)

    async def follow(self, follower_id: int, followee_id: int) -> bool:
        """See the port."""
        return await self._database.write(lambda connection: self._follow(connection, follower_id, followee_id))

    async def unfollow(self, follower_id: int, followee_id: int) -> bool:
        """See the port."""
        pair = (key(follower_id), key(followee_id))

        def work(connection: sqlite3.Connection) -> bool:
            _require_users(connection, pair)
            ended = _end_follow(connection, *pair)
            if ended:
                _count_version(connection, pair[:1])
            return ended

        return await self._database.write(work)

    async def import_follows(self, edges: Sequence[tuple[int, int]]) -> ImportCounts:
        """See the port."""

        def work(connection: sqlite3.Connection) -> ImportCounts:
            created = existing = 0
            for follower_id, followee_id in edges:
                if follower_id == followee_id:
                    continue
                try:
                    made = self._follow(connection, follower_id, followee_id)
                except (NotFoundError, PermissionDeniedError, FailedPreconditionError):
                    continue
                created += made
                existing += not made
            return ImportCounts(created, existing, len(edges) - created - existing)

        return await self._database.write(work)

    def _follow(self, connection: sqlite3.Connection, follower_id: int, followee_id: int) -> bool:
        """Raises before it changes anything."""
        pair = (key(follower_id), key(followee_id))
        _require_users(connection, pair)
        if connection.execute("SELECT 1 FROM following WHERE follower_id = ? AND followee_id = ?", pair).fetchone():
            return False
        _refuse_when_blocked(connection, *pair)
        version, followees = connection.execute(
            "SELECT version, following_count FROM users WHERE user_id = ?", pair[:1]
        ).fetchone()
        if followees >= FOLLOWEES_MAX:
            raise FailedPreconditionError(
                f"At most {FOLLOWEES_MAX:,} accounts can be followed.", reason="FOLLOW_LIMIT_REACHED"
            )
        self._put_follower(connection, *pair)
        connection.execute("INSERT INTO following VALUES (?, ?, ?)", (*pair, version + 1))
        _count(connection, *pair, 1)
        _count_version(connection, pair[:1])
        return True

    def _put_follower(self, connection: sqlite3.Connection, follower_id: int, followee_id: int) -> None:
        again = connection.execute(
            "UPDATE followers SET active = 1 WHERE followee_id = ? AND follower_id = ?",
            (followee_id, follower_id),
        )
        if again.rowcount == 0:
            (rows,) = connection.execute(
                "UPDATE users SET follower_rows = follower_rows + 1 WHERE user_id = ? RETURNING follower_rows",
                (followee_id,),
            ).fetchone()
            bucket = (rows - 1) // self._bucket_size
            connection.execute("INSERT INTO followers VALUES (?, ?, ?, 1)", (followee_id, follower_id, bucket))

    async def block(self, blocker_id: int, blocked_id: int) -> bool:
        """See the port."""
        blocker, blocked = pair = key(blocker_id), key(blocked_id)

        def work(connection: sqlite3.Connection) -> bool:
            if not _hide(connection, _BLOCKS, pair):
                return False
            _end_follow(connection, blocker, blocked)
            _end_follow(connection, blocked, blocker)
            _count_version(connection, pair)
            return True

        return await self._database.write(work)

    async def unblock(self, blocker_id: int, blocked_id: int) -> bool:
        """See the port."""
        pair = (key(blocker_id), key(blocked_id))
        return await self._database.write(lambda connection: _show(connection, _BLOCKS, pair, of=pair))

    async def mute(self, muter_id: int, muted_id: int) -> bool:
        """See the port."""
        pair = (key(muter_id), key(muted_id))

        def work(connection: sqlite3.Connection) -> bool:
            if not _hide(connection, _MUTES, pair):
                return False
            _count_version(connection, pair[:1])
            return True

        return await self._database.write(work)

    async def unmute(self, muter_id: int, muted_id: int) -> bool:
        """See the port."""
        pair = (key(muter_id), key(muted_id))
        return await self._database.write(lambda connection: _show(connection, _MUTES, pair, of=pair[:1]))

    async def check_blocks(self, user_id: int, other_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """See the port."""
        marks = ",".join("?" * len(other_ids))
        arguments = (key(user_id), *map(key, other_ids))

        def work(connection: sqlite3.Connection) -> tuple[list[int], list[int]]:
            _require_users(connection, arguments[:1])
            blocked_by = connection.execute(
                f"SELECT blocker_id FROM blocks WHERE blocked_id = ? AND blocker_id IN ({marks}) ORDER BY blocker_id",
                arguments,
            )
            blocked = connection.execute(
                f"SELECT blocked_id FROM blocks WHERE blocker_id = ? AND blocked_id IN ({marks}) ORDER BY blocked_id",
                arguments,
            )
            return [row[0] for row in blocked_by], [row[0] for row in blocked]

        return await self._database.look(work)

    async def followers(self, author_id: int, bucket: int, after_id: int, limit: int) -> list[int]:
        """See the port."""
        sql = (
            "SELECT follower_id FROM followers WHERE active = 1 AND followee_id = ? AND bucket = ?"
            " AND follower_id > ? ORDER BY follower_id LIMIT ?"
        )
        arguments = (key(author_id), bucket, key(after_id), limit)
        return await self._database.look(lambda connection: [row[0] for row in connection.execute(sql, arguments)])

    async def list_followers(self, user_id: int, after_id: int, limit: int) -> list[int]:
        """See the port."""
        return await self._ids(
            "SELECT follower_id FROM followers WHERE active = 1 AND followee_id = ? AND follower_id > ?"
            " ORDER BY follower_id LIMIT ?",
            (key(user_id), key(after_id), limit),
        )

    async def list_following(self, user_id: int, after_id: int, limit: int) -> list[int]:
        """See the port."""
        return await self._ids(
            "SELECT followee_id FROM following WHERE follower_id = ? AND followee_id > ? ORDER BY followee_id LIMIT ?",
            (key(user_id), key(after_id), limit),
        )

    async def list_blocked(self, user_id: int, after_id: int, limit: int) -> list[int]:
        """See the port."""
        return await self._ids(
            "SELECT blocked_id FROM blocks WHERE blocker_id = ? AND blocked_id > ? ORDER BY blocked_id LIMIT ?",
            (key(user_id), key(after_id), limit),
        )

    async def list_muted(self, user_id: int, after_id: int, limit: int) -> list[int]:
        """See the port."""
        return await self._ids(
            "SELECT muted_id FROM mutes WHERE muter_id = ? AND muted_id > ? ORDER BY muted_id LIMIT ?",
            (key(user_id), key(after_id), limit),
        )

    async def _ids(self, sql: str, arguments: tuple[int, ...]) -> list[int]:
        return await self._database.read(lambda connection: [row[0] for row in connection.execute(sql, arguments)])

    async def viewer_context(self, viewer_id: int) -> ViewerContext | None:
        """See the port."""

        viewer = (key(viewer_id),)

        def work(connection: sqlite3.Connection) -> ViewerContext | None:
            row = connection.execute("SELECT version FROM users WHERE user_id = ?", viewer).fetchone()
            if row is None:
                return None
            followees, since = array("Q"), array("Q")
            for followee_id, since_version in connection.execute(
                "SELECT followee_id, since FROM following WHERE follower_id = ? ORDER BY followee_id", viewer
            ):
                followees.append(followee_id)
                since.append(since_version)
            blocked = connection.execute(
                "SELECT blocked_id FROM blocks WHERE blocker_id = ? ORDER BY blocked_id", viewer
            )
            muted = connection.execute("SELECT muted_id FROM mutes WHERE muter_id = ? ORDER BY muted_id", viewer)
            blocked_ids, muted_ids = array("Q", (row[0] for row in blocked)), array("Q", (row[0] for row in muted))
            return ViewerContext(row[0], followees, since, blocked_ids, muted_ids)

        return await self._database.read(work)


def _require_users(connection: sqlite3.Connection, user_ids: Sequence[int]) -> None:
    for user_id in user_ids:
        if not connection.execute("SELECT 1 FROM users WHERE user_id = ?", (user_id,)).fetchone():
            raise NotFoundError("No such user.", reason="USER_NOT_FOUND", user_id=str(user_id))


def _hide(connection: sqlite3.Connection, hiding: _Hiding, pair: tuple[int, int]) -> bool:
    """Put a block or a mute; False, and no change, when it stands. The versions are the caller's."""
    _require_users(connection, pair)
    where = f"FROM {hiding.table} WHERE {hiding.who} = ?"
    if connection.execute(f"SELECT 1 {where} AND {hiding.whom} = ?", pair).fetchone():
        return False
    (stand,) = connection.execute(f"SELECT count(*) {where}", pair[:1]).fetchone()
    if stand >= hiding.most:
        raise FailedPreconditionError(f"At most {hiding.most:,} accounts.", reason=hiding.limit_reached)
    connection.execute(f"INSERT INTO {hiding.table} VALUES (?, ?)", pair)
    return True


def _show(connection: sqlite3.Connection, hiding: _Hiding, pair: tuple[int, int], of: Sequence[int]) -> bool:
    """End a block or a mute, and count the versions `of` some; False, and no change, when there is none."""
    _require_users(connection, pair)
    ended = connection.execute(f"DELETE FROM {hiding.table} WHERE {hiding.who} = ? AND {hiding.whom} = ?", pair)
    if ended.rowcount:
        _count_version(connection, of)
    return ended.rowcount > 0


def _refuse_when_blocked(connection: sqlite3.Connection, user_id: int, other_id: int) -> None:
    for pair in ((user_id, other_id), (other_id, user_id)):
        if connection.execute("SELECT 1 FROM blocks WHERE blocker_id = ? AND blocked_id = ?", pair).fetchone():
            raise PermissionDeniedError("One of the two blocks the other.", reason="BLOCKED")


def _end_follow(connection: sqlite3.Connection, follower_id: int, followee_id: int) -> bool:
    """Both sides of it, and the counts; False, and no change, when there is none. The version is the caller's."""
    pair = (follower_id, followee_id)
    ended = connection.execute("DELETE FROM following WHERE follower_id = ? AND followee_id = ?", pair)
    if ended.rowcount == 0:
        return False
    connection.execute("UPDATE followers SET active = 0 WHERE follower_id = ? AND followee_id = ?", pair)
    _count(connection, *pair, -1)
    return True


def _count_version(connection: sqlite3.Connection, user_ids: Sequence[int]) -> None:
    connection.executemany("UPDATE users SET version = version + 1 WHERE user_id = ?", [(i,) for i in user_ids])


def _count(connection: sqlite3.Connection, follower_id: int, followee_id: int, change: int) -> None:
    connection.execute(
        "UPDATE users SET following_count = following_count + ? WHERE user_id = ?", (change, follower_id)
    )
    connection.execute("UPDATE users SET follower_count = follower_count + ? WHERE user_id = ?", (change, followee_id))
