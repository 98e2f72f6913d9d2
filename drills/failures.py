"""Servers die, one kind after the other, while people post and read: `make drill-failures`.

The mesh runs on three nodes of Cassandra, three of Kafka, and a Valkey cluster of three masters with a replica each,
all started here and gone afterwards. Everybody's posts are in several parts (tiny buckets). Each drill has the same
load, of posts that are tried again under their request id until they are acknowledged, and of reads; then a fault in
it; and at the end, when all is delivered, everybody's home timeline is walked and compared with what was acknowledged.

Asked of each: no post lost, none there twice, and no read that failed. Where a drill takes away what reads can't do
without, that is said, and another thing is asked. Delays are printed; the load and all servers share this machine.

Exit status: 0 when everything asked for was reached, else 1. It takes about a quarter of an hour, and needs Java.
"""

import asyncio
import os
import random
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

import click
import grpc
from cassandra import ConsistencyLevel
from cassandra.cluster import EXEC_PROFILE_DEFAULT, ExecutionProfile
from cassandra.cluster import Cluster as Driver
from cassandra.policies import WhiteListRoundRobinPolicy

from backends import cassandra, kafka, valkey_cluster
from backends.servers import Cluster, Server, await_that
from cli.client import Client
from cli.importing import handle_of, import_graph
from drills.findings import Checks, Progress, carry_out, quantile
from drills.graphs import Graph, evenly
from drills.own_mesh import BUILD, DrillError, OwnMesh
from mesh.config import Where
from mesh.migrate import migrate
from mesh.principals import user
from starling.tweet.v1 import tweet_pb2

PEOPLE = 60
FOLLOWERS = 12
BUCKET_SIZE = 5
POSTS_PER_SECOND = 5
READS_PER_SECOND = 15
NODES = 3
_KEYSPACE = "drill"
_SHORT, _LONG = 15.0, 60.0
_POST_SECONDS_MAX = 120.0
_READ_P99_SECONDS_MAX = 2.0
_AT_ONCE = 64
_UP_SECONDS_MAX = 180.0
_REST_SECONDS_MAX = 180.0
_HINTS_SECONDS_MAX = 180.0
_PAUSE = 0.1


@dataclass
class Figures:
    """What one drill saw. Seconds."""

    what: str
    acknowledged: int = 0
    post_seconds: list[float] = field(default_factory=list)
    read_seconds: list[float] = field(default_factory=list)
    read_errors: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    twice: int = 0
    others: dict[str, tuple[float, float]] = field(default_factory=dict)
    """What else is asked, at most so much, and what was reached."""
    reads_may_fail: bool = False

    def checks(self) -> Checks:
        """What is asked of it."""
        checks = Checks()
        checks.equal("posts lost", 0, self.lost)
        checks.equal("posts there twice", 0, self.twice)
        if not self.reads_may_fail:
            checks.equal("reads that failed", 0, self.read_errors.total())
        for what, (asked, reached) in self.others.items():
            checks.at_most(what, asked, reached)
        return checks

    def lines(self) -> list[str]:
        """For people."""
        errors = ", ".join(f"{count} {code}" for code, count in sorted(self.read_errors.items()))
        return [
            f"{self.what}: {self.acknowledged:,} posts acknowledged, P99 {_ms(self.post_seconds)};"
            f" {len(self.read_seconds):,} reads, P99 {_ms(self.read_seconds)}"
            + (f"; failed: {errors}" if errors else ""),
            *self.checks().lines(),
        ]


def _ms(seconds: Sequence[float]) -> str:
    return f"{quantile(seconds, 0.99) * 1_000:,.0f} ms" if seconds else "-"


class Drills:
    """The load, and what is known to be acknowledged."""

    def __init__(self, client: Client, graph: Graph, ids: Mapping[int, int], progress: Progress) -> None:
        self.client = client
        self.progress = progress
        self.posted: dict[int, int] = {}
        self._graph = graph
        self._ids = ids
        self._chance = random.Random(7)  # noqa: S311 - the same people do the same each time
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self.figures = Figures("")

    async def under_load(
        self, what: str, fault: Callable[[], Awaitable[None]], *, reads_may_fail: bool = False
    ) -> Figures:
        """Post and read, let it happen, and see what became of everything that was ever posted."""
        self.progress.step(what)
        self.figures = Figures(what, reads_may_fail=reads_may_fail)
        ending = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._steadily(POSTS_PER_SECOND, self._post, ending))
            group.create_task(self._steadily(READS_PER_SECOND, self._read, ending))
            await asyncio.sleep(2.0)
            await fault()
            await asyncio.sleep(3.0)
            ending.set()
        await self._compare()
        return self.figures

    async def _steadily(self, per_second: float, act: Callable[[], Awaitable[None]], ending: asyncio.Event) -> None:
        async def one() -> None:
            try:
                await act()
            finally:
                self._slots.release()

        start = time.monotonic()
        number = 0
        async with asyncio.TaskGroup() as group:
            while not ending.is_set():
                await asyncio.sleep(max(0.0, start + number / per_second - time.monotonic()))
                await self._slots.acquire()
                group.create_task(one())
                number += 1

    async def _post(self) -> None:
        author = self._ids[self._chance.choice(sorted(self._graph.followers))]
        request_id, began = str(uuid.uuid4()), time.monotonic()
        while True:
            try:
                made = await self.client.post(author, f"at {began}", request_id=request_id)
                break
            except grpc.aio.AioRpcError as error:
                if time.monotonic() - began > _POST_SECONDS_MAX:
                    raise DrillError(f"a post isn't acknowledged after {_POST_SECONDS_MAX:.0f} s: {error}") from error
                await asyncio.sleep(_PAUSE)
        self.posted[made.tweet.tweet_id] = author
        self.figures.acknowledged += 1
        self.figures.post_seconds.append(time.monotonic() - began)

    async def _read(self) -> None:
        viewer = self._ids[self._chance.choice(sorted(self._ids))]
        began = time.monotonic()
        try:
            page = await self.client.home_page(viewer, 20)
        except grpc.aio.AioRpcError as error:
            self.figures.read_errors[error.code().name] += 1
            return
        self.figures.read_seconds.append(time.monotonic() - began)
        shown = [item.tweet.tweet_id for item in page.items]
        if shown != sorted(set(shown), reverse=True):
            raise DrillError(f"a page isn't in order, or repeats itself: {shown}")

    async def _compare(self) -> None:
        end = time.monotonic() + _REST_SECONDS_MAX
        while True:
            lost, twice = await self._differences()
            if not (lost or twice) or time.monotonic() > end:
                self.figures.lost, self.figures.twice = len(lost), len(twice)
                return
            await asyncio.sleep(1.0)

    async def _differences(self) -> tuple[set[int], set[int]]:
        """Acknowledged posts that a home lacks, and what else is in one, or is there again."""
        lost, more = set[int](), set[int]()
        for label, viewer in self._ids.items():
            near = {viewer, *(self._ids[followee] for followee in self._graph.followees[label])}
            home = {tweet for tweet, author in self.posted.items() if author in near}
            try:
                walk = [item.tweet.tweet_id async for item in self.client.walk_home(viewer)]
            except grpc.aio.AioRpcError:
                return set(self.posted), more  # Not yet.
            lost |= home - set(walk)
            more |= {tweet for tweet, count in Counter(walk).items() if tweet not in home or count > 1}
        return lost, more


class Faults:
    """What happens to the servers."""

    def __init__(self, mesh: OwnMesh, nodes: Cluster, brokers: Cluster, valkey: Cluster) -> None:
        self.mesh = mesh
        self.nodes = nodes
        self.brokers = brokers
        self.valkey = valkey

    async def a_node_dies(self) -> None:
        """Of Cassandra, and comes back."""
        await self._dies_and_comes_back(self.nodes.servers[2:], _SHORT)
        await self._all_nodes_are_up()

    async def a_broker_dies(self) -> None:
        """Of Kafka, and comes back."""
        await self._dies_and_comes_back(self.brokers.servers[1:2], _SHORT)

    async def a_master_dies(self) -> None:
        """Of Valkey; a replica takes over, and the dead one comes back as a replica."""
        await self._dies_and_comes_back(self.valkey.servers[:1], _SHORT)

    async def workers_die(self) -> None:
        """Both of the ordinary ones, one after the other, a few times, with posts in parts in hand."""
        for name in ("fanout_svc", "fanout_svc-2") * 3:
            pid = self.mesh.mesh.pids[name]
            await asyncio.to_thread(_kill, pid)
            await self._until(lambda name=name, pid=pid: self.mesh.mesh.pids.get(name, pid) != pid, name)  # type: ignore[misc]
            await asyncio.sleep(2.0)

    async def kafka_is_gone(self) -> None:
        """All of it, for a minute."""
        await self._dies_and_comes_back(self.brokers.servers, _LONG)

    async def valkey_is_gone(self) -> None:
        """All of it, for a while."""
        await self._dies_and_comes_back(self.valkey.servers, 2 * _SHORT)

    async def cassandra_is_gone(self) -> None:
        """All copies of everything, for some seconds."""
        await self._dies_and_comes_back(self.nodes.servers, _SHORT)
        await self._all_nodes_are_up()

    async def _dies_and_comes_back(self, servers: Sequence[Server], seconds: float) -> None:
        for server in servers:
            await asyncio.to_thread(server.kill)
        await asyncio.sleep(seconds)
        for server in servers:
            server.start()
        await asyncio.sleep(5.0)
        for server in servers:
            if not server.alive():
                raise DrillError(f"{server.name} doesn't come back:\n{server.end_of_log()}")

    async def _all_nodes_are_up(self) -> None:
        for address in self.nodes.addresses:
            host, _, port = address.partition(":")
            await self._until(lambda host=host, port=port: cassandra.peers(host, int(port)) == NODES - 1, address)  # type: ignore[misc]

    async def _until(self, holds: Callable[[], object], what: str) -> None:
        await asyncio.to_thread(await_that, holds, _UP_SECONDS_MAX, f"{what} doesn't come back")


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def _catches_up(drills: Drills, faults: Faults) -> Figures:
    """A node that was away has what it missed, once hints were replayed: read from it alone, all others dead."""
    before = set(drills.posted)
    figures = await drills.under_load("a Cassandra node is away, and catches up", faults.a_node_dies)
    missed = sorted(set(drills.posted) - before)
    drills.progress.step("its hints are replayed; then it is read alone")
    host, _, port = faults.nodes.addresses[2].partition(":")
    end = time.monotonic() + _HINTS_SECONDS_MAX
    while True:
        # A read of one copy, with this node to coordinate it, is answered by its own.
        lacking = await asyncio.to_thread(_lacking, host, int(port), missed)
        if not lacking or time.monotonic() > end:
            break
        await asyncio.sleep(5.0)
    others = faults.nodes.servers[:2]
    for server in others:
        await asyncio.to_thread(server.kill)
    figures.others["posts that it lacks, read alone"] = (0, await asyncio.to_thread(_lacking, host, int(port), missed))
    for server in others:
        server.start()
    await faults._all_nodes_are_up()
    return figures


def _lacking(host: str, port: int, tweet_ids: Sequence[int]) -> int:
    """How many of these tweets a node doesn't have itself."""
    profile = ExecutionProfile(
        load_balancing_policy=WhiteListRoundRobinPolicy([host]),
        consistency_level=ConsistencyLevel.ONE,
        request_timeout=20.0,
    )
    driver = Driver([host], port=port, protocol_version=4, execution_profiles={EXEC_PROFILE_DEFAULT: profile})
    try:
        session = driver.connect(_KEYSPACE)
        query = session.prepare("SELECT tweet_id FROM tweets WHERE tweet_id = ?")
        return sum(session.execute(query, [tweet_id]).one() is None for tweet_id in tweet_ids)
    finally:
        driver.shutdown()


async def _all_copies_gone(drills: Drills, faults: Faults) -> Figures:
    """What is cached is shown; the rest is a clear UNAVAILABLE."""
    seen = Counter[str]()

    async def fault() -> None:
        happening = asyncio.create_task(faults.cassandra_is_gone())
        await asyncio.sleep(6.0)
        cached, author = next(reversed(drills.posted.items()))
        for _ in range(10):
            try:
                request = tweet_pb2.GetTweetRequest(tweet_id=cached)
                await drills.client.tweet.GetTweet(request, timeout=5, metadata=drills.client.as_(user(author)))
                seen["OK"] += 1
            except grpc.aio.AioRpcError as error:
                seen[error.code().name] += 1
        await happening

    figures = await drills.under_load("all copies of Cassandra's data are gone", fault, reads_may_fail=True)
    strange = sum(count for code, count in (figures.read_errors + seen).items() if code not in {"OK", "UNAVAILABLE"})
    figures.others["answers that are neither right nor UNAVAILABLE"] = (0, strange)
    figures.others["cached tweets that were refused"] = (0, seen["UNAVAILABLE"])
    return figures


async def _run(only: Sequence[str]) -> list[Figures]:
    progress = Progress()
    people = range(1, PEOPLE + 1)
    graph = evenly(dict.fromkeys(people, FOLLOWERS), people, 4)
    folder = BUILD / "failures"
    with ExitStack() as stack:
        clusters = []
        for backend in (cassandra, kafka, valkey_cluster):
            progress.step(f"starting three of {backend.NAME}")
            clusters.append(await asyncio.to_thread(backend.start, folder / backend.NAME, NODES, bound=True))
            stack.callback(clusters[-1].stop)
        nodes, brokers, valkey = clusters
        hosts, ports = zip(*(address.split(":") for address in nodes.addresses), strict=True)
        progress.step("making the tables")
        where = Where(hosts, _KEYSPACE, int(ports[0]))
        await asyncio.to_thread(migrate, where, nodes.environment["STARLING_CASSANDRA_REPLICATION"])
        environment = {**nodes.environment, **brokers.environment, **valkey.environment}
        environment |= {"STARLING_CASSANDRA_KEYSPACE": _KEYSPACE, "STARLING_BUCKET_SIZE": str(BUCKET_SIZE)}
        mesh = stack.enter_context(OwnMesh("failures", **environment, STARLING_FANOUT_WORKERS="2"))
        async with mesh.client() as client:
            report = await import_graph(client, list(graph.edges()))
            ids = {label: report.user_ids[handle_of(label)] for label in people}
            drills, faults = Drills(client, graph, ids, progress), Faults(mesh, nodes, brokers, valkey)
            load = drills.under_load
            plan: dict[str, Callable[[], Awaitable[Figures]]] = {
                "nothing": partial(load, "nothing happens", partial(asyncio.sleep, _SHORT)),
                "node": partial(load, "a Cassandra node dies and comes back", faults.a_node_dies),
                "broker": partial(load, "a Kafka broker dies and comes back", faults.a_broker_dies),
                "master": partial(load, "a Valkey master dies; a replica takes over", faults.a_master_dies),
                "worker": partial(load, "workers are killed with posts in parts in hand", faults.workers_die),
                "kafka": partial(load, "all of Kafka is gone for a minute", faults.kafka_is_gone),
                "valkey": partial(load, "all of Valkey is gone for half a minute", faults.valkey_is_gone),
                "hints": partial(_catches_up, drills, faults),
                "cassandra": partial(_all_copies_gone, drills, faults),
            }
            found = []
            for name in only or plan:
                figures = await plan[name]()
                if name == "valkey":
                    p99 = quantile(figures.read_seconds, 0.99)
                    figures.others["reads' P99, seconds"] = (_READ_P99_SECONDS_MAX, p99)
                for line in figures.lines():
                    click.echo(line)
                found.append(figures)
    return found


@click.command()
@click.argument("only", nargs=-1)
def main(only: Sequence[str]) -> None:
    """Let servers die under load.

    ONLY: some of nothing, node, broker, master, worker, kafka, valkey, hints, cassandra.
    """
    start = time.monotonic()
    found = carry_out(_run(only))
    click.echo(f"{len(found)} drills, {time.monotonic() - start:.0f} s")
    sys.exit(0 if all(figures.checks().hold for figures in found) else 1)


if __name__ == "__main__":
    main()
