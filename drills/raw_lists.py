"""What a drill sees in the mesh's Valkey with its own eyes: home lists as they lie there, and the log's sub-tasks."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from drills.own_mesh import DrillError
from mesh.eventlog.topics import FANOUT_TASKS
from mesh.ids import time_ms_of
from mesh.timelines.port import ListState
from mesh.timelines.valkey import hash_tag, parse_record
from starling.event.v1 import event_pb2

_KEYS_AT_ONCE = 500
_POLL_SECONDS = 0.005
_NEWEST = 100
"""Entries in which an arrival is looked for: as many can't come between two looks."""


class RawLists:
    """Reads, and never writes."""

    def __init__(self, valkey_url: str) -> None:
        self._valkey: Any = Redis.from_url(valkey_url)

    async def close(self) -> None:
        """Let the connection go."""
        await self._valkey.aclose()

    async def _each(self, viewer_ids: Sequence[int], *command: str | int) -> list[Any]:
        """One command's reply for each viewer's list; its second word is the key."""
        replies: list[Any] = []
        for start in range(0, len(viewer_ids), _KEYS_AT_ONCE):
            pipeline = self._valkey.pipeline(transaction=False)
            for viewer_id in viewer_ids[start : start + _KEYS_AT_ONCE]:
                pipeline.execute_command(command[0], _key(viewer_id), *command[1:])
            replies += await pipeline.execute()
        return replies

    async def without(self, viewer_ids: Sequence[int]) -> list[int]:
        """Those of the viewers who have no finished list."""
        records = [parse_record(tail) if tail else None for tail in await self._each(viewer_ids, "LINDEX", -1)]
        return [
            viewer_id
            for viewer_id, record in zip(viewer_ids, records, strict=True)
            if record is None or record.state is not ListState.READY
        ]

    async def entries(self, viewer_ids: Sequence[int]) -> list[set[int]]:
        """The ids in each viewer's list."""
        return [set(map(int, elements[:-1])) for elements in await self._each(viewer_ids, "LRANGE", 0, -1)]

    async def arrived(self, expected: Sequence[tuple[int, int]]) -> list[bool]:
        """Of pairs of viewer and tweet: whether the tweet is among the newest of the viewer's list."""
        pipeline = self._valkey.pipeline(transaction=False)
        for viewer_id, tweet_id in expected:
            pipeline.execute_command("LPOS", _key(viewer_id), tweet_id, "MAXLEN", _NEWEST)
        return [position is not None for position in await pipeline.execute()]

    async def number_of_sub_tasks(self) -> int:
        """Sub-tasks ever published: the log keeps them until it is full, which a drill never makes it."""
        pipeline = self._valkey.pipeline(transaction=False)
        for partition in range(FANOUT_TASKS.partitions):
            pipeline.xlen(_stream(partition))
        return sum(await pipeline.execute())

    async def sub_tasks(self) -> list[tuple[int, event_pb2.TweetEvent]]:
        """Partition and event of each of them."""
        pipeline = self._valkey.pipeline(transaction=False)
        for partition in range(FANOUT_TASKS.partitions):
            pipeline.xrange(_stream(partition))
        return [
            (partition, event_pb2.TweetEvent.FromString(fields[b"v"]))
            for partition, entries in enumerate(await pipeline.execute())
            for _, fields in entries
        ]


def _key(viewer_id: int) -> str:
    return f"timeline:{{{hash_tag(viewer_id)}}}:{viewer_id}"


def _stream(partition: int) -> str:
    return f"log:{FANOUT_TASKS.name}:{partition}"


class Arrivals:
    """How long tweets take from their id's time to a follower's list, seconds, by tweet.

    From the id: it is made when the post is taken in, before it is stored, so this is the whole way. To the list: it
    is looked at every 5 ms, so a figure is up to 5 ms too large, and more when the machine has no time for the drill.
    Workers' own figures would be exact, but mix all authors.
    """

    def __init__(self, lists: RawLists) -> None:
        self._lists = lists
        self._expected: dict[int, int] = {}
        self.delays: dict[int, float] = {}

    def expect(self, viewer_id: int, tweet_id: int) -> None:
        """Watch for a tweet in one of its readers' lists."""
        self._expected[tweet_id] = viewer_id

    @asynccontextmanager
    async def watched(self, patience_seconds: float) -> AsyncIterator[None]:
        """Watch during the block, and after it until everything has arrived. Raises DrillError when it doesn't."""
        watching = asyncio.create_task(self._watch())
        try:
            yield
            end = time.monotonic() + patience_seconds
            while self._expected and not watching.done():
                if time.monotonic() > end:
                    raise DrillError(f"{len(self._expected)} tweets don't arrive within {patience_seconds:.0f} s")
                await asyncio.sleep(_POLL_SECONDS)
            if watching.done():
                watching.result()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        while True:  # Until it is cancelled.
            await asyncio.sleep(_POLL_SECONDS)
            expected = [(viewer_id, tweet_id) for tweet_id, viewer_id in self._expected.items()]
            if not expected:
                continue
            arrived = await self._lists.arrived(expected)
            now_ms = time.time() * 1_000
            for (_, tweet_id), here in zip(expected, arrived, strict=True):
                if here:
                    self.delays[tweet_id] = max(0.0, now_ms - time_ms_of(tweet_id)) / 1_000
                    del self._expected[tweet_id]
