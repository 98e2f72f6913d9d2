"""How fast tweets are retweeted, over all processes of tweet_svc: `retweet_velocity:<original>`, for half a minute."""

from mesh.clock import Clock
from mesh.valkey import Valkey
from tweet_svc import core
from tweet_svc.core import Heat

HOT_PER_SECOND = core.HOT_RETWEETS * 1_000 // core.HOT_WINDOW_MS
_BUCKET_MS = 200
_BUCKETS = core.HOT_WINDOW_MS // _BUCKET_MS
assert _BUCKETS * _BUCKET_MS == core.HOT_WINDOW_MS


class Velocity:
    """A sliding window for each original. `hot_per_second`: from how many retweets a second on it is hot; 0: never."""

    def __init__(self, valkey: Valkey, clock: Clock, hot_per_second: int = HOT_PER_SECOND) -> None:
        self._valkey = valkey
        self._clock = clock
        self._bar = hot_per_second * core.HOT_WINDOW_MS // 1_000

    async def retweeted(self, original_id: int) -> Heat:
        """Count one more retweet, and judge. Raises UnavailableError."""
        if not self._bar:
            return Heat.COLD
        now = self._clock.now_ms()
        hits, over_ms = await self._valkey.fcall(
            "cache_hit_v1",
            [f"{self._valkey.key_prefix}retweet_velocity:{original_id}"],
            *(now, _BUCKET_MS, _BUCKETS, self._bar, core.HOT_WINDOW_MS + core.HOT_KEPT_MS),
        )
        return core.heat(hits, over_ms, now, self._bar)
