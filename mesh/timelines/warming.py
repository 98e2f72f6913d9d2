"""Making lists from the store, behind the reads that missed them."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mesh.errors import StarlingError
from mesh.timelines.port import ListKey, Timelines

log = logging.getLogger(__name__)

LEASE_MS = 30_000
_QUEUE_MAX = 10_000
_CONCURRENT = 8


@dataclass(frozen=True, slots=True)
class Content:
    """What a list is to hold, read from the store: see `Timelines.finish`."""

    version: int
    ids: Sequence[int]
    down_to: int


async def rebuild(
    timelines: Timelines, key: ListKey, fetch: Callable[[], Awaitable[Content]], *, lease_ms: int = LEASE_MS
) -> bool:
    """Create the list, then read the store, then finish: in this order, so that whatever is committed after the
    store was read finds a list to be pushed to. False when somebody else is building, or it is there.

    Dying half-way leaves a list that nobody reads, until its lease is over and the next one takes it.
    """
    token = secrets.token_hex(8)
    if not await timelines.create(key, token, lease_ms):
        return False
    content = await fetch()
    return await timelines.finish(key, token, content.version, content.ids, content.down_to)


class Warmer:
    """A bounded queue of owners whose lists are to be made; an owner waits in it once.

    What doesn't fit is forgotten: the next read asks again.
    """

    def __init__(self, warm: Callable[[int], Awaitable[object]]) -> None:
        self._warm = warm
        self._waiting: dict[int, None] = {}
        self._wakened = asyncio.Event()

    def enqueue(self, owner: int) -> None:
        """Have the owner's list made soon."""
        if len(self._waiting) < _QUEUE_MAX:
            self._waiting[owner] = None
            self._wakened.set()

    async def step(self) -> bool:
        """Make one list; False when none waits. What fails is left to the next read."""
        if not self._waiting:
            return False
        owner = next(iter(self._waiting))
        del self._waiting[owner]
        try:
            await self._warm(owner)
        except StarlingError as error:
            log.debug("list of %d not made: %s", owner, error)
        except Exception:  # a list is a convenience: nothing that goes wrong here may end the process
            log.exception("list of %d not made", owner)
        return True

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`, with bounded concurrency."""
        await asyncio.gather(*(self._work(stopping) for _ in range(_CONCURRENT)))

    async def _work(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            if not await self.step():
                self._wakened.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wakened.wait(), 0.5)
