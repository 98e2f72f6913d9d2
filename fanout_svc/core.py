"""What fan-out does with an event: pure. I/O gathers facts, `plan` decides, I/O acts."""

from dataclasses import dataclass
from enum import Enum

from google.protobuf.message import DecodeError

from starling.event.v1 import event_pb2


class Action(Enum):
    """`DELIVER`: the id goes into the author's own lists, then into all followers' home lists, bucket by bucket.
    `ERASE`: the cached body goes; lists keep the id, which readers filter."""

    DELIVER = "deliver"
    ERASE = "erase"


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do. `version`: for ERASE, the tweet's version with the deletion."""

    action: Action
    author_id: int
    tweet_id: int
    version: int = 0


class InvalidEventError(Exception):
    """The record can never succeed; the text is the cause for the dead letters."""


def read(value: bytes) -> event_pb2.TweetEvent:
    """A record's event. Raises InvalidEventError."""
    try:
        return event_pb2.TweetEvent.FromString(value)
    except DecodeError as error:
        raise InvalidEventError(f"not a TweetEvent: {error}") from error


def plan(event: event_pb2.TweetEvent) -> Decision:
    """Decide. Raises InvalidEventError.

    The cases, in order: an event without its ids; a deletion; a creation; a kind that we don't know.
    """
    kind = event.WhichOneof("kind")
    tweet_id = getattr(event, kind).tweet_id if kind else 0
    if kind and not (event.author_id and tweet_id):
        raise InvalidEventError(f"{kind} without author_id or tweet_id")
    if kind == "deleted":
        return Decision(Action.ERASE, event.author_id, tweet_id, event.deleted.version)
    if kind == "created":
        return Decision(Action.DELIVER, event.author_id, tweet_id)
    raise InvalidEventError("a kind of event that this release doesn't know")
