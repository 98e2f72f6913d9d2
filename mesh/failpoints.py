"""Named places where a test has a real process killed. Off unless STARLING_FAILPOINTS names a folder at start.

A test arms one by making a file of its name in that folder; the first process that comes by removes it and dies as by
`kill -9`. Sites ask `ARMED` first, so that nothing is called when it's off.
"""

import os
import signal
from pathlib import Path

ARMED = os.environ.get("STARLING_FAILPOINTS", "")

NAMES = frozenset(
    {
        "between-store-writes",
        "after-outbox-row",
        "before-mark-published",
        "between-batches",
        "before-ack",
        "before-version-copy-deleted",
        "in-drain",
        "before-flush-finished",
    }
)


def hit(name: str) -> None:
    """Die here, if a test asks for it."""
    assert name in NAMES
    try:
        (Path(ARMED) / name).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
