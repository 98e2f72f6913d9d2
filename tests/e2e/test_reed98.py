"""The main job on a real social graph: everybody posts, and everybody reads their exact home timeline.

The graph is Reed98: 962 accounts, 18,812 friendships, so 37,624 follows. It is real processes, started as people do.
"""

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from redis import Redis, RedisCluster

from backends.servers import Cluster
from cli.client import Client
from cli.importing import EdgeFile, handle_of, import_graph
from fanout_svc.core import PULL_AGE_SECONDS
from mesh import principals
from mesh.channels import streaming
from mesh.valkey_cluster import SCHEME
from starling.fanout.v1 import fanout_pb2
from starling.graph.v1 import graph_pb2
from starling.timeline.v1 import timeline_pb2
from starling.tweet.v1 import tweet_pb2
from tests.cassandra import Keyspace
from tests.e2e.conftest import RunningMesh
from tests.shared_data import shared_path
from tests.waiting import eventually

ACCOUNTS, FOLLOWS = 962, 37_624
TWEETS_EACH = 5
CALLS_AT_ONCE = 32
BIGGEST, BIGGEST_FOLLOWERS, ITS_HOME = 678, 313, 1_570

PULLED_FROM, CELEBRITIES = 100, 58
OF_MODES = {
    ("operator", "graph.GetFanoutPolicy"),
    ("operator", "graph.UpdateFanoutPolicy"),
    ("service:fanout_svc", "graph.CompleteDrain"),
    ("service:fanout_svc", "graph.StreamFollowers"),  # Where authors aren't moved, it is for who has more followers.
    ("service:fanout_svc", "tweet.StreamAuthorTweets"),
}
ROOT = Path(__file__).parents[2]

T = TypeVar("T")


@pytest.fixture
def reed98() -> Path:
    return shared_path("datasets/socfb-Reed98.edges")


@pytest.fixture
def noisy_mesh(tmp_path: Path) -> Iterator[RunningMesh]:
    """A mesh that logs each call; the test starts it."""
    mesh = RunningMesh(tmp_path / "data")
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

    async def do_all_else_that_people_do(self) -> None:
        """The smallest account follows and unfollows, posts and deletes, and looks about."""
        me, other = self.ids[min(self.ids)], self.ids[BIGGEST]
        how: dict[str, Any] = {"metadata": self.client.as_(principals.user(me)), "timeout": 10}
        graph, tweet = self.client.graph, self.client.tweet
        await self.client.follow(me, other)
        await self.client.unfollow(me, other)
        await self.client.follow(me, other)
        made = await self.client.post(me, "for a moment only")
        await tweet.GetTweet(tweet_pb2.GetTweetRequest(tweet_id=made.tweet.tweet_id), **how)
        await tweet.BatchGetTweets(tweet_pb2.BatchGetTweetsRequest(tweet_ids=[made.tweet.tweet_id]), **how)
        await self.client.delete(me, made.tweet.tweet_id)
        await tweet.ListUserTweets(tweet_pb2.ListUserTweetsRequest(user_id=other), **how)
        biggest = await graph.GetUser(graph_pb2.GetUserRequest(user_id=other), **how)
        assert biggest.user.follower_count == BIGGEST_FOLLOWERS
        await graph.BatchGetUsers(graph_pb2.BatchGetUsersRequest(user_ids=[me, other]), **how)
        await graph.ListFollowers(graph_pb2.ListFollowersRequest(user_id=other), **how)
        await graph.ListFollowing(graph_pb2.ListFollowingRequest(user_id=other), **how)
        await self.client.rebuild(me)
        await self.client.verify(me)
        await self.client.explain(me, self.tweets[BIGGEST][0])
        await self.client.timeline.ExplainHomeTimelineItem(
            timeline_pb2.ExplainHomeTimelineItemRequest(tweet_id=self.tweets[BIGGEST][0]), **how
        )
        await self._do_what_people_do_with_tweets(how)
        await self._do_what_people_do_with_each_other(how)

    async def _do_what_people_do_with_tweets(self, how: dict[str, Any]) -> None:
        label = min(self.ids)
        me, friend, stranger = self.ids[label], self.ids[min(self.followees[label])], self.ids[self._stranger(label)]
        mine = (await self.client.post(me, "hullo")).tweet.tweet_id
        await self.client.edit(me, mine, "hello")
        assert [r.text for r in (await self.client.revisions_page(mine)).revisions] == ["hello", "hullo"]
        theirs = (await self.client.post(stranger, "to be retweeted")).tweet.tweet_id
        await self.client.retweet(friend, theirs)

        async def retweeted() -> bool:
            first = (await self.client.home_page(me)).items[0]
            return (first.tweet.tweet_id, first.retweeted_by.user_id) == (theirs, friend)

        await eventually(retweeted)
        assert await self.client.like(me, theirs)
        request = tweet_pb2.BatchGetEngagementsRequest(tweet_ids=[mine, theirs])
        assert (await self.client.tweet.BatchGetEngagements(request, **how)).liked_tweet_ids == [theirs]
        assert await self.client.unlike(me, theirs)
        assert await self.client.undo_retweet(friend, theirs)
        async with asyncio.timeout(30):  # It begins a minute before that, oldest first.
            async for item in self.client.watch_home(me, newer_than_id=mine - 1):
                if item.item_id == mine:
                    break

    async def _do_what_people_do_with_each_other(self, how: dict[str, Any]) -> None:
        label = min(self.ids)
        me, stranger, graph = self.ids[label], self.ids[self._stranger(label)], self.client.graph
        await self.client.mute(me, stranger)
        await self.client.block(me, stranger)
        for listed in (
            await graph.ListMuted(graph_pb2.ListMutedRequest(), **how),
            await graph.ListBlocked(graph_pb2.ListBlockedRequest(), **how),
        ):
            assert list(listed.user_ids) == [stranger]
        await self.client.unmute(me, stranger)
        await self.client.unblock(me, stranger)

    def _stranger(self, label: int) -> int:
        """An account that has nothing to do with another."""
        return min(other for other in self.ids if other != label and other not in self.followees[label])

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
    return (await client.fanout_status())["fanout_svc"]


async def delivered(client: Client, events: int) -> bool:
    """So many of them, and nothing is left. An empty log alone is not enough: posts may be on their way to it."""
    now = await status(client)
    return now.worker.events >= events and not any(partition.lag_messages for partition in now.partitions)


def call_matrix() -> set[tuple[str, str]]:
    """Who calls whom by which RPC, as the README shows it."""
    services = {"tweet_svc", "graph_svc", "fanout_svc", "timeline_svc"}
    rows = re.findall(r"^\| (\w+) \| (\w+)_svc \| (\w+)(?: ⇉)? \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    return {(f"service:{who}" if who in services else who, f"{area}.{rpc}") for who, area, rpc in rows}


def evict_bodies(mesh: RunningMesh, tweet_ids: Iterable[int]) -> None:
    with Redis.from_url(mesh.mesh.valkey_url) as valkey:
        valkey.delete(*(f"tweet:{tweet_id}" for tweet_id in tweet_ids))


def number_of_lists(mesh: RunningMesh) -> int:
    url = mesh.mesh.valkey_url
    if url.startswith(SCHEME):
        host, port = url.removeprefix(SCHEME).partition(",")[0].split(":")
        server: Redis | RedisCluster = RedisCluster(host, int(port))
    else:
        server = Redis.from_url(url)
    with server as valkey:
        return sum(1 for _ in valkey.scan_iter("timeline:*", count=1_000))


def calls_seen(log: str) -> Counter[tuple[str, str]]:
    """(kind of caller, RPC) of each call that succeeded, or that its caller ended, as one does with a stream."""
    pattern = re.compile(r"call caller=(\S+) method=/starling\.(\w+)\.v1\.\w+/(\w+) code=(?:OK|CANCELLED)")
    found = pattern.findall(log)
    return Counter((re.sub(r"^user:\d+$", "user", caller), f"{area}.{method}") for caller, area, method in found)


@asynccontextmanager
async def everybody(mesh: RunningMesh, edges: EdgeFile, **settings: str) -> AsyncIterator[People]:
    """The graph, imported; everybody has read their home once, so everybody has a list."""
    mesh.start(STARLING_LOG_REQUESTS="1", **settings)
    async with mesh.client() as client:
        report = await import_graph(client, edges)
        assert (report.users_created, report.follows_created, report.follows_refused) == (ACCOUNTS, FOLLOWS, 0)
        people = People(client, edges, report.user_ids)
        await people.first_pages_are_read()
        await eventually(lambda: number_of_lists(mesh) == ACCOUNTS, 60)  # They are made behind the reads.
        yield people


@pytest.mark.timeout(600)
async def test_everybody_on_reed98_reads_their_exact_home_timeline(reed98: Path, noisy_mesh: RunningMesh) -> None:
    async with everybody(noisy_mesh, EdgeFile(reed98, undirected=True)) as people:
        await people.all_post(TWEETS_EACH)
        await eventually(lambda: delivered(people.client, TWEETS_EACH * ACCOUNTS), 120)
        worker = (await status(people.client)).worker
        assert worker.deliveries == TWEETS_EACH * FOLLOWS == 188_120
        assert worker.deliveries_to_lists == worker.deliveries
        assert worker.events == TWEETS_EACH * ACCOUNTS
        _print_delays(worker)

        the_biggest = set(people.tweets[BIGGEST])
        followers = [label for label in people.ids if BIGGEST in people.followees[label]]
        assert len(followers) == BIGGEST_FOLLOWERS
        for label in followers:
            assert the_biggest <= set(await people.walk(label))
        evict_bodies(noisy_mesh, the_biggest)
        assert len(await people.walk(BIGGEST)) == ITS_HOME, "past the cap"
        items = await people.every_walk_is_exact()
        assert items == TWEETS_EACH * (FOLLOWS + ACCOUNTS)
        await people.do_all_else_that_people_do()
    matrix = call_matrix() - OF_MODES
    with suppress(AssertionError):  # The next one says what is missing.
        await eventually(lambda: set(calls_seen(noisy_mesh.log())) >= matrix, 10)  # Logs come a little later.
    seen = calls_seen(noisy_mesh.log())
    assert set(seen) == matrix, "every edge of the call matrix is used, and no other"
    print("\n".join(f"  {caller:24} {rpc:28} {count:>7,}" for (caller, rpc), count in sorted(seen.items())))


@pytest.mark.backends
@pytest.mark.timeout(1_500)
async def test_everybody_on_reed98_reads_their_exact_home_timeline_on_the_production_profile(
    reed98: Path,
    noisy_mesh: RunningMesh,
    cassandra_node: Cluster,
    keyspace: Keyspace,
    kafka_cluster: Cluster,
    valkey_cluster: Cluster,
) -> None:
    profile = {**cassandra_node.environment, **kafka_cluster.environment, **valkey_cluster.environment}
    profile["STARLING_CASSANDRA_KEYSPACE"] = keyspace.where.keyspace
    async with everybody(noisy_mesh, EdgeFile(reed98, undirected=True), **profile) as people:
        await people.all_post(1)
        await eventually(lambda: delivered(people.client, ACCOUNTS), 240)
        worker = (await status(people.client)).worker
        assert worker.deliveries == FOLLOWS, "each once"
        _print_delays(worker)
        assert await people.every_walk_is_exact() == FOLLOWS + ACCOUNTS
        await people.do_all_else_that_people_do()


async def pulled_authors(client: Client) -> int:
    """How many there are now."""
    how: dict[str, Any] = {"metadata": client.as_(principals.service("timeline_svc")), "timeout": 10}
    async with streaming(client.graph.WatchPullAuthors(graph_pb2.WatchPullAuthorsRequest(), **how)) as watch:
        async for message in watch:
            assert message.snapshot.complete
            return len(message.snapshot.author_ids)
    raise AssertionError("no snapshot")


async def workers_leave_followers_out(client: Client, authors: Iterable[int]) -> bool:
    how: dict[str, Any] = {"metadata": client.as_(principals.service("fanout_svc")), "timeout": 10}
    for author in authors:
        state = await client.graph.GetAuthorMode(graph_pb2.GetAuthorModeRequest(author_id=author), **how)
        if state.mode != graph_pb2.AUTHOR_MODE_PULL or state.age_seconds <= PULL_AGE_SECONDS:
            return False
    return True


async def set_pull_threshold(client: Client, threshold: int) -> None:
    how: dict[str, Any] = {"metadata": client.as_(principals.OPERATOR), "timeout": 10}
    policy = graph_pb2.FanoutPolicy(pull_threshold=threshold)
    await client.graph.UpdateFanoutPolicy(graph_pb2.UpdateFanoutPolicyRequest(policy=policy), **how)
    assert (await client.graph.GetFanoutPolicy(graph_pb2.GetFanoutPolicyRequest(), **how)).policy == policy


@pytest.mark.timeout(600)
async def test_reed98_with_58_celebrities_is_exact_while_they_are_pulled_and_when_they_are_pushed_again(
    reed98: Path, noisy_mesh: RunningMesh
) -> None:
    edges = EdgeFile(reed98, undirected=True)
    followers = Counter(followee for _, followee in edges)
    small = sum(count for count in followers.values() if count < PULLED_FROM)
    async with everybody(noisy_mesh, edges, STARLING_PULL_THRESHOLD=str(PULLED_FROM)) as people:
        client = people.client
        assert await pulled_authors(client) == CELEBRITIES == sum(n >= PULLED_FROM for n in followers.values())
        celebrities = [people.ids[label] for label, count in followers.items() if count >= PULLED_FROM]
        await eventually(lambda: workers_leave_followers_out(client, celebrities), 40)
        await people.all_post(1)
        await eventually(lambda: delivered(client, ACCOUNTS), 120)
        assert (await status(client)).worker.deliveries == small, "computed from the edge file"
        await people.every_walk_is_exact()

        await set_pull_threshold(client, 400)  # 80 % of it is above all of them.

        async def nobody_is_pulled() -> bool:
            return await pulled_authors(client) == 0

        await eventually(nobody_is_pulled, 60)
        await people.every_walk_is_exact()
        await people.all_post(1)
        await eventually(lambda: delivered(client, 2 * ACCOUNTS), 120)
        worker = (await status(client)).worker
        assert worker.deliveries == small + FOLLOWS
        drained = (await client.fanout_status())["fanout_svc-slow"].worker.drained_buckets
        assert drained == CELEBRITIES
        await people.every_walk_is_exact()
        print(f"\n{CELEBRITIES} pulled: {small:,} of {FOLLOWS:,} deliveries; drained {drained} buckets")
    assert set(calls_seen(noisy_mesh.log())) >= OF_MODES


def _print_delays(worker: fanout_pb2.WorkerStatus) -> None:
    delay = worker.delay
    figures: Sequence[tuple[str, float]] = [
        ("p50", delay.p50_seconds),
        ("p95", delay.p95_seconds),
        ("p99", delay.p99_seconds),
        ("max", delay.max_seconds),
    ]
    print("\ndelay from post to list: " + ", ".join(f"{name} {seconds * 1_000:,.0f} ms" for name, seconds in figures))
