"""Counts of what is done with tweets: from the cache, or from the store with what is on its way there; and that way.

Only what is done with a tweet is exact, in the store. Counts may lag; nothing waits for them long, or fails with them.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress

from mesh import failpoints
from mesh.caches.counts import Counts, Shard, Tally
from mesh.clock import Clock
from mesh.errors import StarlingError, UnavailableError
from starling.tweet.v1 import tweet_pb2
from tweet_svc.store import TweetStore

log = logging.getLogger(__name__)

_CACHE_SECONDS = 0.25
_FLUSHES_MAX = 1_000
"""In one go."""


class Counting:
    """Of all tweets. Several processes may flush at once: each flush is added once."""

    def __init__(self, counts: Counts, store: TweetStore, clock: Clock) -> None:
        self._counts = counts
        self._store = store
        self._clock = clock

    async def of(self, tweet_ids: Sequence[int]) -> Mapping[int, tweet_pb2.TweetCounts]:
        """What is known of these; nothing while Valkey is away."""
        if not tweet_ids:
            return {}
        try:
            async with asyncio.timeout(_CACHE_SECONDS):
                found = await self._counts.get(tweet_ids)
                missing = self._counts.by_shard(tweet_id for tweet_id in tweet_ids if tweet_id not in found)
                for filled in await asyncio.gather(*(self._filled(shard, ids) for shard, ids in missing.items())):
                    found |= filled
                return found
        except (TimeoutError, UnavailableError) as error:
            log.debug("no counts: %s", error)
            return {}

    async def _filled(self, shard: Shard, tweet_ids: Sequence[int]) -> Mapping[int, tweet_pb2.TweetCounts]:
        found = await shard.find(tweet_ids)
        missing = [tweet_id for tweet_id in tweet_ids if tweet_id not in found.counts]
        if not missing:
            return found.counts
        stored, added = await self._store.counts(missing, found.unfinished_flush)
        return {**found.counts, **await shard.fill(stored, found, added=added)}

    async def begin(self, tweet_id: int) -> None:
        """A tweet is new: its counts are 0. Raises UnavailableError."""
        await self._counts.begin(tweet_id)

    async def add(self, changes: Mapping[int, Tally]) -> None:
        """Note changes; while Valkey is away, in the store at once. Raises nothing."""
        if not changes:
            return
        try:
            async with asyncio.timeout(_CACHE_SECONDS):
                await self._counts.add(changes)
        except TimeoutError:
            log.warning("counts of %s may be off: Valkey took too long", list(changes))  # It has most likely done it.
        except UnavailableError:
            try:
                await self._store.add_counts(secrets.token_hex(8), changes, self._clock.now_ms())
            except StarlingError as error:
                log.warning("counts of %s are off: %s", list(changes), error)

    async def flush(self) -> bool:
        """Bring a part of each shard's changes to the store; False when there was none. Raises UnavailableError."""
        return any(await asyncio.gather(*map(self._flush, self._counts.shards)))

    async def _flush(self, shard: Shard) -> bool:
        flush = await shard.take()
        if flush is None:
            return False
        await self._store.add_counts(flush.flush_id, flush.sums, self._clock.now_ms())
        if failpoints.ARMED:
            failpoints.hit("before-flush-finished")
        await shard.finish(flush)
        return True

    async def run(self, stopping: asyncio.Event, every_seconds: float) -> None:
        """Flush every so often, until `stopping`."""
        while not stopping.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), every_seconds)
            try:
                for _ in range(_FLUSHES_MAX):
                    if not await self.flush():
                        break
            except StarlingError as error:
                log.warning("counts wait to be flushed: %s", error)
