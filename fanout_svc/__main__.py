"""fanout_svc: wiring, and nothing else."""

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack

import grpc

from fanout_svc.deliveries import Deliveries
from fanout_svc.peers import Peers
from fanout_svc.service import ALLOWED, FanoutService
from fanout_svc.worker import IN_HAND_MAX, Figures, Worker
from mesh import caches, channels, principals
from mesh.background import process_name
from mesh.caches.bodies import Bodies
from mesh.clock import SystemClock
from mesh.config import Config, load
from mesh.eventlog import topics, valkey_streams
from mesh.eventlog.choice import open_log
from mesh.server import run
from mesh.timelines import valkey as valkey_timelines
from mesh.valkey import Valkey
from starling.fanout.v1 import fanout_pb2_grpc

_HANDS = ((topics.TWEET_FANOUT, IN_HAND_MAX), (topics.FANOUT_TASKS, 2), (topics.FANOUT_TASKS_SLOW, 2))
"""How many records of each topic a worker has in hand: few of those that are much work, or may wait, so that they don't
delay the others. The last one also yields to those before it."""


class FanoutConfig(Config):
    """What fanout_svc is told besides."""

    graph_target: str
    """Where graph_svc is."""
    tweet_target: str
    """Where tweet_svc is."""


class App:
    """See `mesh.server.App`."""

    name = "fanout_svc"
    allowed = ALLOWED

    def __init__(self, config: FanoutConfig) -> None:
        clock = SystemClock()
        libraries = (valkey_timelines.LIBRARY, valkey_streams.LIBRARY, caches.LIBRARY)
        self._valkey = Valkey(config.valkey_url, key_prefix=config.key_prefix, libraries=libraries)
        self._log = open_log(config, self._valkey)
        self._graph = channels.connect(config.graph_target, max_message_bytes=config.max_message_bytes)
        self._tweets = channels.connect(config.tweet_target, max_message_bytes=config.max_message_bytes)
        credentials = principals.Credentials(config.auth_secret.get_secret_value(), principals.service(self.name))
        self._figures = Figures()
        self._deliveries = Deliveries()
        name = process_name()
        self._consumers = [
            self._log.consumer(topic, topics.FANOUT_WORKERS, name, topics.FANOUT_DEAD_LETTERS) for topic, _ in _HANDS
        ]
        producer = self._log.producer([topics.FANOUT_TASKS, topics.FANOUT_TASKS_SLOW])
        timelines = valkey_timelines.ValkeyTimelines(self._valkey, clock)
        self._workers: list[Worker] = []
        for consumer, (topic, in_hand_max) in zip(self._consumers, _HANDS, strict=True):
            worker = Worker(
                consumer=consumer,
                producer=producer,
                timelines=timelines,
                bodies=Bodies(self._valkey),
                peers=Peers(self._graph, self._tweets, credentials),
                clock=clock,
                figures=self._figures,
                deliveries=self._deliveries,
                in_hand_max=in_hand_max,
                yields_to=tuple(self._workers) if topic is topics.FANOUT_TASKS_SLOW else (),
            )
            self._workers.append(worker)

    def register(self, server: grpc.aio.Server) -> list[str]:
        """See the protocol."""
        self._service = FanoutService(self._consumers, self._figures, self._deliveries)
        fanout_pb2_grpc.add_FanoutServiceServicer_to_server(self._service, server)
        return ["starling.fanout.v1.FanoutService"]

    async def start(self) -> None:
        """Nothing durable is here; the worker waits for Valkey by itself."""

    def loops(self, stopping: asyncio.Event) -> list[Awaitable[None]]:
        """See the protocol."""
        self._service.stopping = stopping
        return [worker.run(stopping) for worker in self._workers]

    async def stop(self) -> None:
        """See the protocol."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._valkey.close)
            stack.push_async_callback(self._log.close)
            stack.push_async_callback(self._graph.close)
            stack.push_async_callback(self._tweets.close)
            for consumer in self._consumers:
                await consumer.close()


if __name__ == "__main__":
    config = load(FanoutConfig)
    run(config, lambda: App(config))
