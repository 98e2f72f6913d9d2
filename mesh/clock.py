"""Clocks. Injected everywhere, so that tests own time."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def now_ms(self) -> int:
        """Wall time, ms since the Unix epoch; may step."""
        ...

    def monotonic(self) -> float:
        """Seconds that only grow; their zero means nothing."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        """Wall time, ms since the Unix epoch."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Seconds that only grow."""
        return time.monotonic()
