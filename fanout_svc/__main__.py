"""fanout_svc: wiring, and nothing else."""

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack

import grpc
from pydantic import Field

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
from mesh.valkey_cluster import connect_to
from starling.fanout.v1 import fanout_pb2_grpc

_HANDS = {topics.TWEET_FANOUT: IN_HAND_MAX, topics.FANOUT_TASKS: 2, topics.FANOUT_TASKS_SLOW: 2}
"""How many records of each topic a worker has in hand: few of those that are much work, or may wait, so that they don't
delay the others."""
_NAMES = "|".join(topic.name for topic in _HANDS)


class FanoutConfig(Config):
    """What fanout_svc is told besides."""

    graph_target: str
    """Where graph_svc is."""
    tweet_target: str
    """Where tweet_svc is."""
    fanout_topics: str = Field(",".join(topic.name for topic in _HANDS), pattern=rf"^(?:{_NAMES})(?:,(?:{_NAMES}))*$")
    """What this worker takes from, so that others have work of another kind."""


class App:
    """See `mesh.server.App`."""

    name = "fanout_svc"
    allowed = ALLOWED

    def __init__(self, config: FanoutConfig) -> None:
        clock = SystemClock()
        libraries = (valkey_timelines.LIBRARY, valkey_streams.LIBRARY, caches.LIBRARY)
        self._valkey = connect_to(config.valkey_url, key_prefix=config.key_prefix, libraries=libraries)
        self._log = open_log(config, self._valkey)
        self._graph = channels.connect(config.graph_target, max_message_bytes=config.max_message_bytes)
        self._tweets = channels.connect(config.tweet_target, max_message_bytes=config.max_message_bytes)
        credentials = principals.Credentials(config.auth_secret.get_secret_value(), principals.service(self.name))
        self._figures = Figures()
        self._figures.measured()
        self._deliveries = Deliveries()
        name = process_name()
        taken = [topic for topic in _HANDS if topic.name in config.fanout_topics.split(",")]
        self._consumers = [
            self._log.consumer(topic, topics.FANOUT_WORKERS, name, topics.FANOUT_DEAD_LETTERS) for topic in taken
        ]
        self._lag = self._log.lag_reader(list(_HANDS), topics.FANOUT_WORKERS)
        producer = self._log.producer([topics.FANOUT_TASKS, topics.FANOUT_TASKS_SLOW])
        timelines = valkey_timelines.ValkeyTimelines(self._valkey, clock)
        self._workers = [
            Worker(
                consumer=consumer,
                producer=producer,
                timelines=timelines,
                bodies=Bodies(self._valkey),
                peers=Peers(self._graph, self._tweets, credentials),
                clock=clock,
                figures=self._figures,
                deliveries=self._deliveries,
                in_hand_max=_HANDS[topic],
            )
            for consumer, topic in zip(self._consumers, taken, strict=True)
        ]

    def register(self, server: grpc.aio.Server) -> list[str]:
        """See the protocol."""
        self._service = FanoutService(self._consumers[0], self._lag, self._figures, self._deliveries)
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
