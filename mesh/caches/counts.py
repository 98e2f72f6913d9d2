"""Counts of what is done with tweets: `tweet_counts:{shard}:<id>`, for 5 minutes; and what has changed since the last
flush. Shards are what has one hash slot in a cluster.

A shard's changes wait in one hash, `tweet_counts_pending:{shard}`. A flush takes a part of it, under a fresh id, into
`tweet_counts_taken:{shard}`; the store adds the sums, once for each id; then the flush is over. Where a flusher died,
the next one finds what was taken, under the same id.
"""

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mesh.valkey import Command, Valkey
from starling.tweet.v1 import tweet_pb2

TTL_SECONDS = 300
SHARDS = 64
_HASH_FACTOR = 0x9E3779B97F4A7C15
FLUSH_MAX = 1_000
"""Changed numbers that one flush takes: a bound to the store's transaction."""
_DONE = "done:"


class Tally(NamedTuple):
    """The counts of a tweet; or changes of them, which may be negative."""

    likes: int = 0
    retweets: int = 0
    replies: int = 0
    quotes: int = 0


@dataclass(frozen=True, slots=True)
class Flush:
    """What one flush has taken: changes by tweet."""

    flush_id: str
    sums: Mapping[int, Tally]


@dataclass(frozen=True, slots=True)
class Found:
    """What is cached, and the state of the flushes when it was read, for `fill`.

    `unfinished_flush`: whose sums the store may have added already, or not; empty: none.
    """

    counts: Mapping[int, tweet_pb2.TweetCounts]
    state: str

    @property
    def unfinished_flush(self) -> str:
        """See the class."""
        return "" if self.state.startswith(_DONE) else self.state


class Counts:
    """The counts of all tweets. All methods that ask Valkey raise UnavailableError."""

    def __init__(self, valkey: Valkey, shards: int = SHARDS) -> None:
        self._valkey = valkey
        self.shards = [Shard(valkey, number) for number in range(shards)]

    def _shard(self, tweet_id: int) -> "Shard":
        return self.shards[tweet_id * _HASH_FACTOR % (1 << 64) * len(self.shards) >> 64]

    def by_shard(self, tweet_ids: Iterable[int]) -> "dict[Shard, list[int]]":
        """The ids by where they are kept."""
        found: dict[Shard, list[int]] = {}
        for tweet_id in tweet_ids:
            found.setdefault(self._shard(tweet_id), []).append(tweet_id)
        return found

    async def get(self, tweet_ids: Sequence[int]) -> dict[int, tweet_pb2.TweetCounts]:
        """What is cached of these, in one round trip."""
        return self.parse(tweet_ids, await self._valkey.call(*self.get_command(tweet_ids))) if tweet_ids else {}

    def get_command(self, tweet_ids: Sequence[int]) -> Command:
        """To be sent along with other commands (at least one id); `parse` reads the reply."""
        return ("MGET", *(self._shard(tweet_id).key(tweet_id) for tweet_id in tweet_ids))

    @staticmethod
    def parse(tweet_ids: Sequence[int], values: Sequence[bytes | None]) -> dict[int, tweet_pb2.TweetCounts]:
        """What the reply says of these."""
        return _parsed(tweet_ids, values)

    async def begin(self, tweet_id: int) -> None:
        """Cache that a tweet which is new has none, unless something is known."""
        zeros = ":".join("0" for _ in Tally._fields)
        await self._valkey.call("SET", self._shard(tweet_id).key(tweet_id), zeros, "EX", TTL_SECONDS, "NX")

    async def add(self, changes: Mapping[int, Tally]) -> None:
        """Note changes: for the next flush, and in cached counts."""
        by_shard = self.by_shard(changes).items()
        await asyncio.gather(*(shard.add({i: changes[i] for i in tweet_ids}) for shard, tweet_ids in by_shard))


class Shard:
    """A part of them. All methods raise UnavailableError."""

    def __init__(self, valkey: Valkey, number: int) -> None:
        self._valkey = valkey
        self._tag = f"{{counts{number}}}"
        self._pending = f"{valkey.key_prefix}tweet_counts_pending:{self._tag}"
        self._taken = f"{valkey.key_prefix}tweet_counts_taken:{self._tag}"

    def key(self, tweet_id: int) -> str:
        """Of a tweet's cached counts."""
        return f"{self._valkey.key_prefix}tweet_counts:{self._tag}:{tweet_id}"

    async def find(self, tweet_ids: Sequence[int]) -> Found:
        """What is cached of these (at least one), and what `fill` needs for those that are missing."""
        get = ("MGET", *map(self.key, tweet_ids))
        cached, state = await self._valkey.pipeline([get, ("HGET", self._taken, "flush")])
        return Found(_parsed(tweet_ids, cached), (state or b"").decode())

    async def fill(self, stored: Mapping[int, Tally], found: Found, *, added: bool) -> dict[int, tweet_pb2.TweetCounts]:
        """Cache what the store holds, with what is on its way there; nothing when a flush began or ended since `found`.

        `stored` was read after `found`; `added`: with the sums of its unfinished flush.
        """
        if not stored:
            return {}
        values = await self._valkey.fcall(
            "cache_fill_counts_v1",
            [self._pending, self._taken, *map(self.key, stored)],
            *(found.state, int(added or not found.unfinished_flush), TTL_SECONDS),
            *(part for tweet_id, tally in stored.items() for part in (tweet_id, *tally)),
        )
        return _parsed(list(stored), values) if values else {}

    async def add(self, changes: Mapping[int, Tally]) -> None:
        """Note changes: for the next flush, and in cached counts."""
        changed = [
            (tweet_id, number, change)
            for tweet_id, tally in changes.items()
            for number, change in enumerate(tally, 1)
            if change
        ]
        if changed:
            keys = [self._pending, *(self.key(tweet_id) for tweet_id, _, _ in changed)]
            await self._valkey.fcall("cache_add_counts_v1", keys, *(part for change in changed for part in change))

    async def take(self) -> Flush | None:
        """What a flusher that died has left, or else a part of what is pending; None when there is nothing."""
        content = await self._valkey.fcall(
            "cache_take_counts_v1", [self._pending, self._taken], secrets.token_hex(8), FLUSH_MAX
        )
        if not content:
            return None
        fields = dict(zip(content[::2], content[1::2], strict=True))
        flush_id = fields.pop(b"flush").decode()
        sums: defaultdict[int, list[int]] = defaultdict(lambda: [0] * len(Tally._fields))
        for field, change in fields.items():
            tweet_id, _, number = field.partition(b":")
            sums[int(tweet_id)][int(number) - 1] = int(change)
        return Flush(flush_id, {tweet_id: Tally(*changes) for tweet_id, changes in sums.items()})

    async def finish(self, flush: Flush) -> None:
        """The store has added it."""
        await self._valkey.fcall("cache_finish_counts_v1", [self._taken], flush.flush_id)


def _parsed(tweet_ids: Sequence[int], values: Sequence[bytes | None]) -> dict[int, tweet_pb2.TweetCounts]:
    found: dict[int, tweet_pb2.TweetCounts] = {}
    for tweet_id, value in zip(tweet_ids, values, strict=True):
        if value is not None:
            # A change may overtake the one that it undoes.
            tally = Tally(*(max(0, int(part)) for part in value.split(b":")))
            found[tweet_id] = tweet_pb2.TweetCounts(**tally._asdict())
    return found
