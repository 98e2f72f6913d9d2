"""How fast tweets are retweeted, over all processes of tweet_svc: `retweet_velocity:<original>`, for half a minute."""

from collections import OrderedDict

from mesh.clock import Clock
from mesh.valkey import Valkey
from tweet_svc import core
from tweet_svc.core import Heat

HOT_PER_SECOND = core.HOT_RETWEETS * 1_000 // core.HOT_WINDOW_MS
_BUCKET_MS = 200
_BUCKETS = core.HOT_WINDOW_MS // _BUCKET_MS
assert _BUCKETS * _BUCKET_MS == core.HOT_WINDOW_MS
_KNOWN_MAX = 10_000


class Velocity:
    """A sliding window for each original. `hot_per_second`: from how many retweets a second on it is hot; 0: never."""

    def __init__(self, valkey: Valkey, clock: Clock, hot_per_second: int = HOT_PER_SECOND) -> None:
        self._valkey = valkey
        self._clock = clock
        self._bar = hot_per_second * core.HOT_WINDOW_MS // 1_000
        self._hot_until = OrderedDict[int, int]()

    def is_hot(self, original_id: int) -> bool:
        """Whether it is, as far as retweets through this process have shown."""
        return self._clock.now_ms() < self._hot_until.get(original_id, 0)

    def hot(self) -> int:
        """How many are, as far as is known here."""
        now = self._clock.now_ms()
        return sum(now < until for until in list(self._hot_until.values()))

    async def retweeted(self, original_id: int, times: int = 1) -> Heat:
        """Count so many retweets more, and judge. Raises UnavailableError."""
        if not self._bar:
            return Heat.COLD
        now = self._clock.now_ms()
        hits, over_ms = await self._valkey.fcall(
            "cache_hit_v1",
            [f"{self._valkey.key_prefix}retweet_velocity:{original_id}"],
            *(now, _BUCKET_MS, _BUCKETS, self._bar, core.HOT_WINDOW_MS + core.HOT_KEPT_MS, times),
        )
        heat = core.heat(hits, over_ms, now, self._bar)
        if heat is not Heat.COLD:
            self._hot_until[original_id] = core.HOT_KEPT_MS + (now if hits >= self._bar else over_ms)
            self._hot_until.move_to_end(original_id)
            if len(self._hot_until) > _KNOWN_MAX:
                self._hot_until.popitem(last=False)
        return heat
