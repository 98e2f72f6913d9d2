"""The log on a real Kafka: a slow fan-out, and records that can never succeed (K1, K2)."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from backends.servers import Cluster
from fanout_svc.worker import Worker
from mesh.caches.bodies import Bodies
from mesh.clock import SystemClock
from mesh.eventlog import topics
from mesh.eventlog.kafka import Kafka, KafkaConsumer, KafkaLagReader, KafkaProducer
from mesh.timelines import port as lists
from mesh.timelines.valkey import LIBRARY, ValkeyTimelines
from mesh.valkey import Valkey
from starling.event.v1 import event_pb2
from tests.cases import slow_worker
from tests.cases.slow_worker import CHUNKS, FOLLOWERS, GROUP, TOPIC
from tests.cases.test_timeline_cases import people
from tests.harness import Mesh
from tests.waiting import eventually

pytestmark = pytest.mark.backends
ROOT = Path(__file__).resolve().parents[2]


def created(author_id: int, tweet_id: int) -> bytes:
    event = event_pb2.TweetEvent(author_id=author_id)
    event.created.tweet_id = tweet_id
    return event.SerializeToString()


async def share_the_partitions(cluster: Kafka, workers: int) -> bool:
    """Whether so many workers have the same number of partitions each."""
    group = cluster.group(GROUP, TOPIC.name)
    told = (await cluster.look(lambda looker: looker.admin.describe_groups([group])))[group]
    assigned = [member["member_assignment"] for member in told["members"]]
    held = [sum(len(topic["partitions"]) for topic in one["assigned_partitions"]) for one in assigned if one]
    return told["group_state"] == "Stable" and held == [TOPIC.partitions // workers] * workers


def start_worker(stack: ExitStack, *arguments: str) -> None:
    """A process, which ends with the stack."""
    process = subprocess.Popen([sys.executable, "-m", slow_worker.__name__, *arguments], cwd=ROOT)
    stack.callback(process.wait, 10)
    stack.callback(process.kill)


async def lag_of(cluster: Kafka) -> int:
    return sum(lag.messages for lag in await KafkaLagReader(cluster, [TOPIC], GROUP).lag())


@pytest.mark.timeout(180)
async def test_k1_a_slow_fanout_is_neither_taken_away_nor_lost_with_its_worker(
    kafka_cluster: Cluster, valkey_url: str, key_prefix: str, tmp_path: Path
) -> None:
    url, prefix = kafka_cluster.environment["STARLING_EVENTLOG_URL"], f"k1{os.getpid()}{key_prefix}"
    cluster = Kafka.at(url, prefix=prefix)
    valkey = Valkey(valkey_url, key_prefix=prefix, libraries=[LIBRARY])
    timelines = ValkeyTimelines(valkey, SystemClock())
    homes = [lists.home(follower) for follower in FOLLOWERS]
    for home in homes:
        await timelines.create(home, "token", 60_000)
        await timelines.finish(home, "token", 1, [], 0)
    events = [(b"%d" % author, created(author, 1_000 + author)) for author in range(1, 41)]
    await cluster.make([TOPIC])
    journal = tmp_path / "journal"
    journal.touch()

    def noted(what: str) -> list[int]:
        """Who noted it."""
        return [int(line.split()[0]) for line in journal.read_text().splitlines() if line.endswith(what)]

    with ExitStack() as stack:
        for _ in range(2):
            start_worker(stack, url, prefix, valkey_url, str(journal))
        await eventually(lambda: share_the_partitions(cluster, 2), 40)
        await KafkaProducer(cluster, [TOPIC]).publish(TOPIC.name, events)
        await eventually(lambda: len(noted("chunk")) >= CHUNKS // 2, 40)
        [victim] = set(noted("begins"))
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()

        async def is_done() -> bool:
            return await lag_of(cluster) == 0

        await eventually(is_done, 60)
        print(f"\nlag 0 after {time.monotonic() - killed:.1f} s")
    for home in homes:
        view = await timelines.read(home, 100)
        assert view
        assert sorted(view.ids) == [1_000 + author for author in range(1, 41)]
    assert len(noted("begins")) <= 2
    assert noted("ends") == [noted("begins")[-1]], "it took longer than the poll interval, and was left in peace"
    await cluster.close()
    await valkey.close()


async def dead_letters(cluster: Kafka) -> dict[bytes, event_pb2.DeadLetter]:
    """By what was buried."""
    topic = topics.FANOUT_DEAD_LETTERS
    reader = KafkaConsumer(cluster, topic=topic, group="reader", name="reader", dead_letters=topic)
    try:
        letters = [event_pb2.DeadLetter.FromString(record.value) for record in await reader.poll(10, 0)]
    finally:
        await reader.close()
    return {letter.value: letter for letter in letters}


async def test_k2_poison_stops_no_partition(mesh: Mesh, kafka_cluster: Cluster, key_prefix: str) -> None:
    author, follower = await people(mesh, 2)
    await mesh.follow(follower, author)
    tweet = await mesh.post(author)
    await mesh.home(follower)
    await mesh.settle()
    good = tweet.tweet_id + 1

    cluster = Kafka.at(kafka_cluster.environment["STARLING_EVENTLOG_URL"], prefix=f"k2{os.getpid()}{key_prefix}")
    consumer = KafkaConsumer(
        cluster,
        topic=topics.TWEET_FANOUT,
        group=topics.FANOUT_WORKERS,
        name="worker",
        dead_letters=topics.FANOUT_DEAD_LETTERS,
    )
    producer = KafkaProducer(cluster, [topics.TWEET_FANOUT])
    worker = Worker(
        consumer=consumer,
        producer=producer,
        timelines=mesh.timelines,
        bodies=Bodies(mesh.valkey),
        peers=mesh.peers,
        clock=SystemClock(),
        figures=mesh.figures,
    )
    await consumer.poll(1, 0)  # It has joined: what is measured is the delivery.
    records = [b"\xff\xfe", created(999, 998), created(author, good)]
    await producer.publish(topics.TWEET_FANOUT.name, [(b"same", value) for value in records])
    published = time.monotonic()
    running = asyncio.create_task(worker.run(asyncio.Event()))

    async def is_delivered() -> bool:
        view = await mesh.timelines.read(lists.home(follower), 10)
        return view is not None and good in view.ids

    await eventually(is_delivered, 5)
    print(f"\nthe good one is delivered after {time.monotonic() - published:.2f} s")

    async def are_buried() -> bool:
        return await consumer.dead_letters() == 2 and not any(lag.messages for lag in await consumer.lag())

    await eventually(are_buried, 10)
    letters = await dead_letters(cluster)
    assert letters.keys() == set(records[:2])
    for offset, (value, cause) in enumerate(zip(records[:2], ("not a TweetEvent", "unknown author"), strict=True)):
        letter = letters[value]
        assert (letter.topic, letter.position) == (topics.TWEET_FANOUT.name, str(offset))
        assert letter.partition == letters[records[0]].partition
        assert cause in letter.cause
    assert not running.done(), "it goes on, as it was"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await consumer.close()
    await cluster.close()
