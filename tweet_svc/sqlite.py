"""TweetStore on SQLite: tweet, request id and outbox row are one transaction, so no sweep has to complete them."""

import sqlite3
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from mesh import failpoints
from mesh.errors import InvalidArgumentError, ResourceExhaustedError
from mesh.sqlite import Database, key
from mesh.sqlite_leases import SCHEMA as LEASES_SCHEMA
from mesh.sqlite_leases import SqliteWorkerLeases
from tweet_svc.store import OutboxRow, Request, StoredTweet

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
    deleted INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS tweets_by_author ON tweets (author_id, tweet_id DESC) WHERE deleted = 0;
CREATE TABLE IF NOT EXISTS requests (
    user_id INTEGER NOT NULL,
    request_id TEXT NOT NULL,
    tweet_id INTEGER NOT NULL,
    fingerprint BLOB NOT NULL,
    expires_ms INTEGER NOT NULL,
    PRIMARY KEY (user_id, request_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS requests_by_expiry ON requests (expires_ms);
CREATE TABLE IF NOT EXISTS outbox (
    event_id INTEGER PRIMARY KEY AUTOINCREMENT,
    author_id INTEGER NOT NULL,
    tweet_id INTEGER NOT NULL,
    deleted_version INTEGER NOT NULL,
    published_ms INTEGER,
    again INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS outbox_unpublished ON outbox (event_id) WHERE published_ms IS NULL;
CREATE INDEX IF NOT EXISTS outbox_never_published ON outbox (event_id) WHERE published_ms IS NULL AND again = 0;
CREATE INDEX IF NOT EXISTS outbox_published ON outbox (published_ms) WHERE published_ms IS NOT NULL;
CREATE TABLE IF NOT EXISTS log_incarnation (only INTEGER PRIMARY KEY CHECK (only = 1), incarnation TEXT NOT NULL);
"""
)
_TWEET_COLUMNS = tuple(field.name for field in fields(StoredTweet))
_TWEET = ", ".join(_TWEET_COLUMNS)
_PRUNE_ROWS_MAX = 1_000


class SqliteTweetStore(SqliteWorkerLeases):
    """See the port."""

    def __init__(self, path: str | Path, *, synchronous: str = "FULL") -> None:
        self._database = Database(path, _SCHEMA, synchronous=synchronous)
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
            if _outbox_span(connection) >= outbox_max:
                raise ResourceExhaustedError(
                    "Fan-out has been away for too long; try again later.",
                    retry_after_seconds=5.0,
                    reason="OUTBOX_FULL",
                )
            _put_outbox(connection, tweet, 0)
            if failpoints.ARMED:
                failpoints.hit("between-store-writes")
            connection.execute(
                f"INSERT INTO tweets ({_TWEET}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
                (
                    *(tweet.tweet_id, tweet.author_id, tweet.text),
                    *(tweet.in_reply_to_tweet_id, tweet.in_reply_to_user_id, tweet.quoted_tweet_id),
                    *(",".join(tweet.media_ids), ",".join(tweet.mentions), tweet.version),
                ),
            )
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

    async def made_before(self, author_id: int, request: Request, now_ms: int) -> StoredTweet | None:
        """See the port."""
        return await self._database.read(lambda connection: _made_before(connection, author_id, request, now_ms))

    async def tweets(self, tweet_ids: Sequence[int]) -> list[StoredTweet]:
        """See the port."""

        def work(connection: sqlite3.Connection) -> list[StoredTweet]:
            found = (_tweet(connection, tweet_id) for tweet_id in tweet_ids)
            return [tweet for tweet in found if tweet]

        return await self._database.read(work)

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

    async def delete_tweet(self, tweet_id: int, author_id: int) -> StoredTweet | None:
        """See the port."""

        def work(connection: sqlite3.Connection) -> StoredTweet | None:
            tweet = _tweet(connection, tweet_id)
            if tweet is None or tweet.deleted or tweet.author_id != author_id:
                return tweet
            connection.execute(
                "UPDATE tweets SET text = '', media_ids = '', mentions = '', version = version + 1, deleted = 1"
                " WHERE tweet_id = ?",
                (tweet_id,),
            )
            _put_outbox(connection, tweet, tweet.version + 1)
            return _tweet(connection, tweet_id)

        return await self._database.write(work)

    async def unpublished(self, limit: int) -> list[OutboxRow]:
        """See the port."""

        def work(connection: sqlite3.Connection) -> list[OutboxRow]:
            rows = connection.execute(
                "SELECT event_id, author_id, tweet_id, deleted_version FROM outbox"
                " WHERE published_ms IS NULL ORDER BY event_id LIMIT ?",
                (limit,),
            )
            return [OutboxRow(*row) for row in rows]

        return await self._database.read(work)

    async def mark_published(self, event_ids: Sequence[int], incarnation: str, now_ms: int) -> None:
        """See the port."""
        rows = [(now_ms, event_id) for event_id in event_ids]

        def work(connection: sqlite3.Connection) -> None:
            if _incarnation(connection) == incarnation:
                connection.executemany("UPDATE outbox SET published_ms = ? WHERE event_id = ?", rows)

        await self._database.write(work)

    async def republish(self, incarnation: str, since_ms: int) -> int:
        """See the port."""

        def work(connection: sqlite3.Connection) -> int:
            if _incarnation(connection) == incarnation:
                return 0
            connection.execute("INSERT OR REPLACE INTO log_incarnation VALUES (1, ?)", (incarnation,))
            return connection.execute(
                "UPDATE outbox SET published_ms = NULL, again = 1 WHERE published_ms >= ?", (since_ms,)
            ).rowcount

        return 0 if await self._database.read(_incarnation) == incarnation else await self._database.write(work)

    async def prune(self, published_before_ms: int, now_ms: int) -> bool:
        """See the port. A bounded number of rows each time."""

        def work(connection: sqlite3.Connection) -> bool:
            rows = connection.execute(
                "DELETE FROM outbox WHERE event_id IN (SELECT event_id FROM outbox WHERE published_ms < ? LIMIT ?)",
                (published_before_ms, _PRUNE_ROWS_MAX),
            ).rowcount
            requests = connection.execute(
                "DELETE FROM requests WHERE (user_id, request_id) IN"
                " (SELECT user_id, request_id FROM requests WHERE expires_ms <= ? LIMIT ?)",
                (now_ms, _PRUNE_ROWS_MAX),
            ).rowcount
            return _PRUNE_ROWS_MAX in {rows, requests}

        return await self._database.write(work)

    async def outbox_depth(self) -> int:
        """See the port."""

        def work(connection: sqlite3.Connection) -> int:
            row = connection.execute("SELECT count(*) FROM outbox WHERE published_ms IS NULL").fetchone()
            return int(row[0])

        return await self._database.read(work)


def _tweet(connection: sqlite3.Connection, tweet_id: int) -> StoredTweet | None:
    row = connection.execute(f"SELECT {_TWEET} FROM tweets WHERE tweet_id = ?", (key(tweet_id),)).fetchone()
    if row is None:
        return None
    columns = dict(zip(_TWEET_COLUMNS, row, strict=True))
    columns |= {name: _split(columns[name]) for name in ("media_ids", "mentions")}
    return StoredTweet(**(columns | {"deleted": bool(columns["deleted"])}))


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


def _put_outbox(connection: sqlite3.Connection, tweet: StoredTweet, deleted_version: int) -> None:
    connection.execute(
        "INSERT INTO outbox (author_id, tweet_id, deleted_version) VALUES (?, ?, ?)",
        (tweet.author_id, tweet.tweet_id, deleted_version),
    )


def _incarnation(connection: sqlite3.Connection) -> str | None:
    row = connection.execute("SELECT incarnation FROM log_incarnation").fetchone()
    return row[0] if row else None


def _outbox_span(connection: sqlite3.Connection) -> int:
    """From the oldest row that was never published to the newest: their number, or a little more, at no cost on the
    way of a post."""
    oldest, newest = connection.execute(
        "SELECT (SELECT min(event_id) FROM outbox WHERE published_ms IS NULL AND again = 0),"
        " (SELECT max(event_id) FROM outbox)"
    ).fetchone()
    return 0 if oldest is None else newest - oldest + 1
