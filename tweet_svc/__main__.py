"""tweet_svc: wiring, and nothing else."""

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack

import grpc
from pydantic import Field

from mesh import caches, channels, principals
from mesh.background import keep_lease, process_name
from mesh.caches.bodies import Bodies
from mesh.clock import SystemClock
from mesh.config import Config, load
from mesh.eventlog import topics, valkey_streams
from mesh.ids import Snowflakes
from mesh.page_tokens import PageTokens
from mesh.server import run
from mesh.timelines import valkey as valkey_timelines
from mesh.valkey import Valkey
from starling.tweet.v1 import tweet_pb2_grpc
from tweet_svc.accounts import Accounts
from tweet_svc.relay import Relay
from tweet_svc.service import ALLOWED, TweetService
from tweet_svc.sqlite import SqliteTweetStore


class TweetConfig(Config):
    """What tweet_svc is told besides."""

    tweet_database: str
    """Path of the SQLite file."""
    graph_target: str
    """Where graph_svc is."""
    outbox_max: int = Field(100_000, ge=1)
    """Events that may wait for the log before posts are refused."""


class App:
    """See `mesh.server.App`."""

    name = "tweet_svc"
    allowed = ALLOWED

    def __init__(self, config: TweetConfig) -> None:
        clock = SystemClock()
        libraries = (valkey_timelines.LIBRARY, valkey_streams.LIBRARY, caches.LIBRARY)
        self._valkey = Valkey(config.valkey_url, key_prefix=config.key_prefix, libraries=libraries)
        self._store = SqliteTweetStore(config.tweet_database)
        self._snowflakes = Snowflakes(self._store, clock, process_name())
        self._channel = channels.connect(config.graph_target, max_message_bytes=config.max_message_bytes)
        credentials = principals.Credentials(config.auth_secret.get_secret_value(), principals.service(self.name))
        self._relay = Relay(self._store, valkey_streams.StreamsProducer(self._valkey, [topics.TWEET_FANOUT]), clock)
        self._service = TweetService(
            store=self._store,
            timelines=valkey_timelines.ValkeyTimelines(self._valkey, clock),
            bodies=Bodies(self._valkey),
            snowflakes=self._snowflakes,
            page_tokens=PageTokens([key.get_secret_value() for key in config.page_token_keys]),
            account_exists=Accounts(self._channel, credentials).exists,
            on_write=self._relay.nudge,
            clock=clock,
            outbox_max=config.outbox_max,
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
            keep_lease(self._snowflakes, stopping),
        ]

    async def stop(self) -> None:
        """See the protocol."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._store.close)
            stack.push_async_callback(self._valkey.close)
            stack.push_async_callback(self._channel.close)
            await self._snowflakes.release()


if __name__ == "__main__":
    config = load(TweetConfig)
    run(config, lambda: App(config))
