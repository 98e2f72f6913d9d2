"""An author with 60,000 followers posts, and those with few don't wait for it: `make drill-big-author`.

A generated graph of 100,000 accounts is imported into a mesh of the drill's own, which pushes everybody (the pull
threshold is 100,000). Some thousand accounts read, and so have home lists. Small authors post at a steady rate, first
alone, then while the biggest author posts, one tweet after the other, each as soon as the one before has reached
everybody. At the end sampled home timelines are walked, and compared with what the edge file and the posts say.

Exit status: 0 when everything asked for was reached, else 1. It takes some minutes.
"""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import click

from cli.importing import EdgeFile, handle_of
from drills.crowd import PATIENCE_SECONDS, POLL_SECONDS, Crowd, crowd_in
from drills.findings import Checks, carry_out, delay_lines, machine, quantile
from drills.own_mesh import DrillError, OwnMesh
from drills.power_law import Shape, power_law
from mesh.eventlog.topics import FANOUT_TASKS
from mesh.ids import time_ms_of

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
_BEFORE, _DURING = "small authors before", "small authors during"


@dataclass
class Findings:
    """What the drill measured. Delays in seconds."""

    checks: Checks = field(default_factory=Checks)
    before: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    big: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    """The machine's load average (1 min) when `before` and when `during` was done."""


class Drill:
    """One run, against a mesh that serves and is empty."""

    def __init__(self, crowd: Crowd, shape: Shape) -> None:
        self._crowd = crowd
        self._graph = crowd.graph
        self._shape = shape
        self._progress = crowd.progress
        self.findings = Findings()

    async def run(self, edges: EdgeFile) -> None:
        """The whole drill; see `findings` then. Raises DrillError when it can't go on."""
        crowd, checks = self._crowd, self.findings.checks
        await self._import(edges)
        fans, readers = self._readers()
        await crowd.have_lists(readers)
        await crowd.log_is_empty()
        small = crowd.watched(self._small_authors(), readers)
        before = (await crowd.fanout()).worker
        self._progress.step(f"small authors post, {POSTS_PER_SECOND} a second ({len(small):,} of them are watched)")
        self.findings.before = await self._small_authors_post(small)
        self._progress.step("the same while the biggest author posts")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._the_biggest_posts())
            during = group.create_task(self._small_authors_post(small))
        self.findings.during = during.result()
        await crowd.log_is_empty()
        await self._check_deliveries(before.deliveries)
        await self._check_lists(fans)
        walkers = crowd.chance.sample(readers, min(WALKS, len(readers)))
        checks.equal("sampled home timelines that are exact", len(walkers), await crowd.exact_walks(walkers))

    async def _import(self, edges: EdgeFile) -> None:
        report = await self._crowd.sign_up(edges)
        biggest = await self._crowd.client.user(handle_of(BIGGEST))
        threshold = (await self._crowd.client.fanout_policy()).policy.pull_threshold
        if threshold <= biggest.follower_count:
            raise DrillError(f"the pull threshold is {threshold:,}: the biggest author wouldn't be pushed")
        checks = self.findings.checks
        checks.equal("accounts imported", self._shape.accounts, report.users_created)
        checks.equal("follows imported", self._shape.follows, report.follows_created)
        checks.equal("followers of the biggest author", self._shape.biggest_followers, biggest.follower_count)

    def _readers(self) -> tuple[list[int], list[int]]:
        """Followers of the biggest author, and with them any accounts: labels of those who shall have lists."""
        followers, everybody = sorted(self._graph.followers[BIGGEST]), sorted(self._graph.followees)
        fans = self._crowd.chance.sample(followers, min(READERS_OF_EACH_KIND, len(followers)))
        anybody = self._crowd.chance.sample(everybody, min(READERS_OF_EACH_KIND, len(everybody)))
        return fans, sorted({*fans, *anybody})

    def _small_authors(self) -> list[int]:
        return [label for label, followers in self._graph.followers.items() if len(followers) < SMALL_MAX]

    async def _small_authors_post(self, small: dict[int, list[int]]) -> list[float]:
        delays = await self._crowd.post_steadily(small, POSTS_PER_SECOND, LOAD_SECONDS)
        self.findings.loads.append(os.getloadavg()[0])
        return list(delays.values())

    async def _the_biggest_posts(self) -> None:
        """As long as the small ones do, so that there is always one of its tweets on its way."""
        end = time.monotonic() + LOAD_SECONDS
        for number in range(1, BIG_TWEETS_MAX + 1):
            tweet_id = await self._crowd.post(BIGGEST, f"the biggest author's tweet {number}")
            await self._all_buckets_are_done(number)
            self.findings.big.append(time.time() - time_ms_of(tweet_id) / 1_000)
            if time.monotonic() > end:
                return

    async def _all_buckets_are_done(self, tweets: int) -> None:
        """All sub-tasks are in the log, and none of them is unacknowledged. Only authors with several buckets have any,
        and nobody but the biggest one has and posts."""
        lists, end = self._crowd.lists, time.monotonic() + PATIENCE_SECONDS
        while await lists.number_of_sub_tasks() < tweets * self._buckets or await self._crowd.lag(FANOUT_TASKS.name):
            if time.monotonic() > end:
                raise DrillError(f"the biggest author's tweet is still on its way after {PATIENCE_SECONDS:.0f} s")
            await asyncio.sleep(POLL_SECONDS)

    @property
    def _buckets(self) -> int:
        return -(-self._shape.biggest_followers // BUCKET_SIZE)

    async def _check_deliveries(self, before: int) -> None:
        checks, posted = self.findings.checks, self._crowd.posted
        tweets = posted[BIGGEST]
        tasks = [(partition, event) for partition, event in await self._crowd.lists.sub_tasks()]
        buckets = {
            tweet_id: {event.bucket.bucket for _, event in tasks if tweet_id in event.bucket.tweet_ids}
            for tweet_id in tweets
        }
        checks.equal("sub-tasks of each of its tweets", self._buckets, min(map(len, buckets.values())))
        partitions = len({partition for partition, _ in tasks})
        checks.at_least("partitions that they spread over", PARTITIONS_MIN, partitions)
        # What workers counted, less what the small authors' tweets account for: their followers are known.
        small = sum(len(self._graph.followers[label]) * len(ids) for label, ids in posted.items() if label != BIGGEST)
        reached = (await self._crowd.fanout()).worker.deliveries - before - small
        checks.at_least(f"deliveries of its {len(tweets)} tweets", len(tweets) * self._shape.biggest_followers, reached)

    async def _check_lists(self, fans: Sequence[int]) -> None:
        """Each of the biggest author's tweets is in the raw list of each follower who has one."""
        tweets = set(self._crowd.posted[BIGGEST])
        lists = await self._crowd.lists.entries([self._crowd.ids[label] for label in fans])
        having = sum(tweets <= ids for ids in lists)
        self.findings.checks.equal("followers' lists that have all of them", len(fans), having)


def table(findings: Findings) -> list[str]:
    """The result, for people."""
    delays = {_BEFORE: findings.before, _DURING: findings.during}
    big = findings.big
    return [
        *findings.checks.lines(),
        "",
        *delay_lines(delays, before=_BEFORE, during=_DURING),
        "",
        f"until all followers of the biggest author were delivered to: first tweet {big[0]:.1f} s, "
        f"median {quantile(big, 0.5):.1f} s, slowest {max(big):.1f} s",
    ]


async def _run(seed: int) -> Findings:
    click.echo("generating the graph, starting a mesh", err=True)
    graph = power_law(SHAPE, seed)
    with OwnMesh("big-author") as mesh:
        path = mesh.folder / "graph.edges"
        graph.write(path)
        async with crowd_in(mesh, graph, seed) as crowd:
            drill = Drill(crowd, SHAPE)
            await drill.run(EdgeFile(path))
    return drill.findings


@click.command()
@click.option("--seed", type=int, default=4, show_default=True, help="Another seed is another graph.")
def main(seed: int) -> None:
    """Post as an author with 60,000 followers, and see whether others have to wait."""
    start = time.monotonic()
    findings = carry_out(_run(seed))
    click.echo(
        f"big author, seed {seed}: {SHAPE.accounts:,} accounts, {SHAPE.follows:,} follows, "
        f"{time.monotonic() - start:.0f} s, {machine(findings.loads)}\n"
    )
    for line in table(findings):
        click.echo(line)
    sys.exit(0 if findings.checks.hold else 1)


if __name__ == "__main__":
    main()
