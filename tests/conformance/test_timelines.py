"""What every Timelines adapter must keep. The `timelines` fixture is an empty store of lists with a small cap."""

import asyncio
from collections.abc import Sequence

import pytest

from mesh.timelines.port import ListKey, ListState, ListView, Timelines, author, home

VIEWER = home(11)
MINUTE_MS = 60_000
ALL = 10_000
SNOWFLAKE = 2102038470456250368


async def view_of(timelines: Timelines, key: ListKey = VIEWER) -> ListView:
    view = await timelines.read(key, ALL)
    assert view is not None
    assert view.complete
    return view


async def ids_of(timelines: Timelines, key: ListKey = VIEWER) -> list[int]:
    return list((await view_of(timelines, key)).ids)


async def make_ready(timelines: Timelines, ids: Sequence[int], down_to: int = 0, version: int = 1) -> None:
    assert await timelines.create(VIEWER, "life", MINUTE_MS)
    assert await timelines.finish(VIEWER, "life", version, ids, down_to)


# ---- Lives -------------------------------------------------------------------------------------------


async def test_a_list_that_nobody_created_is_missing(timelines: Timelines) -> None:
    assert await timelines.read(VIEWER, 10) is None


async def test_a_new_life_is_empty_and_building(timelines: Timelines) -> None:
    assert await timelines.create(VIEWER, "life", MINUTE_MS)
    view = await view_of(timelines)
    assert list(view.ids) == []
    assert (view.record.state, view.record.floor, view.record.token) == (ListState.BUILDING, 0, "life")


async def test_of_many_builders_at_once_one_gets_the_life(timelines: Timelines) -> None:
    tokens = [f"builder-{number}" for number in range(8)]
    won = await asyncio.gather(*(timelines.create(VIEWER, token, MINUTE_MS) for token in tokens))
    assert won.count(True) == 1
    assert (await view_of(timelines)).record.token == tokens[won.index(True)]


async def test_a_builder_whose_lease_is_over_loses_its_life_and_what_was_pushed_into_it(timelines: Timelines) -> None:
    assert await timelines.create(VIEWER, "slow", 0)
    await timelines.push([VIEWER], [5])
    assert await timelines.create(VIEWER, "quick", MINUTE_MS)
    assert await ids_of(timelines) == []
    assert not await timelines.finish(VIEWER, "slow", 1, [5], 0)
    assert await timelines.finish(VIEWER, "quick", 1, [6], 0)
    assert await ids_of(timelines) == [6]


async def test_a_builder_within_its_lease_keeps_its_life(timelines: Timelines) -> None:
    assert await timelines.create(VIEWER, "first", MINUTE_MS)
    assert not await timelines.create(VIEWER, "second", MINUTE_MS)
    assert (await view_of(timelines)).record.token == "first"


async def test_a_builder_whose_lease_is_over_may_still_finish_while_nobody_took_over(timelines: Timelines) -> None:
    assert await timelines.create(VIEWER, "slow", 0)
    assert await timelines.finish(VIEWER, "slow", 1, [5], 0)
    assert await ids_of(timelines) == [5]


async def test_a_ready_list_is_not_created_again(timelines: Timelines) -> None:
    await make_ready(timelines, [5])
    assert not await timelines.create(VIEWER, "other", 0)
    assert await ids_of(timelines) == [5]


async def test_what_is_removed_is_gone_and_the_rest_stays_as_exact_as_it_was(timelines: Timelines) -> None:
    await make_ready(timelines, [3, 5, SNOWFLAKE, SNOWFLAKE + 1], down_to=2)
    assert await timelines.remove(VIEWER, [5, SNOWFLAKE, 9]) == 2
    view = await view_of(timelines)
    assert (list(view.ids), view.record.floor) == ([SNOWFLAKE + 1, 3], 2)
    assert await timelines.remove(VIEWER, [SNOWFLAKE + 1, 3]) == 2
    await timelines.push([VIEWER], [4, 1])
    assert await ids_of(timelines) == [4]
    assert await timelines.remove(home(12), [3]) == 0


async def test_a_walk_meets_each_list_with_its_entries_and_lets_each_die_in_its_time(timelines: Timelines) -> None:
    await make_ready(timelines, [3, 5])
    assert await timelines.create(author(7), "life", MINUTE_MS)
    found = {key: list(ids) async for some in timelines.walk() for key, ids in some}
    assert found == {VIEWER: [5, 3], author(7): []}


async def test_a_dropped_list_is_missing_and_may_be_created_again(timelines: Timelines) -> None:
    await make_ready(timelines, [5])
    await timelines.drop(VIEWER)
    assert await timelines.read(VIEWER, 10) is None
    await timelines.drop(VIEWER)
    assert await timelines.create(VIEWER, "next", MINUTE_MS)
    assert await ids_of(timelines) == []


async def test_a_viewer_and_an_author_of_the_same_number_have_lists_of_their_own(timelines: Timelines) -> None:
    for number, key in enumerate([home(11), author(11), home(12)]):
        assert await timelines.create(key, f"life-{number}", MINUTE_MS)
        assert await timelines.push([key], [number]) == 1
    assert [await ids_of(timelines, key) for key in (home(11), author(11), home(12))] == [[0], [1], [2]]


# ---- Reading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "ids", "complete"),
    [(0, [], False), (1, [30], False), (2, [30, 20], False), (3, [30, 20, 10], True), (4, [30, 20, 10], True)],
)
async def test_a_read_gives_the_newest_ids_and_says_whether_more_follow(
    timelines: Timelines, count: int, ids: list[int], complete: bool
) -> None:
    await make_ready(timelines, [10, 30, 20], version=7)
    view = await timelines.read(VIEWER, count)
    assert view is not None
    assert (list(view.ids), view.complete) == (ids, complete)
    assert (view.record.state, view.record.version) == (ListState.READY, 7)


@pytest.mark.parametrize("count", [0, 1])
async def test_a_list_without_ids_is_a_list(timelines: Timelines, count: int) -> None:
    await make_ready(timelines, [])
    view = await timelines.read(VIEWER, count)
    assert view is not None
    assert (list(view.ids), view.complete) == ([], True)


# ---- Pushing -----------------------------------------------------------------------------------------


async def test_bounds_are_the_newest_ids_of_lists_that_are_ready(timelines: Timelines) -> None:
    owners = [author(number) for number in range(1, 6)]
    for key, ids, down_to in ((owners[0], [5, 9, 7], 0), (owners[2], [], 0), (owners[3], [], 4)):
        assert await timelines.create(key, "token", 1_000)
        assert await timelines.finish(key, "token", 0, ids, down_to)
    assert await timelines.create(owners[4], "token", 1_000)
    await timelines.push(owners, [11])
    assert await timelines.bounds(owners) == [11, None, 11, 11, None]
    others = [author(number) for number in (7, 8)]
    for key, down_to in zip(others, (0, 4), strict=True):
        assert await timelines.create(key, "token", 1_000)
        assert await timelines.finish(key, "token", 0, [], down_to)
    assert await timelines.bounds(others) == [0, 4]
    assert await timelines.bounds([]) == []


async def test_a_push_reaches_existing_lists_only_and_counts_them(timelines: Timelines) -> None:
    await make_ready(timelines, [])
    assert await timelines.create(author(1), "life", MINUTE_MS)
    assert await timelines.push([home(12), VIEWER, author(2), author(1)], [5]) == 2
    assert await ids_of(timelines) == await ids_of(timelines, author(1)) == [5]
    assert await timelines.read(home(12), 1) is None
    assert await timelines.read(author(2), 1) is None


@pytest.mark.parametrize("order", [(1, 2, 3, 4), (4, 3, 2, 1), (3, 1, 4, 2), (2, 2, 4, 1, 3, 1)])
async def test_ids_come_to_stand_newest_first_and_once_in_whatever_order_they_arrive(
    timelines: Timelines, order: tuple[int, ...]
) -> None:
    await make_ready(timelines, [])
    for id_ in order:
        await timelines.push([VIEWER], [id_])
    assert await ids_of(timelines) == [4, 3, 2, 1]
    assert await timelines.create(author(1), "life", MINUTE_MS)
    await timelines.push([author(1)], order)
    assert await ids_of(timelines, author(1)) == [4, 3, 2, 1]


async def test_neighbours_beyond_2_to_the_53_and_longer_numbers_keep_their_order(timelines: Timelines) -> None:
    ids = [10**19 + 1, 10**19, 10**19 - 1, 2**63, 2**63 - 1, SNOWFLAKE + 1, SNOWFLAKE]
    await make_ready(timelines, ids[1::3])
    await timelines.push([VIEWER], ids[2::3])
    await timelines.push([VIEWER], ids[0::3])
    assert await ids_of(timelines) == ids


async def test_a_push_is_kept_while_the_list_is_being_built(timelines: Timelines) -> None:
    await timelines.create(VIEWER, "life", MINUTE_MS)
    await timelines.push([VIEWER], [50])
    assert await timelines.finish(VIEWER, "life", 1, [40, 30], 0)
    assert await ids_of(timelines) == [50, 40, 30]


async def test_a_push_changes_neither_version_nor_token_nor_state(timelines: Timelines) -> None:
    await make_ready(timelines, [10, 20], down_to=5, version=3)
    before = (await view_of(timelines)).record
    await timelines.push([VIEWER], [4, 15, 25])
    assert (await view_of(timelines)).record == before


@pytest.mark.parametrize("ids", [[], [20, 30]])
async def test_below_the_floor_nothing_is_inserted_and_at_it_is(timelines: Timelines, ids: list[int]) -> None:
    await make_ready(timelines, ids, down_to=10)
    await timelines.push([VIEWER], [9, 10])
    view = await view_of(timelines)
    assert (list(view.ids), view.record.floor) == ([*ids[::-1], 10], 10)


@pytest.mark.parametrize("building", [True, False])
async def test_a_list_stays_bounded_and_misses_nothing_down_to_its_floor(timelines: Timelines, building: bool) -> None:
    assert await timelines.create(VIEWER, "life", MINUTE_MS)
    if not building:
        assert await timelines.finish(VIEWER, "life", 1, [], 0)
    everything: set[int] = set()
    floor = 0
    for step in range(5 * timelines.cap):
        id_ = 100 + step - (step % 3) * 4
        everything.add(id_)
        await timelines.push([VIEWER], [id_])
        view = await view_of(timelines)
        assert list(view.ids) == sorted((one for one in everything if one >= view.record.floor), reverse=True)
        assert view.record.floor >= floor
        floor = view.record.floor
    assert floor > 0
    assert timelines.cap <= len((await view_of(timelines)).ids) < 2 * timelines.cap


async def test_one_push_may_hold_more_lists_and_ids_than_one_call_takes(timelines: Timelines) -> None:
    keys = [author(number) for number in range(1, 1101)]
    created = await asyncio.gather(*(timelines.create(key, "life", MINUTE_MS) for key in keys[::100]))
    assert all(created)
    ids = range(1, 200)
    assert await timelines.push(keys, ids) == 11
    for key in keys[::100]:
        view = await view_of(timelines, key)
        assert list(view.ids) == sorted((one for one in ids if one >= view.record.floor), reverse=True)


async def test_a_push_of_nothing_or_to_nobody_does_nothing(timelines: Timelines) -> None:
    await make_ready(timelines, [1])
    assert await timelines.push([], [5]) == 0
    assert await timelines.push([VIEWER, home(12)], []) == 1
    assert await ids_of(timelines) == [1]


# ---- Finishing and covering --------------------------------------------------------------------------


async def test_finishing_joins_what_was_pushed_and_what_the_store_gave(timelines: Timelines) -> None:
    await timelines.create(VIEWER, "life", MINUTE_MS)
    await timelines.push([VIEWER], [30, 20])
    assert await timelines.finish(VIEWER, "life", 4, [10, 40, 20, 10], 0)
    view = await view_of(timelines)
    assert list(view.ids) == [40, 30, 20, 10]
    assert (view.record.state, view.record.version, view.record.floor) == (ListState.READY, 4, 0)
    assert view.record.token == "life"


async def test_what_lies_below_where_the_store_was_asked_goes_and_what_is_equal_stays(timelines: Timelines) -> None:
    await timelines.create(VIEWER, "life", MINUTE_MS)
    await timelines.push([VIEWER], [30, 9, 8])
    assert await timelines.finish(VIEWER, "life", 1, [20, 10], 10)
    view = await view_of(timelines)
    assert (list(view.ids), view.record.floor) == ([30, 20, 10], 10)


@pytest.mark.parametrize("covering", [False, True])
async def test_more_than_the_cap_is_cut_and_the_floor_rises_to_the_smallest_kept(
    timelines: Timelines, covering: bool
) -> None:
    ids = list(range(1, 3 * timelines.cap))
    await timelines.create(VIEWER, "life", MINUTE_MS)
    if covering:
        assert await timelines.finish(VIEWER, "life", 1, ids[::4], 0)
        assert await timelines.cover(VIEWER, "life", 1, 2, ids, 0)
    else:
        assert await timelines.finish(VIEWER, "life", 1, ids, 0)
    view = await view_of(timelines)
    assert list(view.ids) == ids[: -timelines.cap - 1 : -1]
    assert view.record.floor == view.ids[-1]


async def test_as_many_as_the_cap_are_kept_without_a_cut(timelines: Timelines) -> None:
    await make_ready(timelines, range(1, timelines.cap + 1))
    view = await view_of(timelines)
    assert (len(view.ids), view.record.floor) == (timelines.cap, 0)


async def test_a_life_is_finished_by_its_own_builder_once(timelines: Timelines) -> None:
    assert not await timelines.finish(VIEWER, "life", 1, [5], 0)
    assert await timelines.read(VIEWER, 1) is None
    await timelines.create(VIEWER, "life", MINUTE_MS)
    assert not await timelines.finish(VIEWER, "other", 1, [5], 0)
    assert (await view_of(timelines)).record.state is ListState.BUILDING
    assert await timelines.finish(VIEWER, "life", 1, [5], 0)
    assert not await timelines.finish(VIEWER, "life", 2, [6], 0)
    assert await ids_of(timelines) == [5]


async def test_covering_takes_in_new_followees_at_the_new_version(timelines: Timelines) -> None:
    await make_ready(timelines, [40, 20], down_to=10, version=1)
    assert await timelines.cover(VIEWER, "life", 1, 2, [30, 10, 5], 10)
    view = await view_of(timelines)
    assert list(view.ids) == [40, 30, 20, 10]
    assert (view.record.state, view.record.version, view.record.floor) == (ListState.READY, 2, 10)


async def test_a_cover_that_the_store_answered_less_deeply_raises_the_floor(timelines: Timelines) -> None:
    await make_ready(timelines, [40, 20], down_to=10)
    assert await timelines.cover(VIEWER, "life", 1, 2, [30], 25)
    view = await view_of(timelines)
    assert (list(view.ids), view.record.floor) == ([40, 30], 25)


async def test_a_cover_that_the_store_answered_more_deeply_leaves_the_floor(timelines: Timelines) -> None:
    await make_ready(timelines, [40, 20], down_to=10)
    assert await timelines.cover(VIEWER, "life", 1, 2, [30, 5], 0)
    view = await view_of(timelines)
    assert (list(view.ids), view.record.floor) == ([40, 30, 20], 10)


@pytest.mark.parametrize(("token", "from_version"), [("other", 3), ("life", 2), ("life", 4)])
async def test_a_cover_of_another_life_or_version_changes_nothing(
    timelines: Timelines, token: str, from_version: int
) -> None:
    await make_ready(timelines, [40], version=3)
    before = await view_of(timelines)
    assert not await timelines.cover(VIEWER, token, from_version, 5, [50], 45)
    assert await view_of(timelines) == before


async def test_of_two_covers_from_one_version_one_counts(timelines: Timelines) -> None:
    await make_ready(timelines, [40], version=3)
    assert await timelines.cover(VIEWER, "life", 3, 4, [50], 0)
    assert not await timelines.cover(VIEWER, "life", 3, 5, [60], 0)
    assert await ids_of(timelines) == [50, 40]


async def test_a_list_that_is_missing_or_being_built_is_not_covered(timelines: Timelines) -> None:
    assert not await timelines.cover(VIEWER, "life", 0, 1, [5], 0)
    assert await timelines.read(VIEWER, 1) is None
    await timelines.create(VIEWER, "life", MINUTE_MS)
    assert not await timelines.cover(VIEWER, "life", 0, 1, [5], 0)
    assert await ids_of(timelines) == []


async def test_a_merge_repairs_lists_in_any_state_and_makes_none(timelines: Timelines) -> None:
    building, ready, missing = home(1), home(2), home(3)
    await timelines.create(building, "one", 1_000)
    await timelines.create(ready, "two", 1_000)
    await timelines.finish(ready, "two", 7, [50, 40], 40)
    await timelines.push([building], [60])
    assert await timelines.merge([building, ready, missing], [55, 45, 35], 35) == 2
    found = await timelines.read(building, 10)
    assert found
    assert (list(found.ids), found.record.state, found.record.floor) == ([60, 55, 45, 35], ListState.BUILDING, 35)
    found = await timelines.read(ready, 10)
    assert found
    assert (list(found.ids), found.record.floor, found.record.version) == ([55, 50, 45, 40], 40, 7)
    assert found.record.token == "two"
    assert await timelines.read(missing, 10) is None


async def test_a_merge_that_was_cut_raises_the_floor(timelines: Timelines) -> None:
    await timelines.create(home(1), "one", 1_000)
    await timelines.finish(home(1), "one", 1, [90, 10], 0)
    assert await timelines.merge([home(1)], [80, 70], 70) == 1
    found = await timelines.read(home(1), 10)
    assert found
    assert (list(found.ids), found.record.floor) == ([90, 80, 70], 70)
