"""The EventLog on Kafka (4.x, KRaft): the production log, for many machines.

A topic is a topic, a group one of Kafka's groups for each topic, `<group>.<topic>`, since each join of a member stops
a whole group for a moment; both names begin with the prefix. Topics are made by whoever needs one first, with the
shape and the retention that the mesh wants; with three copies, two must be written before a record counts as taken.

- **Threads.** kafka-python blocks, so each client has a thread, and is used on no other; what it gives is handed over
  to the event loop a turn at a time. Every call has a bound. A client that failed is dropped, and the next call makes
  another: its buffers would go out late, and out of order.
- **Membership.** A consumer polls all the time, whatever is in hand, so a slow fan-out never costs it its partitions;
  one whose event loop hangs stops polling, and loses them. Partitions of which `window` records are unfinished are
  paused meanwhile.
- **Acknowledging** is kept here (`progress`), and what is done without a gap is committed within a moment: by a member
  of the group only, and only for partitions that it holds. `lag` and `close` commit first.
- **Handing over** is cooperative: when a partition goes to another member, this one finishes what it has in hand of it,
  within a bound, and commits; then the other begins. What was lost otherwise is never committed.
- **Replay** sets back the whole group, and a member can't tell the others: so all are put out of it, the group is set
  back while it is empty, and they come back by themselves, with nothing in hand that counts.
- **Loss.** Kafka loses nothing that it has taken; but it outlives the lists that its records fill. `incarnation` names
  both: when the cache is another process than before, the relay publishes its last hour again, as it does when the log
  went with it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count as count_up
from typing import Any, TypeVar

import kafka
from kafka import TopicPartition as Partition
from kafka.admin import MemberToRemove, OffsetSpec
from kafka.consumer.subscription_state import AsyncConsumerRebalanceListener
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.errors import KafkaError, NoError, TopicAlreadyExistsError
from kafka.net.compat import KafkaNetClient
from kafka.structs import MemberState, OffsetAndMetadata

from mesh.clock import Clock, SystemClock
from mesh.errors import ConfigurationError, UnavailableError
from mesh.eventlog.port import (
    POLL_RECORDS_MAX,
    Lag,
    Record,
    Topic,
    check_bounds,
    letter_of,
)
from mesh.eventlog.progress import Progress, share_out

log = logging.getLogger(__name__)
# It tells of each connection and each step of a group.
logging.getLogger("kafka").setLevel(logging.WARNING)

T = TypeVar("T")

CLAIM_SECONDS = 15.0
POLL_INTERVAL_SECONDS = 60.0
"""A member that hasn't polled for so long has lost its partitions."""
SESSION_SECONDS = 10.0
"""A member that is gone without leaving has lost its partitions after so long."""
HAND_OVER_SECONDS = 5.0
"""How long a partition waits for what is in hand of it before it goes to another member."""
WINDOW = 2_000
"""Records of a partition that are fetched and not committed, at most."""

_BOOTSTRAP_SECONDS = 2.0
_REQUEST_SECONDS = 5.0
_DELIVERY_SECONDS = 10.0
_COMMIT_SECONDS = 1.0
_COMMIT_EVERY_SECONDS = 0.1
_TURN_SECONDS = 0.1
_TURN_RECORDS_MAX = 500
_FLUSH_SECONDS = 2.0
_LOOK_SECONDS = 10.0
_CLOSE_SECONDS = 2.0
_STUCK_SECONDS = 5.0
_AWAY_SECONDS = 0.5
_LIFE_SECONDS = 5.0
"""So long the names of the cluster and its topics are believed."""
_REWIND_TRIES_MAX = 20
_NO_EPOCH = -1
_TEXT_CHARS_MAX = 300
_ERRORS = (KafkaError, OSError, RuntimeError)
"""What a client raises when it can't; RuntimeError when it was closed meanwhile."""


class Kafka:
    """A cluster, and what a process shares of it: one producer, and one client to look and to manage with.

    `replication`: how many copies topics have that are made here. `lists_life`: names the life of the lists that the
    records fill; raises UnavailableError.
    """

    def __init__(
        self,
        servers: Sequence[str],
        *,
        replication: int,
        prefix: str = "",
        lists_life: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        self.servers = [*servers]
        self._replication = replication
        self._prefix = prefix.replace(":", ".")
        self._lists_life = lists_life
        self._producing = _Clients(self._open_producer, _drop_producer, "producer")
        self._looking = _Clients(self._open_looker, _Looker.close, "looker")
        self._made: set[str] = set()
        self._lives: dict[tuple[str, ...], tuple[str, float]] = {}

    @classmethod
    def at(cls, url: str, *, prefix: str = "", lists_life: Callable[[], Awaitable[str]] | None = None) -> "Kafka":
        """The cluster at `kafka://host:port,…?replication=N` (3 unless it is said)."""
        servers, _, replication = url.removeprefix("kafka://").partition("?replication=")
        return cls(servers.split(","), replication=int(replication or 3), prefix=prefix, lists_life=lists_life)

    def name(self, name: str) -> str:
        """What a topic or a group is called in the cluster."""
        return self._prefix + name

    def group(self, group: str, topic: str) -> str:
        """What a group is called that reads this topic."""
        return self.name(f"{group}.{topic}")

    def partitions(self, topics: Sequence[Topic]) -> list[Partition]:
        """Of these topics, in order."""
        return [Partition(self.name(topic.name), number) for topic in topics for number in range(topic.partitions)]

    async def make(self, topics: Sequence[Topic]) -> None:
        """Make the topics that aren't there. Raises UnavailableError, and ConfigurationError for one of another shape
        than is wanted."""
        missing = [topic for topic in topics if topic.name not in self._made]
        if missing:
            await self.look(lambda looker: looker.make({self.name(t.name): t for t in missing}, self._replication))
            self._made.update(topic.name for topic in missing)

    async def look(self, work: Callable[["_Looker"], T]) -> T:
        """Look at the cluster, or manage it. Raises UnavailableError."""
        return await self._looking.use(work)

    async def publish(self, topic: str, records: Sequence[tuple[bytes, bytes]]) -> None:
        """Append, one batch of a process at a time. Raises UnavailableError."""
        try:
            await self._producing.use(lambda producer: _publish(producer, self.name(topic), records))
        except UnavailableError:
            self._made.clear()  # It may be gone.
            raise

    async def incarnation(self, topics: Sequence[Topic]) -> str:
        """See the port."""
        lists = await self._lists_life() if self._lists_life else ""
        names = tuple(self.name(topic.name) for topic in topics)
        life, until = self._lives.get(names, ("", 0.0))
        if time.monotonic() >= until:
            await self.make(topics)
            life = await self.look(lambda looker: looker.life(names))
            self._lives[names] = (life, time.monotonic() + _LIFE_SECONDS)
        return f"{life} {lists}".rstrip()

    async def close(self) -> None:
        """Close all clients, within a bound."""
        await self._producing.close()
        await self._looking.close()

    def settings(self, client_id: str) -> dict[str, Any]:
        """What all clients are told."""
        return {
            "bootstrap_servers": self.servers,
            "client_id": client_id,
            "bootstrap_timeout_ms": int(_BOOTSTRAP_SECONDS * 1000),
            "request_timeout_ms": int(_REQUEST_SECONDS * 1000),
            "reconnect_backoff_max_ms": 1_000,
        }

    def _open_producer(self) -> Any:
        return connected(
            kafka.KafkaProducer,
            **self.settings("starling"),
            metrics_enabled=False,
            enable_idempotence=True,
            acks="all",
            allow_auto_create_topics=False,
            max_block_ms=int(_REQUEST_SECONDS * 1000),
            delivery_timeout_ms=int(_DELIVERY_SECONDS * 1000),
        )

    def _open_looker(self) -> "_Looker":
        return _Looker(self.settings("starling-looks"))


def connected(make: Callable[..., T], **settings: Any) -> T:
    """A client of kafka-python. One that finds no broker raises, and leaves a thread behind: that is ended here."""
    nets: list[Any] = []

    def net(**config: Any) -> Any:
        nets.append(KafkaNetClient(**config))
        return nets[-1]

    try:
        return make(kafka_client=net, **settings)
    except BaseException:
        for one in nets:
            one.close()
        raise


def _unavailable(error: Exception) -> UnavailableError:
    # Some errors' texts hold the whole request.
    text = f"Kafka can't: {type(error).__name__}: {str(error)[:_TEXT_CHARS_MAX]}"
    return UnavailableError(text, reason="KAFKA_UNAVAILABLE")


class _Clients:
    """A client of kafka-python on a thread of its own: made when it is needed, dropped when it fails."""

    def __init__(self, make: Callable[[], Any], drop: Callable[[Any], None], name: str) -> None:
        self._make = make
        self._drop = drop
        self._thread = ThreadPoolExecutor(1, f"kafka-{name}")
        self._client: Any = None
        self._look_again = 0.0

    async def use(self, work: Callable[[Any], T]) -> T:
        """Do it on the thread. Raises UnavailableError; for a moment after a failure at once."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._use, work)

    def _use(self, work: Callable[[Any], T]) -> T:
        if time.monotonic() < self._look_again:
            raise UnavailableError("Kafka doesn't answer.", reason="KAFKA_UNAVAILABLE")
        try:
            self._client = self._client or self._make()
            return work(self._client)
        except _ERRORS as error:
            self._close()
            self._look_again = time.monotonic() + _AWAY_SECONDS
            raise _unavailable(error) from error

    def _close(self) -> None:
        if self._client:
            client, self._client = self._client, None
            with suppress(*_ERRORS):
                self._drop(client)

    async def close(self) -> None:
        """The client, and the thread."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)


def _publish(producer: Any, topic: str, records: Sequence[tuple[bytes, bytes]]) -> None:
    """Nothing is known of the others when one fails: all are sent again by the caller."""
    end = time.monotonic() + _DELIVERY_SECONDS
    for sent in [producer.send(topic, key=key, value=value) for key, value in records]:
        sent.get(timeout=max(0.0, end - time.monotonic()))


def _drop_producer(producer: Any) -> None:
    """Without sending what it still has, which close() would wait for."""
    producer._sender.force_close()
    producer.close(timeout=_CLOSE_SECONDS)


class _Looker:
    """Looks at a cluster and manages it; blocks. All of it raises KafkaError."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self.admin = connected(kafka.KafkaAdminClient, **settings)
        self._reader: Any = None
        self._times: dict[Partition, tuple[int, int]] = {}

    def close(self) -> None:
        """Both clients."""
        self.admin.close()
        if self._reader:
            self._reader.close(timeout_ms=int(_CLOSE_SECONDS * 1000))

    def life(self, topics: Sequence[str]) -> str:
        """Names the cluster and these topics; one that was made anew has another name."""
        ids = [str(topic["topic_id"]) for topic in self.admin.describe_topics([*topics])]
        return " ".join([self.admin.describe_cluster()["cluster_id"], *sorted(ids)])

    def make(self, topics: Mapping[str, Topic], replication: int) -> None:
        """Make those that aren't there; others may do the same at the same time."""
        absent = [name for name in topics if name not in self._shapes(topics)]
        if absent:
            made = {name: _creation(topics[name], replication) for name in absent}
            with suppress(TopicAlreadyExistsError):
                self.admin.create_topics(made, raise_errors=True)
            self.admin.wait_for_topics(absent, timeout_ms=int(_REQUEST_SECONDS * 1000))
        for name, partitions in self._shapes(topics).items():
            if partitions != topics[name].partitions:
                raise ConfigurationError(
                    f"STARLING_EVENTLOG_URL: {name} has {partitions} partitions there, not {topics[name].partitions}"
                )

    def _shapes(self, topics: Collection[str]) -> dict[str, int]:
        told = self.admin.describe_topics([*topics])
        return {topic["name"]: len(topic["partitions"]) for topic in told if not topic["error_code"]}

    def bounds(self, partitions: Sequence[Partition]) -> tuple[dict[Partition, int], dict[Partition, int]]:
        """The oldest offset kept, and the one after the newest."""
        return self._offsets(partitions, OffsetSpec.EARLIEST), self._offsets(partitions, OffsetSpec.LATEST)

    def _offsets(self, partitions: Sequence[Partition], spec: Any) -> dict[Partition, int]:
        """-1: none, where it is a time."""
        told = self.admin.list_partition_offsets(dict.fromkeys(partitions, spec))
        return {partition: at.offset for partition, at in told.items()}

    def committed(self, group: str, partitions: Sequence[Partition], first: Mapping[Partition, int]) -> dict[Any, int]:
        """Where the group is, from the oldest kept on: there where it never was."""
        told = self.admin.list_group_offsets({group: [*partitions]})[group]
        return {at: max(first[at], told[at].offset if at in told else -1) for at in partitions}

    def lag(self, groups: Mapping[str, Sequence[Partition]]) -> dict[Partition, tuple[int, int]]:
        """Of each group's partitions: records from the first that isn't committed on, and its time (ms; 0: none)."""
        partitions = [partition for ours in groups.values() for partition in ours]
        first, end = self.bounds(partitions)
        at: dict[Partition, int] = {}
        for group, ours in groups.items():
            at |= self.committed(group, ours, first)
        behind = {partition: at[partition] for partition in partitions if at[partition] < end[partition]}
        times = self._times_at(behind, partitions)
        return {
            partition: (max(0, end[partition] - at[partition]), times.get(partition, 0)) for partition in partitions
        }

    def _times_at(self, offsets: Mapping[Partition, int], partitions: Sequence[Partition]) -> dict[Partition, int]:
        """When the records at these offsets were appended (ms). Those that were asked for the last time are known.
        `partitions`: all that the question is about."""
        for at in partitions:
            if at in self._times and offsets.get(at) != self._times[at][0]:
                del self._times[at]
        wanted = {at: offset for at, offset in offsets.items() if at not in self._times}
        if wanted and not self._reader:
            self._reader = connected(
                kafka.KafkaConsumer, **self._settings, metrics_enabled=False, enable_auto_commit=False
            )
        end = time.monotonic() + _REQUEST_SECONDS
        while wanted and time.monotonic() < end:
            # Only those that are still wanted: one that has much would keep the others waiting.
            self._reader.assign([*wanted])
            for at, offset in wanted.items():
                self._reader.seek(at, offset)
            for at, records in self._reader.poll(timeout_ms=500, max_records=_TURN_RECORDS_MAX).items():
                self._times[at] = (wanted.pop(at), records[0].timestamp)
        if wanted:
            raise kafka.errors.KafkaTimeoutError(f"the oldest records of {len(wanted)} partitions can't be read")
        return {at: self._times[at][1] for at in offsets}

    def rewind(self, group: str, partitions: Sequence[Partition], since_ms: int) -> None:
        """Put all members out, and set the group back while it is empty; again when one came back too soon."""
        for _ in range(_REWIND_TRIES_MAX):
            self.remove(group, self.members(group))
            first, end = self.bounds(partitions)
            since = self._offsets(partitions, since_ms)
            now = self.committed(group, partitions, first)
            later = {at: end[at] if offset < 0 else offset for at, offset in since.items()}
            back = _at({at: max(first[at], min(now[at], later[at])) for at in partitions})
            if all(error is NoError for error in self.admin.alter_group_offsets(group, back).values()):
                return
        raise kafka.errors.KafkaTimeoutError(f"the group {group} is never empty")

    def remove(self, group: str, member_ids: Collection[str]) -> None:
        """Put these out of the group, as far as they are in it."""
        if member_ids:
            self.admin.remove_group_members(group, [MemberToRemove(member_id) for member_id in member_ids])

    def members(self, group: str) -> dict[str, str]:
        """The group's members: id to the name that each gave itself."""
        try:
            told = self.admin.describe_groups([group])
        except kafka.errors.GroupIdNotFoundError:
            return {}
        return {member["member_id"]: member["client_id"] for member in told[group]["members"]}


def _creation(topic: Topic, replication: int) -> dict[str, Any]:
    return {
        "num_partitions": topic.partitions,
        "replication_factor": replication,
        "configs": {
            "cleanup.policy": "delete",
            "retention.ms": str(int(topic.keep_seconds * 1000)),
            # One copy may be away; with two, a record that counts as taken survives the loss of either.
            "min.insync.replicas": str(max(1, replication - 1)),
            # Ages, and times to replay from, are by the log's clock.
            "message.timestamp.type": "LogAppendTime",
        },
    }


class KafkaProducer:
    """Appends. `topics`: those that may be published to."""

    def __init__(self, cluster: Kafka, topics: Sequence[Topic]) -> None:
        self._cluster = cluster
        self._topics = {topic.name: topic for topic in topics}

    async def publish(self, topic: str, records: Sequence[tuple[bytes, bytes]]) -> None:
        """Append; durable in as many copies as must be in sync. Raises UnavailableError or ValueError."""
        shape = self._topics[topic]
        check_bounds(records)
        if records:
            await self._cluster.make([shape])
            await self._cluster.publish(topic, records)

    async def incarnation(self) -> str:
        """Names the cluster, its topics, and the lists' life. A topic that was made anew is noticed within seconds."""
        return await self._cluster.incarnation([*self._topics.values()])


class KafkaLagReader:
    """Sees a group's lag, without being in it."""

    def __init__(self, cluster: Kafka, topics: Sequence[Topic], group: str) -> None:
        self._cluster = cluster
        self._topics = topics
        self._group = group
        self._clock = SystemClock()

    async def lag(self) -> list[Lag]:
        """From the first record that isn't committed on; a group that never committed is at the oldest one."""
        await self._cluster.make(self._topics)
        groups = {
            self._cluster.group(self._group, topic.name): self._cluster.partitions([topic]) for topic in self._topics
        }
        told = await self._cluster.look(lambda looker: looker.lag(groups))
        names = [topic.name for topic in self._topics for _ in range(topic.partitions)]
        now = self._clock.now_ms()
        return [
            Lag(name, at.partition, messages, max(0, now - ms) / 1000 if messages else 0.0)
            for name, (at, (messages, ms)) in zip(names, told.items(), strict=True)
        ]


@dataclass(slots=True)
class _Turn:
    """What one turn of a consumer brought."""

    held: dict[Partition, int | None] = field(default_factory=dict)
    """The partitions that it holds now, and the offset of the next record to be fetched, if it is known."""
    records: dict[Partition, list[Any]] = field(default_factory=dict)
    committed: dict[Partition, int] = field(default_factory=dict)
    is_member: bool = False


class KafkaConsumer:
    """One member of a topic's group. See the port, and the module.

    `claim_seconds`: after so long unrenewed a record is handed out again, by this member. `window`: so many records of
    a partition are fetched and not yet committed, at most.
    """

    def __init__(
        self,
        cluster: Kafka,
        *,
        topic: Topic,
        group: str,
        name: str,
        dead_letters: Topic,
        claim_seconds: float = CLAIM_SECONDS,
        poll_interval_seconds: float = POLL_INTERVAL_SECONDS,
        window: int = WINDOW,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self._cluster = cluster
        self._topic = topic
        self._group = cluster.group(group, topic.name)
        self._dead_letters = dead_letters
        self._claim_seconds = claim_seconds
        self._poll_interval_seconds = poll_interval_seconds
        # A partition is full when it mightn't have room for what the next turn brings.
        self._turn_records = min(_TURN_RECORDS_MAX, max(1, window // 4))
        self._full_at = window - self._turn_records
        self._clock = clock or SystemClock()
        self._lag_reader = KafkaLagReader(cluster, [topic], group)
        self._thread = ThreadPoolExecutor(1, f"kafka-{topic.name}")
        self._client: Any = None
        self._assignor = CooperativeStickyAssignor()
        # The rest belongs to the event loop; the listener, on the client's thread, reads it and adds to `gone`.
        self._progress: dict[Partition, Progress] = {}
        self._gone: deque[Partition] = deque()
        self._leaving: set[Partition] = set()
        self._tenures = count_up(1)
        self._first = 0
        self._driving: asyncio.Task[None] | None = None
        self._turning = asyncio.Lock()
        self._turned = asyncio.Event()
        self._is_member = False
        self._commit_due = 0.0
        self._closing = False

    # ---- What the port promises --------------------------------------------------------------------------

    async def poll(self, count: int, wait_seconds: float) -> list[Record]:
        """Records to work on; see the port."""
        if not 1 <= count <= POLL_RECORDS_MAX:
            raise ValueError(f"count is 1 to {POLL_RECORDS_MAX}, not {count}")
        await self.join()
        if wait_seconds <= 0 and sum(progress.waiting for progress in self._open()) < count:
            await self._fetch_what_is_there()
        end = time.monotonic() + wait_seconds
        while not (records := self._take(count)) and (left := end - time.monotonic()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._turned.wait(), left)
        return records

    async def renew(self, records: Sequence[Record]) -> None:
        """They aren't handed out again for the claim time. The partitions stay this member's anyway, while it polls."""
        now = self._clock.monotonic()
        for record in records:
            if progress := self._progress_of(record):
                progress.renew(record, now)

    async def ack(self, records: Sequence[Record]) -> None:
        """Done with these; committed within a moment, as far as there is no gap."""
        for record in records:
            if progress := self._progress_of(record):
                progress.finish(record)

    async def dead_letter(self, record: Record, cause: str) -> None:
        """Move it; see the port."""
        progress = self._progress_of(record)
        if progress and progress.holds(record):
            await self._cluster.make([self._dead_letters])
            await self._cluster.publish(self._dead_letters.name, [(record.key, letter_of(record, cause))])
            progress.finish(record)

    async def replay(self, since_ms: int) -> None:
        """Set the group back in every partition, and put all members out of it: they begin anew."""
        if since_ms < 0:
            raise ValueError(f"since_ms is a time, not {since_ms}")
        await self._cluster.make([self._topic])
        await self._flush()
        partitions = self._cluster.partitions([self._topic])
        async with self._turning:
            try:
                await self._on_thread(self._leave)
                self._progress.clear()
                await self._cluster.look(lambda looker: looker.rewind(self._group, partitions, since_ms))
            except _ERRORS as error:
                raise _unavailable(error) from error
            finally:
                await self._on_thread(self._join)

    async def lag(self) -> list[Lag]:
        """See KafkaLagReader. What is done here is committed first."""
        await self._flush()
        return await self._lag_reader.lag()

    async def dead_letters(self) -> int:
        """Number of records in the dead-letter topic."""
        await self._cluster.make([self._dead_letters])
        partitions = self._cluster.partitions([self._dead_letters])
        first, end = await self._cluster.look(lambda looker: looker.bounds(partitions))
        return sum(end[at] - first[at] for at in partitions)

    async def close(self) -> None:
        """Commit what is done, and leave: others begin at once with what isn't."""
        if not self._closing:
            await self._flush()
            self._closing = True
            member_id = ""
            if self._driving and (await asyncio.wait([self._driving], timeout=_STUCK_SECONDS))[1]:
                # Its turn waits for a broker: closed from another thread, the client gives up.
                member_id = await asyncio.to_thread(self._close_client)
            member_id = await self._on_thread(self._close_client) or member_id
            self._thread.shutdown(wait=False)
            if member_id:
                # While it joins, its own word that it leaves waits behind that, and is never heard.
                with suppress(UnavailableError):
                    await self._cluster.look(lambda looker: looker.remove(self._group, [member_id]))

    def held(self) -> set[Partition]:
        """The partitions that it holds now."""
        return set(self._progress)

    # ---- On the event loop -------------------------------------------------------------------------------

    async def join(self) -> None:
        """Become a member, as the first poll does; it may take a moment after this returned."""
        if self._closing:
            raise UnavailableError("this consumer is closed", reason="CLOSED")
        if not self._driving:
            await self._cluster.make([self._topic])
            self._driving = self._driving or asyncio.create_task(self._drive())

    async def _drive(self) -> None:
        """One turn after the other. A client that fails is replaced, and holds nothing any more."""
        while not self._closing:
            try:
                async with self._turning:
                    self._settle(await self._on_thread(self._turn))
            except Exception as error:  # Whatever is wrong with a client, another one may do.
                if self._closing:
                    return
                log.warning("%s: the consumer begins anew: %r", self._topic.name, error, exc_info=error)
                await self._on_thread(self._close_client)
                self._settle(_Turn())
                await asyncio.sleep(_AWAY_SECONDS)
            finally:
                turned, self._turned = self._turned, asyncio.Event()
                turned.set()

    def _settle(self, turn: _Turn) -> None:
        """Take what a turn brought."""
        self._is_member = turn.is_member
        while self._gone:
            self._progress.pop(self._gone.popleft(), None)
        self._leaving.clear()
        for at in self._progress.keys() - turn.held.keys():
            del self._progress[at]
        for at, offset in turn.committed.items():
            if at in self._progress:
                self._progress[at].committed = offset
        for at, position in turn.held.items():
            records = turn.records.get(at, ())
            begin = records[0].offset if records else position
            progress = self._progress.get(at)
            # Where it goes back, the log was made anew, or lost its end.
            if begin is not None and (progress is None or begin < progress.next):
                progress = self._progress[at] = Progress(next(self._tenures), begin, self._full_at)
            if progress:
                progress.add((record.offset, self._record(record)) for record in records)

    def _record(self, fetched: Any) -> Record:
        position = str(fetched.offset)
        return Record(self._topic.name, fetched.partition, position, fetched.key or b"", fetched.value or b"")

    def _take(self, count: int) -> list[Record]:
        now = self._clock.monotonic()
        self._first += 1
        records: list[Record] = []
        for progress in self._open():
            records += progress.take_idle(count - len(records), self._claim_seconds, now)
        return records + share_out(self._open(), count - len(records), self._first, now)

    def _open(self) -> list[Progress]:
        """Of the partitions of which records may be handed out."""
        return [progress for at, progress in self._progress.items() if at not in self._leaving]

    def _progress_of(self, record: Record) -> Progress | None:
        return self._progress.get(Partition(self._cluster.name(record.topic), record.partition))

    async def _fetch_what_is_there(self) -> None:
        """Until all is fetched that was there when this began, as far as there is room. Raises UnavailableError."""
        end: dict[Partition, int] | None = None
        partitions = self._cluster.partitions([self._topic])
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                while True:
                    await self._turned.wait()
                    if not self._is_member:
                        continue
                    if end is None:
                        _, end = await self._cluster.look(lambda looker: looker.bounds(partitions))
                    elif all(held.is_full or held.next >= end[at] for at, held in self._progress.items()):
                        return
        raise UnavailableError("Kafka doesn't give what it has", reason="KAFKA_UNAVAILABLE")

    async def _flush(self) -> None:
        """Have committed what is done now, as far as there is no gap; within a bound."""
        wanted = self._to_commit()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                while self._driving and not self._closing:
                    wanted = {at: wanted[at] for at in self._to_commit().keys() & wanted.keys()}
                    if all(self._progress[at].committed >= offset for at, offset in wanted.items()):
                        return
                    self._commit_due = 0.0
                    await self._turned.wait()

    def _to_commit(self) -> dict[Partition, int]:
        return {at: held.done_below for at, held in self._progress.items() if held.done_below > held.committed}

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # ---- On the thread, but for what is said otherwise --------------------------------------------------

    def _turn(self) -> _Turn:
        """Commit, let in or keep out, poll: each within a bound."""
        turn = _Turn()
        if not self._client:
            self._client = self._open_client()
            # The one that shares out partitions must know of them before.
            self._client.partitions_for_topic(self._cluster.name(self._topic.name))
            self._join()
        held = self._client.assignment()
        if held and time.monotonic() >= self._commit_due:
            turn.committed = self._commit({at: offset for at, offset in self._to_commit().items() if at in held})
        self._let_in_or_keep_out(held)
        turn.records = self._client.poll(timeout_ms=int(_TURN_SECONDS * 1000), max_records=self._turn_records)
        turn.held = {at: self._position(at) for at in self._client.assignment()}
        turn.is_member = self._client.group_metadata().state is MemberState.STABLE
        if not turn.is_member:
            # A join that one poll began for new metadata, and didn't see to its end, is forgotten by the next one
            # (kafka-python 3.0.12: its need_rejoin() says no meanwhile): the member would sit there for ever.
            self._client._coordinator.request_rejoin()
        return turn

    def _let_in_or_keep_out(self, held: Collection[Partition]) -> None:
        """Pause the partitions that are full, and resume those that are no more."""
        full = {at for at, progress in self._progress.items() if progress.is_full and at in held}
        paused = self._client.paused()
        self._client.pause(*(full - paused))
        self._client.resume(*(paused - full))
        # What was fetched of a paused partition is set aside, and (kafka-python 3.0.12) comes back only where this is
        # None, not where it is something that has been used up: then the partition would give nothing any more.
        if not self._client._fetcher._next_partition_records:
            self._client._fetcher._next_partition_records = None

    def _position(self, at: Partition) -> int | None:
        progress = self._progress.get(at)
        # Asked for once: then its records tell.
        return progress.next if progress and at not in self._gone else self._client.position(at, timeout_ms=1_000)

    def _commit(self, offsets: dict[Partition, int]) -> dict[Partition, int]:
        """What could be committed. A member that is being moved can't, and one that was put out learns it by this."""
        self._commit_due = time.monotonic() + _COMMIT_EVERY_SECONDS
        if not offsets or self._client.group_metadata().state is not MemberState.STABLE:
            return {}
        try:
            self._client.commit(_at(offsets), timeout_ms=int(_COMMIT_SECONDS * 1000))
        except KafkaError as error:
            log.info("%s: not committed: %r", self._topic.name, error)
            return {}
        return offsets

    def _open_client(self) -> Any:
        return connected(
            kafka.KafkaConsumer,
            **self._cluster.settings(self.name),
            metrics_enabled=False,
            group_id=self._group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            allow_auto_create_topics=False,
            partition_assignment_strategy=[self._assignor],
            session_timeout_ms=int(SESSION_SECONDS * 1000),
            heartbeat_interval_ms=1_000,
            max_poll_interval_ms=int(self._poll_interval_seconds * 1000),
            fetch_max_bytes=4 << 20,
            max_partition_fetch_bytes=1 << 18,
        )

    def _join(self) -> None:
        if self._client:
            self._client.subscribe([self._cluster.name(self._topic.name)], listener=_Listener(self))

    def _leave(self) -> None:
        if self._client:
            self._client.unsubscribe()
            self._assignor.member_assignment = None

    def _close_client(self) -> str:
        """Returns the member's id."""
        client = self._client
        self._assignor.member_assignment = None
        if not client:
            return ""
        member_id = ""
        with suppress(Exception):  # It may be broken in any way: that is why it is closed.
            member_id = str(client.group_metadata().member_id)
            client.close(autocommit=False, timeout_ms=int(_CLOSE_SECONDS * 1000))
        self._client = None
        return member_id

    async def hand_over(self, partitions: Collection[Partition]) -> None:
        """On the client's own loop, which is none of asyncio: let what is in hand end, within a bound, and commit."""
        client = self._client
        self._leaving.update(partitions)
        held = {at: self._progress[at] for at in partitions if at in self._progress}
        end = time.monotonic() + HAND_OVER_SECONDS
        while not self._closing and time.monotonic() < end and any(progress.in_hand for progress in held.values()):
            await client._net.sleep(_TURN_SECONDS)
        offsets = {at: progress.done_below for at, progress in held.items() if progress.done_below > progress.committed}
        if offsets:
            try:
                await client.commit_async(_at(offsets))
            except KafkaError as error:
                log.info("%s: not committed before handing over: %r", self._topic.name, error)
        self._gone.extend(partitions)

    def lose(self, partitions: Collection[Partition]) -> None:
        """On the client's own loop: they are another's, and nothing is said of them any more."""
        log.warning("%s: lost %d partitions", self._topic.name, len(partitions))
        # Or it would claim at its next join to hold them, and nobody might get them.
        self._assignor.member_assignment = None
        self._gone.extend(partitions)


class KafkaEventLog:
    """See `mesh.eventlog.choice`."""

    def __init__(self, cluster: Kafka) -> None:
        self._cluster = cluster

    def producer(self, topics: Sequence[Topic]) -> KafkaProducer:
        """See the protocol."""
        return KafkaProducer(self._cluster, topics)

    def lag_reader(self, topics: Sequence[Topic], group: str) -> KafkaLagReader:
        """See the protocol."""
        return KafkaLagReader(self._cluster, topics, group)

    def consumer(self, topic: Topic, group: str, name: str, dead_letters: Topic) -> KafkaConsumer:
        """See the protocol."""
        return KafkaConsumer(self._cluster, topic=topic, group=group, name=name, dead_letters=dead_letters)

    async def close(self) -> None:
        """See the protocol."""
        await self._cluster.close()


class _Listener(AsyncConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, consumer: KafkaConsumer) -> None:
        self._consumer = consumer

    async def on_partitions_revoked(self, revoked: Collection[Partition]) -> None:
        await self._consumer.hand_over(revoked)

    async def on_partitions_assigned(self, assigned: Collection[Partition]) -> None:
        """They begin when the turn ends."""

    async def on_partitions_lost(self, lost: Collection[Partition]) -> None:
        self._consumer.lose(lost)


def _at(offsets: Mapping[Partition, int]) -> dict[Partition, Any]:
    return {at: OffsetAndMetadata(offset, "", _NO_EPOCH) for at, offset in offsets.items()}
