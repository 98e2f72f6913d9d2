"""The worker: takes events from the log, acts as `core.plan` says, and only then acknowledges.

Every effect may be repeated, so that is all there is to a crash: the event comes again. What is unavailable is
tried without end, in place; only what can never succeed goes to the dead letters.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from fanout_svc import core
from fanout_svc.core import Action, InvalidEventError
from fanout_svc.deliveries import Deliveries
from fanout_svc.peers import Peers
from mesh import failpoints, metrics, tracing
from mesh.caches.bodies import Bodies
from mesh.clock import Clock
from mesh.errors import NotFoundError, UnavailableError
from mesh.eventlog.port import PUBLISH_RECORDS_MAX, Consumer, LogFullError, Producer, Record
from mesh.eventlog.topics import FANOUT_TASKS, FANOUT_TASKS_SLOW
from mesh.ids import time_ms_of
from mesh.timelines import port as lists
from mesh.timelines.port import Timelines
from starling.event.v1 import event_pb2

log = logging.getLogger(__name__)

IN_HAND_MAX = 32
FEW_FOLLOWERS = 1_024
"""With fewer, an author's followers come with the mode: one call for most authors' tweets."""
_POLL_SECONDS = 0.5
_RENEW_SECONDS = 3.0
_BACKOFF_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
_DELAYS_KEPT = 10_000


@dataclass(slots=True)
class Figures:
    """What one worker did since it started. `delays`: (seconds, deliveries) of its last pushes."""

    events: int = 0
    deliveries: int = 0
    deliveries_to_lists: int = 0
    drained_buckets: int = 0
    retries: int = 0
    delay_max_seconds: float = 0.0
    delay_buckets: metrics.Buckets = field(default_factory=lambda: metrics.Buckets(metrics.DELAY_SECONDS))
    delays: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_DELAYS_KEPT))

    def delivered(self, followers: int, lists_hit: int, delay_seconds: float) -> None:
        """One push to some followers came through."""
        self.deliveries += followers
        self.deliveries_to_lists += lists_hit
        self.delay_max_seconds = max(self.delay_max_seconds, delay_seconds)
        self.delays.append((delay_seconds, followers))
        self.delay_buckets.observe(delay_seconds, followers)

    def measured(self) -> None:
        """From now on these are what the process's metrics tell."""
        metrics.fanout_events.of(lambda: self.events)
        metrics.deliveries.of(lambda: self.deliveries)
        metrics.deliveries_to_lists.of(lambda: self.deliveries_to_lists)
        metrics.drained_buckets.of(lambda: self.drained_buckets)
        metrics.fanout_retries.of(lambda: self.retries)
        metrics.delivery_delay_seconds.buckets = self.delay_buckets

    def percentiles(self, *shares: float) -> list[float]:
        """Delays in seconds below which these shares (ascending, 0 to 1) of the deliveries lie; 0 without any."""
        ordered = sorted(self.delays)
        total = sum(weight for _, weight in ordered)
        found: list[float] = []
        seen = 0
        for delay, weight in ordered:
            seen += weight
            while len(found) < len(shares) and seen >= shares[len(found)] * total:
                found.append(delay)
        return found or [0.0] * len(shares)


@dataclass(slots=True)
class Batch:
    """Records that are worked on together: the first one's event, and the tweets of all."""

    event: event_pb2.TweetEvent
    tweet_ids: list[int]
    records: list[Record]
    traceparent: str = ""


class Worker:
    """One member of the group. Memory is bounded: `in_hand_max` events, one chunk of followers each."""

    def __init__(
        self,
        *,
        consumer: Consumer,
        producer: Producer,
        timelines: Timelines,
        bodies: Bodies,
        peers: Peers,
        clock: Clock,
        figures: Figures,
        deliveries: Deliveries | None = None,
        in_hand_max: int = IN_HAND_MAX,
        few_followers: int = FEW_FOLLOWERS,
    ) -> None:
        self._consumer = consumer
        self._producer = producer
        self._timelines = timelines
        self._bodies = bodies
        self._peers = peers
        self._clock = clock
        self._figures = figures
        self._deliveries = deliveries or Deliveries()
        self._in_hand_max = in_hand_max
        self._few_followers = few_followers
        self._in_hand: dict[asyncio.Task[None], list[Record]] = {}

    async def batches(self, records: Sequence[Record]) -> list[Batch]:
        """Records that are worked on together; those that can never succeed are buried. Raises UnavailableError."""
        batches: dict[object, Batch] = {}
        for number, record in enumerate(records):
            try:
                event = core.read(record.value)
            except InvalidEventError as error:
                await self._bury(record, str(error))
                continue
            batch = batches.get(key := core.batch_key(event) or number)
            if batch is None or len(batch.tweet_ids) >= core.TWEETS_PER_TASK_MAX // 2:
                batches[key if batch is None else number] = Batch(
                    event, core.tweets_of(event), [record], event.traceparent
                )
            else:
                batch.tweet_ids += core.tweets_of(event)
                batch.records.append(record)
                batch.traceparent = batch.traceparent or event.traceparent
        return list(batches.values())

    async def process(self, batch: Batch) -> None:
        """Act, then acknowledge. Raises UnavailableError: it is to be tried again.

        The trace is that of the first event that has one: others of the batch share its work.
        """
        with tracing.Span(f"fanout {batch.event.WhichOneof('kind')}", batch.traceparent) as span:
            span.note("starling.tweets", len(batch.tweet_ids))
            await self._process(batch)

    async def _process(self, batch: Batch) -> None:
        try:
            await self._act(batch)
        except NotFoundError as error:
            for record in batch.records:
                await self._bury(record, f"unknown author: {error}")
            return
        if failpoints.ARMED:
            failpoints.hit("before-ack")
        await self._consumer.ack(batch.records)
        self._figures.events += len(batch.records)

    async def _act(self, batch: Batch) -> None:
        event, tweet_ids = batch.event, batch.tweet_ids
        author = await self._author(event) if core.needs_author(event) else None
        action = core.plan(event, author)
        if action in {Action.INLINE, Action.SPLIT, Action.OWN}:
            # What tweet_svc did inline, again, before anything else and before the event is acknowledged: an outage
            # during the post heals itself here.
            own = [lists.home(event.author_id), lists.author(event.author_id)]
            await self._timelines.push(own, tweet_ids)
            self._deliveries.delivered(tweet_ids, [event.author_id])
        match action:
            case Action.INLINE if author and author.followers is not None:
                if author.followers:
                    await self._push(author.followers, tweet_ids)
            case Action.INLINE:
                await self._deliver(event.author_id, None, tweet_ids)
            case Action.SPLIT if author:
                waits = author.slow or batch.records[0].topic == FANOUT_TASKS_SLOW.name
                await self._split(event.author_id, tweet_ids, author.bucket_count, waits=waits)
            case Action.BUCKET:
                await self._deliver(event.author_id, event.bucket.bucket, tweet_ids)
            case Action.DRAIN:
                await self._drain(event.author_id, event.drain.epoch, event.drain.bucket)
            case Action.REFRESH:
                # As tweet_svc did, again, for a cache that was restarted and lost its last moments.
                await self._bodies.put(await self._peers.bodies(tweet_ids))
            case Action.ERASE:
                await self._bodies.put_deleted(event.deleted.tweet_id, event.deleted.version)

    async def _author(self, event: event_pb2.TweetEvent) -> core.Author:
        below = 0 if event.HasField("bucket") else self._few_followers
        return core.Author.of(await self._peers.mode(event.author_id, below))

    async def _deliver(self, author_id: int, bucket: int | None, tweet_ids: Sequence[int]) -> None:
        async for chunk in self._peers.followers(author_id, bucket):
            await self._push(chunk, tweet_ids)

    async def _push(self, follower_ids: Sequence[int], tweet_ids: Sequence[int]) -> None:
        keys = [lists.home(follower_id) for follower_id in follower_ids]
        hit = await self._timelines.push(keys, tweet_ids)
        metrics.push_lists.observe(len(keys))
        self._deliveries.delivered(tweet_ids, follower_ids)
        if failpoints.ARMED:
            failpoints.hit("between-batches")
        now = self._clock.now_ms()
        for tweet_id in tweet_ids:
            self._figures.delivered(len(keys), hit, max(0, now - time_ms_of(tweet_id)) / 1_000)

    async def _split(self, author_id: int, tweet_ids: list[int], bucket_count: int, *, waits: bool) -> None:
        """The parent is acknowledged when its parts are in the log, which keeps them as it kept the parent."""
        tasks = core.bucket_tasks(author_id, tweet_ids, bucket_count, tracing.current.get())
        topic = FANOUT_TASKS_SLOW if waits else FANOUT_TASKS
        try:
            for start in range(0, len(tasks), PUBLISH_RECORDS_MAX):
                await self._producer.publish(topic.name, tasks[start : start + PUBLISH_RECORDS_MAX])
        except LogFullError as error:
            raise UnavailableError(str(error), reason="LOG_FULL") from error

    async def _drain(self, author_id: int, epoch: int, bucket: int) -> None:
        """Also when the author's epoch is over: a cache that failed may have lost what was merged before."""
        ids, down_to = await self._peers.newest(author_id, self._timelines.cap)
        async for chunk in self._peers.followers(author_id, bucket):
            await self._timelines.merge([lists.home(follower_id) for follower_id in chunk], ids, down_to)
            if failpoints.ARMED:
                failpoints.hit("in-drain")
        await self._peers.complete_drain(author_id, epoch, bucket)
        self._figures.drained_buckets += 1

    async def _bury(self, record: Record, cause: str) -> None:
        log.error("dead letter from %s/%d at %s: %s", record.topic, record.partition, record.position, cause)
        await self._consumer.dead_letter(record, cause)
        metrics.dead_letters.inc()

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`; then what is in hand is finished, or left to others when this is cancelled."""
        renewing = asyncio.create_task(self._renew())
        try:
            while not stopping.is_set():
                if not await self._take(stopping):
                    await asyncio.wait(self._in_hand, return_when=asyncio.FIRST_COMPLETED)
            if self._in_hand:
                await asyncio.wait(self._in_hand)
        finally:
            ending = [renewing, *self._in_hand]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    async def _take(self, stopping: asyncio.Event) -> bool:
        """Poll for as many as there is room for; False when there is none."""
        room = self._in_hand_max - sum(len(records) for records in self._in_hand.values())
        if room <= 0:
            return False
        try:
            batches = await self.batches(await self._consumer.poll(room, _POLL_SECONDS))
        except UnavailableError as error:
            log.warning("the event log is away: %s", error)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), _POLL_SECONDS)
            return True
        for batch in batches:
            task = asyncio.create_task(self._until_done(batch, stopping))
            self._in_hand[task] = batch.records
            task.add_done_callback(self._done)
        return True

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._in_hand[task]
        if not task.cancelled() and (error := task.exception()):
            # A fault of ours: the records stay unacknowledged and come again.
            log.error("a record failed", exc_info=error)

    async def _until_done(self, batch: Batch, stopping: asyncio.Event) -> None:
        attempt = 0
        while True:
            try:
                return await self.process(batch)
            except UnavailableError as error:
                self._figures.retries += 1
                log.warning("again: %s", error)
            if stopping.is_set():
                return None  # unacknowledged: another member takes it
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), _BACKOFF_SECONDS[min(attempt, len(_BACKOFF_SECONDS) - 1)])
            attempt += 1

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            try:
                await self._consumer.renew([record for records in self._in_hand.values() for record in records])
            except UnavailableError as error:
                log.warning("records in hand aren't renewed, others may take them: %s", error)
