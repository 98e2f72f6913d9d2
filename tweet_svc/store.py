"""The TweetStore port: tweets, their authors' timelines, request ids, and the outbox.

Every method may raise `UnavailableError`; nothing is then known of its effect, and all may be repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mesh.ids import WorkerLeases


@dataclass(frozen=True, slots=True)
class StoredTweet:
    """A tweet, or what is left of a deleted one: ids, no text. `version` counts changes from 1."""

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


@dataclass(frozen=True, slots=True)
class Request:
    """An idempotent request: who asked, under which id, for what (a digest), remembered until when."""

    request_id: str
    fingerprint: bytes
    expires_ms: int


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """An event on its way to the log: `deleted_version` is 0 for a creation, else the deletion's version."""

    event_id: int
    author_id: int
    tweet_id: int
    deleted_version: int


class TweetStore(WorkerLeases, Protocol):
    """What tweet_svc owns.

    A write and its outbox row stand or fall together: what is in the store is, or will be, published, and what
    is published is in the store.
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

        All are read at one moment.
        """
        ...

    async def delete_tweet(self, tweet_id: int, author_id: int) -> StoredTweet | None:
        """Erase text and attachments, leave a flag, and put an outbox row; None: it never existed.

        A tweet deleted before, or of another author, is given back unchanged.
        """
        ...

    async def unpublished(self, limit: int) -> list[OutboxRow]:
        """The oldest outbox rows not yet published, in order."""
        ...

    async def mark_published(self, event_ids: Sequence[int], incarnation: str, now_ms: int) -> None:
        """They are in the log of that incarnation. Nothing changes when `republish` has seen another since: that log
        may have lost them."""
        ...

    async def republish(self, incarnation: str, since_ms: int) -> int:
        """When the log's incarnation isn't the one seen last: mark all rows published at or after `since_ms` as
        unpublished, and remember the incarnation, in one write. Returns how many rows. They don't count against
        `outbox_max`: they were accepted before."""
        ...

    async def prune(self, published_before_ms: int, now_ms: int) -> bool:
        """Forget rows published before then, and requests that have expired: a bounded number; True when there may be
        more."""
        ...

    async def outbox_depth(self) -> int:
        """Number of rows not yet published."""
        ...

    async def close(self) -> None:
        """Finish and close."""
        ...
