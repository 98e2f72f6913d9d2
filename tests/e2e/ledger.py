"""What a client was told, while processes die: the model of an end-to-end test."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc

from cli.client import Client
from cli.importing import import_graph
from tests.waiting import eventually

PEOPLE = 30
FOLLOWS_EACH = 8
WRITERS = 4
POSTS_BETWEEN_FAULTS = 60


class Ledger:
    """What the client was told: posts acknowledged, and whether a read failed."""

    def __init__(self, client: Client, ids: dict[str, int], edges: list[tuple[int, int]]) -> None:
        self.client = client
        self.ids = ids
        self.posted: dict[int, int] = {}
        self.follows = {(ids[f"u{a}"], ids[f"u{b}"]) for a, b in edges}
        self.read_errors = 0
        self.reads = 0
        self.attempts = 0

    def home(self, user: int) -> list[int]:
        near = {user} | {followee for follower, followee in self.follows if follower == user}
        return sorted((tweet for tweet, author in self.posted.items() if author in near), reverse=True)

    async def write(self, chance: random.Random, author: int = 0) -> None:
        """Post as a careful client does: again with the same request id until it is acknowledged."""
        author = author or chance.choice(sorted(self.ids.values()))
        request_id = f"{chance.getrandbits(128):032x}"
        request_id = "-".join([request_id[:8], request_id[8:12], request_id[12:16], request_id[16:20], request_id[20:]])
        text = f"post {len(self.posted)}"  # The same in each attempt, or the request id would be used for another.
        for _ in range(100):
            self.attempts += 1
            with suppress(grpc.aio.AioRpcError):
                made = await self.client.post(author, text, request_id=request_id)
                assert self.posted.setdefault(made.tweet.tweet_id, author) == author
                return
        raise AssertionError("a post isn't acknowledged after 100 attempts")

    async def read(self, chance: random.Random) -> None:
        """A page holds what its viewer may see, descending; a tweet of others may still be on its way."""
        viewer = chance.choice(sorted(self.ids.values()))
        self.reads += 1
        try:
            page = await self.client.home_page(viewer, 20)
        except grpc.aio.AioRpcError:
            self.read_errors += 1
            return
        shown = [item.tweet.tweet_id for item in page.items]
        assert shown == sorted(set(shown), reverse=True)

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Writers and readers, for as long as the block lasts."""
        ending = asyncio.Event()

        async def work(number: int) -> None:
            chance = random.Random(number)
            while not ending.is_set():
                await self.write(chance)
                await self.read(chance)

        async with asyncio.TaskGroup() as group:
            for number in range(WRITERS):
                group.create_task(work(number))
            try:
                yield
            finally:
                ending.set()

    async def more_posts(self) -> None:
        target = len(self.posted) + POSTS_BETWEEN_FAULTS
        await eventually(lambda: len(self.posted) >= target, 60)

    async def every_walk_is_exact(self) -> None:
        for user in self.ids.values():
            walk = [item.tweet.tweet_id async for item in self.client.walk_home(user)]
            assert walk == self.home(user)

    async def is_exact(self) -> bool:
        """Whether every walk is, now."""
        for user in self.ids.values():
            if [item.tweet.tweet_id async for item in self.client.walk_home(user)] != self.home(user):
                return False
        return True

    async def drained(self) -> None:
        async def empty() -> bool:
            with suppress(grpc.aio.AioRpcError):
                status, *_ = await self.client.fanout_status()
                return not any(partition.lag_messages for partition in status.partitions)
            return False

        await eventually(empty, 60)


async def people(client: Client) -> Ledger:
    chance = random.Random(7)
    edges = [(a, b) for a in range(PEOPLE) for b in chance.sample(range(PEOPLE), FOLLOWS_EACH) if a != b]
    report = await import_graph(client, edges)
    return Ledger(client, report.user_ids, edges)
