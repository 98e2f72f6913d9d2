"""tweet_svc: wiring, and nothing else."""

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import grpc
from pydantic import Field, ValidationInfo, field_validator

from mesh import caches, channels, metrics, principals
from mesh.background import keep_lease, process_name
from mesh.caches.bodies import Bodies
from mesh.caches.counts import Counts
from mesh.clock import Clock, SystemClock
from mesh.config import CassandraConfig, MediaConfig, load, wanted_without_cassandra
from mesh.eventlog import topics, valkey_streams
from mesh.eventlog.choice import open_log
from mesh.ids import Snowflakes
from mesh.media import MediaUrls
from mesh.page_tokens import PageTokens
from mesh.server import run
from mesh.timelines import valkey as valkey_timelines
from mesh.valkey_cluster import connect_to
from starling.tweet.v1 import tweet_pb2_grpc
from tweet_svc.accounts import Accounts
from tweet_svc.counting import Counting
from tweet_svc.relay import Relay
from tweet_svc.service import ALLOWED, TweetService
from tweet_svc.sqlite import SqliteTweetStore
from tweet_svc.velocity import HOT_PER_SECOND, Velocity

if TYPE_CHECKING:
    from tweet_svc.cassandra import CassandraTweetStore


class TweetConfig(MediaConfig, CassandraConfig):
    """What tweet_svc is told besides."""

    tweet_database: str = Field("", validate_default=True)
    """Path of the SQLite file; not used when Cassandra keeps the store."""
    graph_target: str
    """Where graph_svc is."""
    outbox_max: int = Field(100_000, ge=1)
    """Events that may wait for the log before posts are refused."""
    outbox_slow_max: int = Field(1_000_000, ge=1)
    """The same of retweets of hot tweets."""
    hot_retweets_per_second: int = Field(HOT_PER_SECOND, ge=0)
    """From how many retweets a second on those of a tweet may wait; 0: they never do."""
    counts_flush_seconds: float = Field(30.0, gt=0)
    """How often changes of counts are brought to the store."""

    @field_validator("tweet_database")
    @classmethod
    def _or_cassandra(cls, value: str, info: ValidationInfo) -> str:
        return wanted_without_cassandra(value, info)


def _open_store(config: TweetConfig, clock: Clock) -> "SqliteTweetStore | CassandraTweetStore":
    where = config.cassandra()
    if where is None:
        return SqliteTweetStore(config.tweet_database)
    # Whoever doesn't use it needn't load it at each start.
    from mesh.cassandra import Cassandra  # noqa: PLC0415
    from tweet_svc.cassandra import CassandraTweetStore  # noqa: PLC0415

    return CassandraTweetStore(Cassandra(where), clock)


class App:
    """See `mesh.server.App`."""

    name = "tweet_svc"
    allowed = ALLOWED

    def __init__(self, config: TweetConfig) -> None:
        clock = SystemClock()
        libraries = (valkey_timelines.LIBRARY, valkey_streams.LIBRARY, caches.LIBRARY)
        self._valkey = connect_to(config.valkey_url, key_prefix=config.key_prefix, libraries=libraries)
        self._store = _open_store(config, clock)
        self._snowflakes = Snowflakes(self._store, clock, process_name())
        self._channel = channels.connect(config.graph_target, max_message_bytes=config.max_message_bytes)
        credentials = principals.Credentials(config.auth_secret.get_secret_value(), principals.service(self.name))
        self._log = open_log(config, self._valkey)
        producer = self._log.producer([topics.TWEET_FANOUT, topics.FANOUT_TASKS_SLOW])
        self._relay = Relay(self._store, producer, clock)
        self._counting = Counting(Counts(self._valkey), self._store, clock)
        self._flush_seconds = config.counts_flush_seconds
        velocity = Velocity(self._valkey, clock, config.hot_retweets_per_second)
        metrics.hot_tweets.of(velocity.hot)
        self._service = TweetService(
            store=self._store,
            timelines=valkey_timelines.ValkeyTimelines(self._valkey, clock),
            bodies=Bodies(self._valkey),
            counting=self._counting,
            media=MediaUrls(config.media_base_url, config.media_key.get_secret_value(), clock),
            velocity=velocity,
            snowflakes=self._snowflakes,
            page_tokens=PageTokens([key.get_secret_value() for key in config.page_token_keys]),
            accounts=Accounts(self._channel, credentials),
            on_write=self._relay.nudge,
            clock=clock,
            outbox_max=config.outbox_max,
            outbox_slow_max=config.outbox_slow_max,
        )

    def register(self, server: grpc.aio.Server) -> list[str]:
        """See the protocol."""
        tweet_pb2_grpc.add_TweetServiceServicer_to_server(self._service, server)
        return ["starling.tweet.v1.TweetService"]

    async def start(self) -> None:
        """The store must be there; Valkey need not."""
        await self._store.open()
        await self._snowflakes.renew()

    def loops(self, stopping: asyncio.Event) -> list[Awaitable[None]]:
        """See the protocol."""
        return [
            self._relay.run(stopping),
            self._service.warmer.run(stopping),
            self._counting.run(stopping, self._flush_seconds),
            keep_lease(self._snowflakes, stopping),
        ]

    async def stop(self) -> None:
        """See the protocol."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._store.close)
            stack.push_async_callback(self._valkey.close)
            stack.push_async_callback(self._log.close)
            stack.push_async_callback(self._channel.close)
            await self._snowflakes.release()


if __name__ == "__main__":
    config = load(TweetConfig)
    run(config, lambda: App(config))
