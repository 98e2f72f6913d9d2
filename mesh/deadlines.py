"""Deadlines travel: the one of the call being handled bounds every call that it makes."""

import time
from contextvars import ContextVar

deadline: ContextVar[float | None] = ContextVar("deadline", default=None)
"""On the monotonic clock; None outside of any call. Set by `mesh.server`."""


def remaining(at_most_seconds: float) -> float:
    """Seconds left for a piece of work: `at_most_seconds`, or less when the caller waits less long."""
    end = deadline.get()
    return at_most_seconds if end is None else max(0.0, min(at_most_seconds, end - time.monotonic()))
