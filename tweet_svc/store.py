"""The TweetStore port: tweets, their authors' timelines, what is done with them, request ids, and the outbox.

Every method may raise `UnavailableError`; nothing is then known of its effect, and all may be repeated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from mesh.caches.counts import Tally
from mesh.ids import WorkerLeases


@dataclass(frozen=True, slots=True)
class StoredTweet:
    """A tweet, or what is left of a deleted one: ids, no text. `version` counts changes from 1.

    A retweet has `retweeted_tweet_id`, which is never a retweet's, and no text. `edited_ms`: 0 for never.
    """

    tweet_id: int
    author_id: int
    text: str
    in_reply_to_tweet_id: int = 0
    in_reply_to_user_id: int = 0
    quoted_tweet_id: int = 0
    media_ids: Sequence[str] = ()
    mentions: Sequence[str] = ()
    version: int = 1
    deleted: bool = False
    quoted_user_id: int = 0
    retweeted_tweet_id: int = 0
    retweeted_user_id: int = 0
    edited_ms: int = 0

    def takes_edit(self, author_id: int, text: str, expected_version: int) -> bool:
        """Whether this author may give it this text, it has another one, and it is of that version (0: any)."""
        mine = not self.deleted and self.author_id == author_id and not self.retweeted_tweet_id
        return mine and self.text != text and expected_version in {0, self.version}


@dataclass(frozen=True, slots=True)
class Change:
    """A tweet after a write, and whether it was this write that changed it."""

    tweet: StoredTweet
    changed: bool


@dataclass(frozen=True, slots=True)
class Revision:
    """What a tweet's text was or is, from `version` on."""

    version: int
    text: str
    written_ms: int


@dataclass(frozen=True, slots=True)
class Engagements:
    """What a user has done with some tweets."""

    liked: frozenset[int]
    retweeted: frozenset[int]


@dataclass(frozen=True, slots=True)
class Request:
    """An idempotent request: who asked, under which id, for what (a digest), remembered until when."""

    request_id: str
    fingerprint: bytes
    expires_ms: int


class EventKind(Enum):
    """What happened to a tweet."""

    CREATED = "created"
    UPDATED = "updated"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """An event on its way to the log: the tweet has had `version` since.

    `slow`: it may wait. Such rows have an order and numbers of their own.
    """

    event_id: int
    author_id: int
    tweet_id: int
    kind: EventKind
    version: int
    slow: bool = False


class TweetStore(WorkerLeases, Protocol):
    """What tweet_svc owns.

    A write and its outbox row stand or fall together: what is in the store is, or will be, published, and what
    is published is in the store. Where they aren't one transaction, the row comes first, and whoever finds it
    completes the write before it lets the row be published. `outbox_max` bounds what waits in this process, at least.
    """

    async def create_tweet(
        self, tweet: StoredTweet, request: Request | None, now_ms: int, outbox_max: int
    ) -> StoredTweet:
        """Store the tweet with its outbox row, and give it back; or give back the tweet that the author's same
        request made before (perhaps deleted by now).

        Raises InvalidArgumentError (REQUEST_ID_REUSED) when that one asked for something else, and
        ResourceExhaustedError (OUTBOX_FULL) when `outbox_max` rows wait to be published.
        """
        ...

    async def create_retweet(self, tweet: StoredTweet, outbox_max: int, *, slow: bool = False) -> StoredTweet:
        """Store a retweet with its outbox row, and give it back; or give back the one, not deleted, that the author
        made of the same original before.

        Raises ResourceExhaustedError (OUTBOX_FULL) when `outbox_max` rows, of those that are `slow` or aren't, wait to
        be published.
        """
        ...

    async def retweet_of(self, author_id: int, original_id: int) -> StoredTweet | None:
        """The author's retweet of the original; without one, the one deleted last, if there was one."""
        ...

    async def undo_retweet(self, author_id: int, original_id: int) -> Change | None:
        """Delete the author's retweet of the original, as `delete_tweet` does. Without one, the one deleted last is
        given back unchanged; None: there never was one."""
        ...

    async def made_before(self, author_id: int, request: Request, now_ms: int) -> StoredTweet | None:
        """The tweet that the author's same request made before (perhaps deleted by now), if it did.

        Raises InvalidArgumentError (REQUEST_ID_REUSED) when that one asked for something else.
        """
        ...

    async def tweets(self, tweet_ids: Sequence[int]) -> list[StoredTweet]:
        """Those that exist, deleted ones too, in the order asked for."""
        ...

    async def author_tweet_ids(
        self, author_ids: Sequence[int], below_ids: Sequence[int], limits: Sequence[int]
    ) -> list[list[int]]:
        """For each author the newest ids below its bound, not deleted, descending, at most its limit.

        Each is read with all that was committed before the call; not all at one moment: what is committed meanwhile is
        pushed to the lists that are made of this, so nobody needs that.
        """
        ...

    async def delete_tweet(self, tweet_id: int, author_id: int) -> Change | None:
        """Erase text, its revisions and attachments, leave a flag, and put an outbox row; None: it never existed.

        A tweet deleted before, or of another author, is given back unchanged.
        """
        ...

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
        """Give a tweet another text, keep the one before as a revision, and put an outbox row; None: it never existed.

        A tweet that has this very text, is deleted, of another author, a retweet, or of another version than the
        expected one (0: any) is given back unchanged.
        Raises ResourceExhaustedError (OUTBOX_FULL) when `outbox_max` rows wait to be published.
        """
        ...

    async def revisions(self, tweet_id: int, below_version: int, limit: int) -> list[Revision] | None:
        """What the tweet's text is and was, newest first, at most `limit` of the versions below the bound; None: it
        never existed or is deleted."""
        ...

    async def like(self, user_id: int, tweet_id: int) -> bool:
        """The user likes the tweet (which is for the caller to know of); False when it stood before."""
        ...

    async def unlike(self, user_id: int, tweet_id: int) -> bool:
        """The user likes it no more; False when there was no like."""
        ...

    async def engagements(self, user_id: int, tweet_ids: Sequence[int]) -> Engagements:
        """Which of these the user likes, and of which the user has a retweet that isn't deleted."""
        ...

    async def counts(self, tweet_ids: Sequence[int], flush_id: str) -> tuple[dict[int, Tally], bool]:
        """The sums of `add_counts` for each of these (0 without any), and whether that flush is among them; both at one
        moment."""
        ...

    async def add_counts(self, flush_id: str, sums: Mapping[int, Tally], now_ms: int) -> bool:
        """Add to the counts of tweets. A flush that was added before (and not forgotten, see `prune`) changes nothing:
        False."""
        ...

    async def unpublished(self, limit: int, *, slow: bool = False) -> list[OutboxRow]:
        """The oldest outbox rows not yet published, those that are `slow` or those that aren't, in order."""
        ...

    async def mark_published(self, rows: Sequence[OutboxRow], incarnation: str, now_ms: int) -> bool:
        """They are in the log of that incarnation. False, and nothing changes, when `republish` has seen another since:
        that log may have lost them."""
        ...

    async def republish(self, incarnation: str, since_ms: int) -> int:
        """When the log's incarnation isn't the one seen last: mark all rows published at or after `since_ms` as
        unpublished, and remember the incarnation, in one write. Returns how many rows. They don't count against
        `outbox_max`: they were accepted before."""
        ...

    async def prune(self, published_before_ms: int, now_ms: int) -> bool:
        """Forget rows published before then, requests that have expired, and flushes of counts a day old: a bounded
        number; True when there may be more."""
        ...

    async def outbox_depth(self) -> int:
        """Number of rows not yet published, of those that this process knows of."""
        ...

    async def close(self) -> None:
        """Finish and close."""
        ...
