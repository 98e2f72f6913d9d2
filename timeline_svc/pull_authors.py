"""Whom readers must pull: graph_svc's WatchPullAuthors, followed; and for how long what it said may be believed."""

import asyncio
import logging
from contextlib import suppress

import grpc

from mesh.channels import streaming, translated
from mesh.clock import Clock
from mesh.errors import StarlingError
from mesh.principals import Credentials
from starling.graph.v1 import graph_pb2, graph_pb2_grpc
from timeline_svc.core import MODES_AGE_MS

log = logging.getLogger(__name__)

_STREAM_SECONDS = 30.0
_RETRY_SECONDS = 0.5


class PullAuthors:
    """The set of authors in PULL or DRAIN, as of the newest message.

    Ages are told by wall clocks, graph_svc's and ours: workers wait 5 s longer than readers believe, which must cover
    their difference.
    """

    def __init__(self, channel: grpc.aio.Channel, credentials: Credentials, clock: Clock) -> None:
        self._stub = graph_pb2_grpc.GraphServiceStub(channel)
        self._credentials = credentials
        self._clock = clock
        self._pulled: frozenset[int] = frozenset()
        self._as_of_ms = 0

    def known(self) -> frozenset[int] | None:
        """Whom to pull; None: unknown, since graph_svc has been silent for too long."""
        return self._pulled if self._clock.now_ms() - self._as_of_ms < MODES_AGE_MS else None

    async def follow(self, *, once: bool = False) -> None:
        """Follow one stream to its end, or (`once`) no further than its snapshot. Raises UnavailableError."""
        snapshot: set[int] = set()
        with translated("graph_svc"):
            call = self._stub.WatchPullAuthors(
                graph_pb2.WatchPullAuthorsRequest(), timeout=_STREAM_SECONDS, metadata=self._credentials.metadata()
            )
            async with streaming(call):
                async for message in call:
                    if message.HasField("snapshot"):
                        snapshot.update(message.snapshot.author_ids)
                        if not message.snapshot.complete:
                            continue
                        self._pulled = frozenset(snapshot)
                        if once:
                            self._as_of_ms = message.as_of_ms
                            return
                    elif message.changes.added or message.changes.removed:
                        self._pulled = (self._pulled | set(message.changes.added)) - set(message.changes.removed)
                    self._as_of_ms = message.as_of_ms

    async def run(self, stopping: asyncio.Event) -> None:
        """Follow stream after stream until `stopping`."""
        while not stopping.is_set():
            following = asyncio.ensure_future(self.follow())
            ending = asyncio.ensure_future(stopping.wait())
            await asyncio.wait([following, ending], return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            following.cancel()
            try:
                with suppress(asyncio.CancelledError):
                    await following
            except StarlingError as error:
                log.warning("authors' modes aren't followed: %s", error)
                with suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), _RETRY_SECONDS)
