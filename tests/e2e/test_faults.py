"""Processes die under load: what was acknowledged stays, by a ledger on the client's side, and every walk is exact."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest

from cli.client import Client
from cli.importing import import_graph
from tests.e2e.conftest import RunningMesh
from tests.waiting import eventually

PEOPLE = 30
FOLLOWS_EACH = 8
WRITERS = 4
POSTS_BETWEEN_FAULTS = 60


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[RunningMesh]:
    running = RunningMesh(tmp_path / "data")
    running.start()
    try:
        yield running
        assert running.stop() == 0, running.log()[-5_000:]
    finally:
        running.destroy()


class Ledger:
    """What the client was told: posts acknowledged, and whether a read failed."""

    def __init__(self, client: Client, ids: dict[str, int], edges: list[tuple[int, int]]) -> None:
        self.client = client
        self.ids = ids
        self.edges = edges
        self.posted: dict[int, int] = {}
        self.read_errors = 0
        self.reads = 0
        self.attempts = 0

    def home(self, user: int) -> list[int]:
        label = next(int(handle[1:]) for handle, user_id in self.ids.items() if user_id == user)
        near = {user} | {self.ids[f"u{b}"] for a, b in self.edges if a == label}
        return sorted((tweet for tweet, author in self.posted.items() if author in near), reverse=True)

    async def write(self, chance: random.Random) -> None:
        """Post as a careful client does: again with the same request id until it is acknowledged."""
        author = chance.choice(sorted(self.ids.values()))
        request_id = f"{chance.getrandbits(128):032x}"
        request_id = "-".join([request_id[:8], request_id[8:12], request_id[12:16], request_id[16:20], request_id[20:]])
        for _ in range(100):
            self.attempts += 1
            with suppress(grpc.aio.AioRpcError):
                made = await self.client.post(author, f"post {len(self.posted)}", request_id=request_id)
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

    async def drained(self) -> None:
        async def empty() -> bool:
            with suppress(grpc.aio.AioRpcError):
                (status,) = await self.client.fanout_status()
                return not any(partition.lag_messages for partition in status.partitions)
            return False

        await eventually(empty, 60)


async def people(client: Client) -> Ledger:
    chance = random.Random(7)
    edges = [(a, b) for a in range(PEOPLE) for b in chance.sample(range(PEOPLE), FOLLOWS_EACH) if a != b]
    report = await import_graph(client, edges)
    return Ledger(client, report.user_ids, edges)


@pytest.mark.timeout(300)
async def test_processes_killed_under_load_lose_nothing(mesh: RunningMesh) -> None:
    async with mesh.client() as client:
        ledger = await people(client)
        async with ledger.load():
            for victim in ("fanout_svc", "timeline_svc", "valkey", "tweet_svc", "graph_svc", "valkey"):
                await ledger.more_posts()
                old_pid = mesh.kill(victim)
                await mesh.comes_back(victim, old_pid)
            await ledger.more_posts()
        await ledger.drained()
        await ledger.every_walk_is_exact()
        print(
            f"\nposts acknowledged {len(ledger.posted)} ({ledger.attempts} attempts), lost 0;"
            f" reads {ledger.reads}, failed while timeline_svc or a store was dead {ledger.read_errors}"
        )


@pytest.mark.timeout(300)
async def test_with_valkey_down_posts_succeed_and_reads_are_right(mesh: RunningMesh) -> None:
    async with mesh.client() as client:
        ledger = await people(client)
        chance = random.Random(1)
        for _ in range(20):
            await ledger.write(chance)
        await ledger.drained()
        await ledger.every_walk_is_exact()
        os.kill(mesh.pids["valkey"], signal.SIGSTOP)  # It hangs: worse than if it were gone.
        attempts = ledger.attempts
        for _ in range(20):
            await ledger.write(chance)
        assert ledger.attempts == attempts + 20, "no post fails"
        await ledger.every_walk_is_exact()  # Nothing is in flight for a reader of the stores.
        os.kill(mesh.pids["valkey"], signal.SIGCONT)
        await ledger.drained()
        await ledger.every_walk_is_exact()
