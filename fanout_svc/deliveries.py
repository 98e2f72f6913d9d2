"""What this worker delivers, told to those who watch for some viewers: best effort, bounded, never waited for."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import contextmanager

from mesh.errors import InvalidArgumentError
from starling.fanout.v1 import fanout_pb2

_WAITING_IDS_MAX = 100_000
"""Of tweets and viewers: less than 1 MB, so that it fits into one message."""
VIEWERS_MAX = 100_000
CHANGES_MAX = 10_000


class Listener:
    """One stream: whom it watches for, and what waits to be sent."""

    def __init__(self) -> None:
        self._viewers: set[int] = set()
        self._waiting: list[fanout_pb2.Delivery] = []
        self._waiting_ids = 0
        self._gap = False
        self._wakened = asyncio.Event()

    def change(self, added: Sequence[int], removed: Sequence[int]) -> None:
        """Of whom to watch for; beyond VIEWERS_MAX nobody is added, and the listener is told of a gap."""
        self._viewers.difference_update(removed)
        if len(self._viewers) + len(added) > VIEWERS_MAX:
            self._gap = True
            self._wakened.set()
            return
        self._viewers.update(added)

    def offer(self, tweet_ids: Sequence[int], viewer_ids: Collection[int]) -> None:
        """These came to these."""
        if not (watched := self._viewers.intersection(viewer_ids)):
            return
        self._waiting_ids += len(tweet_ids) * (1 + len(watched))
        if self._waiting_ids > _WAITING_IDS_MAX:
            self._waiting.clear()
            self._waiting_ids = 0
            self._gap = True
        else:
            viewers = sorted(watched)
            self._waiting += [fanout_pb2.Delivery(tweet_id=i, viewer_ids=viewers) for i in tweet_ids]
        self._wakened.set()

    async def follow(self, requests: AsyncIterator[fanout_pb2.StreamDeliveriesRequest]) -> None:
        """Change as the caller says, to the end of what it says. Raises InvalidArgumentError."""
        async for request in requests:
            if len(request.added_viewer_ids) > CHANGES_MAX or 0 in request.added_viewer_ids:
                raise InvalidArgumentError("added_viewer_ids", f"At most {CHANGES_MAX:,} at once, and 0 is no id.")
            self.change(request.added_viewer_ids, request.removed_viewer_ids)

    async def take(self) -> fanout_pb2.StreamDeliveriesResponse:
        """What waits, once something does."""
        await self._wakened.wait()
        self._wakened.clear()
        taken = fanout_pb2.StreamDeliveriesResponse(deliveries=self._waiting, gap=self._gap)
        self._waiting, self._waiting_ids, self._gap = [], 0, False
        return taken


class Deliveries:
    """All that listen to this worker."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    @contextmanager
    def listening(self) -> Iterator[Listener]:
        """One more, for a while."""
        listener = Listener()
        self._listeners.append(listener)
        try:
            yield listener
        finally:
            self._listeners.remove(listener)

    def delivered(self, tweet_ids: Sequence[int], viewer_ids: Collection[int]) -> None:
        """Tell whoever listens; costs nothing when nobody does."""
        for listener in self._listeners:
            listener.offer(tweet_ids, viewer_ids)
