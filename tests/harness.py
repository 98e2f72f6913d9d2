"""The whole mesh in one process: real gRPC, real Valkey, real SQLite; but time and background work are the test's.

Nothing runs by itself: the relay, the worker and the warmers are stepped. Faults are switched on and off here.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc

from fanout_svc.deliveries import Deliveries
from fanout_svc.peers import Peers
from fanout_svc.service import ALLOWED as FANOUT_ALLOWED
from fanout_svc.service import FanoutService
from fanout_svc.worker import Figures, Worker
from graph_svc.cassandra import CassandraGraphStore
from graph_svc.modes import ModeMover
from graph_svc.service import ALLOWED as GRAPH_ALLOWED
from graph_svc.service import GraphService
from graph_svc.sqlite import SqliteGraphStore
from mesh import caches, channels, principals
from mesh.caches.bodies import Bodies
from mesh.caches.counts import Counts
from mesh.caches.viewer_versions import ViewerVersions
from mesh.cassandra import Cassandra
from mesh.config import Where
from mesh.errors import UnavailableError
from mesh.eventlog import topics, valkey_streams
from mesh.eventlog.port import Lag, Record
from mesh.ids import Snowflakes
from mesh.media import MediaUrls
from mesh.page_tokens import PageTokens
from mesh.principals import Principal
from mesh.server import Allowed, Gate, server_options
from mesh.timelines import valkey as valkey_timelines
from mesh.timelines.port import ListKey, ListView
from mesh.timelines.valkey import ValkeyTimelines
from mesh.valkey import Command, Valkey
from starling.fanout.v1 import fanout_pb2_grpc
from starling.graph.v1 import graph_pb2, graph_pb2_grpc
from starling.timeline.v1 import timeline_pb2, timeline_pb2_grpc
from starling.tweet.v1 import tweet_pb2, tweet_pb2_grpc
from tests.clocks import ManualClock
from timeline_svc.core import ViewerContext
from timeline_svc.live import Live
from timeline_svc.peers import Graph, Tweets
from timeline_svc.pull_authors import PullAuthors
from timeline_svc.reconcile import Reconciler
from timeline_svc.service import ALLOWED as TIMELINE_ALLOWED
from timeline_svc.service import TimelineService
from tweet_svc.accounts import Accounts
from tweet_svc.cassandra import CassandraTweetStore
from tweet_svc.counting import Counting
from tweet_svc.relay import Relay
from tweet_svc.service import ALLOWED as TWEET_ALLOWED
from tweet_svc.service import TweetService
from tweet_svc.sqlite import SqliteTweetStore
from tweet_svc.store import Request, StoredTweet
from tweet_svc.velocity import Velocity

SECRET = "a secret for tests that is long enough"
CALL_SECONDS = 10.0
STEPS_MAX = 10_000


class FaultyValkey(Valkey):
    """A client that can be cut off from its server."""

    down = False

    async def call_blocking(self, *command: str | bytes | int | float) -> Any:
        self._check()
        return await super().call_blocking(*command)

    async def pipeline(self, commands: Sequence[Command], *, atomic: bool = False) -> list[Any]:
        self._check()
        return await super().pipeline(commands, atomic=atomic)

    def _check(self) -> None:
        if self.down:
            raise UnavailableError("cut off", reason="VALKEY_UNAVAILABLE")


@dataclass
class Faults:
    """`pushes_left`: pushes and merges before one is cancelled. `chunks_left`: chunks of followers before their stream
    breaks. `deferred`: finishes and covers that came late."""

    pushes_left: int | None = None
    chunks_left: int | None = None
    defer: bool = False
    deferred: list[Callable[[], Awaitable[bool]]] = field(default_factory=list)

    between: Callable[[], Awaitable[None]] | None = None
    """What happens, once, in the middle of the next read or making of a list: after `skip` steps of it."""
    skip: int = 0

    hold: asyncio.Event | None = None
    """The next post gets its id, sets this, and is held before it is committed."""
    held: list[asyncio.Event] = field(default_factory=list)

    async def step(self) -> None:
        if self.between and self.skip == 0:
            happens, self.between = self.between, None
            await happens()
        self.skip = max(0, self.skip - 1)

    def count_push(self) -> None:
        if self.pushes_left == 0:
            self.pushes_left = None
            raise asyncio.CancelledError
        if self.pushes_left is not None:
            self.pushes_left -= 1


class FaultyTimelines(ValkeyTimelines):
    """Lists whose pushes stop in the middle, and whose finishes and covers come later than anything else."""

    faults: Faults

    async def push(self, keys: Sequence[ListKey], ids: Sequence[int]) -> int:
        self.faults.count_push()
        return await super().push(keys, ids)

    async def finish(self, key: ListKey, token: str, version: int, ids: Sequence[int], down_to: int) -> bool:
        return await self._now_or_later(lambda: super(FaultyTimelines, self).finish(key, token, version, ids, down_to))

    async def cover(
        self, key: ListKey, token: str, from_version: int, to_version: int, ids: Sequence[int], down_to: int
    ) -> bool:
        return await self._now_or_later(
            lambda: super(FaultyTimelines, self).cover(key, token, from_version, to_version, ids, down_to)
        )

    async def create(self, key: ListKey, token: str, lease_ms: int) -> bool:
        created = await super().create(key, token, lease_ms)
        await self.faults.step()
        return created

    async def read(self, key: ListKey, count: int) -> ListView | None:
        await self.faults.step()
        return await super().read(key, count)

    async def merge(self, keys: Sequence[ListKey], ids: Sequence[int], down_to: int) -> int:
        self.faults.count_push()
        return await super().merge(keys, ids, down_to)

    async def _now_or_later(self, change: Callable[[], Awaitable[bool]]) -> bool:
        if self.faults.defer:
            self.faults.deferred.append(change)
            return False
        return await change()


class SteppedGraph(Graph):
    """Lets something happen after a context was read."""

    faults: Faults

    async def viewer_context(self, viewer_id: int, *, wait: bool = True) -> ViewerContext:
        viewer = await super().viewer_context(viewer_id, wait=wait)
        await self.faults.step()
        return viewer


class SteppedTweets(Tweets):
    """Lets something happen before the store is read, and between its chunks."""

    faults: Faults

    async def author_ids(
        self, author_ids: Sequence[int], below_id: int, limit: int
    ) -> AsyncGenerator[tuple[Sequence[int], bool], None]:
        await self.faults.step()
        async for chunk in super().author_ids(author_ids, below_id, limit):
            yield chunk
            await self.faults.step()


class _SlowPosts:
    """A store whose commits may wait, so that a smaller id is committed after a greater one."""

    faults: Faults

    async def create_tweet(
        self, tweet: StoredTweet, request: Request | None, now_ms: int, outbox_max: int
    ) -> StoredTweet:
        if self.faults.hold:
            self.faults.hold.set()
            self.faults.hold = None
            self.faults.held.append(asyncio.Event())
            await self.faults.held[-1].wait()
        stored: StoredTweet = await super().create_tweet(tweet, request, now_ms, outbox_max)  # type: ignore[misc]
        return stored


class SlowTweetStore(_SlowPosts, SqliteTweetStore):
    """On SQLite."""


class SlowCassandraTweetStore(_SlowPosts, CassandraTweetStore):
    """On Cassandra."""


class ToldLag:
    """The lag of fan-out as a test tells it: the log's own goes by real time. `seconds`: of what can't wait, None: the
    log is away. `slow_seconds`: of the slow topic."""

    seconds: float | None = 0.0
    slow_seconds = 0.0

    async def lag(self) -> list[Lag]:
        if self.seconds is None:
            raise UnavailableError("cut off", reason="VALKEY_UNAVAILABLE")
        return [
            Lag(topics.TWEET_FANOUT.name, 0, 1, self.seconds),
            Lag(topics.FANOUT_TASKS_SLOW.name, 0, 1, self.slow_seconds),
        ]


class FaultyPeers(Peers):
    """Whose stream of followers may break half-way."""

    faults: Faults

    async def followers(self, author_id: int, bucket: int | None) -> AsyncIterator[Sequence[int]]:
        async for chunk in super().followers(author_id, bucket):
            if self.faults.chunks_left == 0:
                self.faults.chunks_left = None
                raise UnavailableError("the stream broke", reason="GRAPH_SVC_UNAVAILABLE")
            if self.faults.chunks_left is not None:
                self.faults.chunks_left -= 1
            yield chunk


@dataclass(frozen=True)
class Sizes:
    """Everything that has an edge, small."""

    cap: int = 5
    slack: int = 2
    bucket_size: int = 3
    stream_chunk: int = 2
    pull_threshold: int = 1_000
    message_bytes: int = 4 << 20


class Mesh:
    """All four services; see the module. Make it with `running_mesh`."""

    def __init__(
        self,
        valkey_url: str,
        folder: Path,
        key_prefix: str,
        sizes: Sizes,
        libraries: Sequence[str] = (),
        cassandra: Where | None = None,
    ) -> None:
        self.gates: list[Gate] = []
        self.clock = ManualClock()
        self.faults = Faults()
        self.sizes = sizes
        self.names = (f"worker-{n}" for n in itertools.count())
        libraries = libraries or (valkey_timelines.LIBRARY, valkey_streams.LIBRARY, caches.LIBRARY)
        self.valkey = FaultyValkey(valkey_url, key_prefix=key_prefix, libraries=libraries)
        self.timelines = FaultyTimelines(self.valkey, self.clock, cap=sizes.cap, slack=sizes.slack)
        self.timelines.faults = self.faults
        self.tweet_store, self.graph_store = self._stores(folder, cassandra)
        self.tweet_store.faults = self.faults
        self.tweet_ids = Snowflakes(self.tweet_store, self.clock, "tweets")
        self.user_ids = Snowflakes(self.graph_store, self.clock, "users")
        self.page_tokens = PageTokens([SECRET])
        self.deliveries = Deliveries()
        self.media = MediaUrls("https://media.example/", SECRET, self.clock)
        self.fanout_targets: list[str] = []
        self.producer = valkey_streams.StreamsProducer(
            self.valkey, [topics.TWEET_FANOUT, topics.FANOUT_TASKS, topics.FANOUT_TASKS_SLOW]
        )
        self.fanout_lag = ToldLag()
        self.mover = ModeMover(self.graph_store, self.producer, self.fanout_lag, self.clock, sizes.pull_threshold)
        self.relay = Relay(self.tweet_store, self.producer, self.clock)

    def _stores(self, folder: Path, cassandra: Where | None) -> tuple[SlowTweetStore, SqliteGraphStore]:
        """Said to be SQLite's, since some tests look into those."""
        bucket_size = self.sizes.bucket_size
        if cassandra:
            # It sweeps at each step, and takes up at once what another step has begun.
            posts = SlowCassandraTweetStore(Cassandra(cassandra), self.clock, sweep_seconds=0.0, adopt_after_ms=0)
            graph = CassandraGraphStore(Cassandra(cassandra), bucket_size=bucket_size)
            return cast(SlowTweetStore, posts), cast(SqliteGraphStore, graph)
        return (
            SlowTweetStore(folder / "tweets.db", synchronous="OFF"),
            SqliteGraphStore(folder / "graph.db", bucket_size=bucket_size, synchronous="OFF"),
        )

    async def _start(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self.valkey.close)
        await self.tweet_store.open()
        stack.push_async_callback(self.tweet_store.close)
        await self.graph_store.open()
        stack.push_async_callback(self.graph_store.close)
        await self.valkey.load()
        await self.renew_leases()
        self._stack = stack
        await self._start_graph()
        await self._start_tweets()
        await self._start_fanout()
        self.fanout_targets = [f"127.0.0.1:{self.port}"]
        await self._start_timelines()

    async def _serve(self, allowed: Allowed, register: Callable[[grpc.aio.Server], None]) -> grpc.aio.Channel:
        gate = Gate(principals.Verifier(SECRET), allowed)
        self.gates.append(gate)
        server = grpc.aio.server(interceptors=[gate], options=server_options(30.0, 1.0, self.sizes.message_bytes))
        register(server)
        self.port = port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._stack.push_async_callback(server.stop, None)
        channel = channels.connect(f"127.0.0.1:{port}", retries=False, max_message_bytes=self.sizes.message_bytes)
        self._stack.push_async_callback(channel.close)
        return channel

    def _credentials(self, name: str) -> principals.Credentials:
        return principals.Credentials(SECRET, principals.service(name))

    async def _start_graph(self) -> None:
        service = GraphService(
            store=self.graph_store,
            versions=ViewerVersions(self.valkey),
            snowflakes=self.user_ids,
            page_tokens=self.page_tokens,
            clock=self.clock,
            mover=self.mover,
            stream_chunk=self.sizes.stream_chunk,
        )
        self.graph_channel = await self._serve(
            GRAPH_ALLOWED, lambda server: graph_pb2_grpc.add_GraphServiceServicer_to_server(service, server)
        )
        self.graph = graph_pb2_grpc.GraphServiceStub(self.graph_channel)

    async def _start_tweets(self) -> None:
        self.counting = Counting(Counts(self.valkey), self.tweet_store, self.clock)
        self.tweet_service = TweetService(
            store=self.tweet_store,
            timelines=self.timelines,
            bodies=Bodies(self.valkey),
            counting=self.counting,
            media=self.media,
            velocity=Velocity(self.valkey, self.clock),
            snowflakes=self.tweet_ids,
            page_tokens=self.page_tokens,
            accounts=Accounts(self.graph_channel, self._credentials("tweet_svc")),
            on_write=self.relay.nudge,
            clock=self.clock,
            outbox_max=1_000,
            outbox_slow_max=10_000,
        )
        self.tweet_channel = await self._serve(
            TWEET_ALLOWED,
            lambda server: tweet_pb2_grpc.add_TweetServiceServicer_to_server(self.tweet_service, server),
        )
        self.tweets = tweet_pb2_grpc.TweetServiceStub(self.tweet_channel)

    async def _start_timelines(self) -> None:
        credentials = self._credentials("timeline_svc")
        self.pull_authors = PullAuthors(self.graph_channel, credentials, self.clock)
        await self.pull_authors.follow(once=True)
        self.live = Live(self.fanout_targets, credentials, 100)
        graph = SteppedGraph(self.graph_channel, credentials)
        self.stepped_tweets = tweets = SteppedTweets(self.tweet_channel, credentials)
        graph.faults = tweets.faults = self.faults
        self.timeline_service = TimelineService(
            valkey=self.valkey,
            timelines=self.timelines,
            versions=ViewerVersions(self.valkey),
            bodies=Bodies(self.valkey),
            graph=graph,
            tweets=tweets,
            pull_authors=self.pull_authors,
            live=self.live,
            media=self.media,
            page_tokens=self.page_tokens,
            clock=self.clock,
        )
        channel = await self._serve(
            TIMELINE_ALLOWED,
            lambda server: timeline_pb2_grpc.add_TimelineServiceServicer_to_server(self.timeline_service, server),
        )
        self.timeline = timeline_pb2_grpc.TimelineServiceStub(channel)

    async def _start_fanout(self) -> None:
        self.new_worker()
        service = FanoutService(self.consumer, self.consumer, self.figures, self.deliveries)
        channel = await self._serve(
            FANOUT_ALLOWED, lambda server: fanout_pb2_grpc.add_FanoutServiceServicer_to_server(service, server)
        )
        self.fanout = fanout_pb2_grpc.FanoutServiceStub(channel)

    def new_worker(self) -> None:
        """The worker's process is gone, with all that it had in hand; another one starts."""
        self.figures = Figures()
        self.consumer = valkey_streams.StreamsConsumer(
            self.valkey,
            topics=[topics.TWEET_FANOUT, topics.FANOUT_TASKS, topics.FANOUT_TASKS_SLOW],
            group=topics.FANOUT_WORKERS,
            name=next(self.names),
            dead_letters=topics.FANOUT_DEAD_LETTERS,
            claim_idle_ms=0,
            clock=self.clock,
        )
        self.peers = peers = FaultyPeers(self.graph_channel, self.tweet_channel, self._credentials("fanout_svc"))
        peers.faults = self.faults
        self.worker = Worker(
            consumer=self.consumer,
            producer=self.producer,
            timelines=self.timelines,
            bodies=Bodies(self.valkey),
            peers=peers,
            clock=self.clock,
            figures=self.figures,
            deliveries=self.deliveries,
            few_followers=self.sizes.bucket_size,
        )

    async def reconcile_lists(self) -> None:
        """As `python -m timeline_svc.reconcile` does."""
        await Reconciler(self.timelines, self.stepped_tweets, ids_per_second=1e9).run()

    async def renew_leases(self) -> None:
        await self.tweet_ids.renew()
        await self.user_ids.renew()

    # What people do.

    def as_(self, principal: Principal | int) -> dict[str, Any]:
        """Keyword arguments of a call by a user (by id) or another principal."""
        who = principals.user(principal) if isinstance(principal, int) else principal
        return {"metadata": principals.Credentials(SECRET, who).metadata(), "timeout": CALL_SECONDS}

    async def create_user(self, handle: str) -> int:
        request = graph_pb2.CreateUserRequest(handle=handle)
        reply = await self.graph.CreateUser(request, **self.as_(principals.OPERATOR))
        return reply.user.user_id

    async def post(
        self, author_id: int, text: str = "hello", *, timeout: float = CALL_SECONDS, **fields: Any
    ) -> tweet_pb2.Tweet:
        request = tweet_pb2.CreateTweetRequest(text=text, **fields)
        reply = await self.tweets.CreateTweet(request, **(self.as_(author_id) | {"timeout": timeout}))
        return reply.tweet

    async def delete(self, author_id: int, tweet_id: int) -> None:
        await self.tweets.DeleteTweet(tweet_pb2.DeleteTweetRequest(tweet_id=tweet_id), **self.as_(author_id))

    async def follow(self, follower_id: int, followee_id: int) -> None:
        await self.graph.Follow(graph_pb2.FollowRequest(followee_id=followee_id), **self.as_(follower_id))

    async def unfollow(self, follower_id: int, followee_id: int) -> None:
        await self.graph.Unfollow(graph_pb2.UnfollowRequest(followee_id=followee_id), **self.as_(follower_id))

    async def block(self, blocker_id: int, user_id: int) -> None:
        await self.graph.Block(graph_pb2.BlockRequest(user_id=user_id), **self.as_(blocker_id))

    async def unblock(self, blocker_id: int, user_id: int) -> None:
        await self.graph.Unblock(graph_pb2.UnblockRequest(user_id=user_id), **self.as_(blocker_id))

    async def mute(self, muter_id: int, user_id: int) -> None:
        await self.graph.Mute(graph_pb2.MuteRequest(user_id=user_id), **self.as_(muter_id))

    async def unmute(self, muter_id: int, user_id: int) -> None:
        await self.graph.Unmute(graph_pb2.UnmuteRequest(user_id=user_id), **self.as_(muter_id))

    async def retweet(self, author_id: int, tweet_id: int) -> tweet_pb2.Tweet:
        return (await self.tweets.Retweet(tweet_pb2.RetweetRequest(tweet_id=tweet_id), **self.as_(author_id))).tweet

    async def undo_retweet(self, author_id: int, tweet_id: int) -> bool:
        request = tweet_pb2.UndoRetweetRequest(tweet_id=tweet_id)
        return (await self.tweets.UndoRetweet(request, **self.as_(author_id))).changed

    async def edit(self, author_id: int, tweet_id: int, text: str) -> tweet_pb2.Tweet:
        request = tweet_pb2.UpdateTweetRequest(tweet=tweet_pb2.Tweet(tweet_id=tweet_id, text=text))
        return (await self.tweets.UpdateTweet(request, **self.as_(author_id))).tweet

    async def like(self, user_id: int, tweet_id: int) -> bool:
        return (await self.tweets.Like(tweet_pb2.LikeRequest(tweet_id=tweet_id), **self.as_(user_id))).changed

    async def unlike(self, user_id: int, tweet_id: int) -> None:
        await self.tweets.Unlike(tweet_pb2.UnlikeRequest(tweet_id=tweet_id), **self.as_(user_id))

    async def engagements(self, user_id: int, tweet_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """What a user likes, and has retweeted, of these."""
        request = tweet_pb2.BatchGetEngagementsRequest(tweet_ids=tweet_ids)
        reply = await self.tweets.BatchGetEngagements(request, **self.as_(user_id))
        return list(reply.liked_tweet_ids), list(reply.retweeted_tweet_ids)

    async def home(
        self,
        viewer_id: int,
        size: int = 20,
        token: str = "",
        *,
        written: int = 0,
        newer_than: int = 0,
        timeout: float | None = CALL_SECONDS,
    ) -> timeline_pb2.ListHomeTimelineResponse:
        request = timeline_pb2.ListHomeTimelineRequest(
            page_size=size,
            page_token=token,
            read_your_write_token=str(written) if written else "",
            newer_than_id=newer_than,
        )
        return await self.timeline.ListHomeTimeline(request, **(self.as_(viewer_id) | {"timeout": timeout}))

    async def walk(self, viewer_id: int, size: int = 20, newer_than: int = 0) -> list[int]:
        """All ids, from the first page to the last; only the last page has no token."""
        pages = await self.pages(viewer_id, size, newer_than)
        return [tweet_id for page in pages for tweet_id in page]

    async def pages(self, viewer_id: int, size: int, newer_than: int = 0) -> list[list[int]]:
        pages: list[list[int]] = []
        token = ""
        for _ in range(STEPS_MAX):
            page = await self.home(viewer_id, size, token, newer_than=newer_than)
            pages.append([item.item_id for item in page.items])
            token = page.next_page_token
            if not token:
                return pages
        raise AssertionError("the walk doesn't end")

    async def profile(self, reader_id: int, user_id: int, size: int = 20) -> list[int]:
        pages = await self.profile_pages(reader_id, user_id, size)
        return [tweet.tweet_id for page in pages for tweet in page.tweets]

    async def profile_pages(
        self, reader_id: int, user_id: int, size: int = 20
    ) -> list[tweet_pb2.ListUserTweetsResponse]:
        pages: list[tweet_pb2.ListUserTweetsResponse] = []
        token = ""
        for _ in range(STEPS_MAX):
            request = tweet_pb2.ListUserTweetsRequest(user_id=user_id, page_size=size, page_token=token)
            pages.append(await self.tweets.ListUserTweets(request, **self.as_(reader_id)))
            token = pages[-1].next_page_token
            if not token:
                return pages
        raise AssertionError("the walk doesn't end")

    # What runs in the background.

    async def relay_all(self) -> None:
        for _ in range(STEPS_MAX):
            if not await self.relay.step() + await self.relay.step(slow=True):
                return
        raise AssertionError("the outbox doesn't empty")

    async def take(self, count: int) -> list[Record]:
        return await self.consumer.poll(count, 0)

    async def work_on(self, records: Sequence[Record]) -> None:
        for batch in await self.worker.batches(records):
            await self.worker.process(batch)

    async def deliver_all(self) -> None:
        """Relay and worker, until the log is empty."""
        await self.relay_all()
        for _ in range(STEPS_MAX):
            records = await self.take(100)
            if not records:
                return
            await self.work_on(records)
        raise AssertionError("the log doesn't empty")

    async def move_modes(self) -> None:
        """Authors' modes follow their counts; drain tasks are in the log."""
        for _ in range(STEPS_MAX):
            if not await self.mover.step():
                return
        raise AssertionError("modes don't settle")

    async def watch_modes(self) -> None:
        """Readers learn of the modes."""
        await self.pull_authors.follow(once=True)

    async def warm_all(self) -> None:
        services = self.timeline_service, self.tweet_service
        for warmer in (services[0].warmer, services[0].author_warmer, services[1].warmer):
            for _ in range(STEPS_MAX):
                if not await warmer.step():
                    break

    async def quiesce(self, *, readers_hear: bool = True) -> None:
        """Until nothing is in flight, drains included; then two seconds pass. `readers_hear`: of modes, meanwhile."""
        for _ in range(STEPS_MAX):
            await self.move_modes()
            await self.deliver_all()
            if not await self.mover.step():
                break
        self.clock.advance(2_000)
        await self.renew_leases()
        if readers_hear:
            await self.watch_modes()

    async def settle(self) -> None:
        """And lists that were missed are made."""
        await self.quiesce()
        await self.warm_all()

    async def raw_list(self, key: ListKey) -> list[int] | None:
        """The entries of a list as they are, None without it."""
        view = await self.timelines.read(key, 10_000)
        return list(view.ids) if view else None


@asynccontextmanager
async def running_mesh(
    valkey_url: str,
    folder: Path,
    key_prefix: str,
    sizes: Sizes | None = None,
    libraries: Sequence[str] = (),
    cassandra: Where | None = None,
) -> AsyncIterator[Mesh]:
    """The mesh, from start to stop."""
    async with AsyncExitStack() as stack:
        mesh = Mesh(valkey_url, folder, key_prefix, sizes or Sizes(), libraries, cassandra)
        await mesh._start(stack)
        yield mesh
