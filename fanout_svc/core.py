"""What fan-out does with an event: pure. I/O gathers facts, `plan` decides, I/O acts."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from google.protobuf.message import DecodeError

from starling.event.v1 import event_pb2
from starling.graph.v1 import graph_pb2

PULL_AGE_SECONDS = 20.0
"""Workers leave a pulled author's followers out only when the author has been pulled for so long: by then each reader
knows, or knows that it knows nothing (`timeline_svc.core.MODES_AGE_MS`)."""
TWEETS_PER_TASK_MAX = 64


@dataclass(frozen=True, slots=True)
class Author:
    """Facts about an author, read afresh when its event is worked on."""

    pulled: bool
    mode_age_seconds: float
    bucket_count: int
    slow: bool = False
    """Fan-out is behind: tasks for this author's buckets may wait."""
    followers: Sequence[int] | None = None
    """All of them, where they are known already."""

    @classmethod
    def of(cls, reply: graph_pb2.GetAuthorModeResponse) -> "Author":
        """From what graph_svc says."""
        followers = reply.followers.follower_ids if reply.HasField("followers") else None
        pulled = reply.mode == graph_pb2.AUTHOR_MODE_PULL
        return cls(pulled, reply.age_seconds, reply.bucket_count, reply.slow, followers)


class Action(Enum):
    """`INLINE`: into the author's own lists, then into all followers' home lists. `SPLIT`: into the own lists, then one
    task for each bucket of followers. `OWN`: into the own lists; readers pull the rest. `BUCKET`: into the home lists
    of one bucket. `NOTHING`: readers pull. `DRAIN`: repair one bucket's lists from the store. `ERASE`: the cached body
    goes; lists keep the id, which readers filter. `REFRESH`: the newest body into the cache."""

    INLINE = "inline"
    SPLIT = "split"
    OWN = "own"
    BUCKET = "bucket"
    NOTHING = "nothing"
    DRAIN = "drain"
    ERASE = "erase"
    REFRESH = "refresh"


class InvalidEventError(Exception):
    """The record can never succeed; the text is the cause for the dead letters."""


def read(value: bytes) -> event_pb2.TweetEvent:
    """A record's event, complete. Raises InvalidEventError."""
    try:
        event = event_pb2.TweetEvent.FromString(value)
    except DecodeError as error:
        raise InvalidEventError(f"not a TweetEvent: {error}") from error
    kind = event.WhichOneof("kind")
    if kind is None:
        raise InvalidEventError("a kind of event that this release doesn't know")
    tweet_ids = tweets_of(event)
    needs_tweets = kind != "drain"
    if not event.author_id or 0 in tweet_ids or (needs_tweets and not 1 <= len(tweet_ids) <= TWEETS_PER_TASK_MAX):
        raise InvalidEventError(f"{kind} without author or tweets")
    return event


def tweets_of(event: event_pb2.TweetEvent) -> list[int]:
    """The tweets that an event is about."""
    match event.WhichOneof("kind"):
        case "created":
            return [event.created.tweet_id]
        case "deleted":
            return [event.deleted.tweet_id]
        case "updated":
            return [event.updated.tweet_id]
        case "bucket":
            return list(event.bucket.tweet_ids)
        case _:
            return []


def needs_author(event: event_pb2.TweetEvent) -> bool:
    """Whether `plan` must be told about the author."""
    return event.WhichOneof("kind") in {"created", "bucket"}


def plan(event: event_pb2.TweetEvent, author: Author | None) -> Action:
    """Decide. The cases, in order: a deletion; an edit; a drain; an author pulled for long enough (whole, or a part of
    a delivery); a part of a delivery; an author with few followers; one with many."""
    kind = event.WhichOneof("kind")
    if kind == "deleted":
        return Action.ERASE
    if kind == "updated":
        return Action.REFRESH
    if kind == "drain":
        return Action.DRAIN
    assert author is not None, "needs_author says when"
    if author.pulled and author.mode_age_seconds >= PULL_AGE_SECONDS:
        return Action.NOTHING if kind == "bucket" else Action.OWN
    if kind == "bucket":
        return Action.BUCKET
    return Action.INLINE if author.bucket_count == 1 else Action.SPLIT


def bucket_tasks(
    author_id: int, tweet_ids: list[int], bucket_count: int, traceparent: str = ""
) -> list[tuple[bytes, bytes]]:
    """One record for each bucket, keyed by author and bucket: they spread over the partitions."""
    records = []
    for bucket in range(bucket_count):
        event = event_pb2.TweetEvent(author_id=author_id, traceparent=traceparent)
        event.bucket.bucket = bucket
        event.bucket.tweet_ids.extend(tweet_ids)
        records.append((f"{author_id}:{bucket}".encode(), event.SerializeToString()))
    return records


def batch_key(event: event_pb2.TweetEvent) -> tuple[object, ...] | None:
    """Events of equal key are worked on together, several ids to a push; None: by itself."""
    match event.WhichOneof("kind"):
        case "created":
            return ("created", event.author_id)
        case "bucket":
            return ("bucket", event.author_id, event.bucket.bucket)
        case _:
            return None
