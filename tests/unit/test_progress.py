"""What may be committed of a partition whose records end in any order."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.eventlog.port import Record
from mesh.eventlog.progress import Progress, share_out


def record(offset: int) -> Record:
    return Record("notes", 0, str(offset), b"", b"")


def progress(*offsets: int, begin: int = 0, tenure: int = 1, full_at: int = 100) -> Progress:
    made = Progress(tenure, begin, full_at)
    made.add((offset, record(offset)) for offset in offsets)
    return made


def offsets(records: Sequence[Record]) -> list[int]:
    return [int(record.position) for record in records]


@pytest.mark.parametrize(
    ("finished", "done_below"),
    [([], 5), ([5], 6), ([6], 5), ([6, 7], 5), ([7, 6, 5], 8), ([5, 7], 6), ([5, 5], 6), ([5, 6, 7], 8)],
)
def test_all_below_the_first_that_is_not_done_may_be_committed(finished: list[int], done_below: int) -> None:
    held = progress(5, 6, 7, begin=5)
    records = {int(record.position): record for record in held.take(10, 0.0)}
    for offset in finished:
        held.finish(records[offset])
    assert held.done_below == done_below


def test_what_waits_is_not_done() -> None:
    held = progress(0, 1, 2)
    [first] = held.take(1, 0.0)
    held.finish(first)
    assert (held.done_below, held.waiting, held.in_hand) == (1, 2, 0)


def test_a_log_may_have_gaps() -> None:
    held = progress(3, 9, begin=0)
    for taken in held.take(2, 0.0):
        held.finish(taken)
    assert held.done_below == 10


def test_an_offset_that_goes_back_is_a_mistake() -> None:
    with pytest.raises(AssertionError):
        progress(3, 2)


def test_it_is_full_until_the_first_is_done() -> None:
    held = progress(0, 1, 2, full_at=3)
    first, second, third = held.take(3, 0.0)
    held.finish(second)
    held.finish(third)
    assert held.is_full
    held.finish(first)
    assert not held.is_full


def test_what_was_handed_out_in_another_tenure_does_not_count() -> None:
    before, now = progress(0, tenure=1), progress(0, tenure=2)
    [old] = before.take(1, 0.0)
    [new] = now.take(1, 0.0)
    now.finish(old)
    assert (now.done_below, now.holds(old), now.holds(new)) == (0, False, True)
    now.finish(new)
    assert now.done_below == 1


def test_what_is_not_renewed_is_handed_out_again_and_either_may_finish_it() -> None:
    held = progress(0, 1)
    idle, renewed = held.take(2, 0.0)
    held.renew(renewed, 10.0)
    assert held.take_idle(10, 15.0, 14.9) == []
    [again] = held.take_idle(10, 15.0, 15.0)
    assert (again, again.redelivered) == (Record("notes", 0, "0", b"", b"", redelivered=True), True)
    assert held.take_idle(10, 15.0, 15.0) == []
    held.finish(idle)
    held.finish(again)
    assert held.done_below == 1


def test_partitions_share_and_what_one_leaves_the_others_get() -> None:
    loud, quiet, empty = progress(*range(10)), progress(0), progress()
    records = share_out([loud, quiet, empty], 6, 0, 0.0)
    assert len(records) == 6
    assert (loud.in_hand, quiet.in_hand) == (5, 1)
    assert share_out([], 6, 0, 0.0) == []


def test_with_less_room_than_partitions_each_has_its_turn() -> None:
    held = [progress(*range(3)) for _ in range(3)]
    for first in range(3):
        share_out(held, 1, first, 0.0)
    assert [one.in_hand for one in held] == [1, 1, 1]


@given(st.data())
def test_in_any_order_nothing_undone_is_committed_and_nothing_is_handed_out_twice(data: st.DataObject) -> None:
    held, fetched = Progress(1, 0, 20), 0
    in_hand: dict[int, Record] = {}
    handed_out: list[int] = []
    done: set[int] = set()
    for step in data.draw(st.lists(st.sampled_from(["fetch", "take", "finish"]), max_size=60)):
        if step == "fetch" and not held.is_full:
            more = data.draw(st.integers(1, 4))
            held.add((offset, record(offset)) for offset in range(fetched, fetched + more))
            fetched += more
        elif step == "take":
            taken = held.take(data.draw(st.integers(1, 4)), 0.0)
            in_hand |= {int(record.position): record for record in taken}
            handed_out += offsets(taken)
        elif in_hand:
            offset = data.draw(st.sampled_from(sorted(in_hand)))
            held.finish(in_hand.pop(offset))
            done.add(offset)
        assert held.done_below == min(set(range(fetched + 1)) - done)
        assert handed_out == list(range(len(handed_out)))
        assert held.waiting == fetched - len(handed_out)
