"""Timelines in Valkey (or Redis >= 7): one list a timeline, changed by the functions in `timelines.lua`.

Layout: decimal ids, newest first, then, last, the tail record `state:floor:version:token:lease_until_ms`.
Reads are plain commands in a MULTI, which cost a third of a read function; the functions are for what must
look before it writes. `tests/timelines_reference.py` says in a few lines of Python what they do.
"""

import importlib.resources
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise
from typing import Any

from mesh.clock import Clock
from mesh.timelines.port import ListKey, ListKind, ListState, ListView, TailRecord
from mesh.valkey import Call, Command, Valkey, chunks

log = logging.getLogger(__name__)

LIBRARY = importlib.resources.files(__package__).joinpath("timelines.lua").read_text("utf-8")

# A function blocks its server while it runs. These make it about 2 ms for new ids (3-4 us a list, 1 us for each
# further id), and 50 ms at the very worst: 1,024 ids that all arrive late and belong to the ends of full lists.
_KEYS_PER_CALL_MAX = 512
_IDS_PER_CALL_MAX = 64
_INSERTS_PER_CALL_MAX = 1024
# Bounds what a round trip holds in memory on both sides (4 calls: about 100 KB); more wouldn't be faster,
# since the server is busy throughout, and other clients get their turn between the calls.
_FULL_CALLS_PER_ROUND_TRIP_MAX = 4
# About 1 MB of replies.
_LISTS_PER_ROUND_TRIP_MAX = 64
# Read and written by one merge; about half a microsecond each.
_MERGE_ELEMENTS_PER_CALL_MAX = 8192
assert _IDS_PER_CALL_MAX <= _INSERTS_PER_CALL_MAX

_TOUCH_INTERVAL_SECONDS = 3600
_TOUCHES_MAX = 65_536

_UINT64_END = 1 << 64
_NUMBER = rb"(0|[1-9][0-9]{0,19})"
_RECORD = re.compile(rb"(building|ready):%b:%b:([A-Za-z0-9_-]{1,64}):%b" % (_NUMBER, _NUMBER, _NUMBER), flags=re.ASCII)
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}", flags=re.ASCII)

# 2^64 divided by the golden ratio: spreads neighbouring numbers evenly. Fixed for ever, like the shift.
_HASH_FACTOR = 0x9E3779B97F4A7C15
_TAG_BITS = 10


def hash_tag(viewer_id: int) -> int:
    """The Cluster hash tag of a viewer's home list, 0 … 1023 (Knuth's multiplicative hashing).

    A Snowflake's low bits are nearly constant, so they can't be the tag themselves.
    """
    return (viewer_id * _HASH_FACTOR % _UINT64_END) >> (64 - _TAG_BITS)


def parse_record(text: bytes) -> TailRecord | None:
    """A tail record from its stored form; None for anything that this release doesn't know."""
    match = _RECORD.fullmatch(text)
    if match is None:
        return None
    state, floor, version, token, lease = match.groups()
    return TailRecord(ListState(state.decode()), int(floor), int(version), token.decode(), int(lease))


def parse_view(replies: Sequence[Any], count: int) -> ListView | None:
    """The view in the replies to `ValkeyTimelines.read_commands(key, count)`; None: no list that we know.

    One that breaks what the functions promise (entries strictly descend, none is below the floor) is none.
    """
    elements, tail = replies[0], replies[1]
    record = parse_record(tail) if tail is not None else None
    if record is None:
        return None
    # One element more than the entries asked for: the record, or an entry that shows that more follow.
    complete = bool(elements[-1] == tail)
    assert complete or len(elements) == count + 1
    try:
        ids = [int(element) for element in elements[:-1]]
        in_order = all(newer > older for newer, older in pairwise(ids))
    except ValueError:
        ids, in_order = [], False
    if not in_order or (ids and ids[-1] < record.floor):
        log.error("a list breaks its own rules; it counts as missing: %s", record)
        return None
    return ListView(ids, record, complete)


class ValkeyTimelines:
    """The Timelines port on one server. `valkey` must have been given `LIBRARY` among its libraries.

    `ttl_seconds`: how long a list lives after its last read. Pass one instance to all who share a client.
    """

    def __init__(
        self, valkey: Valkey, clock: Clock, *, cap: int = 800, slack: int = 33, ttl_seconds: int = 30 * 86400
    ) -> None:
        assert cap >= 1
        assert slack >= 0
        assert ttl_seconds > _TOUCH_INTERVAL_SECONDS, "a list that is read must not expire between touches"
        self.cap = cap
        self._slack = slack
        self._ttl_seconds = ttl_seconds
        self._valkey = valkey
        self._clock = clock
        # When this process last extended which list (monotonic seconds), the oldest first. Forgetting one,
        # here or in a restart, costs an EXPIRE; remembering one that died is right too: create sets the TTL.
        self._touches: OrderedDict[str, float] = OrderedDict()

    async def read(self, key: ListKey, count: int) -> ListView | None:
        """See the port."""
        replies = await self._valkey.pipeline(self.read_commands(key, count), atomic=True)
        return parse_view(replies, count)

    async def read_many(self, keys: Sequence[ListKey], count: int) -> list[ListView | None]:
        """See the port. A bounded number of lists in a round trip, all in one view."""
        views: list[ListView | None] = []
        for some in chunks(keys, _LISTS_PER_ROUND_TRIP_MAX):
            commands = [self.read_commands(key, count) for key in some]
            replies = await self._valkey.pipeline([one for each in commands for one in each], atomic=True)
            for each in commands:
                views.append(parse_view(replies[: len(each)], count))
                replies = replies[len(each) :]
        return views

    async def bounds(self, keys: Sequence[ListKey]) -> list[int | None]:
        """See the port."""
        names = [self._name(key) for key in keys]
        found: dict[str, Any] = {}
        calls = [("timeline_bounds_v1", some, ()) for some in self._valkey.batches(names, _KEYS_PER_CALL_MAX)]
        for several in _round_trips(calls, _KEYS_PER_CALL_MAX):
            for (_, some, _), reply in zip(several, await self._valkey.fcalls(several), strict=True):
                found.update(zip(some, reply, strict=True))
        return [int(bound) if (bound := found[name]) else None for name in names]

    def read_commands(self, key: ListKey, count: int) -> list[Command]:
        """The commands of one read, for a caller who has more to ask in the same round trip.

        Send them together and `atomic`, or entries and record may be of different moments; give their
        replies, in order, to `parse_view`. Two commands, and a third when the list's life is to be extended,
        which counts as done from then on.
        """
        assert count >= 0
        name = self._name(key)
        commands: list[Command] = [("LRANGE", name, 0, count), ("LINDEX", name, -1)]
        if self._note_touch(name):
            commands.append(("EXPIRE", name, self._ttl_seconds))
        return commands

    async def push(self, keys: Sequence[ListKey], ids: Sequence[int]) -> int:
        """See the port. Older ids go first, since a list takes newer ones than its head at the least cost."""
        names = [self._name(key) for key in keys]
        ordered = _ascending(ids)
        existing = await self._push_pass(names, ordered[:_IDS_PER_CALL_MAX])
        for some in chunks(ordered[_IDS_PER_CALL_MAX:], _IDS_PER_CALL_MAX):
            await self._push_pass(names, some)
        return existing

    async def _push_pass(self, names: Sequence[str], ids: Sequence[int]) -> int:
        """Push a few ids into all lists; how many of them exist."""
        assert len(ids) <= _IDS_PER_CALL_MAX
        keys_max = min(_KEYS_PER_CALL_MAX, _INSERTS_PER_CALL_MAX // max(1, len(ids)))
        args = (self.cap, self._slack, *ids)
        calls = [("timeline_push_v1", batch, args) for batch in self._valkey.batches(names, keys_max)]
        existing = 0
        for some in _round_trips(calls, keys_max):
            existing += sum(await self._valkey.fcalls(some))
        assert existing <= len(names)
        return existing

    async def create(self, key: ListKey, token: str, lease_ms: int) -> bool:
        """See the port. `token`: 1 to 64 of A-Z a-z 0-9 _ - (ValueError otherwise)."""
        _check_token(token)
        now_ms = self._clock.now_ms()
        _check_uint64(now_ms, lease_ms)
        return await self._change("create", key, token, now_ms + lease_ms, now_ms, self._ttl_seconds)

    async def finish(self, key: ListKey, token: str, version: int, ids: Sequence[int], down_to: int) -> bool:
        """See the port."""
        _check_token(token)
        _check_uint64(version, down_to)
        return await self._change("finish", key, token, version, down_to, self.cap, *self._newest(ids))

    async def cover(
        self,
        key: ListKey,
        token: str,
        from_version: int,
        to_version: int,
        ids: Sequence[int],
        down_to: int,
    ) -> bool:
        """See the port."""
        _check_token(token)
        _check_uint64(from_version, to_version, down_to)
        newest = self._newest(ids)
        return await self._change("cover", key, token, from_version, to_version, down_to, self.cap, *newest)

    async def merge(self, keys: Sequence[ListKey], ids: Sequence[int], down_to: int) -> int:
        """See the port. A few lists a call: each is written anew."""
        _check_uint64(down_to)
        newest = self._newest(ids)
        keys_max = max(1, _MERGE_ELEMENTS_PER_CALL_MAX // (self.cap + len(newest)))
        args = (down_to, self.cap, *newest)
        names = [self._name(key) for key in keys]
        calls = [("timeline_merge_v1", batch, args) for batch in self._valkey.batches(names, keys_max)]
        existing = 0
        for some in _round_trips(calls, keys_max):
            existing += sum(await self._valkey.fcalls(some))
        return existing

    async def walk(self) -> AsyncIterator[Sequence[tuple[ListKey, Sequence[int]]]]:
        """See the port."""
        prefix = self._valkey.key_prefix
        for kind, pattern in ((ListKind.HOME, f"{prefix}timeline:*"), (ListKind.AUTHOR, f"{prefix}user_tweets:*")):
            async for names in self._valkey.scan(pattern):
                for some in chunks(names, _LISTS_PER_ROUND_TRIP_MAX):
                    replies = await self._valkey.pipeline([("LRANGE", name, 0, -2) for name in some])
                    owners = (int(name.rpartition(":")[2]) for name in some)
                    yield [
                        (ListKey(kind, owner), [int(entry) for entry in entries])
                        for owner, entries in zip(owners, replies, strict=True)
                    ]

    async def remove(self, key: ListKey, ids: Sequence[int]) -> int:
        """See the port. The record stays, so the list does."""
        _check_uint64(*ids)
        name = self._name(key)
        removed = await self._valkey.pipeline([("LREM", name, 1, tweet_id) for tweet_id in ids])
        return sum(removed)

    async def drop(self, key: ListKey) -> None:
        """See the port."""
        await self._valkey.call("DEL", self._name(key))

    async def _change(self, function: str, key: ListKey, *args: str | int) -> bool:
        return bool(await self._valkey.fcall(f"timeline_{function}_v1", [self._name(key)], *args))

    def _newest(self, ids: Sequence[int]) -> list[int]:
        """The ids, ascending, that a list can keep, and one more, which tells the function of a cut."""
        return _ascending(ids)[-(self.cap + 1) :]

    def _name(self, key: ListKey) -> str:
        if key.kind is ListKind.HOME:
            return f"{self._valkey.key_prefix}timeline:{{{hash_tag(key.owner)}}}:{key.owner}"
        return f"{self._valkey.key_prefix}user_tweets:{key.owner}"

    def _note_touch(self, name: str) -> bool:
        """Whether the list's life is to be extended now; if so, it is noted as done."""
        now = self._clock.monotonic()
        last = self._touches.get(name)
        if last is not None and now - last < _TOUCH_INTERVAL_SECONDS:
            return False
        self._touches[name] = now
        self._touches.move_to_end(name)
        if len(self._touches) > _TOUCHES_MAX:
            self._touches.popitem(last=False)
        return True


def _round_trips(calls: Sequence[Call], keys_max: int) -> Iterator[Sequence[Call]]:
    """The calls in groups, each of no more keys than so many full calls have."""
    some: list[Call] = []
    keys = 0
    for call in calls:
        if some and keys + len(call[1]) > keys_max * _FULL_CALLS_PER_ROUND_TRIP_MAX:
            yield some
            some, keys = [], 0
        some.append(call)
        keys += len(call[1])
    if some:
        yield some


def _ascending(ids: Sequence[int]) -> list[int]:
    """Each id once, in the order that the functions ask for."""
    ordered = sorted(set(ids))
    if ordered:
        _check_uint64(ordered[0], ordered[-1])
    return ordered


def _check_uint64(*numbers: int) -> None:
    """Anything else would end up in a list as text that no function can compare."""
    for number in numbers:
        if not 0 <= number < _UINT64_END:
            raise ValueError(f"not an unsigned 64-bit number: {number}")


def _check_token(token: str) -> None:
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"not a life's token (1 to 64 of A-Z a-z 0-9 _ -): {token!r}")
