"""When a tweet is hot: the window in Valkey, and the judgement."""

import random
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh import caches
from mesh.valkey import Valkey
from tests.clocks import ManualClock
from tweet_svc.core import HOT_KEPT_MS, HOT_RETWEETS, HOT_WINDOW_MS, Heat, heat
from tweet_svc.velocity import Velocity

BUCKET_MS = 200


@pytest.fixture
async def valkey(valkey_url: str, key_prefix: str) -> AsyncIterator[Valkey]:
    client = Valkey(valkey_url, key_prefix=key_prefix, libraries=[caches.LIBRARY])
    yield client
    await client.close()


def judged(moments: list[int], window_ms: int) -> list[Heat]:
    """Of retweets at these moments, ascending, with a window that is counted by hand."""
    found: list[Heat] = []
    over_ms = 0
    for number, now in enumerate(moments):
        hits = sum(now - window_ms < moment for moment in moments[: number + 1])
        found.append(heat(hits, over_ms, now))
        over_ms = now if hits >= HOT_RETWEETS else over_ms
    return found


@given(st.lists(st.sampled_from([0, 1, 20, 99, 101, 300, 2_000, 29_999, 30_000, 31_000]), max_size=120))
def test_a_tweet_is_hot_from_the_bar_on_and_half_a_minute_after_it(gaps: list[int]) -> None:
    now = 1_790_000_000_000
    moments = [now := now + gap for gap in gaps]
    at_bar = [number for number in range(len(moments)) if reaches_bar(moments[: number + 1])]
    for number, heat_then in enumerate(judged(moments, HOT_WINDOW_MS)):
        lasting = any(moments[number] - moments[bar] < HOT_KEPT_MS for bar in at_bar if bar < number)
        assert (heat_then is Heat.HOT) == lasting
        assert (heat_then is Heat.HEATED) == (number in at_bar and not lasting)


def reaches_bar(moments: list[int]) -> bool:
    return len(moments) >= HOT_RETWEETS and moments[-1] - moments[-HOT_RETWEETS] < HOT_WINDOW_MS


@pytest.mark.parametrize("seed", range(10))
async def test_the_window_is_counted_to_a_bucket(valkey: Valkey, seed: int) -> None:
    chance = random.Random(seed)
    clock = ManualClock()
    velocity = Velocity(valkey, clock)
    moments: list[int] = []
    found: list[Heat] = []
    for _ in range(150):
        clock.advance(chance.choice([0, 5, 40, 90, 130]) if chance.random() < 0.98 else chance.randrange(40_000))
        moments.append(clock.now_ms())
        found.append(await velocity.retweeted(5))
    wide = judged(moments, HOT_WINDOW_MS)
    narrow = judged(moments, HOT_WINDOW_MS - BUCKET_MS)
    for seen, most, least in zip(found, wide, narrow, strict=True):
        assert least is Heat.COLD or seen is not Heat.COLD
        assert most is not Heat.COLD or seen is Heat.COLD
    assert await velocity.retweeted(6) is Heat.COLD


async def test_many_retweets_are_counted_at_once(valkey: Valkey) -> None:
    velocity = Velocity(valkey, ManualClock())
    assert await velocity.retweeted(5, HOT_RETWEETS - 1) is Heat.COLD
    assert not velocity.is_hot(5)
    assert await velocity.retweeted(5) is Heat.HEATED
    assert velocity.is_hot(5)


async def test_a_window_is_bounded_and_forgotten(valkey: Valkey) -> None:
    clock = ManualClock()
    velocity = Velocity(valkey, clock)
    for _ in range(500):
        clock.advance(50)
        await velocity.retweeted(5)
    key = f"{valkey.key_prefix}retweet_velocity:5"
    assert await valkey.call("HLEN", key) <= HOT_WINDOW_MS // BUCKET_MS + 1
    assert 0 < await valkey.call("PTTL", key) <= HOT_WINDOW_MS + HOT_KEPT_MS


@pytest.mark.parametrize(("hot_per_second", "expected"), [(0, "COLD COLD COLD"), (1, "COLD HEATED HOT")])
async def test_the_bar_is_configured(valkey: Valkey, hot_per_second: int, expected: str) -> None:
    velocity = Velocity(valkey, ManualClock(), hot_per_second)
    assert " ".join([(await velocity.retweeted(5)).name for _ in range(3)]) == expected
