"""What tweet_svc decides, without I/O: what may be posted, and how authors' timelines merge."""

import hashlib
import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mesh.checks import request_id
from mesh.errors import InvalidArgumentError
from mesh.ids import time_ms_of
from starling.event.v1 import event_pb2
from starling.tweet.v1 import tweet_pb2
from tweet_svc import text
from tweet_svc.store import OutboxRow, StoredTweet

REQUEST_TTL_MS = 86_400_000
MEDIA_MAX = 4
TEXT_CODE_POINTS_MAX = 5_000
"""Before any parsing, which costs up to 12 µs a code point. (A link of any length weighs 23.)"""
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
    if len(request.text) > TEXT_CODE_POINTS_MAX:
        raise InvalidArgumentError("text", "Far too long.", reason="TEXT_INVALID")
    parsed = text.parse(request.text)
    if parsed.invalid_reason:
        raise InvalidArgumentError("text", parsed.invalid_reason, reason="TEXT_INVALID")
    if len(request.media_ids) > MEDIA_MAX:
        raise InvalidArgumentError("media_ids", f"At most {MEDIA_MAX}.")
    if len(set(request.media_ids)) < len(request.media_ids):
        raise InvalidArgumentError("media_ids", "The same one twice.")
    for index, media_id in enumerate(request.media_ids):
        if not _MEDIA_ID.fullmatch(media_id):
            raise InvalidArgumentError(f"media_ids[{index}]", "Must be 1 to 64 of A-Z a-z 0-9 _ -.")
    return Draft(
        text=parsed.text,
        mentions=text.extract_mentions(request.text),
        media_ids=tuple(request.media_ids),
        in_reply_to_tweet_id=request.in_reply_to_tweet_id,
        quoted_tweet_id=request.quoted_tweet_id,
        request_id=request_id(request.request_id),
    )


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
    )
    message.created_at.FromMilliseconds(time_ms_of(tweet.tweet_id))
    return message


def to_event(row: OutboxRow) -> event_pb2.TweetEvent:
    """What the log carries of an outbox row."""
    event = event_pb2.TweetEvent(event_id=row.event_id, author_id=row.author_id)
    if row.deleted_version:
        event.deleted.tweet_id = row.tweet_id
        event.deleted.version = row.deleted_version
    else:
        event.created.tweet_id = row.tweet_id
    return event


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
