"""How workers of one process share it."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from fanout_svc import worker as worker_module
from fanout_svc.worker import Batch, Figures, Worker
from mesh.clock import SystemClock
from mesh.eventlog.port import Record
from starling.event.v1 import event_pb2
from tests.clocks import ManualClock


def event() -> bytes:
    made = event_pb2.TweetEvent(author_id=7)
    made.created.tweet_id = 8
    return made.SerializeToString()


class OneRecord:
    """A topic with one record. `diary`: what happens, in order."""

    def __init__(self, name: str, diary: list[str]) -> None:
        self.name = name
        self._diary = diary
        self._left = [Record(name, 0, "1", b"", event())]

    async def poll(self, count: int, wait_seconds: float) -> list[Record]:
        if not self._left:
            await asyncio.Event().wait()
        self._diary.append(f"{self.name} taken")
        return [self._left.pop()]

    async def renew(self, records: Sequence[Record]) -> None:
        pass


class Held(Worker):
    """Has what it took in hand until it is let go."""

    def __init__(self, name: str, diary: list[str], yields_to: Sequence[Worker] = ()) -> None:
        nothing: Any = None
        consumer: Any = OneRecord(name, diary)
        super().__init__(
            consumer=consumer,
            producer=nothing,
            timelines=nothing,
            bodies=nothing,
            peers=nothing,
            clock=SystemClock(),
            figures=Figures(),
            yields_to=yields_to,
        )
        self._diary = diary
        self.took, self.let_go = asyncio.Event(), asyncio.Event()

    async def process(self, batch: Batch) -> None:
        self.took.set()
        await self.let_go.wait()
        self._diary.append(f"{batch.records[0].topic} done")


async def finish(*running: asyncio.Task[None]) -> None:
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_what_may_wait_is_taken_when_nothing_else_is_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "YIELD_SECONDS_MAX", 60.0)
    diary, stopping = list[str](), asyncio.Event()
    ordinary = Held("ordinary", diary)
    slow = Held("slow", diary, yields_to=[ordinary])
    async with asyncio.timeout(10):
        running = [asyncio.create_task(ordinary.run(stopping))]
        await ordinary.took.wait()
        running.append(asyncio.create_task(slow.run(stopping)))
        ordinary.let_go.set()  # Heard after the slow one's first look, which would take at once.
        await slow.took.wait()
    await finish(*running)
    assert diary == ["ordinary taken", "ordinary done", "slow taken"]


async def test_what_may_wait_is_taken_after_a_while_however_busy_the_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "YIELD_SECONDS_MAX", 0.01)
    diary, stopping = list[str](), asyncio.Event()
    ordinary = Held("ordinary", diary)
    slow = Held("slow", diary, yields_to=[ordinary])
    async with asyncio.timeout(10):
        running = [asyncio.create_task(worker.run(stopping)) for worker in (ordinary, slow)]
        await ordinary.took.wait()
        await slow.took.wait()
    await finish(*running)
    assert sorted(diary) == ["ordinary taken", "slow taken"]


class Erasing(Worker):
    """Erases bodies, which takes a tenth of a second of its clock."""

    def __init__(self, clock: ManualClock, records: int, yields_to: Sequence[Worker]) -> None:
        nothing: Any = None
        self.left = [Record("slow", 0, str(n), b"", deletion()) for n in range(records)]
        log_and_bodies: Any = self
        super().__init__(
            consumer=log_and_bodies,
            producer=nothing,
            timelines=nothing,
            bodies=log_and_bodies,
            peers=nothing,
            clock=clock,
            figures=Figures(),
            in_hand_max=1,
            yields_to=yields_to,
        )
        self._manual = clock
        self.empty = asyncio.Event()

    async def poll(self, count: int, wait_seconds: float) -> list[Record]:
        if not self.left:
            self.empty.set()
            await asyncio.Event().wait()
        return [self.left.pop()]

    async def put_deleted(self, tweet_id: int, version: int) -> None:
        self._manual.advance(100)

    async def ack(self, records: Sequence[Record]) -> None:
        pass

    async def renew(self, records: Sequence[Record]) -> None:
        pass


def deletion() -> bytes:
    made = event_pb2.TweetEvent(author_id=7)
    made.deleted.tweet_id = 8
    return made.SerializeToString()


@pytest.mark.parametrize(("seconds_ago", "expected"), [(0, [0.0, 0.1]), (10, [])])
async def test_what_may_wait_rests_as_long_as_it_worked_while_others_have_work(
    monkeypatch: pytest.MonkeyPatch, seconds_ago: int, expected: list[float]
) -> None:
    clock = ManualClock()
    ordinary = Held("ordinary", [])
    ordinary._done_at = clock.monotonic() - seconds_ago
    slow = Erasing(clock, 1, [ordinary])
    rests: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        rests.append(round(seconds, 6))
        await sleep(0)

    with monkeypatch.context() as patch:
        patch.setattr(slow, "_renew", asyncio.Event().wait)
        patch.setattr(asyncio, "sleep", noted)
        running = asyncio.create_task(slow.run(asyncio.Event()))
        async with asyncio.timeout(10):
            await slow.empty.wait()
    await finish(running)
    assert rests == expected
