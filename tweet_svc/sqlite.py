"""TweetStore on SQLite: tweet, request id and outbox row are one transaction, so no sweep has to complete them."""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from mesh import failpoints
from mesh.caches.counts import Tally
from mesh.errors import InvalidArgumentError, ResourceExhaustedError
from mesh.ids import time_ms_of
from mesh.sqlite import Database, key
from mesh.sqlite_leases import SCHEMA as LEASES_SCHEMA
from mesh.sqlite_leases import SqliteWorkerLeases
from tweet_svc.store import Change, Engagements, EventKind, OutboxRow, Request, Revision, StoredTweet

_OUTBOX = {False: "outbox", True: "outbox_slow"}
"""Slow rows have a table of their own, so that the ordinary ones' bound doesn't see them."""
_OUTBOX_SCHEMA = """
CREATE TABLE IF NOT EXISTS {table} (
    event_id INTEGER PRIMARY KEY AUTOINCREMENT,
    author_id INTEGER NOT NULL,
    tweet_id INTEGER NOT NULL,
    kind TEXT NOT NULL,
    version INTEGER NOT NULL,
    published_ms INTEGER,
    again INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS {table}_unpublished ON {table} (event_id) WHERE published_ms IS NULL;
CREATE INDEX IF NOT EXISTS {table}_never_published ON {table} (event_id) WHERE published_ms IS NULL AND again = 0;
CREATE INDEX IF NOT EXISTS {table}_published ON {table} (published_ms) WHERE published_ms IS NOT NULL;
"""
_SCHEMA = (
    LEASES_SCHEMA
    + """
CREATE TABLE IF NOT EXISTS tweets (
    tweet_id INTEGER PRIMARY KEY,
    author_id INTEGER NOT NULL,
    text TEXT NOT NULL,
    in_reply_to_tweet_id INTEGER NOT NULL,
    in_reply_to_user_id INTEGER NOT NULL,
    quoted_tweet_id INTEGER NOT NULL,
    media_ids TEXT NOT NULL,
    mentions TEXT NOT NULL,
    version INTEGER NOT NULL,
    deleted INTEGER NOT NULL,
    quoted_user_id INTEGER NOT NULL,
    retweeted_tweet_id INTEGER NOT NULL,
    retweeted_user_id INTEGER NOT NULL,
    edited_ms INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS tweets_by_author ON tweets (author_id, tweet_id DESC) WHERE deleted = 0;
CREATE UNIQUE INDEX IF NOT EXISTS retweets ON tweets (author_id, retweeted_tweet_id)
    WHERE retweeted_tweet_id > 0 AND deleted = 0;
CREATE INDEX IF NOT EXISTS retweets_deleted ON tweets (author_id, retweeted_tweet_id, tweet_id)
    WHERE retweeted_tweet_id > 0 AND deleted = 1;
CREATE TABLE IF NOT EXISTS tweet_revisions (
    tweet_id INTEGER NOT NULL,
    version INTEGER NOT NULL,
    text TEXT NOT NULL,
    written_ms INTEGER NOT NULL,
    PRIMARY KEY (tweet_id, version)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS likes (
    user_id INTEGER NOT NULL,
    tweet_id INTEGER NOT NULL,
    PRIMARY KEY (user_id, tweet_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tweet_counts (
    tweet_id INTEGER PRIMARY KEY,
    likes INTEGER NOT NULL,
    retweets INTEGER NOT NULL,
    replies INTEGER NOT NULL,
    quotes INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS count_flushes (flush_id TEXT PRIMARY KEY, added_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS count_flushes_by_age ON count_flushes (added_ms);
CREATE TABLE IF NOT EXISTS requests (
    user_id INTEGER NOT NULL,
    request_id TEXT NOT NULL,
    tweet_id INTEGER NOT NULL,
    fingerprint BLOB NOT NULL,
    expires_ms INTEGER NOT NULL,
    PRIMARY KEY (user_id, request_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS requests_by_expiry ON requests (expires_ms);
CREATE TABLE IF NOT EXISTS log_incarnation (only INTEGER PRIMARY KEY CHECK (only = 1), incarnation TEXT NOT NULL);
"""
    + "".join(_OUTBOX_SCHEMA.format(table=table) for table in _OUTBOX.values())
)
_MIGRATIONS = (
    # Retweets, edits, and events of more than two kinds.
    """
ALTER TABLE tweets ADD COLUMN quoted_user_id INTEGER NOT NULL DEFAULT 0;
ALTER TABLE tweets ADD COLUMN retweeted_tweet_id INTEGER NOT NULL DEFAULT 0;
ALTER TABLE tweets ADD COLUMN retweeted_user_id INTEGER NOT NULL DEFAULT 0;
ALTER TABLE tweets ADD COLUMN edited_ms INTEGER NOT NULL DEFAULT 0;
UPDATE tweets SET quoted_user_id =
    ifnull((SELECT quoted.author_id FROM tweets AS quoted WHERE quoted.tweet_id = tweets.quoted_tweet_id), 0)
    WHERE quoted_tweet_id > 0;
ALTER TABLE outbox ADD COLUMN kind TEXT NOT NULL DEFAULT 'created';
ALTER TABLE outbox RENAME COLUMN deleted_version TO version;
UPDATE outbox SET kind = 'deleted' WHERE version > 0;
UPDATE outbox SET version = 1 WHERE version = 0;
""",
)
_TWEET_COLUMNS = tuple(field.name for field in fields(StoredTweet))
_TWEET = ", ".join(_TWEET_COLUMNS)
_JOINED = ("media_ids", "mentions")
_PRUNE_ROWS_MAX = 1_000
_FLUSHES_KEPT_MS = 86_400_000


class SqliteTweetStore(SqliteWorkerLeases):
    """See the port."""

    def __init__(self, path: str | Path, *, synchronous: str = "FULL") -> None:
        self._database = Database(path, _SCHEMA, migrations=_MIGRATIONS, synchronous=synchronous)
        super().__init__(self._database)

    async def open(self) -> None:
        """Open the file, making it where it is missing."""
        await self._database.open()

    async def close(self) -> None:
        """See the port."""
        await self._database.close()

    async def create_tweet(
        self, tweet: StoredTweet, request: Request | None, now_ms: int, outbox_max: int
    ) -> StoredTweet:
        """See the port."""

        def work(connection: sqlite3.Connection) -> StoredTweet:
            if request and (made := _made_before(connection, tweet.author_id, request, now_ms)):
                return made
            _insert_tweet(connection, tweet, outbox_max, slow=False)
            if request:
                connection.execute(
                    "INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?)",
                    (
                        *(key(tweet.author_id), request.request_id),
                        *(tweet.tweet_id, request.fingerprint, request.expires_ms),
                    ),
                )
            return tweet

        return await self._database.write(work)

    async def create_retweet(self, tweet: StoredTweet, outbox_max: int, *, slow: bool = False) -> StoredTweet:
        """See the port."""

        def work(connection: sqlite3.Connection) -> StoredTweet:
            if made := _retweet_of(connection, tweet.author_id, tweet.retweeted_tweet_id):
                return made
            _insert_tweet(connection, tweet, outbox_max, slow=slow)
            return tweet

        return await self._database.write(work)

    async def retweet_of(self, author_id: int, original_id: int) -> StoredTweet | None:
        """See the port."""
        return await self._database.look(
            lambda connection: (
                _retweet_of(connection, author_id, original_id)
                or _retweet_of(connection, author_id, original_id, deleted=True)
            )
        )

    async def undo_retweet(self, author_id: int, original_id: int) -> Change | None:
        """See the port."""

        def work(connection: sqlite3.Connection) -> Change | None:
            if retweet := _retweet_of(connection, author_id, original_id):
                return _delete(connection, retweet)
            deleted = _retweet_of(connection, author_id, original_id, deleted=True)
            return Change(deleted, changed=False) if deleted else None

        return await self._database.write(work)

    async def made_before(self, author_id: int, request: Request, now_ms: int) -> StoredTweet | None:
        """See the port."""
        return await self._database.look(lambda connection: _made_before(connection, author_id, request, now_ms))

    async def tweets(self, tweet_ids: Sequence[int]) -> list[StoredTweet]:
        """See the port."""

        def work(connection: sqlite3.Connection) -> list[StoredTweet]:
            found = (_tweet(connection, tweet_id) for tweet_id in tweet_ids)
            return [tweet for tweet in found if tweet]

        return await self._database.look(work)

    async def author_tweet_ids(
        self, author_ids: Sequence[int], below_ids: Sequence[int], limits: Sequence[int]
    ) -> list[list[int]]:
        """See the port."""

        def work(connection: sqlite3.Connection) -> list[list[int]]:
            return [
                [
                    row[0]
                    for row in connection.execute(
                        "SELECT tweet_id FROM tweets WHERE deleted = 0 AND author_id = ? AND tweet_id < ?"
                        " ORDER BY tweet_id DESC LIMIT ?",
                        (key(author_id), key(below_id), limit),
                    )
                ]
                for author_id, below_id, limit in zip(author_ids, below_ids, limits, strict=True)
            ]

        return await self._database.read(work)

    async def delete_tweet(self, tweet_id: int, author_id: int) -> Change | None:
        """See the port."""

        def work(connection: sqlite3.Connection) -> Change | None:
            tweet = _tweet(connection, tweet_id)
            if tweet is None or tweet.deleted or tweet.author_id != author_id:
                return Change(tweet, changed=False) if tweet else None
            return _delete(connection, tweet)

        return await self._database.write(work)

    async def update_tweet(
        self,
        tweet_id: int,
        author_id: int,
        text: str,
        mentions: Sequence[str],
        now_ms: int,
        outbox_max: int,
        expected_version: int = 0,
    ) -> Change | None:
        """See the port."""

        def work(connection: sqlite3.Connection) -> Change | None:
            tweet = _tweet(connection, tweet_id)
            if tweet is None:
                return None
            if not tweet.takes_edit(author_id, text, expected_version):
                return Change(tweet, changed=False)
            _require_room(connection, outbox_max, slow=False)
            written = _present_revision(tweet)
            connection.execute(
                "INSERT INTO tweet_revisions VALUES (?, ?, ?, ?)",
                (tweet_id, written.version, written.text, written.written_ms),
            )
            connection.execute(
                "UPDATE tweets SET text = ?, mentions = ?, version = version + 1, edited_ms = ? WHERE tweet_id = ?",
                (text, ",".join(mentions), now_ms, tweet_id),
            )
            return _changed(connection, tweet, EventKind.UPDATED)

        return await self._database.write(work)

    async def revisions(self, tweet_id: int, below_version: int, limit: int) -> list[Revision] | None:
        """See the port. The present text is in `tweets`, only those before it are in `tweet_revisions`."""

        def work(connection: sqlite3.Connection) -> list[Revision] | None:
            tweet = _tweet(connection, tweet_id)
            if tweet is None or tweet.deleted:
                return None
            before = connection.execute(
                "SELECT version, text, written_ms FROM tweet_revisions WHERE tweet_id = ? AND version < ?"
                " ORDER BY version DESC LIMIT ?",
                (tweet_id, below_version, limit),
            )
            present = [_present_revision(tweet)] if tweet.version < below_version else []
            return [*present, *(Revision(*row) for row in before)][:limit]

        return await self._database.read(work)

    async def like(self, user_id: int, tweet_id: int) -> bool:
        """See the port."""
        statement = "INSERT INTO likes VALUES (?, ?) ON CONFLICT DO NOTHING"
        return await self._database.write(
            lambda connection: connection.execute(statement, (key(user_id), key(tweet_id))).rowcount > 0
        )

    async def unlike(self, user_id: int, tweet_id: int) -> bool:
        """See the port."""
        statement = "DELETE FROM likes WHERE user_id = ? AND tweet_id = ?"
        return await self._database.write(
            lambda connection: connection.execute(statement, (key(user_id), key(tweet_id))).rowcount > 0
        )

    async def engagements(self, user_id: int, tweet_ids: Sequence[int]) -> Engagements:
        """See the port."""
        like = "SELECT 1 FROM likes WHERE user_id = ? AND tweet_id = ?"

        def work(connection: sqlite3.Connection) -> Engagements:
            likes = {i for i in tweet_ids if connection.execute(like, (key(user_id), key(i))).fetchone()}
            retweets = {i for i in tweet_ids if _retweet_of(connection, user_id, i)}
            return Engagements(frozenset(likes), frozenset(retweets))

        return await self._database.look(work)

    async def counts(self, tweet_ids: Sequence[int], flush_id: str) -> tuple[dict[int, Tally], bool]:
        """See the port."""
        select = f"SELECT {', '.join(Tally._fields)} FROM tweet_counts WHERE tweet_id = ?"

        def work(connection: sqlite3.Connection) -> tuple[dict[int, Tally], bool]:
            rows = {tweet_id: connection.execute(select, (key(tweet_id),)).fetchone() for tweet_id in tweet_ids}
            added = connection.execute("SELECT 1 FROM count_flushes WHERE flush_id = ?", (flush_id,)).fetchone()
            return {tweet_id: Tally(*row) if row else Tally() for tweet_id, row in rows.items()}, added is not None

        return await self._database.look(work)

    async def add_counts(self, flush_id: str, sums: Mapping[int, Tally], now_ms: int) -> bool:
        """See the port."""
        added = ", ".join(f"{name} = {name} + excluded.{name}" for name in Tally._fields)
        upsert = f"INSERT INTO tweet_counts VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET {added}"
        rows = [(key(tweet_id), *tally) for tweet_id, tally in sums.items()]

        def work(connection: sqlite3.Connection) -> bool:
            flush = "INSERT INTO count_flushes VALUES (?, ?) ON CONFLICT DO NOTHING"
            if not connection.execute(flush, (flush_id, now_ms)).rowcount:
                return False
            connection.executemany(upsert, rows)
            return True

        return await self._database.write(work)

    async def unpublished(self, limit: int, *, slow: bool = False) -> list[OutboxRow]:
        """See the port."""

        def work(connection: sqlite3.Connection) -> list[OutboxRow]:
            rows = connection.execute(
                f"SELECT event_id, author_id, tweet_id, kind, version FROM {_OUTBOX[slow]}"
                " WHERE published_ms IS NULL ORDER BY event_id LIMIT ?",
                (limit,),
            )
            return [
                OutboxRow(event_id, author_id, tweet_id, EventKind(kind), version, slow)
                for event_id, author_id, tweet_id, kind, version in rows
            ]

        return await self._database.look(work)

    async def mark_published(self, rows: Sequence[OutboxRow], incarnation: str, now_ms: int) -> bool:
        """See the port."""

        def work(connection: sqlite3.Connection) -> bool:
            if _incarnation(connection) != incarnation:
                return False
            for slow, table in _OUTBOX.items():
                connection.executemany(
                    f"UPDATE {table} SET published_ms = ? WHERE event_id = ?",
                    [(now_ms, row.event_id) for row in rows if row.slow is slow],
                )
            return True

        return await self._database.write(work)

    async def republish(self, incarnation: str, since_ms: int) -> int:
        """See the port."""

        def work(connection: sqlite3.Connection) -> int:
            if _incarnation(connection) == incarnation:
                return 0
            connection.execute("INSERT OR REPLACE INTO log_incarnation VALUES (1, ?)", (incarnation,))
            return sum(
                connection.execute(
                    f"UPDATE {table} SET published_ms = NULL, again = 1 WHERE published_ms >= ?", (since_ms,)
                ).rowcount
                for table in _OUTBOX.values()
            )

        return 0 if await self._database.look(_incarnation) == incarnation else await self._database.write(work)

    async def prune(self, published_before_ms: int, now_ms: int) -> bool:
        """See the port. A bounded number of rows each time."""

        def work(connection: sqlite3.Connection) -> bool:
            deleted = {
                connection.execute(
                    f"DELETE FROM {table} WHERE ({row}) IN (SELECT {row} FROM {table} WHERE {past} ? LIMIT ?)",
                    (bound, _PRUNE_ROWS_MAX),
                ).rowcount
                for table, row, past, bound in (
                    *((outbox, "event_id", "published_ms <", published_before_ms) for outbox in _OUTBOX.values()),
                    ("requests", "user_id, request_id", "expires_ms <=", now_ms),
                    ("count_flushes", "flush_id", "added_ms <=", now_ms - _FLUSHES_KEPT_MS),
                )
            }
            return _PRUNE_ROWS_MAX in deleted

        return await self._database.write(work)

    async def outbox_depth(self) -> int:
        """See the port."""

        def work(connection: sqlite3.Connection) -> int:
            counts = (
                connection.execute(f"SELECT count(*) FROM {table} WHERE published_ms IS NULL").fetchone()
                for table in _OUTBOX.values()
            )
            return sum(int(row[0]) for row in counts)

        return await self._database.read(work)


def _tweet(connection: sqlite3.Connection, tweet_id: int) -> StoredTweet | None:
    row = connection.execute(f"SELECT {_TWEET} FROM tweets WHERE tweet_id = ?", (key(tweet_id),)).fetchone()
    return _stored(row) if row else None


def _retweet_of(
    connection: sqlite3.Connection, author_id: int, original_id: int, *, deleted: bool = False
) -> StoredTweet | None:
    """The newest; of those that aren't deleted there is one."""
    row = connection.execute(
        f"SELECT {_TWEET} FROM tweets WHERE author_id = ? AND retweeted_tweet_id = ? AND retweeted_tweet_id > 0"
        f" AND deleted = {int(deleted)} ORDER BY tweet_id DESC LIMIT 1",
        (key(author_id), key(original_id)),
    ).fetchone()
    return _stored(row) if row else None


def _stored(row: Sequence[object]) -> StoredTweet:
    columns: dict[str, Any] = dict(zip(_TWEET_COLUMNS, row, strict=True))
    columns |= {name: _split(columns[name]) for name in _JOINED}
    return StoredTweet(**(columns | {"deleted": bool(columns["deleted"])}))


def _insert_tweet(connection: sqlite3.Connection, tweet: StoredTweet, outbox_max: int, *, slow: bool) -> None:
    _require_room(connection, outbox_max, slow=slow)
    _put_outbox(connection, tweet, EventKind.CREATED, tweet.version, slow=slow)
    if failpoints.ARMED:
        failpoints.hit("between-store-writes")
    columns = dict(zip(_TWEET_COLUMNS, astuple(tweet), strict=True))
    columns |= {name: ",".join(columns[name]) for name in _JOINED}
    connection.execute(
        f"INSERT INTO tweets ({_TWEET}) VALUES ({', '.join('?' * len(columns))})", tuple(columns.values())
    )


def _delete(connection: sqlite3.Connection, tweet: StoredTweet) -> Change:
    connection.execute(
        "UPDATE tweets SET text = '', media_ids = '', mentions = '', edited_ms = 0, version = version + 1, deleted = 1"
        " WHERE tweet_id = ?",
        (tweet.tweet_id,),
    )
    connection.execute("DELETE FROM tweet_revisions WHERE tweet_id = ?", (tweet.tweet_id,))
    return _changed(connection, tweet, EventKind.DELETED)


def _changed(connection: sqlite3.Connection, before: StoredTweet, kind: EventKind) -> Change:
    after = _tweet(connection, before.tweet_id)
    assert after is not None
    assert after.version == before.version + 1
    # The cache is told inline; that a storm of retweets is taken back may wait as the storm did.
    _put_outbox(connection, after, kind, after.version, slow=bool(after.retweeted_tweet_id))
    return Change(after, changed=True)


def _present_revision(tweet: StoredTweet) -> Revision:
    return Revision(tweet.version, tweet.text, tweet.edited_ms or time_ms_of(tweet.tweet_id))


def _split(joined: str) -> tuple[str, ...]:
    return tuple(joined.split(",")) if joined else ()


def _made_before(connection: sqlite3.Connection, author_id: int, request: Request, now_ms: int) -> StoredTweet | None:
    row = connection.execute(
        "SELECT tweet_id, fingerprint FROM requests WHERE user_id = ? AND request_id = ? AND expires_ms > ?",
        (key(author_id), request.request_id, now_ms),
    ).fetchone()
    if row is None:
        return None
    if row[1] != request.fingerprint:
        raise InvalidArgumentError("request_id", "Used before for another tweet.", reason="REQUEST_ID_REUSED")
    return _tweet(connection, row[0])


def _require_room(connection: sqlite3.Connection, outbox_max: int, *, slow: bool) -> None:
    if _outbox_span(connection, slow=slow) >= outbox_max:
        raise ResourceExhaustedError(
            "Fan-out has been away for too long; try again later.", retry_after_seconds=5.0, reason="OUTBOX_FULL"
        )


def _put_outbox(
    connection: sqlite3.Connection, tweet: StoredTweet, kind: EventKind, version: int, *, slow: bool
) -> None:
    connection.execute(
        f"INSERT INTO {_OUTBOX[slow]} (author_id, tweet_id, kind, version) VALUES (?, ?, ?, ?)",
        (tweet.author_id, tweet.tweet_id, kind.value, version),
    )


def _incarnation(connection: sqlite3.Connection) -> str | None:
    row = connection.execute("SELECT incarnation FROM log_incarnation").fetchone()
    return row[0] if row else None


def _outbox_span(connection: sqlite3.Connection, *, slow: bool) -> int:
    """From the oldest row that was never published to the newest: their number, or a little more, at no cost on the
    way of a post."""
    table = _OUTBOX[slow]
    oldest, newest = connection.execute(
        f"SELECT (SELECT min(event_id) FROM {table} WHERE published_ms IS NULL AND again = 0),"
        f" (SELECT max(event_id) FROM {table})"
    ).fetchone()
    return 0 if oldest is None else newest - oldest + 1
