"""What a Valkey cluster does its own way: slots on several nodes, on their way, and on nodes that die."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from redis.crc import key_slot

from backends import valkey_cluster as backend
from backends.servers import Cluster
from mesh import caches
from mesh.caches.bodies import Bodies
from mesh.caches.counts import Counts, Tally
from mesh.caches.viewer_versions import ViewerVersions
from mesh.clock import SystemClock
from mesh.errors import UnavailableError
from mesh.timelines.port import home
from mesh.timelines.valkey import LIBRARY, ValkeyTimelines, hash_tag
from mesh.valkey_cluster import ValkeyCluster
from starling.tweet.v1 import tweet_pb2
from tests.running_backends import running
from tests.waiting import eventually

MINUTE_MS = 60_000
SNOWFLAKES = [(1_790_000_000_000 + 977 * n << 22) | (n % 3 << 12) for n in range(20_000)]


@pytest.fixture
async def valkey(valkey_cluster: Cluster, key_prefix: str) -> AsyncIterator[ValkeyCluster]:
    client = ValkeyCluster(address_of(valkey_cluster), key_prefix=key_prefix, libraries=[LIBRARY, caches.LIBRARY])
    yield client
    await client.close()


@pytest.fixture
def cluster_of_one(tmp_path: Path) -> Iterator[Cluster]:
    """Three masters, for a test that moves their slots."""
    with running(backend, tmp_path / "cluster") as cluster:
        yield cluster


def address_of(cluster: Cluster) -> str:
    return cluster.environment["STARLING_VALKEY_URL"]


def timelines_on(valkey: ValkeyCluster) -> ValkeyTimelines:
    return ValkeyTimelines(valkey, SystemClock(), cap=800)


async def make_lists(timelines: ValkeyTimelines, viewers: Sequence[int]) -> None:
    async def make(viewer: int) -> None:
        assert await timelines.create(home(viewer), "life", MINUTE_MS)
        assert await timelines.finish(home(viewer), "life", 1, [], 0)

    await asyncio.gather(*map(make, viewers))


async def ids_of(timelines: ValkeyTimelines, viewer: int) -> list[int]:
    view = await timelines.read(home(viewer), 1_000)
    assert view
    return list(view.ids)


def test_lists_are_spread_evenly_over_the_masters() -> None:
    for masters in (3, 5, 7):
        counts = [0] * masters
        for viewer in SNOWFLAKES:
            counts[key_slot(str(hash_tag(viewer)).encode()) * masters // 16_384] += 1
        assert max(counts) <= 1.2 * len(SNOWFLAKES) / masters


async def test_one_batch_goes_to_lists_on_all_masters(valkey: ValkeyCluster) -> None:
    timelines = timelines_on(valkey)
    viewers = SNOWFLAKES[:500]
    await make_lists(timelines, viewers)
    missing = SNOWFLAKES[500:600]
    assert await timelines.push([home(viewer) for viewer in [*viewers, *missing]], [7, 5]) == len(viewers)
    assert await timelines.merge([home(viewer) for viewer in viewers], [6], 5) == len(viewers)
    views = await timelines.read_many([home(viewer) for viewer in [*viewers, *missing]], 10)
    assert [list(view.ids) if view else None for view in views] == [[7, 6, 5]] * len(viewers) + [None] * len(missing)
    bounds = await timelines.bounds([home(missing[0]), *(home(viewer) for viewer in viewers)])
    assert bounds == [None, *[7] * len(viewers)]
    assert len(valkey.life_of_nodes()) == 3


async def test_what_is_cached_of_many_tweets_comes_in_the_order_asked_for(valkey: ValkeyCluster) -> None:
    bodies, versions = Bodies(valkey), ViewerVersions(valkey)
    tweets = [tweet_pb2.Tweet(tweet_id=number, version=1, text=f"text {number}") for number in range(1, 101)]
    await bodies.put(tweets[:60])
    await bodies.put_deleted(60, 2)
    found = await bodies.get([100, 60, 7, 1])
    assert found == {60: None, 7: tweets[6], 1: tweets[0]}
    for viewer in range(1, 30):
        lease = await versions.lease(viewer)
        assert lease
        await versions.fill(lease, viewer)
        assert versions.parse(viewer, await valkey.call(*versions.get_command(viewer))) == viewer
    await versions.invalidate(range(1, 30))
    assert await valkey.call(*versions.get_command(5)) is None


async def test_counts_of_tweets_on_all_masters_are_flushed_once(valkey: ValkeyCluster) -> None:
    counts = Counts(valkey)
    tweets = SNOWFLAKES[:100]
    await counts.add({tweet: Tally(likes=number, quotes=1) for number, tweet in enumerate(tweets, 1)})
    flushed: dict[int, Tally] = {}
    for shard in counts.shards:
        while flush := await shard.take():
            flushed.update(flush.sums)
            await shard.finish(flush)
    assert flushed == {tweet: Tally(likes=number, quotes=1) for number, tweet in enumerate(tweets, 1)}
    for shard, some in counts.by_shard(tweets).items():
        found = await shard.find(some)
        await shard.fill({tweet: flushed[tweet] for tweet in some}, found, added=True)
    assert {tweet: known.likes for tweet, known in (await counts.get(tweets)).items()} == {
        tweet: number for number, tweet in enumerate(tweets, 1)
    }


async def test_a_master_that_has_lost_its_functions_gets_them_again(valkey: ValkeyCluster) -> None:
    timelines = timelines_on(valkey)
    viewers = SNOWFLAKES[:50]
    await make_lists(timelines, viewers)
    for port in {address.rpartition(":")[2] for address in valkey.life_of_nodes()}:
        backend.ask(int(port), "FUNCTION", "FLUSH")
    assert await timelines.push([home(viewer) for viewer in viewers], [9]) == len(viewers)


class Load:
    """Pushes to all lists without end, as a worker does: again until it's done."""

    def __init__(self, timelines: ValkeyTimelines, viewers: Sequence[int]) -> None:
        self.timelines = timelines
        self.viewers = viewers
        self.pushed: list[int] = []
        self.failures = 0

    async def run(self, ending: asyncio.Event) -> None:
        number = 0
        while not ending.is_set():
            number += 1
            while True:
                try:
                    await self.timelines.push([home(viewer) for viewer in self.viewers], [number])
                    break
                except UnavailableError:
                    self.failures += 1
                    with suppress(TimeoutError):
                        await asyncio.wait_for(ending.wait(), 0.05)
            self.pushed.append(number)


async def test_slots_that_move_while_lists_are_pushed_to_lose_nothing(cluster_of_one: Cluster) -> None:
    valkey = ValkeyCluster(address_of(cluster_of_one), libraries=[LIBRARY])
    try:
        timelines = timelines_on(valkey)
        viewers = SNOWFLAKES[:300]
        await make_lists(timelines, viewers)
        load, ending = Load(timelines, viewers), asyncio.Event()
        running_load = asyncio.create_task(load.run(ending))
        await asyncio.to_thread(move_slots, cluster_of_one)
        done = len(load.pushed)
        await eventually(lambda: len(load.pushed) > done + 2)
        ending.set()
        await running_load
        for viewer in viewers:
            assert await ids_of(timelines, viewer) == load.pushed[::-1]
        assert load.failures == 0, "batches whose slot is between two masters went key by key"
    finally:
        await valkey.close()


def move_slots(cluster: Cluster) -> None:
    """Every slot of the first master that has keys goes to the second, a key at a time, as resharding does."""
    source, target = (int(address.rpartition(":")[2]) for address in cluster.addresses[:2])
    third = int(cluster.addresses[2].rpartition(":")[2])
    source_id, target_id = backend.ask(source, "CLUSTER", "MYID"), backend.ask(target, "CLUSTER", "MYID")
    slots = sorted({key_slot(str(hash_tag(viewer)).encode()) for viewer in SNOWFLAKES[:300]})
    moved = [slot for slot in slots if slot < 16_384 // 3]
    assert moved
    for slot in moved:
        assert backend.ask(target, "CLUSTER", "SETSLOT", str(slot), "IMPORTING", source_id) == "OK"
        assert backend.ask(source, "CLUSTER", "SETSLOT", str(slot), "MIGRATING", target_id) == "OK"
        for viewer in SNOWFLAKES[:300]:
            if key_slot(str(hash_tag(viewer)).encode()) == slot:
                key = f"timeline:{{{hash_tag(viewer)}}}:{viewer}"
                assert backend.ask(source, "MIGRATE", "127.0.0.1", str(target), key, "0", "2000") == "OK"
        for port in (target, source, third):
            assert backend.ask(port, "CLUSTER", "SETSLOT", str(slot), "NODE", target_id) == "OK"


async def test_what_is_left_of_a_cluster_that_is_down_is_unavailable(cluster_of_one: Cluster) -> None:
    valkey = ValkeyCluster(address_of(cluster_of_one), libraries=[LIBRARY])
    try:
        timelines = timelines_on(valkey)
        first = next(v for v in SNOWFLAKES if key_slot(str(hash_tag(v)).encode()) < 16_384 // 3)
        await make_lists(timelines, [first])
        for server in cluster_of_one.servers[1:]:
            server.kill()

        async def refuses() -> bool:
            """It answers, and says CLUSTERDOWN: nothing else may come of a read of several commands."""
            try:
                await timelines.read(home(first), 10)
            except UnavailableError as error:
                return "CLUSTERDOWN" in str(error)
            return False

        await eventually(refuses, 20)
    finally:
        await valkey.close()


@pytest.mark.backends
@pytest.mark.timeout(120)
async def test_a_master_that_dies_is_replaced_and_its_copies_count_no_more(tmp_path: Path) -> None:
    with running(backend, tmp_path / "cluster", nodes=3) as cluster:
        valkey = ValkeyCluster(address_of(cluster), libraries=[LIBRARY, caches.LIBRARY])
        try:
            timelines, versions = timelines_on(valkey), ViewerVersions(valkey)
            viewers = SNOWFLAKES[:200]
            await make_lists(timelines, viewers)
            for viewer in viewers:
                lease = await versions.lease(viewer)
                assert lease
                await versions.fill(lease, 1)
            life = await valkey.life()
            victim = cluster.servers[0]
            dead = [v for v in viewers if key_slot(f"viewer_version:{v}".encode()) < 16_384 // 3]
            load, ending = Load(timelines, viewers), asyncio.Event()
            running_load = asyncio.create_task(load.run(ending))
            await eventually(lambda: len(load.pushed) > 5)
            victim.kill()
            done = len(load.pushed)
            await eventually(lambda: len(load.pushed) > done + 5, 30)
            ending.set()
            await running_load
            assert load.failures > 0
            assert await valkey.life() != life, "who publishes learns that something may be lost"
            copies = [versions.parse(v, await valkey.call(*versions.get_command(v))) for v in viewers]
            assert [v for v, copy in zip(viewers, copies, strict=True) if copy is None] == dead
            newest = load.pushed[: done + 1 : -1]
            chance = random.Random(1)
            for viewer in chance.sample(viewers, 50):
                assert (await ids_of(timelines, viewer))[: len(newest)] == newest
        finally:
            await valkey.close()
