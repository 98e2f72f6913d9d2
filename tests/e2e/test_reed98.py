"""The main job on a real social graph: everybody posts, and everybody reads their exact home timeline.

The graph is Reed98: 962 accounts, 18,812 friendships, so 37,624 follows. It is real processes, started as people do.
"""

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from cli.client import Client
from cli.importing import EdgeFile, handle_of, import_graph
from starling.fanout.v1 import fanout_pb2
from tests.e2e.conftest import RunningMesh
from tests.shared_data import shared_path
from tests.waiting import eventually

ACCOUNTS, FOLLOWS = 962, 37_624
TWEETS_EACH = 5
CALLS_AT_ONCE = 32
BIGGEST, BIGGEST_FOLLOWERS, ITS_HOME = 678, 313, 1_570

# The call matrix: who calls whom by which RPC, as the README shows it.
CALL_MATRIX = {
    ("operator", "graph.CreateUser"),
    ("operator", "graph.ImportFollows"),
    ("user", "tweet.CreateTweet"),
    ("user", "timeline.ListHomeTimeline"),
    ("operator", "fanout.GetFanoutStatus"),
    ("service:tweet_svc", "graph.BatchGetUsers"),
    ("service:fanout_svc", "graph.StreamFollowers"),
    ("service:timeline_svc", "graph.GetViewerContext"),
    ("service:timeline_svc", "graph.BatchGetUsers"),
    ("service:timeline_svc", "tweet.HydrateTweets"),
    ("service:timeline_svc", "tweet.StreamAuthorTweets"),
}

T = TypeVar("T")


@pytest.fixture
def reed98() -> Path:
    return shared_path("datasets/socfb-Reed98.edges")


@pytest.fixture
def noisy_mesh(tmp_path: Path) -> Iterator[RunningMesh]:
    """A mesh that logs each call."""
    mesh = RunningMesh(tmp_path / "data")
    mesh.start(STARLING_LOG_REQUESTS="1")
    try:
        yield mesh
        assert mesh.stop() == 0, mesh.log()[-5_000:]
    finally:
        mesh.destroy()


async def for_each(things: Iterable[T], act: Callable[[T], Awaitable[None]]) -> None:
    """With bounded concurrency."""
    waiting = iter(things)

    async def work() -> None:
        for thing in waiting:
            await act(thing)

    async with asyncio.TaskGroup() as group:
        for _ in range(CALLS_AT_ONCE):
            group.create_task(work())


class People:
    """The accounts, and the model computed from the edge file: who follows whom, who posted what."""

    def __init__(self, client: Client, edges: EdgeFile, ids: dict[str, int]) -> None:
        self.client = client
        self.ids = {label: ids[handle_of(label)] for edge in edges for label in edge}
        self.followees: dict[int, set[int]] = defaultdict(set)
        for follower, followee in edges:
            self.followees[follower].add(followee)
        self.tweets: dict[int, list[int]] = defaultdict(list)

    async def all_post(self, times: int) -> None:
        async def post(label: int) -> None:
            for number in range(times):
                made = await self.client.post(self.ids[label], f"tweet {number} of {handle_of(label)}")
                self.tweets[label].append(made.tweet.tweet_id)

        await for_each(self.ids, post)

    def home(self, label: int) -> list[int]:
        authors = self.followees[label] | {label}
        return sorted((tweet for author in authors for tweet in self.tweets[author]), reverse=True)

    async def walk(self, label: int) -> list[int]:
        return [item.tweet.tweet_id async for item in self.client.walk_home(self.ids[label])]

    async def first_pages_are_read(self) -> None:
        async def read(label: int) -> None:
            await self.client.home_page(self.ids[label])

        await for_each(self.ids, read)

    async def every_walk_is_exact(self) -> int:
        """Returns the number of items read."""
        read: list[int] = []

        async def check(label: int) -> None:
            walk = await self.walk(label)
            assert walk == self.home(label), handle_of(label)
            read.append(len(walk))

        await for_each(self.ids, check)
        assert len(read) == len(self.ids)
        return sum(read)


async def status(client: Client) -> fanout_pb2.GetFanoutStatusResponse:
    (only,) = await client.fanout_status()
    return only


async def log_is_empty(client: Client) -> bool:
    return not any(partition.lag_messages for partition in (await status(client)).partitions)


def calls_seen(log: str) -> Counter[tuple[str, str]]:
    """(kind of caller, RPC) of each call that succeeded."""
    pattern = re.compile(r"call caller=(\S+) method=/starling\.(\w+)\.v1\.\w+/(\w+) code=OK")
    found = pattern.findall(log)
    return Counter((re.sub(r"^user:\d+$", "user", caller), f"{area}.{method}") for caller, area, method in found)


@pytest.mark.timeout(600)
async def test_everybody_on_reed98_reads_their_exact_home_timeline(reed98: Path, noisy_mesh: RunningMesh) -> None:
    edges = EdgeFile(reed98, undirected=True)
    async with noisy_mesh.client() as client:
        report = await import_graph(client, edges)
        assert (report.users_created, report.follows_created, report.follows_refused) == (ACCOUNTS, FOLLOWS, 0)
        assert (await client.user(handle_of(BIGGEST))).follower_count == BIGGEST_FOLLOWERS
        people = People(client, edges, report.user_ids)
        await people.first_pages_are_read()  # Now everybody has a list.

        await people.all_post(TWEETS_EACH)
        await eventually(lambda: log_is_empty(client), 120)
        worker = (await status(client)).worker
        assert worker.deliveries == TWEETS_EACH * FOLLOWS == 188_120
        assert worker.deliveries_to_lists == worker.deliveries
        assert worker.events == TWEETS_EACH * ACCOUNTS
        _print_delays(worker)

        the_biggest = set(people.tweets[BIGGEST])
        followers = [label for label in people.ids if BIGGEST in people.followees[label]]
        assert len(followers) == BIGGEST_FOLLOWERS
        for label in followers:
            assert the_biggest <= set(await people.walk(label))
        assert len(await people.walk(BIGGEST)) == ITS_HOME, "past the cap"
        items = await people.every_walk_is_exact()
        assert items == TWEETS_EACH * (FOLLOWS + ACCOUNTS)
    seen = calls_seen(noisy_mesh.log())
    assert set(seen) >= CALL_MATRIX, "every edge of the call matrix is used"
    print("\n".join(f"  {caller:24} {rpc:28} {count:>7,}" for (caller, rpc), count in sorted(seen.items())))


def _print_delays(worker: fanout_pb2.WorkerStatus) -> None:
    delay = worker.delay
    figures: Sequence[tuple[str, float]] = [
        ("p50", delay.p50_seconds),
        ("p95", delay.p95_seconds),
        ("p99", delay.p99_seconds),
        ("max", delay.max_seconds),
    ]
    print("\ndelay from post to list: " + ", ".join(f"{name} {seconds * 1_000:,.0f} ms" for name, seconds in figures))
