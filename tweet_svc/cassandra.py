"""TweetStore on Cassandra. Every write can be done again by whoever finds its outbox row, or by its caller's retry.

A post: [the claim of its request id, or of (user, original)] → outbox row, with the whole write → `tweets_by_author`
and `tweets`, with one timestamp → reply. A death before the outbox row leaves at most a claim, which the retry goes on
from, with the id and the event that it holds; after it, the sweep or the retry does the rest.

An edit or a deletion: outbox row → (an edit: the text before, among the revisions) → the head, by LWT on the version →
(a deletion: erase). Two edits at once: one wins the version, the other's row is void and it tries again, on top. Edit
and deletion at once: either the deletion comes second, or the edit finds it. A text of a revision that is written after
the deletion has erased it is older than that by its timestamp.

Timestamps: what a tweet was born with has 1, its erasure 2, whoever writes it and when. All else is LWT.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from mesh import failpoints
from mesh.caches.counts import Tally
from mesh.cassandra import PARTITIONS_AT_ONCE, Cassandra, Row, Statement, each, key, parts
from mesh.cassandra_leases import STATEMENTS as LEASES_STATEMENTS
from mesh.cassandra_leases import CassandraWorkerLeases
from mesh.clock import Clock, SystemClock
from mesh.errors import InvalidArgumentError, UnavailableError
from mesh.ids import time_ms_of
from tweet_svc.cassandra_outbox import STATEMENTS as OUTBOX_STATEMENTS
from tweet_svc.cassandra_outbox import Outbox
from tweet_svc.store import Change, Engagements, EventKind, OutboxRow, Request, Revision, StoredTweet

_BORN = (
    *("author_id", "text", "in_reply_to_tweet_id", "in_reply_to_user_id", "quoted_tweet_id", "quoted_user_id"),
    *("retweeted_tweet_id", "retweeted_user_id", "media_ids", "mentions"),
)
_BIRTH, _HEAD = 0, 1
_TWEET_ROW = f"tweet_id, part, {', '.join(_BORN)}, version, deleted, edited_ms, event_id"
_SELECT = Statement(f"SELECT {_TWEET_ROW} FROM tweets WHERE tweet_id = ?")
_SELECT_MANY = Statement(f"SELECT {_TWEET_ROW} FROM tweets WHERE tweet_id IN ?")
_BEAR = Statement(
    f"INSERT INTO tweets (tweet_id, part, {', '.join(_BORN)}) VALUES (?, 0{', ?' * len(_BORN)}) USING TIMESTAMP 1"
)
_ERASE = Statement(
    "UPDATE tweets USING TIMESTAMP 2 SET text = '', media_ids = '', mentions = '' WHERE tweet_id = ? AND part = 0"
)
_HEAD_COLUMNS = "text = ?, mentions = ?, version = ?, deleted = ?, edited_ms = ?, event_id = ?"
_FIRST_HEAD = Statement(
    f"UPDATE tweets SET {_HEAD_COLUMNS} WHERE tweet_id = ? AND part = 1 IF version = null", conditional=True
)
_NEXT_HEAD = Statement(
    f"UPDATE tweets SET {_HEAD_COLUMNS} WHERE tweet_id = ? AND part = 1 IF version = ?", conditional=True
)
_LIST = Statement(
    "INSERT INTO tweets_by_author (author_id, year, tweet_id, deleted) VALUES (?, ?, ?, false) USING TIMESTAMP 1"
)
_UNLIST = Statement(
    "UPDATE tweets_by_author USING TIMESTAMP 2 SET deleted = true WHERE author_id = ? AND year = ? AND tweet_id = ?"
)
_LISTED = Statement(
    "SELECT author_id, tweet_id, deleted FROM tweets_by_author WHERE author_id IN ? AND year = ? AND tweet_id < ?"
    " PER PARTITION LIMIT ?"
)
_REVISE = Statement(
    "INSERT INTO tweet_revisions (tweet_id, version, text, written_ms) VALUES (?, ?, ?, ?) USING TIMESTAMP 1"
)
_REVISIONS = Statement(
    "SELECT version, text, written_ms FROM tweet_revisions WHERE tweet_id = ? AND version < ? LIMIT ?"
)
_FORGET_REVISIONS = Statement("DELETE FROM tweet_revisions USING TIMESTAMP 2 WHERE tweet_id = ?")
_RETWEET = Statement("SELECT tweet_id, event_id FROM retweets WHERE user_id = ? AND original_id = ?")
_FIRST_RETWEET = Statement(
    "INSERT INTO retweets (user_id, original_id, tweet_id, event_id) VALUES (?, ?, ?, ?) IF NOT EXISTS",
    conditional=True,
)
_NEXT_RETWEET = Statement(
    "UPDATE retweets SET tweet_id = ?, event_id = ? WHERE user_id = ? AND original_id = ? IF event_id = ?",
    conditional=True,
)
_REQUEST = Statement(
    "SELECT tweet_id, event_id, fingerprint, expires_ms FROM requests WHERE user_id = ? AND request_id = ?"
)
_FIRST_REQUEST = Statement(
    "INSERT INTO requests (tweet_id, event_id, fingerprint, expires_ms, user_id, request_id)"
    " VALUES (?, ?, ?, ?, ?, ?) IF NOT EXISTS USING TTL ?",
    conditional=True,
)
_NEXT_REQUEST = Statement(
    "UPDATE requests USING TTL ? SET tweet_id = ?, event_id = ?, fingerprint = ?, expires_ms = ?"
    " WHERE user_id = ? AND request_id = ? IF event_id = ?",
    conditional=True,
)
_SET_LIKE = Statement(
    "UPDATE likes_by_user SET liked = ?, op = ? WHERE user_id = ? AND tweet_id = ? IF op = ?", conditional=True
)
_LIKES = Statement("SELECT tweet_id, liked, op FROM likes_by_user WHERE user_id = ? AND tweet_id IN ?")
_COUNTS = Statement(f"SELECT {', '.join(Tally._fields)}, flushes FROM tweet_counts WHERE tweet_id = ?")
_FIRST_COUNTS = Statement(
    f"INSERT INTO tweet_counts ({', '.join(Tally._fields)}, flushes, tweet_id) VALUES (?, ?, ?, ?, ?, ?) IF NOT EXISTS",
    conditional=True,
)
_NEXT_COUNTS = Statement(
    f"UPDATE tweet_counts SET {', '.join(f'{name} = ?' for name in Tally._fields)}, flushes = ?"
    " WHERE tweet_id = ? IF flushes = ?",
    conditional=True,
)
_FLUSH = Statement("SELECT sums, added_ms, added FROM count_flushes WHERE flush_id = ?")
_BEGIN_FLUSH = Statement(
    "INSERT INTO count_flushes (flush_id, sums, added_ms, added) VALUES (?, ?, ?, false) IF NOT EXISTS",
    conditional=True,
)
_END_FLUSH = Statement("UPDATE count_flushes SET added = true WHERE flush_id = ? IF added = false", conditional=True)
_STATEMENTS = (
    *(_SELECT, _SELECT_MANY, _BEAR, _ERASE, _FIRST_HEAD, _NEXT_HEAD, _LIST, _UNLIST, _LISTED, _REVISE, _REVISIONS),
    *(_FORGET_REVISIONS, _RETWEET, _FIRST_RETWEET, _NEXT_RETWEET, _REQUEST, _FIRST_REQUEST, _NEXT_REQUEST),
    *(_SET_LIKE, _LIKES, _COUNTS, _FIRST_COUNTS, _NEXT_COUNTS, _FLUSH, _BEGIN_FLUSH, _END_FLUSH),
    *OUTBOX_STATEMENTS,
    *LEASES_STATEMENTS,
)
_FLUSHES_KEPT_MS = 86_400_000
_FLUSHES_PER_TWEET = 256
"""A tweet's row names so many flushes. While Valkey is away each change is one; a flush that died before is added again
when Valkey is back, which must not be after more of them."""
_EDITS_MAX = 8
_LISTED_MAX = 5_000
_CLOCKS_DIFFER_MS = 3_600_000
_TTL_SECONDS_MIN = 60


@dataclass(frozen=True, slots=True)
class _Known:
    """A tweet, and the event that brought its head here (0: none yet)."""

    tweet: StoredTweet
    event_id: int
    has_head: bool


@dataclass(frozen=True, slots=True)
class _Asked:
    """Of an author's list: so many ids below one, of a year or before."""

    index: int
    year: int
    author_id: int
    below_id: int
    limit: int


class CassandraTweetStore(CassandraWorkerLeases):
    """See the port. The bound of the outbox is each process's own: it counts the rows that wait in it.

    `sweep_seconds`: how often it is looked for what others left, once that is `adopt_after_ms` old.
    """

    def __init__(
        self,
        database: Cassandra,
        clock: Clock | None = None,
        *,
        sweep_seconds: float = 5.0,
        adopt_after_ms: int = 10_000,
    ) -> None:
        super().__init__(database, "tweet_svc")
        self._database = database
        self._clock = clock or SystemClock()
        self._outbox = Outbox(
            database,
            self._clock,
            self._complete,
            self._told,
            sweep_seconds=sweep_seconds,
            adopt_after_ms=adopt_after_ms,
        )
        self._flushes_after_ms = -1

    async def open(self) -> None:
        """Connect, and prepare. Raises UnavailableError, and ConfigurationError where the schema isn't there."""
        await self._database.open(_STATEMENTS)
        await self._outbox.sweep()

    async def close(self) -> None:
        """See the port."""
        await self._database.close()

    # Posts.

    async def create_tweet(
        self, tweet: StoredTweet, request: Request | None, now_ms: int, outbox_max: int
    ) -> StoredTweet:
        """See the port."""
        if request and (made := await self.made_before(tweet.author_id, request, now_ms)):
            return made
        self._outbox.require_room(outbox_max, slow=False)
        event_id = self._outbox.next_event_id(slow=False)
        if request:
            tweet_id, event_id = await self._claim_request(tweet, request, now_ms, event_id)
            if tweet_id != tweet.tweet_id:
                # Another call's, at this moment or before it died. What it hasn't done is done here, as it would.
                if made := await self._tweet(tweet_id):
                    return made
                tweet = replace(tweet, tweet_id=tweet_id)
        return await self._post(event_id, tweet)

    async def _claim_request(self, tweet: StoredTweet, request: Request, now_ms: int, event_id: int) -> tuple[int, int]:
        """The id of the tweet, and of its event, that this request makes: these, or those of an earlier call."""
        where = (key(tweet.author_id), request.request_id)
        ttl = max(_TTL_SECONDS_MIN, (request.expires_ms - now_ms) // 1_000)

        async def attempt(serially: bool) -> tuple[int, int] | None:
            row = await self._database.row(_REQUEST, *where, serially=serially)
            claim = (tweet.tweet_id, event_id, request.fingerprint, request.expires_ms)
            if row and row[3] > now_ms:
                _require_same(row[2], request)
                if row[0] == tweet.tweet_id or not self._outbox.is_stale(row[1]):
                    return row[0], row[1]
                claim = (row[0], *claim[1:])
            step = (_NEXT_REQUEST, (ttl, *claim, *where, row[1])) if row else (_FIRST_REQUEST, (*claim, *where, ttl))
            return (claim[0], event_id) if await self._database.apply(step) else None

        return await self._database.settled(("request", *where), attempt)

    async def made_before(self, author_id: int, request: Request, now_ms: int) -> StoredTweet | None:
        """See the port."""
        row = await self._database.row(_REQUEST, key(author_id), request.request_id)
        if row is None or row[3] <= now_ms:
            return None
        _require_same(row[2], request)
        return await self._claimed(row[0], row[1])

    async def _claimed(self, tweet_id: int, event_id: int) -> StoredTweet | None:
        """The tweet, completed where its outbox row was written; None: nothing was but the claim."""
        if made := await self._tweet(tweet_id):
            return made
        body = await self._outbox.body(event_id)
        if body is None:
            return None
        await self._finish(event_id, body)
        return await self._tweet(tweet_id)

    async def _post(self, event_id: int, tweet: StoredTweet) -> StoredTweet:
        body = {**_event(EventKind.CREATED, tweet, tweet.version), "tweet": asdict(tweet)}
        await self._outbox.put(event_id, body)
        if failpoints.ARMED:
            failpoints.hit("between-store-writes")
        await self._finish(event_id, body)
        return tweet

    async def _finish(self, event_id: int, body: dict[str, Any]) -> None:
        row = await self._complete(event_id, body)
        assert row is not None, "a birth and a deletion are never overtaken"
        self._outbox.done(row)

    async def _complete(self, event_id: int, body: dict[str, Any]) -> OutboxRow | None:
        """Do the write of an outbox row, also again, and by another process. None: it was overtaken."""
        match EventKind(body["kind"]):
            case EventKind.CREATED:
                await self._bear(_from_json(body["tweet"]))
            case EventKind.UPDATED:
                if not await self._edit(event_id, body):
                    return None
            case EventKind.DELETED:
                await self._end(event_id, body["tweet_id"])
        return await self._told(event_id, body)

    async def _told(self, event_id: int, body: dict[str, Any]) -> OutboxRow | None:
        """What is to be published of a write that is done. A deletion's version is where it found the tweet."""
        kind, tweet_id, version = EventKind(body["kind"]), body["tweet_id"], body["version"]
        if kind is EventKind.DELETED:
            tweet = await self._tweet(tweet_id)
            if tweet is None:
                return None
            version = tweet.version
        return OutboxRow(event_id, body["author_id"], tweet_id, kind, version, bool(event_id & 1))

    async def _bear(self, tweet: StoredTweet) -> None:
        """The tweet's own row comes last, so that who finds it needn't look for the other."""
        columns = asdict(tweet) | {"media_ids": ",".join(tweet.media_ids), "mentions": ",".join(tweet.mentions)}
        born = [_bigint(columns[name]) for name in _BORN]
        await self._database.write(_LIST, key(tweet.author_id), _year(tweet.tweet_id), key(tweet.tweet_id))
        if failpoints.ARMED:
            failpoints.hit("between-store-writes")
        await self._database.write(_BEAR, key(tweet.tweet_id), *born)

    # Retweets.

    async def create_retweet(self, tweet: StoredTweet, outbox_max: int, *, slow: bool = False) -> StoredTweet:
        """See the port."""
        where = (key(tweet.author_id), key(tweet.retweeted_tweet_id))
        if (made := await self.retweet_of(*where)) and not made.deleted:
            return made
        self._outbox.require_room(outbox_max, slow=slow)
        event_id = self._outbox.next_event_id(slow=slow)

        async def attempt(serially: bool) -> tuple[StoredTweet | None, int, int] | None:
            """The retweet that stands; or the ids of the one to be made, and of its event."""
            row = await self._database.row(_RETWEET, *where, serially=serially)
            tweet_id = tweet.tweet_id
            if row:
                stands = await self._tweet(row[0])
                if stands and not stands.deleted:
                    return stands, 0, 0
                if stands is None:  # Somebody else's claim: what they haven't done is done here.
                    if row[0] == tweet_id or not self._outbox.is_stale(row[1]):
                        return None, row[0], row[1]
                    tweet_id = row[0]
            claim = (tweet_id, event_id)
            step = (_NEXT_RETWEET, (*claim, *where, row[1])) if row else (_FIRST_RETWEET, (*where, *claim))
            return (None, *claim) if await self._database.apply(step) else None

        stands, tweet_id, event_id = await self._database.settled(("retweet", *where), attempt)
        return stands or await self._post(event_id, replace(tweet, tweet_id=tweet_id))

    async def retweet_of(self, author_id: int, original_id: int) -> StoredTweet | None:
        """See the port."""
        row = await self._database.row(_RETWEET, key(author_id), key(original_id))
        return await self._claimed(row[0], row[1]) if row else None

    async def undo_retweet(self, author_id: int, original_id: int) -> Change | None:
        """See the port."""
        retweet = await self.retweet_of(author_id, original_id)
        return await self.delete_tweet(retweet.tweet_id, author_id) if retweet else None

    # Reads.

    async def tweets(self, tweet_ids: Sequence[int]) -> list[StoredTweet]:
        """See the port."""

        async def some(ids: Sequence[int]) -> dict[int, StoredTweet]:
            rows: dict[int, list[Row]] = {}
            for tweet_key, *row in await self._database.rows(_SELECT_MANY, [key(tweet_id) for tweet_id in ids]):
                rows.setdefault(tweet_key, []).append(tuple(row))
            known = {tweet_id: _parsed(tweet_id, rows.get(key(tweet_id), [])) for tweet_id in ids}
            return {tweet_id: one.tweet for tweet_id, one in known.items() if one}

        found: dict[int, StoredTweet] = {}
        for part in await each(some, parts(tweet_ids, PARTITIONS_AT_ONCE)):
            found |= part
        return [found[tweet_id] for tweet_id in tweet_ids if tweet_id in found]

    async def _tweet(self, tweet_id: int) -> StoredTweet | None:
        known = await self._known(tweet_id)
        return known.tweet if known else None

    async def _known(self, tweet_id: int, *, serially: bool = False) -> _Known | None:
        rows = await self._database.rows(_SELECT, key(tweet_id), serially=serially)
        return _parsed(tweet_id, [row[1:] for row in rows])

    async def author_tweet_ids(
        self, author_ids: Sequence[int], below_ids: Sequence[int], limits: Sequence[int]
    ) -> list[list[int]]:
        """See the port. Authors of whom the same is asked are asked together, a year at a time."""
        found: list[list[int]] = [[] for _ in author_ids]
        # No tweet is younger than now, but for clocks that aren't quite right.
        newest = _year_of_ms(self._clock.now_ms() + _CLOCKS_DIFFER_MS)
        asked = [
            _Asked(index, newest, *one) for index, one in enumerate(zip(author_ids, below_ids, limits, strict=True))
        ]
        asked = [replace(one, year=min(one.year, _year(one.below_id))) for one in asked]
        while asked := [one for one in asked if one.limit > 0 and one.year >= _oldest_year(one.author_id)]:
            # Each round every author goes further down, to the year before, or ends.
            groups: dict[tuple[int, int, int], list[_Asked]] = {}
            for one in asked:
                groups.setdefault((one.year, one.below_id, one.limit), []).append(one)
            together = [
                part
                for (_, _, limit), group in groups.items()
                for part in parts(group, max(1, min(PARTITIONS_AT_ONCE, _LISTED_MAX // limit)))
            ]
            asked = []
            for some in await each(self._listed, together):
                for one, ids in some:
                    found[one.index] += ids
                    asked.append(one)
        return found

    async def _listed(self, together: Sequence[_Asked]) -> list[tuple[_Asked, list[int]]]:
        """What one query gives for each, and what is still to be asked."""
        year, below_id, limit = together[0].year, together[0].below_id, min(together[0].limit, _LISTED_MAX)
        author_ids = list({key(one.author_id) for one in together})
        rows: dict[int, list[Row]] = {}
        for author_id, *row in await self._database.rows(_LISTED, author_ids, year, key(below_id), limit):
            rows.setdefault(author_id, []).append(tuple(row))
        answers = []
        for one in together:
            mine = rows.get(key(one.author_id), [])
            ids = [tweet_id for tweet_id, deleted in mine if not deleted]
            rest = one.limit - len(ids)
            left = replace(one, below_id=mine[-1][0]) if len(mine) == limit else replace(one, year=year - 1)
            answers.append((replace(left, limit=rest), ids))
        return answers

    async def revisions(self, tweet_id: int, below_version: int, limit: int) -> list[Revision] | None:
        """See the port. The present text is the tweet's own. Of the others, one that isn't before it is of an edit that
        was begun only."""
        tweet = await self._tweet(tweet_id)
        if tweet is None or tweet.deleted:
            return None
        below = min(below_version, tweet.version, (1 << 31) - 1)
        rows = await self._database.rows(_REVISIONS, key(tweet_id), below, limit)
        present = [_present_revision(tweet)] if tweet.version < below_version else []
        return [*present, *(Revision(*row) for row in rows)][:limit]

    # Changes.

    async def delete_tweet(self, tweet_id: int, author_id: int) -> Change | None:
        """See the port."""
        known = await self._known(tweet_id)
        if known is None:
            return None
        tweet = known.tweet
        if tweet.deleted or tweet.author_id != author_id:
            if tweet.author_id == author_id:
                await self._erase(tweet)  # Who set the flag may have died.
            return Change(tweet, changed=False)
        # The cache is told inline; that a storm of retweets is taken back may wait as the storm did.
        event_id = self._outbox.next_event_id(slow=bool(tweet.retweeted_tweet_id))
        body = _event(EventKind.DELETED, tweet, tweet.version + 1)
        await self._outbox.put(event_id, body)
        await self._finish(event_id, body)
        ended = await self._known(tweet_id)
        assert ended is not None
        assert ended.tweet.deleted
        return Change(ended.tweet, changed=ended.event_id == event_id)

    async def _end(self, event_id: int, tweet_id: int) -> None:
        """Set the flag, then erase."""

        async def attempt(serially: bool) -> tuple[StoredTweet | None] | None:
            known = await self._known(tweet_id, serially=serially)
            if known is None or known.tweet.deleted:
                return (known.tweet if known else None,)
            after = replace(
                known.tweet,
                text="",
                media_ids=(),
                mentions=(),
                edited_ms=0,
                version=known.tweet.version + 1,
                deleted=True,
            )
            return (after,) if await self._put_head(known, after, event_id) else None

        (ended,) = await self._database.settled(("tweet", tweet_id), attempt)
        if ended:
            await self._erase(ended)

    async def _erase(self, tweet: StoredTweet) -> None:
        tweet_id = key(tweet.tweet_id)
        await self._database.write(_ERASE, tweet_id)
        await self._database.write(_UNLIST, key(tweet.author_id), _year(tweet.tweet_id), tweet_id)
        await self._database.write(_FORGET_REVISIONS, tweet_id)

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
        for _ in range(_EDITS_MAX):
            known = await self._known(tweet_id)
            if known is None:
                return None
            tweet = known.tweet
            if not tweet.takes_edit(author_id, text, expected_version):
                return Change(tweet, changed=False)
            self._outbox.require_room(outbox_max, slow=False)
            event_id = self._outbox.next_event_id(slow=False)
            body = _event(EventKind.UPDATED, tweet, tweet.version + 1)
            body |= {"text": text, "mentions": list(mentions), "edited_ms": now_ms}
            await self._outbox.put(event_id, body)
            if row := await self._complete(event_id, body):
                self._outbox.done(row)
                after = replace(tweet, text=text, mentions=tuple(mentions), edited_ms=now_ms, version=tweet.version + 1)
                return Change(after, changed=True)
            await self._outbox.void(event_id)
        raise UnavailableError("Too many edits at once.", reason="STORE_BUSY")

    async def _edit(self, event_id: int, body: dict[str, Any]) -> bool:
        """False: another edit, or the deletion, came first."""

        async def attempt(serially: bool) -> bool | None:
            known = await self._known(body["tweet_id"], serially=serially)
            if known is None or known.event_id == event_id:
                return known is not None
            if known.tweet.deleted or known.tweet.version != body["version"] - 1:
                return False
            written = _present_revision(known.tweet)
            await self._database.write(
                _REVISE, key(body["tweet_id"]), written.version, written.text, written.written_ms
            )
            text, edited_ms = body["text"], body["edited_ms"]
            after = replace(known.tweet, text=text, edited_ms=edited_ms, version=body["version"])
            after = replace(after, mentions=tuple(body["mentions"]))
            return await self._put_head(known, after, event_id) or None

        return await self._database.settled(("tweet", body["tweet_id"]), attempt)

    async def _put_head(self, before: _Known, after: StoredTweet, event_id: int) -> bool:
        columns = (after.text, ",".join(after.mentions), after.version, after.deleted, after.edited_ms, event_id)
        where = key(after.tweet_id)
        if not before.has_head:
            return await self._database.apply((_FIRST_HEAD, (*columns, where)))
        return await self._database.apply((_NEXT_HEAD, (*columns, where, before.tweet.version)))

    # Likes and counts.

    async def like(self, user_id: int, tweet_id: int) -> bool:
        """See the port."""
        return await self._set_like(key(user_id), key(tweet_id), liked=True)

    async def unlike(self, user_id: int, tweet_id: int) -> bool:
        """See the port."""
        return await self._set_like(key(user_id), key(tweet_id), liked=False)

    async def _set_like(self, user_id: int, tweet_id: int, *, liked: bool) -> bool:
        op = secrets.randbits(62)

        async def attempt(serially: bool) -> bool | None:
            row = await self._database.row(_LIKES, user_id, [tweet_id], serially=serially)
            if bool(row and row[1]) is liked:
                return bool(row and row[2] == op)
            # On the very write that was read: one that comes late finds another, even where a like stands as before.
            before = row[2] if row else None
            return await self._database.apply((_SET_LIKE, (liked, op, user_id, tweet_id, before))) or None

        return await self._database.settled(("like", user_id), attempt)

    async def engagements(self, user_id: int, tweet_ids: Sequence[int]) -> Engagements:
        """See the port."""
        rows = await self._database.rows(_LIKES, key(user_id), [key(tweet_id) for tweet_id in tweet_ids])
        liked = {row[0] for row in rows if row[1]}

        async def retweet(tweet_id: int) -> StoredTweet | None:
            return await self.retweet_of(user_id, tweet_id)

        retweets = zip(tweet_ids, await each(retweet, tweet_ids), strict=True)
        return Engagements(
            frozenset(tweet_id for tweet_id in tweet_ids if key(tweet_id) in liked),
            frozenset(tweet_id for tweet_id, made in retweets if made and not made.deleted),
        )

    async def counts(self, tweet_ids: Sequence[int], flush_id: str) -> tuple[dict[int, Tally], bool]:
        """See the port. A flush is in the counts from the moment that its row is there: what a tweet's own row lacks of
        it is added here. It is looked for first, so that no row has a flush that isn't found."""
        for _ in range(2):
            flush = await self._flush(flush_id) if flush_id else None
            rows = dict(zip(tweet_ids, await each(self._count, tweet_ids), strict=True))
            if flush or not any(flush_id in flushes.split() for _, flushes in rows.values()):
                break  # Else it came in between, or was forgotten.
        sums, everywhere = flush or ({}, True)

        def counted(tweet_id: int) -> Tally:
            tally, flushes = rows[tweet_id]
            lacks = not everywhere and flush_id not in flushes.split()
            return _plus(tally, sums.get(tweet_id, Tally())) if lacks else tally

        return {tweet_id: counted(tweet_id) for tweet_id in tweet_ids}, flush is not None

    async def _flush(self, flush_id: str, *, serially: bool = False) -> tuple[dict[int, Tally], bool] | None:
        """Its sums, and whether all rows have them."""
        row = await self._database.row(_FLUSH, flush_id, serially=serially)
        if row is None or row[1] <= self._flushes_after_ms:
            return None
        return {int(tweet_id): Tally(*sums) for tweet_id, sums in json.loads(row[0]).items()}, bool(row[2])

    async def _count(self, tweet_id: int, *, serially: bool = False) -> tuple[Tally, str]:
        row = await self._database.row(_COUNTS, key(tweet_id), serially=serially)
        return (Tally(*row[:4]), row[4]) if row else (Tally(), "")

    async def add_counts(self, flush_id: str, sums: Mapping[int, Tally], now_ms: int) -> bool:
        """See the port."""
        body = json.dumps({str(tweet_id): list(tally) for tweet_id, tally in sums.items()})

        async def attempt(serially: bool) -> bool:
            if serially and (row := await self._database.row(_FLUSH, flush_id, serially=True)):
                return bool(row[0] == body)  # One that dies as it learns this is another's first, which is as well.
            return await self._database.apply((_BEGIN_FLUSH, (flush_id, body, now_ms)))

        new = await self._database.settled(("flush", flush_id), attempt)
        flush = (dict(sums), False) if new else await self._flush(flush_id)
        if flush and not flush[1]:

            async def one(tweet_id: int) -> None:
                await self._add(tweet_id, flush_id, flush[0][tweet_id])

            await each(one, list(flush[0]))

            async def over(serially: bool) -> bool:
                return await self._database.apply((_END_FLUSH, (flush_id,))) or True

            await self._database.settled(("flush", flush_id), over)
        return new

    async def _add(self, tweet_id: int, flush_id: str, change: Tally) -> None:
        async def attempt(serially: bool) -> bool | None:
            tally, flushes = await self._count(tweet_id, serially=serially)
            if flush_id in flushes.split():
                return True
            last = " ".join([*flushes.split(), flush_id][-_FLUSHES_PER_TWEET:])
            columns = (*_plus(tally, change), last, key(tweet_id))
            step = (_NEXT_COUNTS, (*columns, flushes)) if flushes else (_FIRST_COUNTS, columns)
            return await self._database.apply(step) or None

        await self._database.settled(("counts", tweet_id), attempt)

    # The outbox.

    async def unpublished(self, limit: int, *, slow: bool = False) -> list[OutboxRow]:
        """See the port: of those whose write is done, which the sweep sees to."""
        return await self._outbox.unpublished(limit, slow=slow)

    async def mark_published(self, rows: Sequence[OutboxRow], incarnation: str, now_ms: int) -> bool:
        """See the port."""
        return await self._outbox.mark_published(rows, incarnation, now_ms)

    async def republish(self, incarnation: str, since_ms: int) -> int:
        """See the port."""
        return await self._outbox.republish(incarnation, since_ms)

    async def prune(self, published_before_ms: int, now_ms: int) -> bool:
        """See the port. Requests and flushes expire by themselves."""
        self._flushes_after_ms = max(self._flushes_after_ms, now_ms - _FLUSHES_KEPT_MS)
        return await self._outbox.prune(published_before_ms)

    async def outbox_depth(self) -> int:
        """See the port: those known here."""
        return self._outbox.depth


def _require_same(fingerprint: bytes, request: Request) -> None:
    if fingerprint != request.fingerprint:
        raise InvalidArgumentError("request_id", "Used before for another tweet.", reason="REQUEST_ID_REUSED")


def _event(kind: EventKind, tweet: StoredTweet, version: int) -> dict[str, Any]:
    """What all outbox rows say."""
    return {"kind": kind.value, "author_id": tweet.author_id, "tweet_id": tweet.tweet_id, "version": version}


def _from_json(columns: dict[str, Any]) -> StoredTweet:
    return StoredTweet(**columns | {name: tuple(columns[name]) for name in ("media_ids", "mentions")})


def _bigint(value: Any) -> Any:
    return key(value) if isinstance(value, int) else value


def _parsed(tweet_id: int, rows: Sequence[Row]) -> _Known | None:
    """A tweet from its birth and its head."""
    of = {part: row for part, *row in rows}
    if _BIRTH not in of or of[_BIRTH][0] is None:
        return None
    born, head = dict(zip(_BORN, of[_BIRTH], strict=False)), of.get(_HEAD)
    if head is None:
        version, deleted, edited_ms, event_id = 1, False, 0, 0
    else:
        version, deleted, edited_ms, event_id = head[-4:]
        came = dict(zip(_BORN, head, strict=False))
        born |= {"text": came["text"], "mentions": came["mentions"]} | ({"media_ids": ""} if deleted else {})
    born |= {name: _split(born[name]) for name in ("media_ids", "mentions")}
    tweet = StoredTweet(tweet_id=tweet_id, version=version, deleted=deleted, edited_ms=edited_ms, **born)
    return _Known(tweet, event_id, has_head=head is not None)


def _split(joined: str | None) -> tuple[str, ...]:
    return tuple(joined.split(",")) if joined else ()


def _plus(tally: Tally, change: Tally) -> Tally:
    return Tally(*(a + b for a, b in zip(tally, change, strict=True)))


def _year_of_ms(time_ms: int) -> int:
    return datetime.fromtimestamp(time_ms / 1_000, UTC).year


def _oldest_year(author_id: int) -> int:
    """Of the author's tweets: no older than the author, but for clocks that aren't quite right."""
    return _year_of_ms(time_ms_of(key(author_id)) - _CLOCKS_DIFFER_MS)


def _year(snowflake: int) -> int:
    return _year_of_ms(time_ms_of(key(snowflake)))


def _present_revision(tweet: StoredTweet) -> Revision:
    return Revision(tweet.version, tweet.text, tweet.edited_ms or time_ms_of(tweet.tweet_id))
