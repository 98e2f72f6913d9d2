"""Waiting for a condition, with a bound; and what makes others wait."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

_INTERVAL_SECONDS = 0.02


async def eventually(condition: Callable[[], object | Awaitable[object]], seconds: float = 15.0) -> None:
    """Wait until the condition (plain or async) holds; fail when it doesn't within `seconds`."""
    end = time.monotonic() + seconds
    while True:
        holds = condition()
        if inspect.isawaitable(holds):
            holds = await holds
        if holds:
            return
        assert time.monotonic() < end, f"not within {seconds} s"
        await asyncio.sleep(_INTERVAL_SECONDS)


def until(condition: Callable[[], object], seconds: float = 15.0) -> None:
    """As `eventually`, for tests without an event loop."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(_INTERVAL_SECONDS)


async def turns(count: int) -> None:
    """Let the event loop do what is ready, so many times."""
    for _ in range(count):
        await asyncio.sleep(0.0)


def keep_busy(seconds: float) -> None:
    """Hold the event loop, as long work in between would."""
    time.sleep(seconds)
