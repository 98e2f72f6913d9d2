"""The Lua functions against their reference in plain Python, and what is particular to the Valkey adapter."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from redis.exceptions import ResponseError

from mesh.timelines.port import ListKey, ListState, TailRecord, author, home
from mesh.timelines.valkey import LIBRARY, ValkeyTimelines, hash_tag, parse_record, parse_view
from mesh.valkey import Valkey
from tests.timelines_reference import UNKNOWN_RECORD, TimelinesReference, render

CAP, SLACK = 5, 2
MINUTE_MS = 60_000
FIRST_SNOWFLAKE = 2102038470456250368
NEVER, MISSING = -1, -2  # What PEXPIRETIME says instead of a time.


class ManualClock:
    def __init__(self) -> None:
        self.ms = 1_000

    def now_ms(self) -> int:
        return self.ms

    def monotonic(self) -> float:
        return self.ms / 1000


def stored_name(valkey: Valkey, key: ListKey) -> str:
    tag = f"{{{hash_tag(key.owner)}}}:" if key.kind.value == "timeline" else ""
    return f"{valkey.key_prefix}{key.kind.value}:{tag}{key.owner}"


async def stored(valkey: Valkey, key: ListKey) -> list[bytes]:
    elements: list[bytes] = await valkey.call("LRANGE", stored_name(valkey, key), 0, -1)
    return elements


async def stored_ids(valkey: Valkey, key: ListKey) -> list[int]:
    return [int(element) for element in (await stored(valkey, key))[:-1]]


async def expires_at_ms(valkey: Valkey, key: ListKey) -> int:
    """Absolute, so that two readings of an untouched expiry are equal."""
    return int(await valkey.call("PEXPIRETIME", stored_name(valkey, key)))


# ---- The functions and their reference ---------------------------------------------------------------

KEYS = [home(1), author(1)]
# Neighbours that a double can't tell apart, and of both lengths around a power of ten.
EDGES = [edge + offset for edge in (2**53, 10**18, 2**63, 10**19) for offset in (-1, 0, 1)] + [2**64 - 1]

some_ids = st.integers(0, 15) | st.sampled_from(EDGES)
many_ids = st.lists(some_ids, max_size=10)
floors = st.sampled_from([0, 0, 0, 3, 5, 7, 2**53, 10**19])
leases = st.integers(0, 2)
keys = st.sampled_from(KEYS)
tokens = st.sampled_from([*["life"] * 7, "other-life"])
versions = st.sampled_from([2**53, 2**53 + 1])

# (weight, name, arguments): lists that die too often never get full, or covered.
OPERATIONS: list[tuple[int, str, st.SearchStrategy[tuple[Any, ...]]]] = [
    (3, "push", st.tuples(st.lists(keys, max_size=4), st.lists(some_ids, max_size=5))),
    (3, "push", st.tuples(st.just(KEYS), st.lists(some_ids, min_size=1, max_size=1))),
    (3, "finish", st.tuples(keys, tokens, versions, many_ids, floors)),
    (5, "cover", st.tuples(keys, tokens, versions, versions, many_ids, floors)),
    (2, "merge", st.tuples(st.lists(keys, max_size=3), many_ids, floors)),
    (1, "read", st.tuples(keys, st.integers(0, CAP + SLACK + 1))),
    (4, "create", st.tuples(keys, tokens, leases)),
    (1, "drop", st.tuples(keys)),
    (1, "remove", st.tuples(keys, st.lists(some_ids, max_size=3))),
    (1, "advance", st.tuples(st.integers(0, 2))),
    (1, "forget_record", st.tuples(keys)),
]
operations = st.sampled_from(
    [(name, arguments) for often, name, arguments in OPERATIONS for _ in range(often)]
).flatmap(lambda one: st.tuples(st.just(one[0]), one[1]))


class Pair:
    """A server's timelines and the reference, taken through the same operations."""

    def __init__(self, valkey: Valkey) -> None:
        self.valkey = valkey
        self.clock = ManualClock()
        self.real = ValkeyTimelines(valkey, self.clock, cap=CAP, slack=SLACK)
        self.reference = TimelinesReference(cap=CAP, slack=SLACK, now_ms=self.clock.ms)

    async def start(self) -> None:
        for key in KEYS:
            await self.real.drop(key)
        self.expiries = await self.check()
        for key in KEYS:
            await self.step("create", key, "life", 1)

    async def step(self, name: str, *args: Any) -> None:
        if name == "advance":
            self.clock.ms += args[0]
            self.reference.now_ms = self.clock.ms
        elif name == "forget_record":
            await self.forget_record(args[0])
        else:
            expected = getattr(self.reference, name)(*args)
            assert await getattr(self.real, name)(*args) == expected
        before, self.expiries = self.expiries, await self.check()
        if name not in {"create", "read"}:
            assert all(self.expiries[key] in {before[key], MISSING} for key in KEYS)

    async def check(self) -> dict[ListKey, int]:
        """Hold the lists against the reference's. Gives when they expire."""
        names = [stored_name(self.valkey, key) for key in KEYS]
        found = await self.valkey.pipeline(
            [*(("LRANGE", name, 0, -1) for name in names), *(("PEXPIRETIME", name) for name in names)]
        )
        lists, expiries = found[: len(KEYS)], found[len(KEYS) :]
        assert lists == [self.reference.raw(key) for key in KEYS]
        assert all((expiry == MISSING) == (elements == []) for expiry, elements in zip(expiries, lists, strict=True))
        assert NEVER not in expiries
        return dict(zip(KEYS, expiries, strict=True))

    async def forget_record(self, key: ListKey) -> None:
        """Put a record there that this release doesn't know."""
        if key in self.reference.lists:
            self.reference.lists[key].record = None
            await self.valkey.call("LSET", stored_name(self.valkey, key), -1, UNKNOWN_RECORD)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One loop for all examples: a client's connections can't change loops."""
    with asyncio.Runner() as one:
        yield one


@pytest.fixture(scope="module")
def examples_valkey(valkey_url: str, runner: asyncio.Runner) -> Iterator[Valkey]:
    client = Valkey(valkey_url, key_prefix="examples:", libraries=[LIBRARY])
    yield client
    runner.run(client.close())


def test_the_functions_do_what_the_reference_does(runner: asyncio.Runner, examples_valkey: Valkey) -> None:
    class Histories(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair(examples_valkey)
            runner.run(self.pair.start())

        @rule(operation=operations)
        def step(self, operation: tuple[str, tuple[Any, ...]]) -> None:
            name, arguments = operation
            runner.run(self.pair.step(name, *arguments))

    run_state_machine_as_test(Histories, settings=settings(max_examples=60, stateful_step_count=50, deadline=None))


# ---- What the functions promise, one by one ----------------------------------------------------------


@pytest.fixture
async def valkey(valkey_url: str, key_prefix: str) -> AsyncIterator[Valkey]:
    client = Valkey(valkey_url, key_prefix=key_prefix, libraries=[LIBRARY])
    yield client
    await client.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def timelines(valkey: Valkey, clock: ManualClock) -> ValkeyTimelines:
    return ValkeyTimelines(valkey, clock, cap=CAP, slack=SLACK)


async def make_ready(timelines: ValkeyTimelines, key: ListKey, ids: Sequence[int], down_to: int = 0) -> None:
    assert await timelines.create(key, "life", MINUTE_MS)
    assert await timelines.finish(key, "life", 1, ids, down_to)


async def test_neighbouring_snowflakes_stay_distinct_and_in_order(valkey: Valkey, clock: ManualClock) -> None:
    timelines = ValkeyTimelines(valkey, clock)
    key = home(1)
    ids = [FIRST_SNOWFLAKE + offset for offset in range(10)]
    await make_ready(timelines, key, ids[::3])
    for offset in (4, 9, 1, 0, 8, 2, 3, 7, 6, 5):
        assert await timelines.push([key], [ids[offset]]) == 1
    assert await stored_ids(valkey, key) == ids[::-1]


async def test_a_push_creates_no_list(timelines: ValkeyTimelines, valkey: Valkey) -> None:
    assert await timelines.push([home(1), author(1)], [7]) == 0
    assert await stored(valkey, home(1)) == []
    assert await stored(valkey, author(1)) == []


async def test_trimming_raises_the_floor_to_the_smallest_id_kept(timelines: ValkeyTimelines, valkey: Valkey) -> None:
    key = home(1)
    await make_ready(timelines, key, [])
    for id_ in range(1, CAP + SLACK + 1):
        await timelines.push([key], [id_])
    assert await stored(valkey, key) == [b"7", b"6", b"5", b"4", b"3", b"2", b"1", b"ready:0:1:life:0"]
    await timelines.push([key], [8])
    assert await stored(valkey, key) == [b"8", b"7", b"6", b"5", b"4", b"ready:4:1:life:0"]


async def test_an_insertion_never_lowers_the_floor(timelines: ValkeyTimelines, valkey: Valkey) -> None:
    key = home(1)
    await make_ready(timelines, key, [20, 30], down_to=10)
    await timelines.push([key], [9])
    await timelines.push([key], [11])
    assert await stored(valkey, key) == [b"30", b"20", b"11", b"ready:10:1:life:0"]


@pytest.mark.parametrize("ids", [[], [20, 30]])
async def test_an_id_equal_to_the_floor_is_inserted(timelines: ValkeyTimelines, valkey: Valkey, ids: list[int]) -> None:
    key = home(1)
    await make_ready(timelines, key, ids, down_to=10)
    await timelines.push([key], [10])
    assert await stored_ids(valkey, key) == [*ids[::-1], 10]


@pytest.mark.parametrize("again", [1, 3, 5])
async def test_an_id_pushed_again_stays_once(timelines: ValkeyTimelines, valkey: Valkey, again: int) -> None:
    key = home(1)
    await make_ready(timelines, key, [1, 3, 5])
    assert await timelines.push([key], [again]) == 1
    assert await stored_ids(valkey, key) == [5, 3, 1]


async def test_late_ids_find_their_place_in_a_full_list(valkey: Valkey, clock: ManualClock) -> None:
    timelines = ValkeyTimelines(valkey, clock, cap=1600)
    key = home(1)
    await make_ready(timelines, key, range(2, 1601, 2))
    odd = range(1, 1600, 2)
    for start in range(7):
        await timelines.push([key], odd[start::7])
    assert await stored_ids(valkey, key) == list(range(1600, 0, -1))


@pytest.mark.parametrize("token", ["other", "lif", "life-"])
async def test_the_wrong_token_changes_nothing(timelines: ValkeyTimelines, valkey: Valkey, token: str) -> None:
    key = home(1)
    await timelines.create(key, "life", MINUTE_MS)
    before = await stored(valkey, key)
    assert not await timelines.finish(key, token, 1, [5], 0)
    assert await stored(valkey, key) == before

    await timelines.finish(key, "life", 1, [5], 0)
    before = await stored(valkey, key)
    assert not await timelines.cover(key, token, 1, 2, [6], 0)
    assert await stored(valkey, key) == before


@pytest.mark.parametrize("from_version", [2**53, 2**53 + 2])
async def test_the_wrong_version_changes_nothing(timelines: ValkeyTimelines, valkey: Valkey, from_version: int) -> None:
    key = home(1)
    await timelines.create(key, "life", MINUTE_MS)
    await timelines.finish(key, "life", 2**53 + 1, [5], 0)
    before = await stored(valkey, key)
    assert not await timelines.cover(key, "life", from_version, 2**53 + 3, [6], 0)
    assert await stored(valkey, key) == before


async def test_a_push_leaves_the_expiry_alone_also_when_it_trims(timelines: ValkeyTimelines, valkey: Valkey) -> None:
    key = home(1)
    await make_ready(timelines, key, [])
    await valkey.call("PEXPIREAT", stored_name(valkey, key), 33_333_333_333_333)
    await timelines.push([key], range(1, 30))
    assert await stored_ids(valkey, key) == [29, 28, 27, 26, 25]
    assert await expires_at_ms(valkey, key) == 33_333_333_333_333


async def test_a_list_without_ids_keeps_its_expiry_and_record(timelines: ValkeyTimelines, valkey: Valkey) -> None:
    key = home(1)
    await timelines.create(key, "life", MINUTE_MS)
    expiry = await expires_at_ms(valkey, key)
    assert expiry > 0
    await timelines.finish(key, "life", 1, [1, 2, 3], 50)
    assert await stored(valkey, key) == [b"ready:50:1:life:0"]
    assert await expires_at_ms(valkey, key) == expiry


async def test_ten_thousand_keys_and_many_ids_go_in_one_push(timelines: ValkeyTimelines, valkey: Valkey) -> None:
    viewers = [FIRST_SNOWFLAKE + 4096 * number for number in range(10_000)]
    active = viewers[::2]
    names = [stored_name(valkey, home(viewer)) for viewer in active]
    await valkey.pipeline([("RPUSH", name, "ready:0:1:life:0") for name in names])
    assert await timelines.push([home(viewer) for viewer in viewers], [4, 2, 2, 3]) == 5_000
    lists = await valkey.pipeline([("LRANGE", name, 0, -1) for name in names])
    assert all(one == [b"4", b"3", b"2", b"ready:0:1:life:0"] for one in lists)


async def test_a_newer_id_costs_two_commands(timelines: ValkeyTimelines, valkey: Valkey) -> None:
    key = home(1)
    await make_ready(timelines, key, [1, 2, 3])
    await valkey.call("CONFIG", "RESETSTAT")
    await timelines.push([key], [4])
    stats = (await valkey.call("INFO", "commandstats")).decode()
    calls = {name: int(count) for name, count in re.findall(r"(cmdstat_l\w+):calls=(\d+)", stats)}
    assert calls == {"cmdstat_lindex": 1, "cmdstat_lpush": 1}


async def test_functions_that_the_server_lost_are_loaded_again(timelines: ValkeyTimelines, valkey: Valkey) -> None:
    key = home(1)
    await make_ready(timelines, key, [1])
    await valkey.call("FUNCTION", "FLUSH")
    assert await timelines.push([key], [2]) == 1
    assert await stored_ids(valkey, key) == [2, 1]


async def test_ids_out_of_order_are_refused_by_the_functions(timelines: ValkeyTimelines, valkey: Valkey) -> None:
    key = home(1)
    name = stored_name(valkey, key)
    await timelines.create(key, "life", MINUTE_MS)
    before = await stored(valkey, key)
    for function, args in [
        ("timeline_push_v1", (CAP, SLACK, 2, 1)),
        ("timeline_finish_v1", ("life", 1, 0, CAP, 2, 2)),
        ("timeline_cover_v1", ("life", 1, 2, 0, CAP, 10, 9)),
    ]:
        with pytest.raises(ResponseError, match="strictly ascending"):
            await valkey.fcall(function, [name], *args)
    assert await stored(valkey, key) == before


# ---- The record --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        TailRecord(ListState.READY, 0, 0, "t", 0),
        TailRecord(ListState.READY, FIRST_SNOWFLAKE, 2**63, "A-b_9" * 12, 0),
        TailRecord(ListState.READY, 2**64 - 1, 2**64 - 1, "x" * 64, 2**64 - 1),
    ],
)
async def test_a_known_record_is_read_and_guards_its_list(
    timelines: ValkeyTimelines, valkey: Valkey, record: TailRecord
) -> None:
    await valkey.call("RPUSH", stored_name(valkey, home(1)), render(record))
    view = await timelines.read(home(1), 1)
    assert view is not None
    assert view.record == record
    assert not await timelines.create(home(1), "new", 0)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "::::", "12", "ready", "ready:0:0:t", "ready:0:0:t:0:0", "Ready:0:0:t:0", "done:0:0:t:0"),
        *("ready:007:0:t:0", "ready:-1:0:t:0", "ready:1e3:0:t:0", "ready:0:00:t:0", "ready:0:0:t:", "ready:0:0::0"),
        *("ready:0:0:t t:0", "ready:0:0:t:0\n", " ready:0:0:t:0", f"ready:0:0:{'x' * 65}:0", "ready:0:0:é:0"),
        "ready:100000000000000000000:0:t:0",
    ],
)
async def test_an_unknown_record_counts_as_no_list(timelines: ValkeyTimelines, valkey: Valkey, text: str) -> None:
    """Python and Lua must agree on what is unknown, or a list could neither be read nor be replaced."""
    key = home(1)
    await valkey.call("RPUSH", stored_name(valkey, key), 5, text)
    before = await stored(valkey, key)
    assert await timelines.read(key, 10) is None
    assert await timelines.push([key], [4]) == 0
    assert not await timelines.finish(key, "t", 1, [1], 0)
    assert not await timelines.cover(key, "t", 0, 1, [1], 0)
    assert await stored(valkey, key) == before
    assert await timelines.create(key, "new", 0)
    assert await stored(valkey, key) == [b"building:0:0:new:1000"]
    assert await expires_at_ms(valkey, key) > 0


async def test_a_list_with_an_unknown_record_can_not_grow_for_ever(timelines: ValkeyTimelines, valkey: Valkey) -> None:
    key = home(1)
    await valkey.call("RPUSH", stored_name(valkey, key), 1, UNKNOWN_RECORD)
    await timelines.push([key], range(2, CAP + SLACK + 1))
    assert len(await stored(valkey, key)) == CAP + SLACK + 1
    await timelines.push([key], [100])
    assert await stored(valkey, key) == []


@pytest.mark.parametrize("token", ["", "a:b", "x" * 65, "é", "a\n"])
async def test_a_token_that_would_break_the_record_is_refused(
    timelines: ValkeyTimelines, valkey: Valkey, token: str
) -> None:
    with pytest.raises(ValueError, match="token"):
        await timelines.create(home(1), token, 0)
    with pytest.raises(ValueError, match="token"):
        await timelines.finish(home(1), token, 1, [], 0)
    with pytest.raises(ValueError, match="token"):
        await timelines.cover(home(1), token, 1, 2, [], 0)
    assert await stored(valkey, home(1)) == []


@pytest.mark.parametrize("number", [-1, 2**64])
async def test_numbers_that_are_no_uint64_are_refused(timelines: ValkeyTimelines, number: int) -> None:
    with pytest.raises(ValueError, match="64-bit"):
        await timelines.push([home(1)], [1, number])
    with pytest.raises(ValueError, match="64-bit"):
        await timelines.finish(home(1), "life", 1, [number], 0)
    with pytest.raises(ValueError, match="64-bit"):
        await timelines.finish(home(1), "life", 1, [], number)
    with pytest.raises(ValueError, match="64-bit"):
        await timelines.cover(home(1), "life", number, 1, [], 0)
    with pytest.raises(ValueError, match="64-bit"):
        await timelines.create(home(1), "life", number)


# ---- Reading -----------------------------------------------------------------------------------------


async def test_a_read_can_share_its_round_trip(timelines: ValkeyTimelines, valkey: Valkey) -> None:
    key = home(1)
    await make_ready(timelines, key, [1, 2, 3])
    commands = timelines.read_commands(key, 2)
    replies = await valkey.pipeline([*commands, ("ECHO", "version")], atomic=True)
    view = parse_view(replies[: len(commands)], 2)
    assert view is not None
    assert (view.ids, view.complete) == ([3, 2], False)
    assert replies[len(commands) :] == [b"version"]


async def test_reads_extend_a_life_once_an_hour(timelines: ValkeyTimelines, valkey: Valkey, clock: ManualClock) -> None:
    key = home(1)
    await make_ready(timelines, key, [1])

    async def is_extended_by_a_read() -> bool:
        await valkey.call("PEXPIRE", stored_name(valkey, key), 1_000_000)
        before = await expires_at_ms(valkey, key)
        await timelines.read(key, 1)
        return await expires_at_ms(valkey, key) > before

    assert await is_extended_by_a_read()
    assert not await is_extended_by_a_read()
    clock.ms += 3_599_000
    assert not await is_extended_by_a_read()
    clock.ms += 1_000
    assert await is_extended_by_a_read()


def test_a_hash_tag_is_fixed_for_ever_and_spreads_snowflakes() -> None:
    assert [hash_tag(viewer) for viewer in (0, 1, FIRST_SNOWFLAKE, 2**64 - 1)] == [0, 632, 77, 391]
    assert len({hash_tag(FIRST_SNOWFLAKE + (number << 22)) for number in range(10_000)}) == 1024


def test_every_stored_record_is_parsed_back() -> None:
    record = TailRecord(ListState.BUILDING, FIRST_SNOWFLAKE, 3, "life", 1_000)
    assert parse_record(render(record)) == record
