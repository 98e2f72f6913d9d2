"""Calls about one tweet that come together are worked on together: while one batch is worked on, the next one gathers.

So hundreds of retweets a second of one tweet take few steps of the event loop and few calls of others; else each
other call would meet all of them at each of its own steps.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Generic, TypeVar

from mesh.errors import ResourceExhaustedError, StarlingError, UnavailableError

T = TypeVar("T")

BATCH_MAX = 50
CALLS_MAX = 500
"""That wait or are worked on, whether or not their callers are still there. More are refused: they would take all the
calls that a process may have."""

Work = Callable[[int, Sequence[int]], Awaitable[Sequence[T | StarlingError]]]
"""Of a tweet and some users: an outcome for each."""


class Together(Generic[T]):
    """Batches for `work`, one at a time for each tweet, which isn't done on behalf of any caller."""

    def __init__(self, work: Work[T]) -> None:
        self._work = work
        self._waiting: dict[int, list[tuple[int, asyncio.Future[T]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls = 0

    async def call(self, tweet_id: int, user_id: int) -> T:
        """The outcome for this user. A caller that goes leaves it to happen. Raises ResourceExhaustedError."""
        if self._calls >= CALLS_MAX:
            raise ResourceExhaustedError(
                "Too many do this with the tweet at once.", retry_after_seconds=1.0, reason="TWEET_BUSY"
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if tweet_id not in self._waiting:
            self._waiting[tweet_id] = []
            # Whose deadline and principal is none of the callers'.
            task = loop.create_task(self._run(tweet_id), context=Context())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._waiting[tweet_id].append((user_id, future))
        self._calls += 1
        return await future

    async def _run(self, tweet_id: int) -> None:
        while batch := self._waiting[tweet_id][:BATCH_MAX]:
            del self._waiting[tweet_id][:BATCH_MAX]
            outcomes: Sequence[T | BaseException]
            try:
                outcomes = await self._work(tweet_id, [user_id for user_id, _ in batch])
            except Exception as error:  # It is told to those who wait.
                outcomes = [error] * len(batch)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # Of something in it, as grpc.aio says of a call of its own.
                outcomes = [UnavailableError("A piece of the work was cancelled.")] * len(batch)
            self._calls -= len(batch)
            for (_, future), outcome in zip(batch, outcomes, strict=True):
                if future.done():
                    continue
                if isinstance(outcome, BaseException):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)
        del self._waiting[tweet_id]
