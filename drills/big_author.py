"""An author with 60,000 followers posts, and those with few don't wait for it: `make drill-big-author`.

A generated graph of 100,000 accounts is imported into a mesh of the drill's own, which pushes everybody (the pull
threshold is 100,000). Some thousand accounts read, and so have home lists. Small authors post at a steady rate, first
alone, then while the biggest author posts, one tweet after the other, each as soon as the one before has reached
everybody. At the end sampled home timelines are walked, and compared with what the edge file and the posts say.

Exit status: 0 when everything asked for was reached, else 1. It takes some minutes.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import click
import grpc

from cli.client import Client, NotPossibleError
from cli.failures import line_of
from cli.importing import BATCH_MAX, EdgeFile, ImportReport, handle_of, import_graph
from drills.own_mesh import DrillError, OwnMesh
from drills.power_law import Graph, Shape
from drills.raw_lists import Arrivals, RawLists
from mesh.eventlog.topics import FANOUT_TASKS
from mesh.ids import time_ms_of
from starling.fanout.v1 import fanout_pb2

SHAPE = Shape(accounts=100_000, follows=600_000, biggest_followers=60_000)
BIGGEST = 1
BUCKET_SIZE = 10_000
"""graph_svc's, unless told otherwise."""
PARTITIONS_MIN = 4
READERS_OF_EACH_KIND = 2_000
WALKS = 300
SMALL_MAX = 50
"""Authors with fewer followers are small."""
POSTS_PER_SECOND = 20
LOAD_SECONDS = 15.0
BIG_TWEETS_MAX = 100
_CALLS_AT_ONCE = 32
_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 120.0
_WHOLE_SECONDS = 1_800.0
_PROGRESS_SECONDS = 5.0
_WARM_ROUNDS_MAX = 10


class Progress:
    """A line now and then, on stderr: stdout is for the result."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._last = 0.0

    def step(self, text: str) -> None:
        """Say what begins."""
        self._last = time.monotonic()
        click.echo(f"[{self._last - self._start:5.0f} s] {text}", err=True)

    def more(self, text: str) -> None:
        """Say how far it is, if nothing was said for some seconds."""
        if time.monotonic() - self._last >= _PROGRESS_SECONDS:
            self.step(text)


@dataclass
class Findings:
    """What the drill measured. Delays in seconds."""

    checks: list[tuple[str, str, str, bool]] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    big: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    """The machine's load average (1 min) when `before` and when `during` was done."""

    def check(self, what: str, asked: int, reached: int, *, at_least: bool = False) -> None:
        """One row: what was asked for, and what was reached."""
        holds = reached >= asked if at_least else reached == asked
        self.checks.append((what, f"{'≥ ' if at_least else ''}{asked:,}", f"{reached:,}", holds))

    @property
    def hold(self) -> bool:
        """Whether all that was asked for was reached."""
        return all(holds for *_, holds in self.checks)


class Drill:
    """One run, against a mesh that serves and is empty."""

    def __init__(self, client: Client, lists: RawLists, shape: Shape, graph: Graph, seed: int) -> None:
        self._client = client
        self._lists = lists
        self._shape = shape
        self._graph = graph
        self._chance = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self._ids: dict[int, int] = {}
        self._posted: dict[int, list[int]] = defaultdict(list)
        self._arrivals = Arrivals(lists)
        self._progress = Progress()
        self.findings = Findings()

    async def run(self, edges: EdgeFile) -> None:
        """The whole drill; see `findings` then. Raises DrillError when it can't go on."""
        self._progress.step(f"importing {self._shape.accounts:,} accounts, {self._graph.follows:,} follows")
        await self._import(edges)
        fans, readers = self._readers()
        self._progress.step(f"{len(readers):,} accounts read their homes, so that they have lists")
        await self._have_lists(readers)
        await self._log_is_empty()
        small = self._small_authors(readers)
        before = await self._status()
        self._progress.step(f"small authors post, {POSTS_PER_SECOND} a second ({len(small):,} of them are watched)")
        self.findings.before = await self._small_authors_post(small)
        self.findings.loads.append(os.getloadavg()[0])
        self._progress.step("the same while the biggest author posts")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._the_biggest_posts())
            during = group.create_task(self._small_authors_post(small))
        self.findings.during = during.result()
        self.findings.loads.append(os.getloadavg()[0])
        await self._log_is_empty()
        await self._check_deliveries(before.deliveries)
        await self._check_lists(fans)
        self._progress.step(f"walking {WALKS} homes")
        await self._check_walks(self._chance.sample(readers, min(WALKS, len(readers))))

    async def _import(self, edges: EdgeFile) -> None:
        def on_progress(report: ImportReport) -> None:
            done = f"  {report.users_done:,} accounts, {report.edges_done:,} of {report.edges_total:,} follows"
            self._progress.more(done)

        report = await import_graph(self._client, edges, on_progress=on_progress, batch=BATCH_MAX)
        self._ids = {label: report.user_ids[handle_of(label)] for label in self._graph.followees}
        biggest = await self._client.user(handle_of(BIGGEST))
        threshold = await self._client.pull_threshold()
        if threshold <= biggest.follower_count:
            raise DrillError(f"the pull threshold is {threshold:,}: the biggest author wouldn't be pushed")
        self.findings.check("accounts imported", self._shape.accounts, report.users_created)
        self.findings.check("follows imported", self._shape.follows, report.follows_created)
        self.findings.check("followers of the biggest author", self._shape.biggest_followers, biggest.follower_count)

    def _readers(self) -> tuple[list[int], list[int]]:
        """Followers of the biggest author, and with them any accounts: labels of those who shall have lists."""
        followers = sorted(self._graph.followers[BIGGEST])
        fans = self._chance.sample(followers, min(READERS_OF_EACH_KIND, len(followers)))
        anybody = self._chance.sample(sorted(self._ids), min(READERS_OF_EACH_KIND, len(self._ids)))
        return fans, sorted({*fans, *anybody})

    def _small_authors(self, readers: Sequence[int]) -> dict[int, list[int]]:
        """Authors with few followers, and those of these who have lists: there must be one to see tweets arrive."""
        reading = set(readers)
        small: dict[int, list[int]] = {}
        for label, followers in self._graph.followers.items():
            if len(followers) < SMALL_MAX and (watched := [one for one in followers if one in reading]):
                small[label] = watched
        return small

    async def _have_lists(self, readers: Sequence[int]) -> None:
        """Lists are made behind the reads; what isn't made is asked for again, as a reader's next read would."""
        missing = [self._ids[label] for label in readers]
        reads = 0

        async def read(viewer_id: int) -> None:
            nonlocal reads
            await self._client.home_page(viewer_id)
            reads += 1
            self._progress.more(f"  {reads:,} homes read")

        for _ in range(_WARM_ROUNDS_MAX):
            await _for_each(missing, read)
            for _ in range(int(_PROGRESS_SECONDS / _POLL_SECONDS)):
                missing = await self._lists.without(missing)
                if not missing:
                    return
                await asyncio.sleep(_POLL_SECONDS)
            self._progress.step(f"  {len(missing):,} lists are still to be made")
        raise DrillError(f"{len(missing):,} home lists aren't made")

    async def _status(self) -> fanout_pb2.WorkerStatus:
        (only,) = await self._client.fanout_status()
        return only.worker

    async def _lag(self, topic: str = "") -> int:
        """Records that aren't acknowledged, of one topic or of all."""
        (only,) = await self._client.fanout_status()
        return sum(lag.lag_messages for lag in only.partitions if topic in {"", lag.topic})

    async def _log_is_empty(self) -> None:
        end = time.monotonic() + _PATIENCE_SECONDS
        while await self._lag():
            if time.monotonic() > end:
                raise DrillError(f"fan-out isn't done after {_PATIENCE_SECONDS:.0f} s")
            await asyncio.sleep(_POLL_SECONDS)

    async def _post(self, label: int, text: str) -> int:
        tweet_id = (await self._client.post(self._ids[label], text)).tweet.tweet_id
        self._posted[label].append(tweet_id)
        return tweet_id

    async def _small_authors_post(self, small: dict[int, list[int]]) -> list[float]:
        """At a fixed rate, whether or not earlier posts have been answered: who waited would measure less when it is
        slow. Returns the delays until a follower's list has each tweet."""
        authors = sorted(small)
        mine: list[int] = []

        async def post() -> None:
            author = self._chance.choice(authors)
            reader = self._chance.choice(small[author])
            tweet_id = await self._post(author, "a small author's tweet")
            self._arrivals.expect(self._ids[reader], tweet_id)
            mine.append(tweet_id)

        start = time.monotonic()
        async with self._arrivals.watched(_PATIENCE_SECONDS), asyncio.TaskGroup() as group:
            for number in range(int(LOAD_SECONDS * POSTS_PER_SECOND)):
                await asyncio.sleep(max(0.0, start + number / POSTS_PER_SECOND - time.monotonic()))
                group.create_task(post())
                self._progress.more(f"  {len(mine):,} tweets of small authors posted")
        return [self._arrivals.delays[tweet_id] for tweet_id in mine]

    async def _the_biggest_posts(self) -> None:
        """As long as the small ones do, so that there is always one of its tweets on its way."""
        end = time.monotonic() + LOAD_SECONDS
        for number in range(1, BIG_TWEETS_MAX + 1):
            tweet_id = await self._post(BIGGEST, f"the biggest author's tweet {number}")
            await self._all_buckets_are_done(number)
            self.findings.big.append(time.time() - time_ms_of(tweet_id) / 1_000)
            if time.monotonic() > end:
                return

    async def _all_buckets_are_done(self, tweets: int) -> None:
        """All sub-tasks are in the log, and none of them is unacknowledged. Only authors with several buckets have any,
        and nobody but the biggest one has and posts."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while await self._lists.number_of_sub_tasks() < tweets * self._buckets or await self._lag(FANOUT_TASKS.name):
            if time.monotonic() > end:
                raise DrillError(f"the biggest author's tweet is still on its way after {_PATIENCE_SECONDS:.0f} s")
            await asyncio.sleep(_POLL_SECONDS)

    @property
    def _buckets(self) -> int:
        return -(-self._shape.biggest_followers // BUCKET_SIZE)

    async def _check_deliveries(self, before: int) -> None:
        tweets = self._posted[BIGGEST]
        tasks = [(partition, event) for partition, event in await self._lists.sub_tasks()]
        buckets = {
            tweet_id: {event.bucket.bucket for _, event in tasks if tweet_id in event.bucket.tweet_ids}
            for tweet_id in tweets
        }
        self.findings.check("sub-tasks of each of its tweets", self._buckets, min(map(len, buckets.values())))
        partitions = len({partition for partition, _ in tasks})
        self.findings.check("partitions that they spread over", PARTITIONS_MIN, partitions, at_least=True)
        # What workers counted, less what the small authors' tweets account for: their followers are known.
        small = sum(
            len(self._graph.followers[label]) * len(ids) for label, ids in self._posted.items() if label != BIGGEST
        )
        reached = (await self._status()).deliveries - before - small
        asked = len(tweets) * self._shape.biggest_followers
        self.findings.check(f"deliveries of its {len(tweets)} tweets", asked, reached, at_least=True)

    async def _check_lists(self, fans: Sequence[int]) -> None:
        """Each of the biggest author's tweets is in the raw list of each follower who has one."""
        tweets = set(self._posted[BIGGEST])
        lists = await self._lists.entries([self._ids[label] for label in fans])
        self.findings.check("followers' lists that have all of them", len(fans), sum(tweets <= ids for ids in lists))

    async def _check_walks(self, labels: Sequence[int]) -> None:
        exact: list[int] = []

        async def check(label: int) -> None:
            walk = [item.tweet.tweet_id async for item in self._client.walk_home(self._ids[label])]
            near = {label, *self._graph.followees[label]}
            if walk == sorted((tweet for author in near for tweet in self._posted.get(author, ())), reverse=True):
                exact.append(label)
            self._progress.more(f"  {len(exact):,} are exact so far")

        await _for_each(labels, check)
        self.findings.check("sampled home timelines that are exact", len(labels), len(exact))


async def _for_each(things: Iterable[int], act: Callable[[int], Awaitable[object]]) -> None:
    """With bounded concurrency."""
    waiting = iter(things)

    async def work() -> None:
        for thing in waiting:
            await act(thing)

    async with asyncio.TaskGroup() as group:
        for _ in range(_CALLS_AT_ONCE):
            group.create_task(work())


def _quantile(values: Sequence[float], share: float) -> float:
    """The nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(findings: Findings) -> list[str]:
    """The result, for people."""
    lines = [f"{'':42} {'asked':>12} {'reached':>12}"]
    lines += [
        f"{what:42} {asked:>12} {reached:>12}{'' if holds else '   NOT REACHED'}"
        for what, asked, reached, holds in findings.checks
    ]
    lines += ["", f"{'delay from post to list, ms':42} {'p50':>9} {'p95':>9} {'p99':>9}"]
    shares = (0.50, 0.95, 0.99)
    rows = {
        f"small authors before ({len(findings.before)} tweets)": findings.before,
        f"small authors during ({len(findings.during)} tweets)": findings.during,
    }
    for what, delays in rows.items():
        lines.append(f"{what:42} " + " ".join(f"{_quantile(delays, share) * 1_000:>9,.0f}" for share in shares))
    ratios = [_quantile(findings.during, share) / max(_quantile(findings.before, share), 0.001) for share in shares]
    lines.append(f"{'during / before':42} " + " ".join(f"{ratio:>9,.1f}" for ratio in ratios))
    big = findings.big
    lines += [
        "",
        f"until all followers of the biggest author were delivered to: first tweet {big[0]:.1f} s, "
        f"median {_quantile(big, 0.5):.1f} s, slowest {max(big):.1f} s",
    ]
    return lines


async def _run(seed: int) -> Findings:
    click.echo("generating the graph, starting a mesh", err=True)
    graph = Graph(SHAPE, seed)
    with OwnMesh("big-author") as mesh:
        path = mesh.folder / "graph.edges"
        graph.write(path)
        lists = RawLists(mesh.mesh.valkey_url)
        try:
            async with asyncio.timeout(_WHOLE_SECONDS), mesh.client() as client:
                drill = Drill(client, lists, SHAPE, graph, seed)
                await drill.run(EdgeFile(path))
        except TimeoutError as error:
            raise DrillError(f"not done within {_WHOLE_SECONDS:.0f} s") from error
        finally:
            await lists.close()
    return drill.findings


def _fault(error: BaseException) -> str:
    """In one line; of several, the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return line_of(error) if isinstance(error, grpc.aio.AioRpcError) else str(error) or type(error).__name__


@click.command()
@click.option("--seed", type=int, default=4, show_default=True, help="Another seed is another graph.")
def main(seed: int) -> None:
    """Post as an author with 60,000 followers, and see whether others have to wait."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # As Ctrl-C: what was started is ended.
    start = time.monotonic()
    fault = ""
    try:
        findings = asyncio.run(_run(seed))
    except* (DrillError, NotPossibleError, grpc.aio.AioRpcError, OSError) as errors:
        fault = _fault(errors)
    if fault:
        click.echo(f"the drill can't go on: {fault}", err=True)
        sys.exit(1)
    click.echo(
        f"big author, seed {seed}: {SHAPE.accounts:,} accounts, {SHAPE.follows:,} follows, "
        f"{time.monotonic() - start:.0f} s, {os.cpu_count()} cores; load average before and during: "
        f"{', '.join(f'{load:.1f}' for load in findings.loads)}\n"
    )
    for line in table(findings):
        click.echo(line)
    sys.exit(0 if findings.hold else 1)


if __name__ == "__main__":
    main()
