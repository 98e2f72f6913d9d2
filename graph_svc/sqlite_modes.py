"""Authors' modes (`graph_svc.store.AuthorModes`) in graph_svc's SQLite file."""

import sqlite3
from collections.abc import Sequence

from graph_svc.store import AuthorState, Busy, DrainTask, FanoutPolicy, Mode, ModeChange
from mesh.sqlite import Database, key

# Joined to the schema of sqlite.py, whose `users` table has the modes' columns.
SCHEMA = """
CREATE INDEX IF NOT EXISTS users_by_mode ON users (mode, follower_count);
CREATE INDEX IF NOT EXISTS users_by_mode_sequence ON users (mode_sequence) WHERE mode_sequence > 0;
CREATE TABLE IF NOT EXISTS drains (
    author_id INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    bucket INTEGER NOT NULL,
    published_ms INTEGER,
    done INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (author_id, epoch, bucket)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS drains_unpublished ON drains (author_id) WHERE published_ms IS NULL;
CREATE INDEX IF NOT EXISTS drains_published ON drains (published_ms) WHERE published_ms IS NOT NULL;
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
USER_COLUMNS = """
    mode INTEGER NOT NULL DEFAULT 0,
    epoch INTEGER NOT NULL DEFAULT 0,
    mode_since_ms INTEGER NOT NULL DEFAULT 0,
    mode_sequence INTEGER NOT NULL DEFAULT 0
"""
_MOVES_MAX = 500
_PRUNE_MAX = 1_000
_THRESHOLD = "pull_threshold"
_THRESHOLD_MIN = "pull_threshold_min"
_BUCKET_SIZE = "bucket_size"
_INCARNATION = "log_incarnation"


class SqliteAuthorModes:
    """See the port. `bucket_size`: followers to a bucket."""

    def __init__(self, database: Database, bucket_size: int) -> None:
        self._modes_database = database
        self._bucket_size = bucket_size

    def _buckets(self, follower_rows: int) -> int:
        return max(1, -(-follower_rows // self._bucket_size))

    async def settled_bucket_size(self) -> int:
        """The size of buckets that the database was made with."""

        def work(connection: sqlite3.Connection) -> int:
            if _setting(connection, _BUCKET_SIZE) is None:
                _set(connection, _BUCKET_SIZE, str(self._bucket_size))
            return int(_setting(connection, _BUCKET_SIZE) or 0)

        return await self._modes_database.write(work)

    async def author_state(self, author_id: int) -> AuthorState | None:
        """See the port."""

        def work(connection: sqlite3.Connection) -> AuthorState | None:
            row = connection.execute(
                "SELECT mode, epoch, mode_since_ms, follower_rows FROM users WHERE user_id = ?", (key(author_id),)
            ).fetchone()
            return AuthorState(Mode(row[0]), row[1], row[2], self._buckets(row[3])) if row else None

        return await self._modes_database.look(work)

    async def move_modes(self, pull_from: int, push_below: int, now_ms: int, busy: Busy | None = None) -> int:
        """See the port."""

        def to_move(connection: sqlite3.Connection) -> dict[int, tuple[Mode, int]]:
            moves: dict[int, tuple[Mode, int]] = {}
            for mode, condition, bound, following in (
                (Mode.PUSH, ">=", pull_from, Mode.PULL),
                (Mode.DRAIN, ">=", pull_from, Mode.PULL),
                (Mode.PULL, "<", push_below, Mode.DRAIN),
            ):
                rows = connection.execute(
                    f"SELECT user_id, follower_rows FROM users WHERE mode = ? AND follower_count {condition} ? LIMIT ?",
                    (mode, bound, _MOVES_MAX),
                )
                moves |= {row[0]: (following, row[1]) for row in rows}
            if busy:
                marks = ",".join("?" * len(busy.author_ids))
                rows = connection.execute(
                    "SELECT user_id, follower_rows FROM users"
                    f" WHERE user_id IN ({marks}) AND mode <> ? AND follower_count >= ? LIMIT ?",
                    (*map(key, busy.author_ids), Mode.PULL, busy.pull_from, _MOVES_MAX),
                )
                moves |= {row[0]: (Mode.PULL, row[1]) for row in rows}
            return moves

        def work(connection: sqlite3.Connection) -> int:
            moves = to_move(connection)
            for author_id, (mode, follower_rows) in moves.items():
                epoch = _set_mode(connection, author_id, mode, now_ms)
                if mode is Mode.DRAIN:
                    buckets = range(self._buckets(follower_rows))
                    connection.executemany(
                        "INSERT INTO drains (author_id, epoch, bucket) VALUES (?, ?, ?)",
                        [(author_id, epoch, bucket) for bucket in buckets],
                    )
            return len(moves)

        if not await self._modes_database.read(to_move):  # Nearly always: no write for nothing.
            return 0
        return await self._modes_database.write(work)

    async def is_draining(self) -> bool:
        """See the port."""

        def work(connection: sqlite3.Connection) -> bool:
            return (
                connection.execute("SELECT 1 FROM users WHERE mode = ? LIMIT 1", (Mode.DRAIN,)).fetchone() is not None
            )

        return await self._modes_database.read(work)

    async def unpublished_drains(self, limit: int) -> list[DrainTask]:
        """See the port."""

        def work(connection: sqlite3.Connection) -> list[DrainTask]:
            rows = connection.execute(
                "SELECT author_id, epoch, bucket FROM drains WHERE published_ms IS NULL LIMIT ?", (limit,)
            )
            return [DrainTask(*row) for row in rows]

        return await self._modes_database.read(work)

    async def mark_drains_published(self, tasks: Sequence[DrainTask], incarnation: str, now_ms: int) -> None:
        """See the port."""
        rows = [(now_ms, task.author_id, task.epoch, task.bucket) for task in tasks]

        def work(connection: sqlite3.Connection) -> None:
            if _setting(connection, _INCARNATION) == incarnation:
                connection.executemany(
                    "UPDATE drains SET published_ms = ? WHERE author_id = ? AND epoch = ? AND bucket = ?", rows
                )

        await self._modes_database.write(work)

    async def republish_drains(self, incarnation: str, since_ms: int) -> int:
        """See the port."""
        if await self._modes_database.read(lambda connection: _setting(connection, _INCARNATION)) == incarnation:
            return 0

        def work(connection: sqlite3.Connection) -> int:
            _set(connection, _INCARNATION, incarnation)
            return connection.execute(
                "UPDATE drains SET published_ms = NULL WHERE published_ms >= ?", (since_ms,)
            ).rowcount

        return await self._modes_database.write(work)

    async def complete_drain(self, task: DrainTask, now_ms: int) -> bool:
        """See the port."""

        def work(connection: sqlite3.Connection) -> bool:
            connection.execute(
                "UPDATE drains SET done = 1 WHERE author_id = ? AND epoch = ? AND bucket = ?",
                (key(task.author_id), task.epoch, task.bucket),
            )
            draining = connection.execute(
                "SELECT 1 FROM users WHERE user_id = ? AND mode = ? AND epoch = ?",
                (key(task.author_id), Mode.DRAIN, task.epoch),
            ).fetchone()
            left = connection.execute(
                "SELECT 1 FROM drains WHERE author_id = ? AND epoch = ? AND done = 0 LIMIT 1",
                (key(task.author_id), task.epoch),
            ).fetchone()
            if not draining or left:
                return False
            _set_mode(connection, task.author_id, Mode.PUSH, now_ms)
            return True

        return await self._modes_database.write(work)

    async def prune_drains(self, published_before_ms: int) -> None:
        """See the port."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute(
                "DELETE FROM drains WHERE (author_id, epoch, bucket) IN ("
                " SELECT author_id, epoch, bucket FROM drains WHERE published_ms < ? AND NOT EXISTS ("
                "  SELECT 1 FROM users WHERE user_id = author_id AND mode = ? AND users.epoch = drains.epoch"
                " ) LIMIT ?)",
                (published_before_ms, Mode.DRAIN, _PRUNE_MAX),
            )

        await self._modes_database.write(work)

    async def pulled_authors(self, after_id: int, limit: int) -> list[int]:
        """See the port."""

        def work(connection: sqlite3.Connection) -> list[int]:
            rows = connection.execute(
                "SELECT user_id FROM users WHERE mode IN (?, ?) AND user_id > ? ORDER BY user_id LIMIT ?",
                (Mode.PULL, Mode.DRAIN, after_id, limit),
            )
            return [row[0] for row in rows]

        return await self._modes_database.read(work)

    async def mode_changes(self, after_sequence: int, limit: int) -> list[ModeChange]:
        """See the port."""

        def work(connection: sqlite3.Connection) -> list[ModeChange]:
            rows = connection.execute(
                "SELECT mode_sequence, user_id, mode FROM users WHERE mode_sequence > max(?, 0)"
                " ORDER BY mode_sequence LIMIT ?",
                (after_sequence, limit),
            )
            return [ModeChange(row[0], row[1], Mode(row[2])) for row in rows]

        return await self._modes_database.read(work)

    async def mode_sequence(self) -> int:
        """See the port."""
        return await self._modes_database.read(_last_sequence)

    async def fanout_policy(self) -> FanoutPolicy | None:
        """See the port."""

        def work(connection: sqlite3.Connection) -> FanoutPolicy | None:
            threshold = _setting(connection, _THRESHOLD)
            return FanoutPolicy(int(threshold), int(_setting(connection, _THRESHOLD_MIN) or 0)) if threshold else None

        return await self._modes_database.look(work)

    async def set_fanout_policy(self, policy: FanoutPolicy) -> None:
        """See the port."""

        def work(connection: sqlite3.Connection) -> None:
            _set(connection, _THRESHOLD, str(policy.pull_threshold))
            _set(connection, _THRESHOLD_MIN, str(policy.pull_threshold_min))

        await self._modes_database.write(work)


def _set_mode(connection: sqlite3.Connection, author_id: int, mode: Mode, now_ms: int) -> int:
    """A new mode in a new epoch, which is returned. Tasks of epochs before are over."""
    (epoch,) = connection.execute(
        "UPDATE users SET mode = ?, epoch = epoch + 1, mode_since_ms = ?, mode_sequence = ? WHERE user_id = ?"
        " RETURNING epoch",
        (mode, now_ms, _last_sequence(connection) + 1, author_id),
    ).fetchone()
    return int(epoch)


def _last_sequence(connection: sqlite3.Connection) -> int:
    (last,) = connection.execute("SELECT max(mode_sequence) FROM users WHERE mode_sequence > 0").fetchone()
    return int(last or 0)


def _setting(connection: sqlite3.Connection, name: str) -> str | None:
    row = connection.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
    return str(row[0]) if row else None


def _set(connection: sqlite3.Connection, name: str, value: str) -> None:
    connection.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, value))
