"""What the log on Kafka does its own way: partitions that go from one member to another, commits, topics, replicas."""

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kafka.admin import ConfigResource, ConfigResourceType

from backends import kafka
from backends.servers import Cluster
from mesh.errors import ConfigurationError, UnavailableError
from mesh.eventlog.kafka import Kafka, KafkaConsumer, KafkaLagReader, KafkaProducer
from mesh.eventlog.port import Consumer, Record, Topic
from tests.conformance.conftest import GROUP, KafkaLog
from tests.conformance.test_eventlog import lag_of, numbered, take, values, values_of
from tests.running_backends import running
from tests.waiting import eventually

pytestmark = pytest.mark.backends


async def in_one_partition(log: KafkaLog, count: int) -> None:
    await log.producer().publish("notes", [(b"same", b"%d" % i) for i in range(count)])


async def everything(*members: Consumer) -> list[str]:
    """What they get until none gets any more."""
    got: list[str] = []
    while True:
        shares = await asyncio.gather(*(member.poll(1_000, 0) for member in members))
        for member, records in zip(members, shares, strict=True):
            await member.ack(records)
            got += values(records)
        if not any(shares):
            return sorted(got, key=int)


async def lag_seen(log: KafkaLog) -> int:
    return sum(lag.messages for lag in await log.lag_reader().lag())


# ---- Topics ------------------------------------------------------------------------------------------


async def configs_of(cluster: Kafka, topic: Topic) -> dict[str, str]:
    resource = ConfigResource(ConfigResourceType.TOPIC, cluster.name(topic.name))
    told: Any = await cluster.look(lambda looker: looker.admin.describe_configs([resource], config_filter="all"))
    return {name: str(config["value"]) for name, config in told["topic"][resource.name].items()}


async def test_topics_have_the_shape_and_the_retention_that_was_configured(kafka_log: KafkaLog) -> None:
    topic = Topic("kept", partitions=5, records_max=1, keep_seconds=7_200)
    await kafka_log.cluster.make([topic])
    configs = await configs_of(kafka_log.cluster, topic)
    assert configs["retention.ms"] == "7200000"
    assert configs["message.timestamp.type"] == "LogAppendTime"
    [described] = await kafka_log.cluster.look(
        lambda looker: looker.admin.describe_topics([kafka_log.cluster.name("kept")])
    )
    assert len(described["partitions"]) == 5


async def test_the_logs_life_is_also_that_of_the_lists_that_it_fills(kafka_cluster: Cluster) -> None:
    lives = ["one", "one", "another"]

    async def lists_life() -> str:
        return lives.pop(0)

    url, prefix = kafka_cluster.environment["STARLING_EVENTLOG_URL"], secrets.token_hex(4)
    cluster = Kafka.at(url, prefix=prefix, lists_life=lists_life)
    try:
        producer = KafkaProducer(cluster, [Topic("notes", 1, 1)])
        first, second, third = [await producer.incarnation() for _ in range(3)]
        assert first == second != third
    finally:
        await cluster.close()


async def test_many_that_start_at_once_make_a_topic_once(kafka_cluster: Cluster) -> None:
    prefix = secrets.token_hex(4)
    clusters = [Kafka(kafka_cluster.addresses, replication=1, prefix=prefix) for _ in range(6)]
    topic = Topic("notes", 3, 1_000)
    try:
        await asyncio.gather(*(cluster.make([topic]) for cluster in clusters))
        await asyncio.gather(*(KafkaProducer(one, [topic]).publish("notes", numbered(1)) for one in clusters))
        lags = await KafkaLagReader(clusters[0], [topic], GROUP).lag()
        assert sum(lag.messages for lag in lags) == 6
    finally:
        await asyncio.gather(*(cluster.close() for cluster in clusters))


async def test_a_topic_of_another_shape_is_refused_by_the_name_of_the_variable(kafka_log: KafkaLog) -> None:
    await kafka_log.cluster.make([kafka_log.topic])
    with pytest.raises(ConfigurationError, match=r"STARLING_EVENTLOG_URL.*4 partitions"):
        await kafka_log.cluster.look(
            lambda looker: looker.make({kafka_log.cluster.name("notes"): Topic("notes", 5, 1_000)}, 1)
        )


# ---- Commits -----------------------------------------------------------------------------------------


async def test_only_what_is_done_without_a_gap_is_committed(kafka_log: KafkaLog) -> None:
    await in_one_partition(kafka_log, 10)
    consumer = kafka_log.consumer("a")
    first, *others = await take(consumer, 10)
    await consumer.ack(others)
    assert await lag_of(consumer) == await lag_seen(kafka_log) == 10
    await consumer.ack([first])
    assert await lag_of(consumer) == await lag_seen(kafka_log) == 0


async def test_what_is_done_is_committed_by_itself_within_a_moment(kafka_log: KafkaLog) -> None:
    await in_one_partition(kafka_log, 10)
    consumer = kafka_log.consumer("a")
    await consumer.ack((await take(consumer, 10))[:7])

    async def is_committed() -> bool:
        return await lag_seen(kafka_log) == 3

    await eventually(is_committed, 5)


async def test_a_partition_holds_no_more_than_its_window(kafka_log: KafkaLog) -> None:
    await in_one_partition(kafka_log, 100)
    consumer = KafkaConsumer(
        kafka_log.cluster,
        topic=kafka_log.topic,
        group=GROUP,
        name="a",
        dead_letters=kafka_log.dead_letters,
        window=8,
    )
    try:
        seen: list[str] = []
        while len(seen) < 100:
            held = await consumer.poll(1_000, 10)
            while records := await consumer.poll(1_000, 0.5):
                held += records
            assert 0 < len(held) <= 8, "nothing more before something is done"
            seen += values(held)
            await consumer.ack(held)
        assert seen == values_of(100)
    finally:
        await consumer.close()


# ---- Members -----------------------------------------------------------------------------------------


async def test_a_partition_is_handed_over_when_what_is_in_hand_is_done(kafka_log: KafkaLog) -> None:
    await kafka_log.producer().publish("notes", numbered(40))
    first, second = kafka_log.consumer("first"), kafka_log.consumer("second")
    records = await take(first, 40)
    await second.join()

    async def is_member() -> bool:
        return await kafka_log.members() == {"first", "second"}

    await eventually(is_member, 10)
    await first.ack(records)
    await kafka_log.settled(first, second)
    assert await everything(first, second) == [], "nothing was done twice"
    assert await lag_seen(kafka_log) == 0


async def test_a_partition_is_handed_over_though_its_work_does_not_end(kafka_log: KafkaLog) -> None:
    await kafka_log.producer().publish("notes", numbered(40))
    stuck, other = kafka_log.consumer("stuck"), kafka_log.consumer("other")
    records = await take(stuck, 40)
    await kafka_log.settled(stuck, other)
    moved = {record.value for record in records if record.partition in {at.partition for at in other.held()}}
    again = await take(other, len(moved))
    assert {record.value for record in again} == moved
    await stuck.ack(records)
    assert await lag_of(stuck) == len(moved), "what was lost isn't committed by whoever lost it"
    await other.ack(again)
    assert await lag_of(other) == 0


async def test_a_member_that_hangs_loses_its_partitions_and_may_come_back(kafka_log: KafkaLog) -> None:
    await kafka_log.producer().publish("notes", numbered(40))
    hanging = kafka_log.consumer("hanging", poll_interval_seconds=6.0)
    held = await take(hanging, 40)
    async with hanging.stopped():  # As if its event loop hung.
        other = kafka_log.consumer("other")
        records: list[Record] = []
        async with asyncio.timeout(40):
            while len(records) < 40:
                try:
                    records += await other.poll(1_000, 1.0)
                except UnavailableError:
                    continue
        await other.ack(records)
        assert await lag_of(other) == 0
    await hanging.ack(held)
    await kafka_log.settled(hanging, other)
    await kafka_log.producer().publish("notes", numbered(20))
    assert await everything(hanging, other) == values_of(20)


# ---- Replay ------------------------------------------------------------------------------------------


async def test_a_replay_reaches_what_other_members_hold(kafka_log: KafkaLog) -> None:
    members = [kafka_log.consumer(name) for name in "abc"]
    await kafka_log.settled(*members)
    await kafka_log.producer().publish("notes", numbered(60))
    assert await everything(*members) == values_of(60)
    assert await lag_seen(kafka_log) == 0
    await members[0].replay(0)
    assert await lag_seen(kafka_log) == 60, "it is committed"
    await kafka_log.settled(*members)
    assert await everything(*members) == values_of(60)
    assert await lag_of(members[0]) == 0


async def test_what_is_in_hand_anywhere_when_it_is_replayed_is_taken_again(kafka_log: KafkaLog) -> None:
    members = [kafka_log.consumer(name) for name in "ab"]
    await kafka_log.settled(*members)
    await kafka_log.producer().publish("notes", numbered(60))
    in_hand: list[Sequence[Record]] = [await member.poll(1_000, 0) for member in members]
    assert sum(map(len, in_hand)) == 60
    await members[0].replay(0)
    for member, records in zip(members, in_hand, strict=True):
        await member.ack(records)
    await kafka_log.settled(*members)
    assert await lag_seen(kafka_log) == 60
    assert await everything(*members) == values_of(60)


# ---- Servers that are away ---------------------------------------------------------------------------


async def test_without_a_server_calls_fail_within_a_bound_and_close_does_not_hang() -> None:
    cluster = Kafka(["127.0.0.1:1"], replication=1)
    topic = Topic("notes", 1, 1)
    consumer = KafkaConsumer(cluster, topic=topic, group=GROUP, name="a", dead_letters=Topic("dead", 1, 1))
    async with asyncio.timeout(20):
        for call in (
            KafkaProducer(cluster, [topic]).publish("notes", numbered(1)),
            KafkaProducer(cluster, [topic]).incarnation(),
            KafkaLagReader(cluster, [topic], GROUP).lag(),
            consumer.poll(1, 0),
        ):
            with pytest.raises(UnavailableError):
                await call
        await consumer.close()
        await cluster.close()


@pytest.mark.timeout(300)
async def test_with_one_of_three_brokers_killed_nothing_is_lost(tmp_path: Path) -> None:
    with running(kafka, tmp_path / "three", 3) as servers:
        cluster = Kafka.at(servers.environment["STARLING_EVENTLOG_URL"])
        topic = Topic("notes", 4, 1_000)
        await cluster.make([topic])
        assert (await configs_of(cluster, topic))["min.insync.replicas"] == "2"
        producer = KafkaProducer(cluster, [topic])
        consumer = KafkaConsumer(cluster, topic=topic, group=GROUP, name="a", dead_letters=Topic("dead", 1, 1))
        published, got = 0, set[bytes]()
        victim_up = True
        while published < 1_500:
            if published >= 500 and victim_up:
                servers.servers[0].kill()
                victim_up = False
            records = [(b"%d" % i, b"%d" % i) for i in range(published, published + 100)]

            async def goes_in(records: list[tuple[bytes, bytes]] = records) -> bool:
                try:
                    await producer.publish("notes", records)
                except UnavailableError:
                    return False
                return True

            await eventually(goes_in, 60)
            published += 100

        async def all_came() -> bool:
            records = await consumer.poll(1_000, 0.5)
            got.update(record.value for record in records)
            await consumer.ack(records)
            return len(got) == published

        await eventually(all_came, 60)
        await consumer.close()
        await cluster.close()
