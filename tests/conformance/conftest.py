"""The adapters that the conformance suites run on. The suites name fixtures only."""

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kafka.admin import OffsetSpec

from backends.servers import Cluster
from graph_svc.cassandra import CassandraGraphStore
from graph_svc.sqlite import SqliteGraphStore
from graph_svc.store import GraphStore, Limits
from mesh.cassandra import Cassandra
from mesh.clock import SystemClock
from mesh.eventlog.kafka import Kafka, KafkaConsumer, KafkaLagReader, KafkaProducer
from mesh.eventlog.port import Consumer, LagReader, Producer, Topic
from mesh.eventlog.valkey_streams import LIBRARY, StreamsConsumer, StreamsLagReader, StreamsProducer
from mesh.timelines.port import Timelines
from mesh.timelines.valkey import LIBRARY as TIMELINES_LIBRARY
from mesh.timelines.valkey import ValkeyTimelines
from mesh.valkey import Valkey
from mesh.valkey_cluster import connect_to
from tests.cassandra import Keyspace
from tests.waiting import eventually
from tweet_svc.cassandra import CassandraTweetStore
from tweet_svc.sqlite import SqliteTweetStore
from tweet_svc.store import TweetStore

CLAIM_SECONDS = 60.0
GROUP = "workers"


class SteppedClock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def now_ms(self) -> int:
        return int(self.seconds * 1000)

    def monotonic(self) -> float:
        return self.seconds


class StreamsLog:
    """What the suite may do to an event log, on Valkey Streams. It has one topic, and one for dead letters.

    Time, as the claim time sees it, passes by `pass_time` only (as long as a test takes less than a minute).
    """

    def __init__(self, valkey: Valkey, topic: Topic, dead_letters: Topic) -> None:
        self.topic = topic
        self.dead_letters = dead_letters
        self.claim_seconds = CLAIM_SECONDS
        self._valkey = valkey
        self._clock = SteppedClock()

    def producer(self) -> Producer:
        return StreamsProducer(self._valkey, [self.topic, self.dead_letters])

    def consumer(
        self,
        name: str,
        *,
        topic: Topic | None = None,
        group: str = GROUP,
        claim_seconds: float = CLAIM_SECONDS,
        forget_seconds: float = 3_600.0,
    ) -> Consumer:
        return StreamsConsumer(
            self._valkey,
            topics=[topic or self.topic],
            group=group,
            name=name,
            dead_letters=self.dead_letters,
            claim_idle_ms=int(claim_seconds * 1000),
            forget_after_ms=int(forget_seconds * 1000),
            clock=self._clock,
        )

    def lag_reader(self) -> LagReader:
        return StreamsLagReader(self._valkey, [self.topic], GROUP)

    async def settled(self, *members: Consumer) -> None:
        """Any member reads any partition."""

    async def publish_timed(self, name: bytes) -> int:
        """A record's id begins with its time."""
        await self.producer().publish(self.topic.name, [(name, name)])
        newest = [
            await self._valkey.call("XREVRANGE", stream, "+", "-", "COUNT", 1) for stream in await self._streams()
        ]
        return max(int(entries[0][0].partition(b"-")[0]) for entries in newest if entries)

    async def pass_time(self, seconds: float) -> None:
        """Let everything in hand be idle for so much longer."""
        self._clock.seconds += seconds
        for stream in await self._streams():
            for group in await self._valkey.call("XINFO", "GROUPS", stream):
                name = group[b"name"]
                pending = await self._valkey.call("XPENDING", stream, name, "-", "+", 10_000)
                await self._valkey.pipeline(
                    [
                        ("XCLAIM", stream, name, owner, 0, id_, "IDLE", int(idle + seconds * 1000), "JUSTID")
                        for id_, owner, idle, _ in pending
                    ]
                )

    async def now_ms(self) -> int:
        """The log's clock."""
        seconds, micros = await self._valkey.call("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def kept(self) -> int:
        """Number of records in the topic, acknowledged or not."""
        return sum([await self._valkey.call("XLEN", stream) for stream in await self._streams()])

    async def members(self) -> set[str]:
        """Names that the group knows, but for its own bookkeeping."""
        return {
            member[b"name"].decode()
            for stream in await self._streams()
            for member in await self._valkey.call("XINFO", "CONSUMERS", stream, GROUP)
        } - {"-"}

    async def drop_all_data(self) -> None:
        """As a crash of a server that keeps nothing does."""
        streams = await self._valkey.call("KEYS", f"{self._valkey.key_prefix}*")
        if streams:
            await self._valkey.call("DEL", *streams)

    async def _streams(self) -> list[bytes]:
        return list(await self._valkey.call("KEYS", f"{self._valkey.key_prefix}log:{self.topic.name}:*"))


class StoppableConsumer(KafkaConsumer):
    """One that can be made to hang."""

    @asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """It polls no more meanwhile."""
        async with self._turning:
            yield


class KafkaLog:
    """The same on Kafka. The claim time passes by `pass_time` only, and concerns what this process has in hand."""

    def __init__(self, cluster: Kafka, topic: Topic, dead_letters: Topic) -> None:
        self.topic = topic
        self.dead_letters = dead_letters
        self.claim_seconds = CLAIM_SECONDS
        self.cluster = cluster
        self._clock = SteppedClock()
        self._consumers: list[StoppableConsumer] = []

    def producer(self) -> Producer:
        return KafkaProducer(self.cluster, [self.topic, self.dead_letters])

    def consumer(
        self,
        name: str,
        *,
        topic: Topic | None = None,
        group: str = GROUP,
        claim_seconds: float = CLAIM_SECONDS,
        forget_seconds: float = 0.0,
        poll_interval_seconds: float = 60.0,
    ) -> "StoppableConsumer":
        consumer = StoppableConsumer(
            self.cluster,
            topic=topic or self.topic,
            group=group,
            name=name,
            dead_letters=self.dead_letters,
            claim_seconds=claim_seconds,
            poll_interval_seconds=poll_interval_seconds,
            clock=self._clock,
        )
        self._consumers.append(consumer)
        return consumer

    def lag_reader(self) -> LagReader:
        return KafkaLagReader(self.cluster, [self.topic], GROUP)

    async def settled(self, *members: Consumer) -> None:
        """Until they share the partitions, each once."""
        names = {member.name for member in members}
        ours = [consumer for consumer in self._consumers if consumer.name in names]
        await asyncio.gather(*(consumer.join() for consumer in ours))
        least = self.topic.partitions // len(ours)

        def shared() -> bool:
            held = [consumer.held() for consumer in ours]
            return min(map(len, held)) >= least and sum(map(len, held)) == self.topic.partitions

        await eventually(shared, 30)

    async def publish_timed(self, name: bytes) -> int:
        await self.producer().publish(self.topic.name, [(name, name)])
        partitions = self.cluster.partitions([self.topic])
        newest = dict.fromkeys(partitions, OffsetSpec.MAX_TIMESTAMP)
        told = await self.cluster.look(lambda looker: looker.admin.list_partition_offsets(newest))
        return max(int(at.timestamp) for at in told.values())

    async def pass_time(self, seconds: float) -> None:
        self._clock.seconds += seconds

    async def now_ms(self) -> int:
        return int(time.time() * 1000)

    async def kept(self) -> int:
        await self.cluster.make([self.topic])
        partitions = self.cluster.partitions([self.topic])
        first, end = await self.cluster.look(lambda looker: looker.bounds(partitions))
        return sum(end[at] - first[at] for at in partitions)

    async def members(self) -> set[str]:
        group = self.cluster.group(GROUP, self.topic.name)
        return set((await self.cluster.look(lambda looker: looker.members(group))).values())

    async def close(self) -> None:
        await asyncio.gather(*(consumer.close() for consumer in self._consumers))
        await self.cluster.close()


OpenEventLog = Callable[[int, int], AbstractAsyncContextManager[StreamsLog]]


@pytest.fixture
def open_eventlog(valkey_url: str, key_prefix: str) -> OpenEventLog:
    """Opens an empty log that keeps each record's state and is bounded by records: (partitions, records_max) → context
    manager. Kafka is neither: there a partition belongs to a member as a whole, and its records are kept for a time,
    whoever has acknowledged them. What it does instead is in `test_kafka.py`."""
    numbers = itertools.count()

    @asynccontextmanager
    async def open_log(partitions: int, records_max: int) -> AsyncIterator[StreamsLog]:
        async with AsyncExitStack() as stack:
            valkey = Valkey(valkey_url, key_prefix=f"{key_prefix}{next(numbers)}:", libraries=[LIBRARY])
            stack.push_async_callback(valkey.close)
            log = StreamsLog(valkey, Topic("notes", partitions, records_max), Topic("dead", 1, 100))
            stack.push_async_callback(log.drop_all_data)
            yield log

    return open_log


@pytest.fixture
async def claiming_log(open_eventlog: OpenEventLog) -> AsyncIterator[StreamsLog]:
    """An empty log of 4 partitions, 1,000 records each, whose members take over single records."""
    async with open_eventlog(4, 1_000) as log:
        yield log


@pytest.fixture
async def kafka_log(kafka_cluster: Cluster) -> AsyncIterator[KafkaLog]:
    """An empty log of 4 partitions on a real broker."""
    cluster = Kafka(kafka_cluster.addresses, replication=1, prefix=f"t{secrets.token_hex(4)}:")
    log = KafkaLog(cluster, Topic("notes", 4, 1_000), Topic("dead", 1, 100))
    try:
        yield log
    finally:
        await log.close()


@pytest.fixture(params=["claiming_log", pytest.param("kafka_log", marks=pytest.mark.backends)])
def eventlog(request: pytest.FixtureRequest) -> Any:
    """An empty log of 4 partitions: each adapter's."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["one server", "cluster"])
async def timelines(request: pytest.FixtureRequest, key_prefix: str) -> AsyncIterator[Timelines]:
    """No lists yet; a cap that a test can fill."""
    if request.param == "cluster":
        url = request.getfixturevalue("valkey_cluster").environment["STARLING_VALKEY_URL"]
    else:
        url = request.getfixturevalue("valkey_url")
    valkey = connect_to(url, key_prefix=key_prefix, libraries=[TIMELINES_LIBRARY])
    yield ValkeyTimelines(valkey, SystemClock(), cap=8, slack=3)
    await valkey.close()


@pytest.fixture(params=["sqlite", pytest.param("cassandra", marks=pytest.mark.backends)])
def cassandra(request: pytest.FixtureRequest) -> Keyspace | None:
    """What the stores are on: an empty keyspace, or None: SQLite."""
    return request.getfixturevalue("keyspace") if request.param == "cassandra" else None


@pytest.fixture
async def tweet_store(cassandra: Keyspace | None, tmp_path: Path) -> AsyncIterator[TweetStore]:
    """An empty store."""
    store: SqliteTweetStore | CassandraTweetStore
    if cassandra:
        store = CassandraTweetStore(Cassandra(cassandra.where))
    else:
        store = SqliteTweetStore(tmp_path / "tweets.db", synchronous="OFF")
    await store.open()
    try:
        yield store
    finally:
        await store.close()


OpenGraphStore = Callable[..., AbstractAsyncContextManager[GraphStore]]


@pytest.fixture
def graph_limits(cassandra: Keyspace | None) -> Limits:
    """The real ones on SQLite. On Cassandra each change takes some ms, so there are fewer, by the same code."""
    return Limits(20, 30, 30) if cassandra else Limits()


@pytest.fixture
def graph_store_of(cassandra: Keyspace | None, graph_limits: Limits, tmp_path: Path) -> OpenGraphStore:
    """Opens a store, three followers to a bucket unless told; an empty one, unless it is to be the last one `again`."""
    numbers = itertools.count()
    last = 0

    @asynccontextmanager
    async def open_store(bucket_size: int = 3, *, again: bool = False) -> AsyncIterator[GraphStore]:
        nonlocal last
        last = last if again else next(numbers)
        store: SqliteGraphStore | CassandraGraphStore
        if cassandra:
            if not again:
                cassandra.empty()
            store = CassandraGraphStore(Cassandra(cassandra.where), bucket_size=bucket_size, limits=graph_limits)
        else:
            store = SqliteGraphStore(tmp_path / f"graph-{last}.db", bucket_size=bucket_size, synchronous="OFF")
        try:
            await store.open()
            yield store
        finally:
            await store.close()

    return open_store


@pytest.fixture
async def graph_store(graph_store_of: OpenGraphStore) -> AsyncIterator[GraphStore]:
    """An empty store, three followers to a bucket."""
    async with graph_store_of() as store:
        yield store
