"""A real process is killed at each of the places where it would hurt; afterwards every walk is exact."""

import random
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cli.client import Client
from mesh import failpoints
from mesh.principals import OPERATOR, service
from mesh.valkey import Valkey
from starling.graph.v1 import graph_pb2
from tests.e2e.conftest import RunningMesh
from tests.e2e.ledger import Ledger, people
from tests.waiting import eventually

VICTIMS = {
    "between-store-writes": "tweet_svc",
    "after-outbox-row": "tweet_svc",
    "before-mark-published": "tweet_svc",
    "between-batches": "fanout_svc",
    "before-ack": "fanout_svc",
    "before-version-copy-deleted": "graph_svc",
    "in-drain": "fanout_svc-slow",
    "before-flush-finished": "tweet_svc",
}
ON_THE_WAY_OF_A_POST = list(VICTIMS)[:5]
THRESHOLD, HIGH_THRESHOLD = 5, 1_000


class Armed:
    """A mesh whose processes die where they are told to."""

    def __init__(self, mesh: RunningMesh, folder: Path) -> None:
        self.mesh = mesh
        self._folder = folder

    async def dies_at(self, name: str, act: Callable[[], Awaitable[object]]) -> None:
        """Act, and see the process killed there and brought back."""
        old_pid = self.mesh.pids[VICTIMS[name]]
        (self._folder / name).touch()
        await act()
        await eventually(lambda: not (self._folder / name).exists(), 30)
        await self.mesh.comes_back(VICTIMS[name], old_pid)


@pytest.fixture
def armed(tmp_path: Path) -> Iterator[Armed]:
    folder = tmp_path / "failpoints"
    folder.mkdir()
    running = RunningMesh(tmp_path / "data")
    settings = {
        "FAILPOINTS": str(folder),
        "BUCKET_SIZE": "4",
        "PULL_THRESHOLD": str(HIGH_THRESHOLD),
        "COUNTS_FLUSH_SECONDS": "0.5",
    }
    running.start(**{f"STARLING_{name}": value for name, value in settings.items()})
    try:
        yield Armed(running, folder)
        assert running.stop() == 0, running.log()[-5_000:]
    finally:
        running.destroy()


async def like_patiently(client: Client, user: int, tweet: int) -> None:
    async def likes() -> bool:
        try:
            await client.like(user, tweet)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False
        return True

    await eventually(likes, 30)


async def flush_is_over(mesh: RunningMesh) -> bool:
    valkey = Valkey(mesh.mesh.valkey_url)
    try:
        states = [await valkey.call("HGET", key, "flush") for key in await valkey.call("KEYS", "tweet_counts_taken:*")]
        return bool(states) and all(state.startswith(b"done:") for state in states)
    finally:
        await valkey.close()


def likes_stored(mesh: RunningMesh, tweet: int) -> int:
    with sqlite3.connect(mesh.folder.tweet_database) as connection:
        return int(connection.execute("SELECT likes FROM tweet_counts WHERE tweet_id = ?", (tweet,)).fetchone()[0])


async def set_threshold(client: Client, threshold: int) -> None:
    request = graph_pb2.UpdateFanoutPolicyRequest(policy=graph_pb2.FanoutPolicy(pull_threshold=threshold))
    await client.graph.UpdateFanoutPolicy(request, metadata=client.as_(OPERATOR), timeout=10)


async def follow_patiently(client: Client, ledger: Ledger, follower: int, followee: int) -> None:
    async def follows() -> bool:
        try:
            await client.follow(follower, followee)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False
        return True

    await eventually(follows, 30)
    ledger.follows.add((follower, followee))


@pytest.mark.timeout(300)
async def test_a_process_killed_at_any_failpoint_loses_nothing(armed: Armed) -> None:
    assert set(VICTIMS) == failpoints.NAMES
    chance = random.Random(3)
    async with armed.mesh.client() as client:
        ledger = await people(client)
        await ledger.every_walk_is_exact()  # Now everybody's list is made.
        for name in ON_THE_WAY_OF_A_POST:
            await armed.dies_at(name, lambda: ledger.write(chance))
        users = sorted(ledger.ids.values())
        pair = next((a, b) for a in users for b in users if a != b and (a, b) not in ledger.follows)
        await armed.dies_at("before-version-copy-deleted", lambda: follow_patiently(client, ledger, *pair))
        await ledger.comes_to_rest()

        tweet = min(ledger.posted)
        await armed.dies_at("before-flush-finished", lambda: like_patiently(client, users[0], tweet))
        await eventually(lambda: flush_is_over(armed.mesh), 30)
        assert likes_stored(armed.mesh, tweet) == 1

        author = max(users, key=lambda user: sum(followee == user for _, followee in ledger.follows))
        await pulled_for_long(client, author, ledger, chance)
        await armed.dies_at("in-drain", lambda: set_threshold(client, HIGH_THRESHOLD))
        await ledger.every_walk_is_exact()
        await eventually(lambda: mode_is(client, author, graph_pb2.AUTHOR_MODE_PUSH), 60)
        await ledger.comes_to_rest()


async def mode_of(client: Client, author: int) -> graph_pb2.GetAuthorModeResponse:
    request = graph_pb2.GetAuthorModeRequest(author_id=author)
    how: Any = {"metadata": client.as_(service("fanout_svc")), "timeout": 10}
    return await client.graph.GetAuthorMode(request, **how)


async def mode_is(client: Client, author: int, mode: graph_pb2.AuthorMode.ValueType) -> bool:
    return (await mode_of(client, author)).mode == mode


async def pulled_for_long(client: Client, author: int, ledger: Ledger, chance: random.Random) -> None:
    """The author is pulled, and posts what workers leave out of the lists."""
    await set_threshold(client, THRESHOLD)

    async def long_enough() -> bool:
        state = await mode_of(client, author)
        return state.mode == graph_pb2.AUTHOR_MODE_PULL and state.age_seconds > 20

    await eventually(long_enough, 40)
    for _ in range(5):
        await ledger.write(chance, author)
    await ledger.comes_to_rest()
