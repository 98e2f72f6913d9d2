"""graph_svc: wiring, and nothing else."""

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import grpc
from pydantic import Field, ValidationInfo, field_validator

from graph_svc import core
from graph_svc.modes import ModeMover
from graph_svc.service import ALLOWED, GraphService
from graph_svc.sqlite import SqliteGraphStore
from mesh import caches
from mesh.background import keep_lease, process_name
from mesh.caches.viewer_versions import ViewerVersions
from mesh.clock import SystemClock
from mesh.config import CassandraConfig, Config, load, wanted_without_cassandra
from mesh.eventlog import topics, valkey_streams
from mesh.eventlog.choice import open_log
from mesh.ids import Snowflakes
from mesh.page_tokens import PageTokens
from mesh.server import run
from mesh.valkey_cluster import connect_to
from starling.graph.v1 import graph_pb2_grpc

if TYPE_CHECKING:
    from graph_svc.cassandra import CassandraGraphStore


class GraphConfig(Config, CassandraConfig):
    """What graph_svc is told besides."""

    graph_database: str = Field("", validate_default=True)
    """Path of the SQLite file; not used when Cassandra keeps the store."""
    bucket_size: int = Field(10_000, ge=1)
    """Followers to a bucket. Fixed once there are users: a follower never moves."""
    pull_threshold: int = Field(100_000, ge=core.PULL_THRESHOLD_LEAST, le=core.PULL_THRESHOLD_MOST)
    """Followers from which an author is pulled, until an operator sets another number."""

    @field_validator("graph_database")
    @classmethod
    def _or_cassandra(cls, value: str, info: ValidationInfo) -> str:
        return wanted_without_cassandra(value, info)


def _open_store(config: GraphConfig) -> "SqliteGraphStore | CassandraGraphStore":
    where = config.cassandra()
    if where is None:
        return SqliteGraphStore(config.graph_database, bucket_size=config.bucket_size)
    # Whoever doesn't use it needn't load it at each start.
    from graph_svc.cassandra import CassandraGraphStore  # noqa: PLC0415
    from mesh.cassandra import Cassandra  # noqa: PLC0415

    return CassandraGraphStore(Cassandra(where), bucket_size=config.bucket_size)


class App:
    """See `mesh.server.App`."""

    name = "graph_svc"
    allowed = ALLOWED

    def __init__(self, config: GraphConfig) -> None:
        clock = SystemClock()
        libraries = (caches.LIBRARY, valkey_streams.LIBRARY)
        self._valkey = connect_to(config.valkey_url, key_prefix=config.key_prefix, libraries=libraries)
        self._store = _open_store(config)
        self._snowflakes = Snowflakes(self._store, clock, process_name())
        self._log = open_log(config, self._valkey)
        producer = self._log.producer([topics.FANOUT_TASKS_SLOW])
        delivering = [topics.TWEET_FANOUT, topics.FANOUT_TASKS, topics.FANOUT_TASKS_SLOW]
        fanout_lag = self._log.lag_reader(delivering, topics.FANOUT_WORKERS)
        self._mover = ModeMover(self._store, producer, fanout_lag, clock, config.pull_threshold)
        self._service = GraphService(
            store=self._store,
            versions=ViewerVersions(self._valkey),
            snowflakes=self._snowflakes,
            page_tokens=PageTokens([key.get_secret_value() for key in config.page_token_keys]),
            clock=clock,
            mover=self._mover,
        )

    def register(self, server: grpc.aio.Server) -> list[str]:
        """See the protocol."""
        graph_pb2_grpc.add_GraphServiceServicer_to_server(self._service, server)
        return ["starling.graph.v1.GraphService"]

    async def start(self) -> None:
        """The store must be there; Valkey need not."""
        await self._store.open()
        await self._snowflakes.renew()

    def loops(self, stopping: asyncio.Event) -> list[Awaitable[None]]:
        """See the protocol."""
        self._service.stopping = stopping
        return [keep_lease(self._snowflakes, stopping), self._mover.run(stopping)]

    async def stop(self) -> None:
        """See the protocol."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._store.close)
            stack.push_async_callback(self._valkey.close)
            stack.push_async_callback(self._log.close)
            await self._snowflakes.release()


if __name__ == "__main__":
    config = load(GraphConfig)
    run(config, lambda: App(config))
