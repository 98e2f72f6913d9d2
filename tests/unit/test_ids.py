"""Snowflake ids and their leases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import UnavailableError
from mesh.ids import BACKWARDS_MS_MAX, LEASE_MS, Snowflakes, WorkerLease, time_ms_of
from tests.clocks import SteppingClock


class Leases:
    """One number, given to whoever asks; `lost` makes the next renewal fail."""

    def __init__(self) -> None:
        self.high_ms: dict[int, int] = {}
        self.lost = False
        self.worker = 0

    async def acquire_worker(self, holder: str, now_ms: int, high_ms: int) -> WorkerLease | None:
        before = self.high_ms.get(self.worker, 0)
        self.high_ms[self.worker] = high_ms
        return WorkerLease(self.worker, before)

    async def renew_worker(self, holder: str, worker: int, now_ms: int, high_ms: int) -> bool:
        self.high_ms[worker] = max(self.high_ms[worker], high_ms)
        return not self.lost

    async def release_worker(self, holder: str, worker: int, now_ms: int, high_ms: int) -> None:
        self.high_ms[worker] = high_ms


@pytest.fixture
def clock() -> SteppingClock:
    return SteppingClock()


@pytest.fixture
def leases() -> Leases:
    return Leases()


@pytest.fixture
async def snowflakes(leases: Leases, clock: SteppingClock) -> Snowflakes:
    made = Snowflakes(leases, clock, "me")
    await made.renew()
    return made


async def test_ids_rise_also_while_the_clock_stands(snowflakes: Snowflakes) -> None:
    ids = [snowflakes.next_id() for _ in range(10_000)]
    assert ids == sorted(set(ids))


async def test_an_id_tells_its_time(snowflakes: Snowflakes, clock: SteppingClock) -> None:
    clock.advance(12_345)
    assert time_ms_of(snowflakes.next_id()) == clock.now_ms()


async def test_no_lease_no_ids(clock: SteppingClock, leases: Leases) -> None:
    with pytest.raises(UnavailableError):
        Snowflakes(leases, clock, "me").next_id()


async def test_a_lease_that_ran_out_makes_no_more_ids(snowflakes: Snowflakes, clock: SteppingClock) -> None:
    clock.advance(LEASE_MS - 5_001)
    snowflakes.next_id()
    clock.advance(2)  # The process was stopped, say.
    with pytest.raises(UnavailableError):
        snowflakes.next_id()
    await snowflakes.renew()
    snowflakes.next_id()


async def test_a_lost_number_is_replaced(snowflakes: Snowflakes, leases: Leases, clock: SteppingClock) -> None:
    before = snowflakes.next_id()
    leases.lost, leases.worker = True, 7
    await snowflakes.renew()
    clock.advance(1)
    assert (snowflakes.next_id() >> 12) & 1023 == 7
    assert (before >> 12) & 1023 == 0


async def test_a_released_number_makes_no_more_ids(snowflakes: Snowflakes) -> None:
    await snowflakes.release()
    with pytest.raises(UnavailableError):
        snowflakes.next_id()


async def test_a_small_step_back_of_the_clock_is_waited_out(snowflakes: Snowflakes, clock: SteppingClock) -> None:
    clock.advance(5_000)
    last = snowflakes.next_id()
    clock.offset_ms = -BACKWARDS_MS_MAX
    assert snowflakes.next_id() > last


async def test_a_large_step_back_of_the_clock_refuses(snowflakes: Snowflakes, clock: SteppingClock) -> None:
    snowflakes.next_id()
    clock.offset_ms = -BACKWARDS_MS_MAX - 1
    with pytest.raises(UnavailableError):
        snowflakes.next_id()


async def test_a_jump_ahead_of_the_lease_refuses(snowflakes: Snowflakes, clock: SteppingClock) -> None:
    clock.offset_ms = LEASE_MS + 1
    with pytest.raises(UnavailableError):
        snowflakes.next_id()


@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(-900, 900)), max_size=30))
async def test_the_next_holder_of_a_number_starts_above(steps: list[tuple[int, int]]) -> None:
    """Whatever the clocks do: two processes, one after the other, under the same number."""
    leases, clock = Leases(), SteppingClock()
    ids: list[int] = []
    for ms, offset in steps:
        clock.advance(ms)
        clock.offset_ms = offset
        process = Snowflakes(leases, clock, "another")
        await process.renew()
        for _ in range(3):
            try:
                ids.append(process.next_id())
            except UnavailableError:
                break
        await process.release()
    assert len(ids) == len(set(ids))
    assert ids == sorted(ids)
