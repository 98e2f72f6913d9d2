"""Live home timelines: what workers deliver, told to whoever watches. Best effort: what matters is in the lists."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress

import grpc

from mesh import channels
from mesh.channels import streaming, translated
from mesh.errors import StarlingError
from mesh.principals import Credentials
from starling.fanout.v1 import fanout_pb2, fanout_pb2_grpc

log = logging.getLogger(__name__)

_WAITING_MAX = 256
"""Ids that wait for one slow watcher; more, and it is told of a gap."""
_OF_ONE_VIEWER_MAX = 5
_CHUNK = 4_096
_RETRY_SECONDS = 1.0
_TAKE_OVER_SECONDS = 6.0
"""Workers end a stream some seconds later (`fanout_svc.service`)."""
_LOOK_UP_SECONDS = 5.0


class Watch:
    """One watcher: ids come in from all workers, perhaps more than once, and are taken out by one stream."""

    def __init__(self, viewer_id: int) -> None:
        self.viewer_id = viewer_id
        self._waiting: deque[int] = deque()
        self._gap = False
        self._wakened = asyncio.Event()

    def offer(self, tweet_ids: Sequence[int]) -> None:
        """These came."""
        self._waiting.extend(tweet_ids)
        if len(self._waiting) > _WAITING_MAX:
            self.miss()
        self._wakened.set()

    def miss(self) -> None:
        """Something may have come that nobody knows of; what waits is as good as missed."""
        self._waiting.clear()
        self._gap = True
        self._wakened.set()

    async def take(self, seconds: float) -> tuple[list[int], bool]:
        """What came, after some time at most; and whether something was missed before it."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wakened.wait(), seconds)
        taken = list(self._waiting), self._gap
        self._waiting.clear()
        self._gap = False
        self._wakened.clear()
        return taken


class Live:
    """Who watches, and a stream to each worker.

    `targets`: `host:port` each; every address of a host is a worker. `watches_max`: well below the calls that this
    process takes at once, or watches would keep others from reading.
    """

    def __init__(
        self, targets: Sequence[str], credentials: Credentials, watches_max: int, max_message_bytes: int = 4 << 20
    ) -> None:
        self._targets = targets
        self._credentials = credentials
        self._watches_max = watches_max
        self._max_message_bytes = max_message_bytes
        self._watches: dict[int, list[Watch]] = {}
        self._count = 0
        self._tellings: set[_Telling] = set()
        self._known: dict[str, set[str]] = {}

    def has_room(self, viewer_id: int) -> bool:
        """Whether one more may watch here, and this viewer once more."""
        return self._count < self._watches_max and len(self._watches.get(viewer_id, ())) < _OF_ONE_VIEWER_MAX

    @contextmanager
    def watch(self, viewer_id: int) -> Iterator[Watch]:
        """Have what is delivered to a viewer offered."""
        watch = Watch(viewer_id)
        self._watches.setdefault(viewer_id, []).append(watch)
        self._count += 1
        self._tell()
        try:
            yield watch
        finally:
            self._count -= 1
            self._watches[viewer_id].remove(watch)
            if not self._watches[viewer_id]:
                del self._watches[viewer_id]
            self._tell()

    def _tell(self) -> None:
        for telling in self._tellings:
            telling.changed.set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`: a stream to every worker there is."""
        streams: dict[str, asyncio.Task[None]] = {}
        try:
            while not stopping.is_set():
                addresses = await self._addresses()
                for address in addresses - streams.keys():
                    streams[address] = asyncio.create_task(self._follow(address))
                for address in streams.keys() - addresses:
                    streams.pop(address).cancel()
                with suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), _LOOK_UP_SECONDS)
        finally:
            for stream in streams.values():
                stream.cancel()
            await asyncio.gather(*streams.values(), return_exceptions=True)

    async def _addresses(self) -> set[str]:
        loop = asyncio.get_running_loop()
        for target in self._targets:
            host, _, port = target.removeprefix("dns:///").rpartition(":")
            try:
                infos = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            except OSError as error:
                log.warning("no worker is known by the name %s: %s", host, error)  # Those known before stay.
            else:
                hosts = {str(info[4][0]) for info in infos}
                self._known[target] = {f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in hosts}
        return set().union(*self._known.values())

    async def _follow(self, address: str) -> None:
        """One worker's streams until cancelled: each takes over before the one before it ends, so that nothing is
        missed unless one fails: then watchers are told, once, and once more when the worker is back."""
        channel = channels.connect(address, max_message_bytes=self._max_message_bytes)
        stub = fanout_pb2_grpc.FanoutServiceStub(channel)
        before: asyncio.Task[None] | None = None
        stream: asyncio.Task[None] | None = None
        follows = False
        try:
            while True:
                before, stream = stream, asyncio.create_task(self._stream(stub))
                ended, _ = await asyncio.wait([stream], timeout=_TAKE_OVER_SECONDS)
                if follows == bool(ended):
                    follows = not ended
                    self._missed()
                if ended:
                    await asyncio.sleep(_RETRY_SECONDS)
        finally:
            for task in (before, stream):
                if task:
                    task.cancel()
            await channel.close()

    def _missed(self) -> None:
        for watches in self._watches.values():
            for watch in watches:
                watch.miss()

    async def _stream(self, stub: "fanout_pb2_grpc.FanoutServiceAsyncStub") -> None:
        """Follow one stream to its end, whatever that is."""
        telling = _Telling()
        self._tellings.add(telling)
        try:
            await self._listen(stub, telling)
        except (StarlingError, grpc.aio.AioRpcError) as error:
            log.debug("deliveries aren't followed: %s", error)
        finally:
            self._tellings.discard(telling)
            telling.over = True  # grpc.aio leaves the requests of a call that the server ended waiting for ever.
            telling.changed.set()

    async def _listen(self, stub: "fanout_pb2_grpc.FanoutServiceAsyncStub", telling: "_Telling") -> None:
        with translated("fanout_svc"):
            call: grpc.aio.StreamStreamCall[fanout_pb2.StreamDeliveriesRequest, fanout_pb2.StreamDeliveriesResponse] = (
                stub.StreamDeliveries(self._requests(telling), metadata=self._credentials.metadata())
            )
            async with streaming(call):
                async for reply in call:
                    if reply.gap:
                        self._missed()
                    for delivery in reply.deliveries:
                        for viewer_id in delivery.viewer_ids:
                            for watch in self._watches.get(viewer_id, ()):
                                watch.offer([delivery.tweet_id])

    async def _requests(self, telling: "_Telling") -> AsyncIterator[fanout_pb2.StreamDeliveriesRequest]:
        """Whom to watch for, as it changes."""
        told: set[int] = set()
        while not telling.over:
            telling.changed.clear()
            added, removed = sorted(self._watches.keys() - told), sorted(told - self._watches.keys())
            for start in range(0, max(len(added), len(removed)), _CHUNK):
                some = slice(start, start + _CHUNK)
                yield fanout_pb2.StreamDeliveriesRequest(added_viewer_ids=added[some], removed_viewer_ids=removed[some])
            told = (told | set(added)) - set(removed)
            await telling.changed.wait()


class _Telling:
    """The requests of one stream: that who watches has `changed`, and that the stream is `over`."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.over = False
