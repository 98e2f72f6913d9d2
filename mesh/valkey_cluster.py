"""A client for a Valkey cluster, as `mesh.valkey.Valkey` is for one server.

Each command goes to the node that has its key's slot; those of a round trip that go to one node go together. What a
node says of slots that move (MOVED, ASK, TRYAGAIN) is followed; when a node is gone, the others are asked who has its
slots. All of it within a bound: then it's UnavailableError, and readers take the stores.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice
from typing import Any

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import ResponseError

from mesh.errors import UnavailableError
from mesh.valkey import Call, Command, Valkey, chunks, function_is_missing, raise_first

SCHEME = "valkey-cluster://"
_ROUNDS_MAX = 5
"""How often a command is sent at most: its slot may have moved, and its function be missing there."""
_LOOK_AGAIN_SECONDS = 0.2
"""Nodes aren't asked more often who has which slots."""
_ONE_BY_ONE = {"MGET": "GET", "DEL": "DEL"}
"""Commands of many keys, whose keys may have different slots, and what does the same for one key."""


class _Unit:
    """Commands that go together, since they are one view of one slot. `asked`: the node to turn to once, since the slot
    is on its way there. `between`: some of its keys are here, and some there."""

    def __init__(self, slot: int, commands: Sequence[Command]) -> None:
        self.slot = slot
        self.commands = commands
        self.replies: list[Any] = []
        self.asked = ""
        self.between = False

    def wire(self) -> list[Command]:
        """What is sent."""
        whole = [("MULTI",), *self.commands, ("EXEC",)] if len(self.commands) > 1 else list(self.commands)
        return [("ASKING",), *whole] if self.asked else whole

    def take(self, replies: Sequence[Any]) -> ResponseError | None:
        """Keep what came back; the first error of it."""
        own = list(replies[1:] if self.asked else replies)
        self.asked = ""
        error = next((reply for reply in own if isinstance(reply, ResponseError)), None)
        if error is not None:
            self.replies = [error] * len(self.commands)
        else:
            self.replies = own[-1] if len(self.commands) > 1 else own
        return error


class ValkeyCluster(Valkey):
    """`url`: `valkey-cluster://[user:password@]host:port,…`, where some of the nodes are."""

    def __init__(
        self, url: str, *, key_prefix: str = "", timeout_seconds: float = 1.0, libraries: Sequence[str] = ()
    ) -> None:
        super().__init__(url, key_prefix=key_prefix, timeout_seconds=timeout_seconds, libraries=libraries)
        login, at, addresses = url.removeprefix(SCHEME).rpartition("@")
        self._login = login + at
        self._seeds = addresses.split(",")
        self._nodes: dict[str, Valkey] = {}
        self._owners: list[str] = []
        self._looking: asyncio.Task[None] | None = None
        self._looked = float("-inf")

    def run_id_of(self, key: str) -> str:
        """Of the process that has the key; empty: not known yet."""
        return self._node(self._owners[_slot_of(key)]).run_id if self._owners else ""

    async def life(self) -> str:
        """The processes that have the slots: a replica that takes over may lack its master's last moments."""
        if not self._owners or not all(self._node(address).is_connected for address in set(self._owners)):
            await self.ping()
        return " ".join(sorted(self.life_of_nodes().values()))

    def life_of_nodes(self) -> dict[str, str]:
        """The `run_id` of each known master, by its address."""
        return {address: self._node(address).run_id for address in dict.fromkeys(self._owners)}

    def batches(self, keys: Sequence[str], size: int) -> Iterator[Sequence[str]]:
        """By slot."""
        by_slot = defaultdict[int, list[str]](list)
        for key in keys:
            by_slot[_slot_of(key)].append(key)
        for some in by_slot.values():
            yield from chunks(some, size)

    async def pipeline(self, commands: Sequence[Command], *, atomic: bool = False) -> list[Any]:
        """Many commands in one round trip to each node; `atomic`: those of one slot are one view."""
        parts = [_parts(command) for command in commands]
        slots = [_slot_of(part[1]) for some in parts for part in some]
        singles = [part for some in parts for part in some]
        places = defaultdict[int, list[int]](list)
        for place, slot in enumerate(slots):
            places[slot if atomic else place].append(place)
        units = [_Unit(slots[some[0]], [singles[place] for place in some]) for some in places.values()]
        await self._run(units)
        replies: list[Any] = [None] * len(singles)
        for unit, some in zip(units, places.values(), strict=True):
            for place, reply in zip(some, unit.replies, strict=True):
                replies[place] = reply
        raise_first(replies)
        left = iter(replies)
        return [_joined(command, list(islice(left, len(some)))) for command, some in zip(commands, parts, strict=True)]

    async def scan(self, pattern: str) -> AsyncIterator[list[str]]:
        """On all masters that are known, one after the other."""
        await self._know_owners()
        for address in dict.fromkeys(self._owners):
            async for names in self._node(address).scan(pattern):
                yield names

    async def fcalls(self, calls: Sequence[Call]) -> list[Any]:
        """See Valkey. Where a call's keys are between two nodes, it is made for each by itself: replies are numbers to
        be added, or lists to be joined."""
        units = [_Unit(_slot_of(keys[0]), [("FCALL", name, len(keys), *keys, *args)]) for name, keys, args in calls]
        await self._run(units)
        for unit, (name, keys, args) in zip(units, calls, strict=True):
            if unit.between and len(keys) > 1:
                unit.replies = [_sum(await self.fcalls([(name, [key], args) for key in keys]))]
        replies = [unit.replies[0] for unit in units]
        raise_first(replies)
        return replies

    async def load(self) -> None:
        """To all masters that are known."""
        await self._know_owners()
        await asyncio.gather(*(self._node(address).load() for address in sorted(set(self._owners))))

    async def ping(self) -> None:
        """Raises UnavailableError unless all slots are served."""
        await self._look_around()
        await asyncio.gather(*(self._node(address).ping() for address in sorted(set(self._owners))))

    async def close(self) -> None:
        """Close all connections."""
        if self._looking:
            self._looking.cancel()
        await asyncio.gather(*(node.close() for node in self._nodes.values()))

    async def call_blocking(self, *command: str | bytes | int | float) -> Any:
        """Only a log waits in a server, and a cluster holds none: the configuration sees to that."""
        raise TypeError("a cluster holds no log")

    # ---- Sending -----------------------------------------------------------------------------------------

    async def _run(self, units: Sequence[_Unit]) -> None:
        """Send them until each has its replies, which may be errors that concern the command."""
        waiting = list(units)
        for _ in range(_ROUNDS_MAX):
            await self._know_owners()
            by_node = defaultdict[str, list[_Unit]](list)
            for unit in waiting:
                by_node[unit.asked or self._owners[unit.slot]].append(unit)
            outcomes = await asyncio.gather(*(self._send(address, some) for address, some in by_node.items()))
            waiting = [unit for again in outcomes for unit in again]
            if not waiting:
                return
        raise UnavailableError("Valkey's slots are on their way.", reason="VALKEY_UNAVAILABLE")

    async def _send(self, address: str, units: Sequence[_Unit]) -> list[_Unit]:
        """Returns those that are to be sent again. Raises UnavailableError."""
        node = self._node(address)
        try:
            replies = iter(await node.replies([command for unit in units for command in unit.wire()]))
        except UnavailableError:
            await self._look_around()
            for unit in units:
                unit.asked = ""
            if any(self._owners[unit.slot] == address for unit in units):
                raise
            return list(units)
        again: list[_Unit] = []
        missing = False
        for unit in units:
            error = unit.take(list(islice(replies, len(unit.wire()))))
            if error is None:
                continue
            kind, *rest = str(error).split()
            if kind in {"MOVED", "ASK"}:
                self._follow(unit, kind, rest[-1], address)
            elif kind == "TRYAGAIN":
                unit.between = True
                continue
            elif function_is_missing(error):
                missing = True
            else:
                continue
            again.append(unit)
        if missing:
            await node.load()
        return again

    def _follow(self, unit: _Unit, kind: str, to: str, told_by: str) -> None:
        host, _, port = to.rpartition(":")
        address = f"{host or told_by.rpartition(':')[0]}:{port}"  # A node may leave out its host when it's its own.
        if kind == "MOVED":
            self._owners[unit.slot] = address
        elif len(unit.commands) == 1:
            unit.asked = address
        else:
            raise UnavailableError("Valkey's slots are on their way.", reason="VALKEY_UNAVAILABLE")

    # ---- Who has which slots -----------------------------------------------------------------------------

    def _node(self, address: str) -> Valkey:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = Valkey(
                f"redis://{self._login}{address}/0", timeout_seconds=self._timeout_seconds, libraries=self._libraries
            )
        return node

    async def _know_owners(self) -> None:
        if not self._owners:
            await self._look_around()
            if not self._owners:
                raise UnavailableError("No node of Valkey's cluster answers.", reason="VALKEY_UNAVAILABLE")

    async def _look_around(self) -> None:
        """Ask the nodes, in turn, until one tells; who asks meanwhile waits for the same. Raises nothing."""
        if time.monotonic() - self._looked < _LOOK_AGAIN_SECONDS:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._learn_owners())
        await asyncio.shield(self._looking)

    async def _learn_owners(self) -> None:
        for address in dict.fromkeys([*self._owners, *self._seeds]):
            try:
                told = await self._node(address).call("CLUSTER", "SLOTS")
            except (UnavailableError, ResponseError):
                continue
            owners = [""] * REDIS_CLUSTER_HASH_SLOTS
            for first, last, (host, port, *_), *_ in told:
                name = host.decode() or address.rpartition(":")[0]
                owners[first : last + 1] = [f"{name}:{port}"] * (last - first + 1)
            if all(owners):
                self._owners = owners
                self._looked = time.monotonic()
                return
        self._looked = time.monotonic()


def connect_to(url: str, *, key_prefix: str = "", libraries: Sequence[str] = ()) -> Valkey:
    """A client for one server or for a cluster, as the URL says."""
    kind = ValkeyCluster if url.startswith(SCHEME) else Valkey
    return kind(url, key_prefix=key_prefix, libraries=libraries)


def _slot_of(key: str | bytes | int | float) -> int:
    return int(key_slot(key if isinstance(key, bytes) else str(key).encode()))


def _parts(command: Command) -> list[Command]:
    """The command for each key by itself, where its keys may be anywhere."""
    name = _ONE_BY_ONE.get(str(command[0]))
    return [(name, key) for key in command[1:]] if name else [command]


def _joined(command: Command, replies: list[Any]) -> Any:
    match command[0]:
        case "MGET":
            return replies
        case "DEL":
            return sum(replies)
        case _:
            return replies[0]


def _sum(replies: Sequence[Any]) -> Any:
    return sum(replies) if isinstance(replies[0], int) else [one for reply in replies for one in reply]
