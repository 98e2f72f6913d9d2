"""The caches that services share: bodies by version, viewers' versions by lease, and counts."""

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from operator import add

import pytest

from mesh import caches
from mesh.caches.bodies import Bodies
from mesh.caches.counts import FLUSH_MAX, Counts, Flush, Found, Tally
from mesh.caches.viewer_versions import ViewerVersions
from mesh.valkey import Valkey
from starling.tweet.v1.tweet_pb2 import Tweet, TweetCounts


@pytest.fixture
async def valkey(valkey_url: str, key_prefix: str) -> AsyncIterator[Valkey]:
    client = Valkey(valkey_url, key_prefix=key_prefix, libraries=[caches.LIBRARY])
    yield client
    await client.close()


async def version(versions: ViewerVersions, valkey: Valkey) -> int | None:
    return versions.parse(5, await valkey.call(*versions.get_command(5)))


async def test_the_highest_version_of_a_body_stays(valkey: Valkey) -> None:
    bodies = Bodies(valkey)
    old, new = Tweet(tweet_id=1, version=9, text="old"), Tweet(tweet_id=1, version=10, text="new")
    await bodies.put([new])
    await bodies.put([old])
    assert await bodies.get([1, 2]) == {1: new}


async def test_a_slow_reader_cannot_bring_a_deleted_body_back(valkey: Valkey) -> None:
    bodies = Bodies(valkey)
    read_before = Tweet(tweet_id=1, version=1, text="secret")
    await bodies.put_deleted(1, 2)
    await bodies.put([read_before])
    assert await bodies.get([1]) == {1: None}
    assert await valkey.call("TTL", f"{valkey.key_prefix}tweet:1") > 0


async def test_a_version_is_filled_by_who_has_the_lease(valkey: Valkey) -> None:
    versions = ViewerVersions(valkey)
    assert await version(versions, valkey) is None
    lease = await versions.lease(5)
    assert lease
    assert await versions.lease(5) is None
    assert await version(versions, valkey) is None
    await versions.fill(lease, 7)
    assert await version(versions, valkey) == 7
    assert await versions.lease(5) is None


async def test_a_change_ends_copies_and_leases(valkey: Valkey) -> None:
    versions = ViewerVersions(valkey)
    await version(versions, valkey)
    lease = await versions.lease(5)
    assert lease
    await versions.invalidate([5])
    await versions.fill(lease, 7)  # Read before the change, written after: too late.
    assert await version(versions, valkey) is None
    again = await versions.lease(5)
    assert again
    await versions.fill(again, 8)
    await versions.invalidate([5])
    assert await version(versions, valkey) is None


async def test_a_copy_of_another_server_process_is_no_copy(valkey: Valkey) -> None:
    versions = ViewerVersions(valkey)
    await version(versions, valkey)
    lease = await versions.lease(5)
    assert lease
    await versions.fill(lease, 7)
    valkey.run_id = "restarted"
    assert await version(versions, valkey) is None
    assert await versions.lease(5) is not None


def plus(one: Tally, other: Tally) -> Tally:
    return Tally(*map(add, one, other))


def message(tally: Tally) -> TweetCounts:
    return TweetCounts(**tally._asdict())


@dataclass
class CountStore:
    """Adds each flush once."""

    sums: dict[int, Tally] = field(default_factory=dict)
    flushes: set[str] = field(default_factory=set)

    def add(self, flush: Flush) -> None:
        if flush.flush_id not in self.flushes:
            self.flushes.add(flush.flush_id)
            for tweet_id, change in flush.sums.items():
                self.sums[tweet_id] = plus(self.sums.get(tweet_id, Tally()), change)

    def read(self, found: Found) -> tuple[dict[int, Tally], bool]:
        return {n: self.sums.get(n, Tally()) for n in TWEETS}, found.unfinished_flush in self.flushes


TWEETS = (1, 2, 3)


@pytest.mark.parametrize("seed", range(30))
async def test_cached_counts_are_right_whatever_flushers_and_readers_do(valkey: Valkey, seed: int) -> None:
    """Flushers stop between any two steps, or go on much later; readers fill with what they read before."""
    chance = random.Random(seed)
    counts, store, truth = Counts(valkey, shards=1), CountStore(), dict.fromkeys(TWEETS, Tally())
    taken: list[Flush] = []
    found: list[Found] = []
    read: list[tuple[Found, dict[int, Tally], bool]] = []
    for _ in range(150):
        match chance.choice(["add", "add", "take", "store", "finish", "find", "read", "fill", "fill", "expire"]):
            case "add":
                number = chance.choice(TWEETS)
                change = Tally(likes=chance.choice([0, 1, 1, 2]), replies=chance.choice([0, 1]))
                truth[number] = plus(truth[number], change)
                await counts.add({number: change})
            case "take" if flush := await counts.shards[0].take():
                taken.append(flush)
            case "store" if taken:
                store.add(chance.choice(taken))
            case "finish" if done := [flush for flush in taken if flush.flush_id in store.flushes]:
                await counts.shards[0].finish(chance.choice(done))
            case "find":
                found.append(await counts.shards[0].find(TWEETS))
            case "read" if found:
                read.append((state := found.pop(), *store.read(state)))
            case "fill" if read:
                state, sums, added = read.pop()
                filled = await counts.shards[0].fill(sums, state, added=added)
                assert filled in ({}, {number: message(tally) for number, tally in truth.items()})
            case "expire":
                await valkey.call("DEL", counts.shards[0].key(chance.choice(TWEETS)))
        for number, cached in (await counts.get(TWEETS)).items():
            assert cached == message(truth[number])
    while flush := await counts.shards[0].take():
        store.add(flush)
        await counts.shards[0].finish(flush)
    assert {number: store.sums.get(number, Tally()) for number in TWEETS} == truth


async def test_a_flush_takes_a_bounded_part(valkey: Valkey) -> None:
    counts, store = Counts(valkey, shards=1), CountStore()
    for start in range(1, 2 * FLUSH_MAX, 500):
        await counts.add({number: Tally(likes=1) for number in range(start, start + 500)})
    for _ in range(2):
        flush = await counts.shards[0].take()
        assert flush
        assert len(flush.sums) == FLUSH_MAX
        again = await counts.shards[0].take()
        assert again == flush, "what is unfinished comes first"
        store.add(flush)
        await counts.shards[0].finish(flush)
    assert await counts.shards[0].take() is None
    assert store.sums == dict.fromkeys(range(1, 2 * FLUSH_MAX + 1), Tally(likes=1))


async def test_what_was_undone_needs_no_flush(valkey: Valkey) -> None:
    counts = Counts(valkey, shards=1)
    await counts.add({1: Tally(likes=1, quotes=1)})
    await counts.add({1: Tally(likes=-1, quotes=-1)})
    assert await counts.shards[0].take() is None
    assert await counts.get([1]) == {}
    assert await counts.get([]) == {}


async def test_counts_are_cached_for_a_while_and_never_below_zero(valkey: Valkey) -> None:
    counts = Counts(valkey, shards=1)
    found = await counts.shards[0].find([1, 2])
    assert found == Found({}, "")
    assert await counts.shards[0].fill({1: Tally(likes=1), 2: Tally(2, 3, 4, 5)}, found, added=True) == {
        1: TweetCounts(likes=1),
        2: TweetCounts(likes=2, retweets=3, replies=4, quotes=5),
    }
    await counts.add({1: Tally(likes=-3)})
    assert await counts.get([1, 3]) == {1: TweetCounts()}
    assert 0 < await valkey.call("TTL", counts.shards[0].key(1)) <= 300


async def test_a_change_of_thousands_of_counts_at_once_is_noted(valkey: Valkey) -> None:
    counts = Counts(valkey, shards=1)
    await counts.add({number: Tally(1, 1, 1, 1) for number in range(1, 1_001)})
    flush = await counts.shards[0].take()
    assert flush
    assert sum(sum(tally) for tally in flush.sums.values()) == FLUSH_MAX
