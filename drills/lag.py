"""Big authors post more than fan-out can follow: `make drill-lag`.

Some dozens of authors, each with thousands of followers, post for a minute and a half, several times as much as the
only worker can deliver; small authors go on posting. Once a second it is looked how far behind each topic is, and what
`graph_svc` makes of it: first big authors' tasks wait on the slow topic, then the pull threshold falls, step by step,
and those who post are left to their readers. Then the big authors are quiet, and the threshold rises again.

Asked: nobody's tweets wait for longer than a minute, which is what followers are promised at the very most; no author
changes modes more than twice, there and back; and afterwards sampled home timelines hold exactly what was posted.

Exit status: 0 when everything asked for was reached, else 1. It takes some minutes: calm must last for one before each
step back. A picture is in `build/drills/lag.svg`.
"""

import asyncio
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import click
import grpc

from drills import picture
from drills.crowd import Crowd, at_rate, crowd_in
from drills.findings import Checks, carry_out, delay_lines, machine
from drills.graphs import evenly
from drills.own_mesh import BUILD, ROOT, DrillError, OwnMesh
from drills.picture import Curve, Panel
from mesh import principals
from mesh.channels import streaming
from mesh.eventlog.topics import FANOUT_TASKS, FANOUT_TASKS_SLOW, TWEET_FANOUT
from starling.graph.v1 import graph_pb2

ACCOUNTS = 12_000
BIG = dict.fromkeys(range(1, 13), 7_000) | dict.fromkeys(range(13, 37), 3_500)
"""Followers of the big authors: the first step of the threshold is below the first of them, the second below all."""
SMALL = dict.fromkeys(range(101, 301), 20)
BUCKET_SIZE = 2_000
THRESHOLD, THRESHOLD_MIN = 10_000, 2_500
READERS = 3_000
WALKS = 300
BURST_SECONDS = 90
BIG_POSTS_PER_SECOND = 40
SMALL_POSTS_PER_SECOND = 10
BEFORE_SECONDS = 15
LAG_SECONDS_MAX = 60
"""What followers are promised at the very most."""
CHANGES_MAX = 2
FALL_AFTER_SLOW_SECONDS = 14
"""`graph_svc.pressure` waits for 15; it is looked once a second."""
RECOVERY_SECONDS_MAX = 420
_LOOK_SECONDS = 1.0
_WATCH_SECONDS = 60.0
_BEFORE, _DURING = "small authors before", "small authors during"
_TOPICS = (TWEET_FANOUT.name, FANOUT_TASKS.name, FANOUT_TASKS_SLOW.name)
assert THRESHOLD > max(BIG.values()) > THRESHOLD // 2 > min(BIG.values()) > THRESHOLD_MIN


@dataclass(frozen=True, slots=True)
class Look:
    """The mesh at one moment, `seconds` after the burst's beginning. `lags`: seconds by topic. `deliveries`: so far."""

    seconds: float
    lags: Mapping[str, float]
    deliveries: int
    slow: bool
    threshold: int
    pulled: int

    @property
    def lag(self) -> float:
        """The greatest of all topics."""
        return max(self.lags.values())

    @property
    def is_calm(self) -> bool:
        """Whether all is as it was before."""
        return not self.lag and not self.slow and self.threshold == THRESHOLD and not self.pulled


@dataclass
class Findings:
    """What the drill measured."""

    checks: Checks = field(default_factory=Checks)
    looks: list[Look] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)


class PulledAuthors:
    """Who is pulled (or on the way back), as readers learn it; and how often each has changed."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self.now: set[int] = set()
        self.changes: Counter[int] = Counter()

    async def follow(self) -> None:
        """Until it is cancelled. The server ends each stream after a while, and is asked again."""
        while True:
            try:
                await self._follow_one()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(_LOOK_SECONDS)

    async def _follow_one(self) -> None:
        client, snapshot = self._crowd.client, set[int]()
        call = client.graph.WatchPullAuthors(
            graph_pb2.WatchPullAuthorsRequest(),
            timeout=_WATCH_SECONDS,
            metadata=client.as_(principals.service("drill")),
        )
        async with streaming(call):
            async for message in call:
                snapshot.update(message.snapshot.author_ids)
                if message.snapshot.complete:
                    self._are(snapshot)
                self._are((self.now | set(message.changes.added)) - set(message.changes.removed))

    def _are(self, pulled: set[int]) -> None:
        self.changes.update(self.now ^ pulled)
        self.now = set(pulled)


class Drill:
    """One run, against a mesh that serves and is empty."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._progress = crowd.progress
        self._pulled = PulledAuthors(crowd)
        self.findings = Findings()

    async def run(self) -> None:
        """The whole drill; see `findings` then. Raises DrillError when it can't go on."""
        crowd = self._crowd
        await crowd.client.set_fanout_policy(
            graph_pb2.FanoutPolicy(pull_threshold=THRESHOLD, pull_threshold_min=THRESHOLD_MIN)
        )
        await crowd.sign_up()
        fans = sorted({fan for author in BIG for fan in crowd.graph.followers[author]})
        readers = crowd.chance.sample(fans, READERS)
        await crowd.have_lists(readers)
        await crowd.log_is_empty()
        small = crowd.watched(SMALL, readers)
        self._progress.step(f"small authors post, {SMALL_POSTS_PER_SECOND} a second")
        before = await crowd.post_steadily(small, SMALL_POSTS_PER_SECOND, BEFORE_SECONDS)
        self.findings.before = list(before.values())
        async with self._watched():
            self._progress.step(f"big authors post, {BIG_POSTS_PER_SECOND} a second, and small ones go on")
            async with asyncio.TaskGroup() as group:
                during = group.create_task(crowd.post_steadily(small, SMALL_POSTS_PER_SECOND, BURST_SECONDS))
                await self._burst()
            self.findings.during = list(during.result().values())
            self.findings.loads.append(os.getloadavg()[0])
            self._progress.step("the burst is over")
            await self._until_it_is_calm()
        self.findings.loads.append(os.getloadavg()[0])
        self._check_pressure()
        await self._check_modes()
        walkers = crowd.chance.sample(readers, WALKS)
        exact = await crowd.exact_walks(walkers)
        self.findings.checks.equal("sampled home timelines that are exact", WALKS, exact)

    async def _burst(self) -> None:
        authors = sorted(BIG)

        async def post(_: int) -> None:
            await self._crowd.post(self._crowd.chance.choice(authors), "a big author's tweet")

        await at_rate(BURST_SECONDS * BIG_POSTS_PER_SECOND, BIG_POSTS_PER_SECOND, post)

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """Look during the block, and end it when that fails."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._pulled.follow()), group.create_task(self._look_on())]
            yield
            for task in tasks:
                task.cancel()

    async def _look_on(self) -> None:
        start = time.monotonic()
        for number in itertools.count():
            await asyncio.sleep(max(0.0, start + number * _LOOK_SECONDS - time.monotonic()))
            status, policy = await asyncio.gather(self._crowd.fanout(), self._crowd.client.fanout_policy())
            self.findings.looks.append(
                look := Look(
                    seconds=time.monotonic() - start,
                    lags={
                        topic: max(lag.lag_seconds for lag in status.partitions if lag.topic == topic)
                        for topic in _TOPICS
                    },
                    deliveries=status.worker.deliveries,
                    slow=policy.pressure.big_tasks_slow,
                    threshold=policy.pressure.pull_threshold,
                    pulled=len(self._pulled.now),
                )
            )
            self._progress.more(
                f"  lag {look.lag:.1f} s, big tasks {'slow' if look.slow else 'as usual'}, "
                f"threshold {look.threshold:,}, {look.pulled} authors pulled"
            )

    async def _until_it_is_calm(self) -> None:
        end = time.monotonic() + RECOVERY_SECONDS_MAX
        while not self.findings.looks[-1].is_calm:
            if time.monotonic() > end:
                raise DrillError(f"it isn't as before {RECOVERY_SECONDS_MAX} s after the burst")
            await asyncio.sleep(_LOOK_SECONDS)

    def _check_pressure(self) -> None:
        checks, looks = self.findings.checks, self.findings.looks
        slow, fell = first(looks, lambda look: look.slow), first(looks, lambda look: look.threshold < THRESHOLD)
        pulled = max(look.pulled for look in looks)
        checks.at_least("seconds from slow tasks to a lower threshold", FALL_AFTER_SLOW_SECONDS, fell - slow)
        checks.at_least("lowest threshold", THRESHOLD_MIN, min(look.threshold for look in looks))
        checks.at_least("authors pulled because of it", 1, pulled)
        checks.at_most("peak lag of any topic, s", LAG_SECONDS_MAX, max(look.lag for look in looks))
        checks.equal("threshold afterwards", THRESHOLD, looks[-1].threshold)

    async def _check_modes(self) -> None:
        """An epoch counts each change, and the way back has two: DRAIN, and PUSH."""
        crowd, pushed, epochs = self._crowd, 0, list[int]()
        for author in BIG:
            mode = await crowd.client.graph.GetAuthorMode(
                graph_pb2.GetAuthorModeRequest(author_id=crowd.ids[author]),
                timeout=_LOOK_SECONDS,
                metadata=crowd.client.as_(principals.service("drill")),
            )
            pushed += mode.mode == graph_pb2.AUTHOR_MODE_PUSH
            epochs.append(mode.epoch)
        checks = self.findings.checks
        checks.at_most("mode changes of an author (there, back)", CHANGES_MAX, max(self._pulled.changes.values()))
        checks.at_most("  epochs of an author (the drain is one, too)", CHANGES_MAX + 1, max(epochs))
        checks.equal("authors who are pushed afterwards", len(BIG), pushed)


def first(looks: Sequence[Look], holds: Callable[[Look], bool]) -> float:
    """Seconds until it was so. Raises DrillError when it never was: then there was no overload."""
    for look in looks:
        if holds(look):
            return look.seconds
    raise DrillError("fan-out followed: this machine wants a greater burst")


def rate(looks: Sequence[Look], start: float, end: float) -> float:
    """Deliveries a second between two moments."""
    within = [look for look in looks if start <= look.seconds <= end]
    return (within[-1].deliveries - within[0].deliveries) / (within[-1].seconds - within[0].seconds)


def story(looks: Sequence[Look]) -> list[str]:
    """What was in force when."""
    lines, before = list[str](), (False, THRESHOLD)
    for look in looks:
        if (now := (look.slow, look.threshold)) != before:
            tasks = "slow" if look.slow else "as usual"
            lines.append(
                f"{look.seconds:6.0f} s: big tasks {tasks}, threshold {look.threshold:,}, lag {look.lag:.1f} s"
            )
            before = now
    return lines


def table(findings: Findings) -> list[str]:
    """The result, for people."""
    looks, delays = findings.looks, {_BEFORE: findings.before, _DURING: findings.during}
    asked = BIG_POSTS_PER_SECOND * sum(BIG.values()) / len(BIG)
    reached = rate(looks, 0.0, first(looks, lambda look: look.threshold < THRESHOLD))
    return [
        *findings.checks.lines(),
        "",
        *delay_lines(delays, before=_BEFORE, during=_DURING),
        "",
        f"the burst wants {asked:,.0f} deliveries a second; before the threshold fell, the worker made {reached:,.0f}",
        *story(looks),
    ]


def draw(looks: Sequence[Look]) -> None:
    """To build/drills."""
    per_second = [
        (b.seconds, (b.deliveries - a.deliveries) / (b.seconds - a.seconds)) for a, b in itertools.pairwise(looks)
    ]
    panels = [
        Panel("lag, s", [Curve(topic, [(look.seconds, look.lags[topic]) for look in looks]) for topic in _TOPICS]),
        Panel("pull threshold in force", [Curve("", [(look.seconds, look.threshold) for look in looks])]),
        Panel("authors who are pulled", [Curve("", [(look.seconds, look.pulled) for look in looks])]),
        Panel("deliveries a second", [Curve("", per_second)]),
    ]
    picture.write(BUILD / "lag.svg", "A burst that fan-out can't follow", panels, {"burst ends": BURST_SECONDS})


async def _run(seed: int) -> Findings:
    click.echo("generating the graph, starting a mesh", err=True)
    graph = evenly(BIG | SMALL, range(1_001, 1_001 + ACCOUNTS), seed)
    with OwnMesh("lag", STARLING_BUCKET_SIZE=str(BUCKET_SIZE)) as mesh:
        async with crowd_in(mesh, graph, seed) as crowd:
            drill = Drill(crowd)
            await drill.run()
    return drill.findings


@click.command()
@click.option("--seed", type=int, default=4, show_default=True, help="Another seed is another graph.")
def main(seed: int) -> None:
    """Have big authors post more than fan-out can follow, and see what is made of it."""
    start = time.monotonic()
    findings = carry_out(_run(seed))
    draw(findings.looks)
    click.echo(f"lag, seed {seed}: {time.monotonic() - start:.0f} s, {machine(findings.loads)}\n")
    for line in table(findings):
        click.echo(line)
    click.echo(f"\na picture: {(BUILD / 'lag.svg').relative_to(ROOT)}")
    sys.exit(0 if findings.checks.hold else 1)


if __name__ == "__main__":
    main()
