"""fanout_svc: wiring, and nothing else."""

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack

import grpc

from fanout_svc.followers import Followers
from fanout_svc.service import ALLOWED, FanoutService
from fanout_svc.worker import Worker
from mesh import caches, channels, principals
from mesh.background import process_name
from mesh.caches.bodies import Bodies
from mesh.clock import SystemClock
from mesh.config import Config, load
from mesh.eventlog import topics, valkey_streams
from mesh.server import run
from mesh.timelines import valkey as valkey_timelines
from mesh.valkey import Valkey
from starling.fanout.v1 import fanout_pb2_grpc


class FanoutConfig(Config):
    """What fanout_svc is told besides."""

    graph_target: str
    """Where graph_svc is."""


class App:
    """See `mesh.server.App`."""

    name = "fanout_svc"
    allowed = ALLOWED

    def __init__(self, config: FanoutConfig) -> None:
        clock = SystemClock()
        libraries = (valkey_timelines.LIBRARY, valkey_streams.LIBRARY, caches.LIBRARY)
        self._valkey = Valkey(config.valkey_url, key_prefix=config.key_prefix, libraries=libraries)
        self._channel = channels.connect(config.graph_target, max_message_bytes=config.max_message_bytes)
        credentials = principals.Credentials(config.auth_secret.get_secret_value(), principals.service(self.name))
        self._consumer = valkey_streams.StreamsConsumer(
            self._valkey,
            topics=[topics.TWEET_FANOUT],
            group=topics.FANOUT_WORKERS,
            name=process_name(),
            dead_letters=topics.FANOUT_DEAD_LETTERS,
        )
        self._worker = Worker(
            consumer=self._consumer,
            timelines=valkey_timelines.ValkeyTimelines(self._valkey, clock),
            bodies=Bodies(self._valkey),
            followers=Followers(self._channel, credentials).of,
            clock=clock,
        )

    def register(self, server: grpc.aio.Server) -> list[str]:
        """See the protocol."""
        service = FanoutService(self._consumer, self._worker.figures)
        fanout_pb2_grpc.add_FanoutServiceServicer_to_server(service, server)
        return ["starling.fanout.v1.FanoutService"]

    async def start(self) -> None:
        """Nothing durable is here; the worker waits for Valkey by itself."""

    def loops(self, stopping: asyncio.Event) -> list[Awaitable[None]]:
        """See the protocol."""
        return [self._worker.run(stopping)]

    async def stop(self) -> None:
        """See the protocol."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._valkey.close)
            stack.push_async_callback(self._channel.close)
            await self._consumer.close()


if __name__ == "__main__":
    config = load(FanoutConfig)
    run(config, lambda: App(config))
