"""What every EventLog adapter must keep. The `eventlog` fixture gives an empty log of each; `claiming_log` and
`open_eventlog` one that keeps each record's state and is bounded by records, which not every adapter is (see there)."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesh.eventlog.port import (
    PART_BYTES_MAX,
    POLL_RECORDS_MAX,
    PUBLISH_RECORDS_MAX,
    Consumer,
    LagReader,
    LogFullError,
    Producer,
    Record,
    Topic,
)
from starling.event.v1.event_pb2 import DeadLetter
from tests.waiting import eventually

WAIT_SECONDS = 10.0


class Log(Protocol):
    """A log with one topic and its dead letters, and what the suite may do to it."""

    topic: Topic
    dead_letters: Topic
    # After this time unrenewed a record is claimed.
    claim_seconds: float

    def producer(self) -> Producer: ...

    def consumer(
        self,
        name: str,
        *,
        topic: Topic | None = None,
        group: str = ...,
        claim_seconds: float = ...,
        forget_seconds: float = ...,
    ) -> Consumer:
        """A member that joins the group by its first poll."""
        ...

    def lag_reader(self) -> LagReader:
        """Looks at the same group."""
        ...

    async def settled(self, *members: Consumer) -> None:
        """Until these share the partitions, where a partition belongs to a member."""
        ...

    async def publish_timed(self, name: bytes) -> int:
        """Publishes one record and gives its time (ms), by the log's clock."""
        ...

    async def pass_time(self, seconds: float) -> None:
        """Claim time passes by this only; the log's clock goes its own way."""
        ...

    async def now_ms(self) -> int:
        """The log's clock."""
        ...

    async def kept(self) -> int:
        """Records in the topic, acknowledged or not."""
        ...

    async def members(self) -> set[str]:
        """Names that the group knows."""
        ...

    async def drop_all_data(self) -> None: ...


OpenLog = Callable[[int, int], AbstractAsyncContextManager[Log]]


def named(values: Iterable[str]) -> list[tuple[bytes, bytes]]:
    """Records that are their own keys."""
    return [(value.encode(), value.encode()) for value in values]


def numbered(count: int) -> list[tuple[bytes, bytes]]:
    return named(str(i) for i in range(count))


def values_of(count: int) -> list[str]:
    """Those of numbered()."""
    return [str(i) for i in range(count)]


def values(records: Iterable[Record]) -> list[str]:
    return [record.value.decode() for record in records]


async def publish(log: Log, *names: str) -> None:
    await log.producer().publish(log.topic.name, named(names))


async def take(consumer: Consumer, count: int) -> list[Record]:
    """Exactly `count` records, in as many polls as it takes, and no more are there."""
    records: list[Record] = []
    async with asyncio.timeout(WAIT_SECONDS):
        while len(records) < count:
            records += await consumer.poll(POLL_RECORDS_MAX, WAIT_SECONDS)
    assert len(records) == count
    assert await consumer.poll(POLL_RECORDS_MAX, 0) == []
    return records


async def lag_of(consumer: Consumer) -> int:
    return sum(lag.messages for lag in await consumer.lag())


async def until_ms(log: Log, time_ms: int) -> None:
    """Until the log's clock is there."""

    async def is_there() -> bool:
        return await log.now_ms() >= time_ms

    await eventually(is_there, WAIT_SECONDS)


async def until_members(log: Log, *names: str) -> None:
    """Until these have joined."""

    async def are_there() -> bool:
        return await log.members() == set(names)

    await eventually(are_there, WAIT_SECONDS)


# ---- Publishing and polling --------------------------------------------------------------------------


async def test_an_empty_log_gives_nothing(eventlog: Log) -> None:
    assert await eventlog.consumer("a").poll(10, 0) == []


async def test_a_record_arrives_whole(eventlog: Log) -> None:
    key, value = bytes(range(256)), b"\x00\xff" * 100
    await eventlog.producer().publish("notes", [(key, value)])
    [record] = await take(eventlog.consumer("a"), 1)
    assert (record.topic, record.key, record.value, record.redelivered) == ("notes", key, value, False)
    assert 0 <= record.partition < eventlog.topic.partitions


async def test_empty_and_largest_keys_and_values_arrive(eventlog: Log) -> None:
    largest = b"x" * PART_BYTES_MAX
    await eventlog.producer().publish("notes", [(b"", b""), (largest, largest)])
    records = await take(eventlog.consumer("a"), 2)
    assert {(record.key, record.value) for record in records} == {(b"", b""), (largest, largest)}


@pytest.mark.parametrize("records", [[(b"x" * (PART_BYTES_MAX + 1), b"")], [(b"", b"x" * (PART_BYTES_MAX + 1))]])
async def test_too_large_a_record_is_refused(eventlog: Log, records: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(ValueError, match="bytes"):
        await eventlog.producer().publish("notes", records)


async def test_too_many_records_at_once_are_refused(eventlog: Log) -> None:
    with pytest.raises(ValueError, match="records"):
        await eventlog.producer().publish("notes", numbered(PUBLISH_RECORDS_MAX + 1))
    for count in (0, POLL_RECORDS_MAX + 1):
        with pytest.raises(ValueError, match="count"):
            await eventlog.consumer("a").poll(count, 0)


async def test_publishing_nothing_does_nothing(eventlog: Log) -> None:
    await eventlog.producer().publish("notes", [])
    assert await eventlog.kept() == 0


async def test_a_batch_arrives_once_each(eventlog: Log) -> None:
    await eventlog.producer().publish("notes", numbered(500))
    records = await take(eventlog.consumer("a"), 500)
    assert sorted(values(records), key=int) == [str(i) for i in range(500)]


async def test_equal_keys_share_a_partition_and_keep_their_order(eventlog: Log) -> None:
    for batch in range(5):
        await eventlog.producer().publish(
            "notes", [(b"key%d" % (i % 7), b"%d" % (batch * 100 + i)) for i in range(100)]
        )
    by_key: dict[bytes, list[Record]] = {}
    consumer = eventlog.consumer("a")
    while records := await consumer.poll(30, 0):
        for record in records:
            by_key.setdefault(record.key, []).append(record)
    assert sum(map(len, by_key.values())) == 500
    for records in by_key.values():
        assert len({record.partition for record in records}) == 1
        assert values(records) == sorted(values(records), key=int)


async def test_keys_spread_over_all_partitions(eventlog: Log) -> None:
    await eventlog.producer().publish("notes", numbered(200))
    partitions = {record.partition for record in await take(eventlog.consumer("a"), 200)}
    assert partitions == set(range(eventlog.topic.partitions))


async def test_a_poll_gives_at_most_what_was_asked(eventlog: Log) -> None:
    await eventlog.producer().publish("notes", numbered(100))
    consumer = eventlog.consumer("a")
    assert [len(await consumer.poll(count, 0)) for count in (1, 2, 3, 50, 100)] == [1, 2, 3, 50, 44]


async def test_a_full_partition_does_not_starve_the_others(eventlog: Log) -> None:
    await eventlog.producer().publish("notes", [(b"loud", b"%d" % i) for i in range(500)])
    await eventlog.producer().publish("notes", numbered(40))
    partitions = {record.partition for record in await eventlog.consumer("a").poll(20, 0)}
    assert partitions == set(range(eventlog.topic.partitions))


@pytest.mark.parametrize("count", [1, 10])
async def test_a_waiting_poll_gets_what_is_published_meanwhile(eventlog: Log, count: int) -> None:
    consumer = eventlog.consumer("a")
    polling = asyncio.create_task(consumer.poll(count, WAIT_SECONDS))
    await until_members(eventlog, "a")
    await publish(eventlog, "late")
    assert values(await polling) == ["late"]


async def test_two_groups_each_get_everything(eventlog: Log) -> None:
    await eventlog.producer().publish("notes", numbered(20))
    for group in ("workers", "auditors"):
        await take(eventlog.consumer("a", group=group), 20)


async def test_members_share_the_work_without_overlap(eventlog: Log) -> None:
    await eventlog.producer().publish("notes", numbered(200))
    members = [eventlog.consumer(name) for name in "abc"]
    await eventlog.settled(*members)
    rounds = [await asyncio.gather(*(member.poll(7, 0) for member in members)) for _ in range(25)]
    handed_out = [value for shares in rounds for share in shares for value in values(share)]
    assert len(handed_out) == len(set(handed_out)) == 200


async def test_the_log_names_its_life(eventlog: Log) -> None:
    first = await eventlog.producer().incarnation()
    assert first
    assert await eventlog.producer().incarnation() == first


# ---- Claims ------------------------------------------------------------------------------------------


async def test_a_dead_members_records_are_claimed_after_the_claim_time(claiming_log: Log) -> None:
    await publish(claiming_log, "x", "y")
    await take(claiming_log.consumer("dead"), 2)
    survivor = claiming_log.consumer("survivor")
    await claiming_log.pass_time(claiming_log.claim_seconds * 0.9)
    assert await survivor.poll(10, 0) == []
    await claiming_log.pass_time(claiming_log.claim_seconds * 0.4)
    records = await take(survivor, 2)
    assert set(values(records)) == {"x", "y"}
    assert all(record.redelivered for record in records)


async def test_more_than_a_poll_takes_is_claimed_by_and_by(claiming_log: Log) -> None:
    await claiming_log.producer().publish("notes", numbered(300))
    await take(claiming_log.consumer("dead"), 300)
    await claiming_log.pass_time(claiming_log.claim_seconds)
    survivor = claiming_log.consumer("survivor")
    claimed = [value for _ in range(30) for value in values(await survivor.poll(10, 0))]
    assert len(claimed) == len(set(claimed)) == 300


async def test_a_member_gets_its_own_unrenewed_records_again(eventlog: Log) -> None:
    await publish(eventlog, "x")
    consumer = eventlog.consumer("a")
    await take(consumer, 1)
    await eventlog.pass_time(eventlog.claim_seconds)
    [record] = await take(consumer, 1)
    assert record.redelivered


async def test_renewed_records_stay_with_their_member(claiming_log: Log) -> None:
    await publish(claiming_log, "renewed", "left")
    worker, other = claiming_log.consumer("worker"), claiming_log.consumer("other")
    records = await take(worker, 2)
    await claiming_log.pass_time(claiming_log.claim_seconds * 0.6)
    await worker.renew([record for record in records if record.value == b"renewed"])
    await claiming_log.pass_time(claiming_log.claim_seconds * 0.6)
    assert values(await take(other, 1)) == ["left"]


async def test_many_records_are_renewed_at_once(claiming_log: Log) -> None:
    await claiming_log.producer().publish("notes", [(b"same", b"%d" % i) for i in range(1_000)])
    worker, other = claiming_log.consumer("worker"), claiming_log.consumer("other")
    records = await take(worker, 1_000)
    await claiming_log.pass_time(claiming_log.claim_seconds * 0.6)
    await worker.renew(records)
    await claiming_log.pass_time(claiming_log.claim_seconds * 0.6)
    assert await other.poll(10, 0) == []


async def test_renewing_does_not_steal_back_what_another_has_claimed(claiming_log: Log) -> None:
    await publish(claiming_log, "x")
    slow, quick, third = (claiming_log.consumer(name) for name in ("slow", "quick", "third"))
    records = await take(slow, 1)
    await claiming_log.pass_time(claiming_log.claim_seconds)
    await take(quick, 1)
    await claiming_log.pass_time(claiming_log.claim_seconds)
    await slow.renew(records)
    assert values(await take(third, 1)) == ["x"]


async def test_renewing_what_is_acknowledged_brings_nothing_back(eventlog: Log) -> None:
    await publish(eventlog, "x")
    consumer = eventlog.consumer("a")
    records = await take(consumer, 1)
    await consumer.ack(records)
    await consumer.renew(records)
    assert await lag_of(consumer) == 0


async def test_without_a_claim_time_each_poll_gives_all_that_is_pending_once(eventlog: Log) -> None:
    await eventlog.producer().publish("notes", numbered(10))
    consumer = eventlog.consumer("a", claim_seconds=0)
    await consumer.poll(6, 0)
    for _ in range(3):
        records = await consumer.poll(100, 0)
        assert sorted(values(records)) == [str(i) for i in range(10)]


async def test_a_member_that_comes_back_under_its_name_goes_on_at_once(claiming_log: Log) -> None:
    await publish(claiming_log, "x", "y")
    await take(claiming_log.consumer("pod-0"), 2)
    assert set(values(await take(claiming_log.consumer("pod-0"), 2))) == {"x", "y"}


# ---- Acknowledging -----------------------------------------------------------------------------------


async def test_acknowledged_records_never_come_again(eventlog: Log) -> None:
    await publish(eventlog, "x", "y")
    consumer = eventlog.consumer("a")
    await consumer.ack(await take(consumer, 2))
    await eventlog.pass_time(eventlog.claim_seconds)
    assert await consumer.poll(10, 0) == []
    assert await lag_of(consumer) == 0


async def test_acknowledging_is_idempotent_and_anyones(claiming_log: Log) -> None:
    await publish(claiming_log, "x", "y")
    slow, quick = claiming_log.consumer("slow"), claiming_log.consumer("quick")
    records = await take(slow, 2)
    await claiming_log.pass_time(claiming_log.claim_seconds)
    await take(quick, 2)
    for member in (slow, slow, quick):
        await member.ack([*records, records[0]])
    await claiming_log.pass_time(claiming_log.claim_seconds)
    assert await quick.poll(10, 0) == []
    assert await lag_of(quick) == 0


async def test_acknowledging_and_renewing_nothing_is_fine(eventlog: Log) -> None:
    consumer = eventlog.consumer("a")
    await consumer.ack([])
    await consumer.renew([])


# ---- The bound ---------------------------------------------------------------------------------------


async def fill(log: Log) -> None:
    await log.producer().publish("notes", numbered(log.topic.records_max))


async def test_a_log_that_nobody_reads_fills_and_loses_nothing(open_eventlog: OpenLog) -> None:
    async with open_eventlog(1, 10) as log:
        await fill(log)
        with pytest.raises(LogFullError):
            await publish(log, "more")
        assert values(await take(log.consumer("a"), 10)) == values_of(10)


async def test_what_is_pending_is_never_trimmed(open_eventlog: OpenLog) -> None:
    async with open_eventlog(1, 10) as log:
        await fill(log)
        consumer = log.consumer("a")
        records = await take(consumer, 10)
        await consumer.ack(records[1:])
        with pytest.raises(LogFullError):
            await publish(log, "more")
        await log.pass_time(log.claim_seconds)
        assert values(await take(consumer, 1)) == ["0"]


async def test_what_is_undelivered_is_never_trimmed(open_eventlog: OpenLog) -> None:
    async with open_eventlog(1, 10) as log:
        await fill(log)
        consumer = log.consumer("a")
        await consumer.ack(await consumer.poll(4, 0))
        await publish(log, "a", "b", "c", "d")
        with pytest.raises(LogFullError):
            await publish(log, "e")
        assert values(await take(consumer, 10)) == [*values_of(10)[4:], "a", "b", "c", "d"]


async def test_what_another_group_has_not_acknowledged_is_never_trimmed(open_eventlog: OpenLog) -> None:
    async with open_eventlog(1, 10) as log:
        await fill(log)
        quick, slow = log.consumer("a"), log.consumer("a", group="slow")
        held = await slow.poll(3, 0)
        await quick.ack(await take(quick, 10))
        with pytest.raises(LogFullError):
            await publish(log, "more")
        await slow.ack(held)
        await publish(log, "a", "b", "c")
        assert values(await take(slow, 10)) == [*values_of(10)[3:], "a", "b", "c"]


async def test_what_a_replay_brings_back_is_not_trimmed_before_it_is_acknowledged(
    open_eventlog: OpenLog,
) -> None:
    async with open_eventlog(1, 10) as log:
        await fill(log)
        consumer = log.consumer("a")
        await consumer.ack(await take(consumer, 10))
        await consumer.replay(0)
        with pytest.raises(LogFullError):
            await publish(log, "more")
        assert values(await take(consumer, 10)) == values_of(10)


async def test_a_full_partition_does_not_keep_records_from_others(open_eventlog: OpenLog) -> None:
    async with open_eventlog(4, 10) as log:
        full = [(b"same", str(number).encode()) for number in range(10)]
        await log.producer().publish("notes", full)
        others = [(str(number).encode(), b"other") for number in range(8)]
        with pytest.raises(LogFullError) as refused:
            await log.producer().publish("notes", [*others, (b"same", b"more")])
        assert 8 in refused.value.refused
        assert await log.kept() == 10 + 9 - len(refused.value.refused)
        assert len(refused.value.refused) < 9


async def test_a_batch_that_does_not_fit_leaves_a_partition_as_it_was(open_eventlog: OpenLog) -> None:
    async with open_eventlog(1, 10) as log:
        await log.producer().publish("notes", numbered(8))
        with pytest.raises(LogFullError):
            await publish(log, "a", "b", "c")
        assert await log.kept() == 8
        await publish(log, "a", "b")


async def test_acknowledged_records_make_room_and_are_kept_until_it_is_needed(open_eventlog: OpenLog) -> None:
    async with open_eventlog(1, 10) as log:
        await fill(log)
        consumer = log.consumer("a")
        await consumer.ack(await take(consumer, 10))
        assert await log.kept() == 10
        await publish(log, "a", "b", "c")
        assert await log.kept() == 10
        await consumer.replay(0)
        assert values(await take(consumer, 10)) == [*values_of(10)[3:], "a", "b", "c"]


async def test_a_log_in_steady_use_keeps_its_bound_and_its_lag(open_eventlog: OpenLog) -> None:
    async with open_eventlog(2, 5) as log:
        consumer = log.consumer("a")
        assert await consumer.poll(1, 0) == []
        for i in range(100):
            await publish(log, str(i))
            assert await lag_of(consumer) == 1
            [record] = await consumer.poll(10, 0)
            assert record.value == str(i).encode()
            await consumer.ack([record])
        assert await log.kept() == 10


# ---- Lag ---------------------------------------------------------------------------------------------


async def test_lag_has_one_entry_per_partition_in_order(eventlog: Log) -> None:
    lags = await eventlog.consumer("a").lag()
    assert [(lag.topic, lag.partition) for lag in lags] == [("notes", p) for p in range(4)]
    assert {(lag.messages, lag.seconds) for lag in lags} == {(0, 0.0)}


async def test_a_group_that_never_was_lags_by_everything(eventlog: Log) -> None:
    await eventlog.producer().publish("notes", numbered(25))
    assert await lag_of(eventlog.consumer("a")) == 25


async def test_lag_counts_what_is_undelivered_and_what_is_in_hand(eventlog: Log) -> None:
    await eventlog.producer().publish("notes", numbered(25))
    consumer = eventlog.consumer("a")
    records = await consumer.poll(10, 0)
    assert await lag_of(consumer) == 25
    await consumer.ack(records[:4])
    assert await lag_of(consumer) == 21


async def test_lag_after_a_replay_counts_each_record_once(eventlog: Log) -> None:
    await eventlog.producer().publish("notes", numbered(25))
    consumer = eventlog.consumer("a")
    records = await take(consumer, 25)
    await consumer.ack(records[:20])
    await consumer.replay(0)
    assert await lag_of(consumer) == 25
    await consumer.ack(records[20:])
    assert await lag_of(consumer) == 25
    await consumer.ack(await take(consumer, 25))
    assert await lag_of(consumer) == 0


async def test_who_only_looks_at_the_lag_sees_what_members_see_and_is_none(eventlog: Log) -> None:
    reader, consumer = eventlog.lag_reader(), eventlog.consumer("a")
    assert [(lag.partition, lag.messages, lag.seconds) for lag in await reader.lag()] == [(p, 0, 0.0) for p in range(4)]
    await eventlog.producer().publish("notes", numbered(25))
    assert sum(lag.messages for lag in await reader.lag()) == 25
    await consumer.ack((await take(consumer, 25))[:4])
    for told, seen in zip(await consumer.lag(), await reader.lag(), strict=True):
        assert (told.topic, told.partition, told.messages) == (seen.topic, seen.partition, seen.messages)
        assert told.seconds <= seen.seconds < told.seconds + WAIT_SECONDS
    assert await eventlog.members() == {"a"}


async def test_lag_in_seconds_is_the_age_of_the_oldest_unacknowledged(eventlog: Log) -> None:
    published_ms = await eventlog.now_ms()
    await publish(eventlog, "old")
    consumer = eventlog.consumer("a")
    await until_ms(eventlog, await eventlog.now_ms() + 21)
    await publish(eventlog, "new")
    undelivered = max(lag.seconds for lag in await consumer.lag())
    records = await take(consumer, 2)
    pending = max(lag.seconds for lag in await consumer.lag())
    assert 0.02 <= undelivered <= pending <= (await eventlog.now_ms() - published_ms) / 1000
    await consumer.ack(records)
    assert {lag.seconds for lag in await consumer.lag()} == {0.0}


# ---- Replay ------------------------------------------------------------------------------------------


async def test_a_replay_from_zero_brings_everything_kept_again(eventlog: Log) -> None:
    await eventlog.producer().publish("notes", numbered(50))
    consumer = eventlog.consumer("a")
    await consumer.ack(await take(consumer, 50))
    await consumer.replay(0)
    assert sorted(values(await take(consumer, 50)), key=int) == values_of(50)


async def test_a_replay_from_a_time_brings_what_was_published_from_then_on(eventlog: Log) -> None:
    published_ms = await eventlog.publish_timed(b"early")
    await until_ms(eventlog, published_ms + 1)
    await publish(eventlog, "late")
    consumer = eventlog.consumer("a")
    await consumer.ack(await consumer.poll(POLL_RECORDS_MAX, 0))
    await consumer.replay(published_ms + 1)
    again = await take(consumer, 1)
    assert values(again) == ["late"]
    await consumer.ack(again)
    await consumer.replay(published_ms)
    assert set(values(await take(consumer, 2))) == {"early", "late"}


async def test_a_replay_never_skips_what_was_not_handed_out(eventlog: Log) -> None:
    await eventlog.producer().publish("notes", numbered(20))
    consumer = eventlog.consumer("a")
    in_hand = await consumer.poll(5, 0)
    await consumer.replay(await eventlog.now_ms() + 1_000_000)
    assert await lag_of(consumer) == 20
    handed_out: set[str] = set()
    while records := await consumer.poll(POLL_RECORDS_MAX, 0):
        handed_out.update(values(records))
    assert handed_out >= set(values_of(20)) - set(values(in_hand))


async def test_a_replay_of_a_group_that_never_was_skips_nothing(eventlog: Log) -> None:
    await publish(eventlog, "x")
    consumer = eventlog.consumer("a")
    await consumer.replay(await eventlog.now_ms() + 1_000_000)
    assert values(await take(consumer, 1)) == ["x"]


async def test_a_replay_before_the_epoch_is_refused(eventlog: Log) -> None:
    with pytest.raises(ValueError, match="since_ms"):
        await eventlog.consumer("a").replay(-1)


# ---- Dead letters ------------------------------------------------------------------------------------


async def test_a_dead_letter_holds_the_record_its_position_and_the_cause(eventlog: Log) -> None:
    await eventlog.producer().publish("notes", [(b"author", b"\xffbroken")])
    consumer = eventlog.consumer("a")
    [record] = await take(consumer, 1)
    await consumer.dead_letter(record, "can't be parsed")
    assert await consumer.dead_letters() == 1
    assert await lag_of(consumer) == 0
    [stored] = await take(eventlog.consumer("reader", topic=eventlog.dead_letters), 1)
    assert stored.key == b"author"
    assert DeadLetter.FromString(stored.value) == DeadLetter(
        topic="notes",
        partition=record.partition,
        position=record.position,
        cause="can't be parsed",
        value=b"\xffbroken",
    )


async def test_a_log_without_dead_letters_counts_none(eventlog: Log) -> None:
    assert await eventlog.consumer("a").dead_letters() == 0


async def test_a_dead_letter_is_not_stored_again_by_a_repeat_or_by_a_slow_member(claiming_log: Log) -> None:
    await publish(claiming_log, "x")
    slow, quick = claiming_log.consumer("slow"), claiming_log.consumer("quick")
    [record] = await take(slow, 1)
    await claiming_log.pass_time(claiming_log.claim_seconds)
    [claimed] = await take(quick, 1)
    for member, copy in ((quick, claimed), (quick, claimed), (slow, record)):
        await member.dead_letter(copy, "bad")
    assert await slow.dead_letters() == 1


async def test_dead_letters_are_bounded_by_dropping_their_oldest(open_eventlog: OpenLog) -> None:
    async with open_eventlog(1, 1_000) as log:
        await log.producer().publish("notes", numbered(500))
        consumer = log.consumer("a")
        for record in await take(consumer, 500):
            await consumer.dead_letter(record, "bad")
        kept = await consumer.dead_letters()
        assert log.dead_letters.records_max <= kept < 2 * log.dead_letters.records_max + 100
        letters = await take(log.consumer("reader", topic=log.dead_letters), kept)
        assert DeadLetter.FromString(letters[-1].value).value == b"499"


# ---- Loss, leaving -----------------------------------------------------------------------------------


async def test_when_all_data_is_lost_consumers_go_on_with_what_is_published_then(claiming_log: Log) -> None:
    consumer = claiming_log.consumer("a")
    await publish(claiming_log, "before", "too")
    records = await take(consumer, 2)
    await claiming_log.drop_all_data()
    await consumer.ack(records)
    await consumer.renew(records)
    await consumer.dead_letter(records[0], "stale")
    assert await lag_of(consumer) == 0
    await publish(claiming_log, "after")
    assert await lag_of(consumer) == 1
    await consumer.ack(await take(consumer, 1))
    assert await lag_of(consumer) == 0


async def test_when_all_data_is_lost_a_waiting_poll_goes_on(claiming_log: Log) -> None:
    polling = asyncio.create_task(claiming_log.consumer("a").poll(10, WAIT_SECONDS))
    await until_members(claiming_log, "a")
    await claiming_log.drop_all_data()
    await publish(claiming_log, "after")
    assert values(await polling) == ["after"]


async def test_a_leaving_member_hands_over_at_once(eventlog: Log) -> None:
    await publish(eventlog, "x", "y")
    leaving, staying = eventlog.consumer("leaving"), eventlog.consumer("staying")
    await take(leaving, 2)
    assert await staying.poll(10, 0) == []
    await leaving.close()
    records = await take(staying, 2)
    assert set(values(records)) == {"x", "y"}
    await staying.ack(records)
    assert await eventlog.members() == {"staying"}


async def test_what_a_leaving_member_hands_over_is_known_to_have_been_in_hand(claiming_log: Log) -> None:
    await publish(claiming_log, "x")
    leaving = claiming_log.consumer("leaving")
    await take(leaving, 1)
    await leaving.close()
    [record] = await take(claiming_log.consumer("staying"), 1)
    assert record.redelivered


async def test_a_leaving_member_hands_over_many_records_at_once(eventlog: Log) -> None:
    producer = eventlog.producer()
    for _ in range(3):
        await producer.publish("notes", [(b"same", b"%d" % i) for i in range(300)])
    leaving = eventlog.consumer("leaving")
    await take(leaving, 900)
    await leaving.close()
    await take(eventlog.consumer("staying"), 900)
    assert await eventlog.members() == {"staying"}


async def test_a_waiting_member_gets_what_a_leaving_one_hands_over(eventlog: Log) -> None:
    await publish(eventlog, "x")
    leaving, staying = eventlog.consumer("leaving"), eventlog.consumer("staying")
    await take(leaving, 1)
    polling = asyncio.create_task(staying.poll(10, WAIT_SECONDS))
    await until_members(eventlog, "leaving", "staying")
    await leaving.close()
    assert values(await polling) == ["x"]


async def test_leaving_a_group_that_never_was_is_fine(eventlog: Log) -> None:
    await eventlog.consumer("a").close()


async def test_dead_members_are_forgotten_unless_they_hold_records(claiming_log: Log) -> None:
    await publish(claiming_log, "x")
    await take(claiming_log.consumer("holder"), 1)
    await claiming_log.consumer("idler").poll(10, 0)
    survivor = claiming_log.consumer("survivor", forget_seconds=0)
    assert await survivor.poll(10, 0) == []
    assert await claiming_log.members() == {"holder", "survivor"}
    await claiming_log.pass_time(claiming_log.claim_seconds)
    assert values(await take(survivor, 1)) == ["x"]


# ---- Any sequence ------------------------------------------------------------------------------------

MEMBERS = 3
DRAIN_POLLS_MAX = 100


class Model:
    """What a log of one group must hold: records by name, in the order of publishing.

    A record is undelivered, or pending, or (after a replay) both, or acknowledged. Of the pending ones,
    those idle for the claim time and those given back may be handed out again, unless they are undelivered.
    """

    def __init__(self, records_max: int) -> None:
        self.records_max = records_max
        self.forget_all()

    def forget_all(self) -> None:
        self.kept: list[str] = []
        self.undelivered: set[str] = set()
        self.owners: dict[str, str] = {}
        self.idle: set[str] = set()
        self.released: set[str] = set()
        self.dead_letters = 0

    def unacknowledged(self) -> set[str]:
        return self.undelivered | self.owners.keys()

    def publish(self, names: Sequence[str]) -> bool:
        """Whether it fits."""
        excess = len(self.kept) + len(names) - self.records_max
        if excess > 0 and (excess > len(self.kept) or self.unacknowledged() & set(self.kept[:excess])):
            return False
        self.kept = [*self.kept[max(0, excess) :], *names]
        self.undelivered |= set(names)
        return True

    def check_and_hand_out(self, member: str, count: int, records: Sequence[Record]) -> None:
        names = values(records)
        assert len(names) == len(set(names)) <= count
        taken_over = {record.value.decode() for record in records if record.redelivered}
        new = set(names) - taken_over
        assert new <= self.undelivered
        assert taken_over <= (self.idle | self.released) - self.undelivered
        assert len(names) >= min(count, len(self.undelivered | self.released))
        for partition in {record.partition for record in records}:
            fresh = [r.value.decode() for r in records if r.partition == partition and not r.redelivered]
            assert fresh == sorted(fresh, key=self.kept.index)
        self.undelivered -= new
        self.idle -= set(names)
        self.released -= set(names)
        self.owners.update(dict.fromkeys(names, member))

    def ack(self, names: Iterable[str]) -> None:
        for name in names:
            self.owners.pop(name, None)
        self.idle &= self.owners.keys()
        self.released &= self.owners.keys()

    def renew(self, member: str, names: Iterable[str]) -> None:
        self.idle -= {name for name in names if self.owners.get(name) == member}

    def pass_claim_time(self) -> None:
        self.idle |= self.owners.keys()

    def leave(self, member: str) -> None:
        mine = {name for name, owner in self.owners.items() if owner == member}
        self.released |= mine
        self.idle -= mine
        self.owners.update(dict.fromkeys(mine, ""))


class Scenario:
    """Runs steps on the log and on the model, and compares after each."""

    def __init__(self, log: Log, model: Model) -> None:
        self.log = log
        self.model = model
        self.producer = log.producer()
        self.names = 0
        self.seats = [self._newcomer() for _ in range(MEMBERS)]
        # What each seat's member got and hasn't acknowledged, as far as it knows.
        self.hands: list[dict[str, Record]] = [{} for _ in range(MEMBERS)]

    def _newcomer(self) -> Consumer:
        self.names += 1
        return self.log.consumer(f"member{self.names}")

    async def publish(self, count: int) -> None:
        names = [f"record{self.names + i}" for i in range(count)]
        self.names += count
        fits = self.model.publish(names)
        try:
            await self.producer.publish(self.log.topic.name, named(names))
        except LogFullError:
            assert not fits
        else:
            assert fits

    async def poll(self, seat: int, count: int) -> None:
        records = await self.seats[seat].poll(count, 0)
        self.model.check_and_hand_out(self.seats[seat].name, count, records)
        self.hands[seat].update({record.value.decode(): record for record in records})

    async def ack(self, seat: int, which: slice) -> None:
        names = list(self.hands[seat])[which]
        await self.seats[seat].ack([self.hands[seat].pop(name) for name in names])
        self.model.ack(names)

    async def renew(self, seat: int, which: slice) -> None:
        names = list(self.hands[seat])[which]
        await self.seats[seat].renew([self.hands[seat][name] for name in names])
        self.model.renew(self.seats[seat].name, names)

    async def dead_letter(self, seat: int) -> None:
        for name in list(self.hands[seat])[:1]:
            await self.seats[seat].dead_letter(self.hands[seat].pop(name), "bad")
            self.model.dead_letters += name in self.model.owners
            self.model.ack([name])

    async def crash(self, seat: int) -> None:
        self.seats[seat], self.hands[seat] = self._newcomer(), {}

    async def leave(self, seat: int) -> None:
        await self.seats[seat].close()
        self.model.leave(self.seats[seat].name)
        await self.crash(seat)

    async def pass_claim_time(self) -> None:
        await self.log.pass_time(self.log.claim_seconds)
        self.model.pass_claim_time()

    async def replay(self, from_the_first: bool) -> None:
        since_ms = 0 if from_the_first else await self.log.now_ms() + 1_000_000
        await self.seats[0].replay(since_ms)
        if from_the_first:
            self.model.undelivered = set(self.model.kept)

    async def lose_everything(self) -> None:
        await self.log.drop_all_data()
        self.model.forget_all()
        self.hands = [{} for _ in range(MEMBERS)]

    async def check(self) -> None:
        lags = await self.seats[0].lag()
        assert sum(lag.messages for lag in lags) == len(self.model.unacknowledged())
        assert all(lag.messages > 0 or lag.seconds == 0 for lag in lags)
        assert await self.log.kept() == len(self.model.kept)
        assert await self.seats[0].dead_letters() == self.model.dead_letters

    async def drain(self) -> None:
        """After the claim time one member alone gets all that is left."""
        await self.pass_claim_time()
        missing = self.model.unacknowledged()
        last = self._newcomer()
        for _ in range(DRAIN_POLLS_MAX):
            records = await last.poll(7, 0)
            missing -= set(values(records))
            await last.ack(records)
            if not records:
                break
        assert not missing
        assert await lag_of(last) == 0


seats = st.integers(0, MEMBERS - 1)
# Which of what a member holds: from the first, second or third on, all or every other.
slices = st.builds(slice, st.integers(0, 2), st.none(), st.integers(1, 2))
publishing = st.tuples(st.just(Scenario.publish), st.integers(1, 4))
polling = st.tuples(st.just(Scenario.poll), seats, st.integers(1, 6))
acknowledging = st.tuples(st.just(Scenario.ack), seats, slices)
going = st.tuples(st.sampled_from([Scenario.crash, Scenario.leave]), seats)
others = st.one_of(
    st.tuples(st.just(Scenario.renew), seats, slices),
    st.tuples(st.just(Scenario.dead_letter), seats),
    st.tuples(st.just(Scenario.pass_claim_time)),
    st.tuples(st.just(Scenario.replay), st.booleans()),
    st.tuples(st.just(Scenario.lose_everything)),
)
steps = st.one_of(publishing, polling, polling, acknowledging, going, others)


@pytest.mark.parametrize(("partitions", "records_max"), [(1, 5), (3, 1_000)], ids=["trimmed", "partitioned"])
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(program=st.lists(steps, min_size=20, max_size=60))
def test_nothing_is_lost_in_any_sequence(
    open_eventlog: OpenLog, partitions: int, records_max: int, program: list[tuple[Any, ...]]
) -> None:
    async def run() -> None:
        async with open_eventlog(partitions, records_max) as log:
            scenario = Scenario(log, Model(records_max))
            for step, *args in program:
                await step(scenario, *args)
                await scenario.check()
            await scenario.drain()

    asyncio.run(run())
