"""What tweet_svc decides, without I/O: what may be posted and edited, and how authors' timelines merge."""

import hashlib
import heapq
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from operator import add

from mesh.caches.counts import Tally
from mesh.checks import request_id, required_id
from mesh.errors import InvalidArgumentError
from mesh.ids import time_ms_of
from starling.event.v1 import event_pb2
from starling.tweet.v1 import tweet_pb2
from tweet_svc import text
from tweet_svc.store import EventKind, OutboxRow, Revision, StoredTweet

REQUEST_TTL_MS = 86_400_000
MEDIA_MAX = 4
TEXT_CODE_POINTS_MAX = 5_000
"""Before any parsing, which costs up to 12 µs a code point. (A link of any length weighs 23.)"""
HOT_WINDOW_MS = 2_000
HOT_RETWEETS = 20
"""The bar, in the window, unless configured: 10 a second. A hot tweet's retweets may wait, so that they don't delay
others."""
HOT_KEPT_MS = 30_000
"""So long a tweet stays hot under the bar."""
_MEDIA_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Draft:
    """A request to post that is valid by itself. `text` is NFC; `request_id` is empty or a UUID."""

    text: str
    mentions: Sequence[str]
    media_ids: Sequence[str]
    in_reply_to_tweet_id: int
    quoted_tweet_id: int
    request_id: str

    @property
    def fingerprint(self) -> bytes:
        """Equal for requests that ask for the same tweet."""
        parts = [self.text, ",".join(self.media_ids), str(self.in_reply_to_tweet_id), str(self.quoted_tweet_id)]
        return hashlib.sha256("\0".join(parts).encode()).digest()


def draft(request: tweet_pb2.CreateTweetRequest) -> Draft:
    """Check a request. Raises InvalidArgumentError naming the field."""
    normal, mentions = _checked_text("text", request.text)
    if len(request.media_ids) > MEDIA_MAX:
        raise InvalidArgumentError("media_ids", f"At most {MEDIA_MAX}.")
    if len(set(request.media_ids)) < len(request.media_ids):
        raise InvalidArgumentError("media_ids", "The same one twice.")
    for index, media_id in enumerate(request.media_ids):
        if not _MEDIA_ID.fullmatch(media_id):
            raise InvalidArgumentError(f"media_ids[{index}]", "Must be 1 to 64 of A-Z a-z 0-9 _ -.")
    return Draft(
        text=normal,
        mentions=mentions,
        media_ids=tuple(request.media_ids),
        in_reply_to_tweet_id=request.in_reply_to_tweet_id,
        quoted_tweet_id=request.quoted_tweet_id,
        request_id=request_id(request.request_id),
    )


@dataclass(frozen=True, slots=True)
class Edit:
    """A request to edit that is valid by itself. `text` is NFC."""

    tweet_id: int
    text: str
    mentions: Sequence[str]


def edit(request: tweet_pb2.UpdateTweetRequest) -> Edit:
    """Check a request. Raises InvalidArgumentError naming the field."""
    tweet_id = required_id("tweet.tweet_id", request.tweet.tweet_id)
    if not set(request.update_mask.paths) <= {"text"}:
        raise InvalidArgumentError("update_mask", "Only `text` can be changed.")
    normal, mentions = _checked_text("tweet.text", request.tweet.text)
    return Edit(tweet_id, normal, mentions)


def _checked_text(field: str, given: str) -> tuple[str, Sequence[str]]:
    """In NFC, and whom it mentions."""
    if len(given) > TEXT_CODE_POINTS_MAX:
        raise InvalidArgumentError(field, "Far too long.", reason="TEXT_INVALID")
    parsed = text.parse(given)
    if parsed.invalid_reason:
        raise InvalidArgumentError(field, parsed.invalid_reason, reason="TEXT_INVALID")
    return parsed.text, text.extract_mentions(given)


def to_message(tweet: StoredTweet) -> tweet_pb2.Tweet:
    """A visible tweet as its readers see it."""
    assert not tweet.deleted
    message = tweet_pb2.Tweet(
        tweet_id=tweet.tweet_id,
        author_id=tweet.author_id,
        text=tweet.text,
        in_reply_to_tweet_id=tweet.in_reply_to_tweet_id,
        in_reply_to_user_id=tweet.in_reply_to_user_id,
        quoted_tweet_id=tweet.quoted_tweet_id,
        media_ids=tweet.media_ids,
        mentions=tweet.mentions,
        version=tweet.version,
        quoted_user_id=tweet.quoted_user_id,
        retweeted_tweet_id=tweet.retweeted_tweet_id,
        retweeted_user_id=tweet.retweeted_user_id,
    )
    message.created_at.FromMilliseconds(time_ms_of(tweet.tweet_id))
    if tweet.edited_ms:
        message.edited_at.FromMilliseconds(tweet.edited_ms)
    return message


def referred_to(tweets: Iterable[StoredTweet | tweet_pb2.Tweet]) -> list[int]:
    """The tweets that these answer, quote or retweet, each once."""
    ids = (i for t in tweets for i in (t.in_reply_to_tweet_id, t.quoted_tweet_id, t.retweeted_tweet_id) if i)
    return list(dict.fromkeys(ids))


def references(tweet_ids: Sequence[int], found: Iterable[StoredTweet]) -> list[tweet_pb2.TweetReference]:
    """One for each id, with its tweet where that is visible."""
    visible = {tweet.tweet_id: to_message(tweet) for tweet in found if not tweet.deleted}
    return [tweet_pb2.TweetReference(tweet_id=tweet_id, tweet=visible.get(tweet_id)) for tweet_id in tweet_ids]


def counted(tweet: StoredTweet, by: int) -> dict[int, Tally]:
    """What a tweet's coming (1) or going (-1) changes in the counts of others."""
    changes: dict[int, Tally] = {}
    for tweet_id, change in (
        (tweet.in_reply_to_tweet_id, Tally(replies=by)),
        (tweet.quoted_tweet_id, Tally(quotes=by)),
        (tweet.retweeted_tweet_id, Tally(retweets=by)),
    ):
        if tweet_id:
            changes[tweet_id] = Tally(*map(add, changes.get(tweet_id, Tally()), change))
    return changes


def to_revision(revision: Revision) -> tweet_pb2.TweetRevision:
    """A revision as its readers see it."""
    message = tweet_pb2.TweetRevision(version=revision.version, text=revision.text)
    message.created_at.FromMilliseconds(revision.written_ms)
    return message


def to_event(row: OutboxRow) -> event_pb2.TweetEvent:
    """What the log carries of an outbox row."""
    event = event_pb2.TweetEvent(event_id=row.event_id, author_id=row.author_id)
    match row.kind:
        case EventKind.CREATED:
            event.created.tweet_id = row.tweet_id
        case EventKind.UPDATED:
            event.updated.tweet_id, event.updated.version = row.tweet_id, row.version
        case EventKind.DELETED:
            event.deleted.tweet_id, event.deleted.version = row.tweet_id, row.version
    return event


class Heat(Enum):
    """Of a tweet that is retweeted. `HEATED`: hot from this retweet on."""

    COLD = "cold"
    HEATED = "heated"
    HOT = "hot"


def heat(hits: int, over_ms: int, now_ms: int, bar: int = HOT_RETWEETS) -> Heat:
    """Judge a tweet by its retweets in the window that ends now, this one included, and by when they were last, before
    it, at the bar or over it (ms since the Unix epoch; 0: never)."""
    if now_ms - over_ms < HOT_KEPT_MS:
        return Heat.HOT
    return Heat.HEATED if hits >= bar else Heat.COLD


class AuthorMerge:
    """Merges the timelines of many authors, each fetched in chunks that grow, into one descending stream.

    Ask `wanted`, `feed` what the store answers, `take`; again until enough is taken or `exhausted`. Memory: an
    author's next chunk is four times the one that was used up, so no more than 8 ids an author, and four times what is
    taken.
    """

    def __init__(self, author_ids: Sequence[int], below_id: int, limit: int) -> None:
        self._authors = list(dict.fromkeys(author_ids))
        self._below = [below_id] * len(self._authors)
        self._limit = limit
        self._chunks = [min(limit, max(8, 2 * limit // len(self._authors)))] * len(self._authors)
        self._buffers: list[list[int]] = [[] for _ in self._authors]
        self._dry = set(range(len(self._authors)))
        self._asked: list[int] = []
        self._heads: list[tuple[int, int]] = []

    def wanted(self) -> tuple[list[int], list[int], list[int]]:
        """Authors to be read before more can be taken, the ids to read below, and how many of each."""
        self._asked = asked = sorted(self._dry)
        return [self._authors[i] for i in asked], [self._below[i] for i in asked], [self._chunks[i] for i in asked]

    def feed(self, chunks: Sequence[Sequence[int]]) -> None:
        """The answers to `wanted`, in its order, each descending."""
        for index, ids in zip(self._asked, chunks, strict=True):
            assert all(a > b for a, b in pairwise(ids)), "descending"
            self._below[index] = ids[-1] if len(ids) == self._chunks[index] else 0
            self._chunks[index] = min(self._limit, 4 * self._chunks[index])
            self._buffers[index] = list(reversed(ids))
            self._dry.discard(index)
            self._next_head(index)
        self._asked = []

    def _next_head(self, index: int) -> None:
        if self._buffers[index]:
            heapq.heappush(self._heads, (-self._buffers[index].pop(), index))
        elif self._below[index]:
            self._dry.add(index)

    def take(self, count: int) -> list[int]:
        """At most `count` next ids: none when an author has to be read first, or all are exhausted."""
        taken: list[int] = []
        while len(taken) < count and self._heads and not self._dry:
            negative, index = heapq.heappop(self._heads)
            taken.append(-negative)
            self._next_head(index)
        return taken

    @property
    def exhausted(self) -> bool:
        """True when nothing remains of any author."""
        return not self._heads and not self._dry
