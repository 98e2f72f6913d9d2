"""Tweets' bodies: `tweet:<id>`, for 24 h. "Not found" is never cached; a deletion is."""

import logging
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from mesh.valkey import Command, Valkey
from starling.tweet.v1 import tweet_pb2

log = logging.getLogger(__name__)

TTL_SECONDS = 86_400

Body = tweet_pb2.Tweet | None
"""A visible tweet; None for a deleted one."""


class Bodies:
    """All methods raise UnavailableError."""

    def __init__(self, valkey: Valkey) -> None:
        self._valkey = valkey

    def _key(self, tweet_id: int) -> str:
        return f"{self._valkey.key_prefix}tweet:{tweet_id}"

    async def get(self, tweet_ids: Sequence[int]) -> dict[int, Body]:
        """What is cached of these."""
        return self.parse(tweet_ids, await self._valkey.call(*self.get_command(tweet_ids))) if tweet_ids else {}

    def get_command(self, tweet_ids: Sequence[int]) -> Command:
        """To be sent along with other commands (at least one id); `parse` reads the reply."""
        return ("MGET", *(self._key(tweet_id) for tweet_id in tweet_ids))

    def parse(self, tweet_ids: Sequence[int], values: Sequence[bytes | None]) -> dict[int, Body]:
        """What the reply says of these."""
        found: dict[int, Body] = {}
        for tweet_id, value in zip(tweet_ids, values, strict=True):
            try:
                if value is not None:
                    found[tweet_id] = _body(value)
            except DecodeError:  # as good as none
                log.exception("the cached body of tweet %d can't be read", tweet_id)
        return found

    async def put(self, tweets: Sequence[tweet_pb2.Tweet]) -> None:
        """Cache visible tweets, each unless a version as high or higher is known."""
        await self._put([(tweet.tweet_id, tweet.version, tweet.SerializeToString()) for tweet in tweets])

    async def put_deleted(self, tweet_id: int, version: int) -> None:
        """Cache that the tweet is gone since `version`."""
        await self._put([(tweet_id, version, b"")])

    async def _put(self, bodies: Sequence[tuple[int, int, bytes]]) -> None:
        if bodies:
            await self._valkey.fcalls(
                [
                    ("cache_put_body_v1", [self._key(tweet_id)], (version, body, TTL_SECONDS))
                    for tweet_id, version, body in bodies
                ]
            )


def _body(value: bytes) -> Body:
    body = value.partition(b":")[2]
    return tweet_pb2.Tweet.FromString(body) if body else None
