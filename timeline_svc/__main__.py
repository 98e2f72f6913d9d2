"""timeline_svc: wiring, and nothing else."""

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack

import grpc
from pydantic import Field

from mesh import caches, channels, metrics, principals
from mesh.caches.bodies import Bodies
from mesh.caches.viewer_versions import ViewerVersions
from mesh.clock import SystemClock
from mesh.config import MediaConfig, load
from mesh.media import MediaUrls
from mesh.page_tokens import PageTokens
from mesh.server import run
from mesh.timelines import valkey as valkey_timelines
from mesh.valkey_cluster import connect_to
from starling.timeline.v1 import timeline_pb2_grpc
from timeline_svc.live import Live
from timeline_svc.peers import Graph, Tweets
from timeline_svc.pull_authors import PullAuthors
from timeline_svc.service import ALLOWED, TimelineService

_TARGET = r"(?:dns:///)?(?:\[[0-9a-fA-F:.]+\]|[^\s,:/\[\]]+):\d{1,5}"


class TimelineConfig(MediaConfig):
    """What timeline_svc is told besides."""

    graph_target: str
    """Where graph_svc is."""
    tweet_target: str
    """Where tweet_svc is."""
    fanout_targets: str = Field("", pattern=rf"^(?:{_TARGET}(?:,{_TARGET})*)?$")
    """Where fanout_svc's workers are, comma-separated; every address of a name is one. Without: watches hear of pulled
    authors only."""
    sampler_viewers_per_minute: float = Field(0.0, ge=0, le=600)
    """How many viewers' homes are held against the stores; those who read lately, drawn at random."""


class App:
    """See `mesh.server.App`."""

    name = "timeline_svc"
    allowed = ALLOWED

    def __init__(self, config: TimelineConfig) -> None:
        clock = SystemClock()
        self._samples_per_minute = config.sampler_viewers_per_minute
        libraries = (valkey_timelines.LIBRARY, caches.LIBRARY)
        self._valkey = connect_to(config.valkey_url, key_prefix=config.key_prefix, libraries=libraries)
        self._graph_channel = channels.connect(config.graph_target, max_message_bytes=config.max_message_bytes)
        self._tweet_channel = channels.connect(config.tweet_target, max_message_bytes=config.max_message_bytes)
        credentials = principals.Credentials(config.auth_secret.get_secret_value(), principals.service(self.name))
        self._pull_authors = PullAuthors(self._graph_channel, credentials, clock)
        metrics.pulled_authors.of(lambda: -1 if (known := self._pull_authors.known()) is None else len(known))
        targets = config.fanout_targets.split(",") if config.fanout_targets else []
        self._live = Live(targets, credentials, config.concurrent_calls_max // 2, config.max_message_bytes)
        self._service = TimelineService(
            valkey=self._valkey,
            timelines=valkey_timelines.ValkeyTimelines(self._valkey, clock),
            versions=ViewerVersions(self._valkey),
            bodies=Bodies(self._valkey),
            graph=Graph(self._graph_channel, credentials),
            tweets=Tweets(self._tweet_channel, credentials),
            page_tokens=PageTokens([key.get_secret_value() for key in config.page_token_keys]),
            pull_authors=self._pull_authors,
            live=self._live,
            media=MediaUrls(config.media_base_url, config.media_key.get_secret_value(), clock),
            clock=clock,
        )

    def register(self, server: grpc.aio.Server) -> list[str]:
        """See the protocol."""
        timeline_pb2_grpc.add_TimelineServiceServicer_to_server(self._service, server)
        return ["starling.timeline.v1.TimelineService"]

    async def start(self) -> None:
        """Nothing durable is here, and each store may be away for a while."""

    def loops(self, stopping: asyncio.Event) -> list[Awaitable[None]]:
        """See the protocol."""
        self._service.stopping = stopping
        return [
            self._live.run(stopping),
            self._service.sampler.run(stopping, self._samples_per_minute),
            self._pull_authors.run(stopping),
            self._service.warmer.run(stopping),
            self._service.author_warmer.run(stopping),
        ]

    async def stop(self) -> None:
        """See the protocol."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._valkey.close)
            stack.push_async_callback(self._graph_channel.close)
            stack.push_async_callback(self._tweet_channel.close)


if __name__ == "__main__":
    config = load(TimelineConfig)
    run(config, lambda: App(config))
