"""The people of a drill: they are imported, have home lists, post, and read; what they shall find is known."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

from cli.client import Client
from cli.importing import BATCH_MAX, Edge, ImportReport, handle_of, import_graph
from drills.findings import Progress
from drills.graphs import Graph
from drills.own_mesh import DrillError, OwnMesh
from drills.raw_lists import Arrivals, RawLists
from starling.fanout.v1 import fanout_pb2

POLL_SECONDS = 0.1
PATIENCE_SECONDS = 120.0
_CALLS_AT_ONCE = 32
_LISTS_SECONDS = 5.0
_WARM_ROUNDS_MAX = 10
_WHOLE_SECONDS = 1_800.0


class Crowd:
    """The accounts of a graph in a mesh that serves, by their labels."""

    def __init__(self, client: Client, lists: RawLists, graph: Graph, chance: random.Random) -> None:
        self.client = client
        self.lists = lists
        self.graph = graph
        self.chance = chance
        self.progress = Progress()
        self.ids: dict[int, int] = {}
        self.posted: dict[int, list[int]] = defaultdict(list)
        self.retweeted: dict[int, int] = {}
        """Who retweeted the one tweet that nobody sees but by a retweet, and the retweet's id."""

    async def sign_up(self, edges: Iterable[Edge] | None = None) -> ImportReport:
        """Import everybody, and whom they follow."""
        self.progress.step(f"importing {len(self.graph.followees):,} accounts, {self.graph.follows:,} follows")

        def on_progress(report: ImportReport) -> None:
            done = f"  {report.users_done:,} accounts, {report.edges_done:,} of {report.edges_total:,} follows"
            self.progress.more(done)

        edges = edges if edges is not None else list(self.graph.edges())
        report = await import_graph(self.client, edges, on_progress=on_progress, batch=BATCH_MAX)
        self.ids = {label: report.user_ids[handle_of(label)] for label in self.graph.followees}
        return report

    async def have_lists(self, readers: Sequence[int]) -> None:
        """Lists are made behind the reads; what isn't made is asked for again, as a reader's next read would."""
        self.progress.step(f"{len(readers):,} accounts read their homes, so that they have lists")
        missing = [self.ids[label] for label in readers]
        reads = 0

        async def read(viewer_id: int) -> None:
            nonlocal reads
            await self.client.home_page(viewer_id)
            reads += 1
            self.progress.more(f"  {reads:,} homes read")

        for _ in range(_WARM_ROUNDS_MAX):
            await for_each(missing, read)
            for _ in range(int(_LISTS_SECONDS / POLL_SECONDS)):
                missing = await self.lists.without(missing)
                if not missing:
                    return
                await asyncio.sleep(POLL_SECONDS)
            self.progress.step(f"  {len(missing):,} lists are still to be made")
        raise DrillError(f"{len(missing):,} home lists aren't made")

    async def fanout(self) -> fanout_pb2.GetFanoutStatusResponse:
        """What the worker of ordinary tweets says."""
        return (await self.client.fanout_status())["fanout_svc"]

    async def lag(self, topic: str = "") -> int:
        """Records that aren't acknowledged, of one topic or of all."""
        return sum(lag.lag_messages for lag in (await self.fanout()).partitions if topic in {"", lag.topic})

    async def log_is_empty(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Wait for it. Raises DrillError."""
        end = time.monotonic() + patience_seconds
        while lag := await self.lag():
            if time.monotonic() > end:
                raise DrillError(f"fan-out isn't done after {patience_seconds:.0f} s")
            self.progress.more(f"  {lag:,} records are still in the log")
            await asyncio.sleep(POLL_SECONDS)

    async def post(self, label: int, text: str) -> int:
        """One tweet; its id."""
        tweet_id = (await self.client.post(self.ids[label], text)).tweet.tweet_id
        self.posted[label].append(tweet_id)
        return tweet_id

    async def retweet(self, label: int, tweet_id: int) -> None:
        """By somebody who hasn't yet."""
        self.retweeted[label] = (await self.client.retweet(self.ids[label], tweet_id)).tweet.tweet_id

    def watched(self, authors: Iterable[int], readers: Iterable[int]) -> dict[int, list[int]]:
        """Of the authors, those that some of the readers follow, and these: there must be one to see tweets arrive."""
        reading = set(readers)
        found = {author: [one for one in self.graph.followers[author] if one in reading] for author in authors}
        return {author: some for author, some in found.items() if some}

    async def post_steadily(
        self, watched: Mapping[int, Sequence[int]], per_second: float, seconds: float
    ) -> dict[int, float]:
        """Any of the authors post. Returns the delay, seconds, until a follower's list has each tweet."""
        authors = sorted(watched)
        arrivals = Arrivals(self.lists)

        async def post(_: int) -> None:
            author = self.chance.choice(authors)
            reader = self.chance.choice(watched[author])
            arrivals.expect(self.ids[reader], await self.post(author, "an ordinary tweet"))

        async with arrivals.watched(PATIENCE_SECONDS):
            await at_rate(int(per_second * seconds), per_second, post)
        return arrivals.delays

    def home(self, label: int) -> list[int]:
        """What a home timeline must hold: the tweets of whom they follow and their own, and of all retweets of the one
        tweet the newest."""
        near = [label, *self.graph.followees[label]]
        newest_retweet = max((self.retweeted[one] for one in near if one in self.retweeted), default=None)
        tweets = [tweet for one in near for tweet in self.posted.get(one, ())]
        return sorted(tweets if newest_retweet is None else [*tweets, newest_retweet], reverse=True)

    async def exact_walks(self, labels: Sequence[int]) -> int:
        """Walk so many homes; of how many each page to the last was right."""
        self.progress.step(f"walking {len(labels):,} homes")
        exact: list[int] = []

        async def check(label: int) -> None:
            if [item.item_id async for item in self.client.walk_home(self.ids[label])] == self.home(label):
                exact.append(label)
            self.progress.more(f"  {len(exact):,} are exact so far")

        await for_each(labels, check)
        return len(exact)


@asynccontextmanager
async def crowd_in(mesh: OwnMesh, graph: Graph, seed: int) -> AsyncIterator[Crowd]:
    """A graph's people, who are still to sign up. Raises DrillError when the block takes longer than half an hour."""
    lists = RawLists(mesh.mesh.valkey_url)
    try:
        async with asyncio.timeout(_WHOLE_SECONDS), mesh.client() as client:
            yield Crowd(client, lists, graph, random.Random(seed))  # noqa: S311 - repeatable, not secret
    except TimeoutError as error:
        raise DrillError(f"not done within {_WHOLE_SECONDS:.0f} s") from error
    finally:
        await lists.close()


async def for_each(things: Iterable[int], act: Callable[[int], Awaitable[object]]) -> None:
    """With bounded concurrency."""
    waiting = iter(things)

    async def work() -> None:
        for thing in waiting:
            await act(thing)

    async with asyncio.TaskGroup() as group:
        for _ in range(_CALLS_AT_ONCE):
            group.create_task(work())


async def at_rate(
    count: int, per_second: float, act: Callable[[int], Awaitable[None]], at_once_max: int = 1_000
) -> None:
    """`act(number)` so often at a fixed rate, whether or not earlier ones are done: who waited would measure less when
    the mesh is slow. No faster than the mesh takes them, though, once so many are going on."""
    slots = asyncio.Semaphore(at_once_max)

    async def one(number: int) -> None:
        try:
            await act(number)
        finally:
            slots.release()

    start = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            await asyncio.sleep(max(0.0, start + number / per_second - time.monotonic()))
            await slots.acquire()
            group.create_task(one(number))
