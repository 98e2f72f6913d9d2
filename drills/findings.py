"""What a drill says: where it is, and at the end what was asked beside what was reached."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import click
import grpc

from cli.client import NotPossibleError
from cli.failures import line_of
from drills.own_mesh import DrillError

_PROGRESS_SECONDS = 5.0
_SHARES = (0.50, 0.95, 0.99)

T = TypeVar("T")


class Progress:
    """A line now and then, on stderr: stdout is for the result."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._last = 0.0

    def step(self, text: str) -> None:
        """Say what begins."""
        self._last = time.monotonic()
        click.echo(f"[{self._last - self._start:5.0f} s] {text}", err=True)

    def more(self, text: str) -> None:
        """Say how far it is, if nothing was said for some seconds."""
        if time.monotonic() - self._last >= _PROGRESS_SECONDS:
            self.step(text)


class Checks:
    """What was asked for, and what was reached: a row each."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, str, bool]] = []

    def equal(self, what: str, asked: int, reached: int) -> None:
        """Exactly so many."""
        self._row(what, f"{asked:,}", reached, reached == asked)

    def at_least(self, what: str, asked: float, reached: float) -> None:
        """So many or more."""
        self._row(what, f"≥ {asked:,}", reached, reached >= asked)

    def at_most(self, what: str, asked: float, reached: float) -> None:
        """So many or fewer."""
        self._row(what, f"≤ {asked:,}", reached, reached <= asked)

    def _row(self, what: str, asked: str, reached: float, holds: bool) -> None:
        self._rows.append((what, asked, f"{reached:,}" if isinstance(reached, int) else f"{reached:,.1f}", holds))

    @property
    def hold(self) -> bool:
        """Whether all that was asked for was reached."""
        return all(holds for *_, holds in self._rows)

    def lines(self) -> list[str]:
        """The table, for people."""
        return [f"{'':46} {'asked':>12} {'reached':>12}"] + [
            f"{what:46} {asked:>12} {reached:>12}{'' if holds else '   NOT REACHED'}"
            for what, asked, reached, holds in self._rows
        ]


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def times(during: Sequence[float], before: Sequence[float], share: float) -> float:
    """How many times as long it takes, at one quantile; what took less than a millisecond counts as one."""
    return quantile(during, share) / max(quantile(before, share), 0.001)


def delay_lines(delays: Mapping[str, Sequence[float]], before: str, during: str) -> list[str]:
    """Quantiles of delays in seconds, a row each, and how two of them compare."""
    lines = [f"{'delay from post to list, ms':46} {'p50':>9} {'p95':>9} {'p99':>9}"]
    for what, values in delays.items():
        row = f"{what} ({len(values):,} tweets)"
        lines.append(f"{row:46} " + " ".join(f"{quantile(values, share) * 1_000:>9,.0f}" for share in _SHARES))
    ratios = [times(delays[during], delays[before], share) for share in _SHARES]
    return [*lines, f"{f'{during} / {before}':46} " + " ".join(f"{ratio:>9,.1f}" for ratio in ratios)]


def machine(loads: Sequence[float]) -> str:
    """What the figures depend on. `loads`: the machine's load averages (1 min), as the drill went on."""
    return f"{os.cpu_count()} cores; load average meanwhile: {', '.join(f'{load:.1f}' for load in loads)}"


def carry_out(drill: Coroutine[Any, Any, T]) -> T:
    """Run it, whole; or say why it can't go on, and exit."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # As Ctrl-C: what was started is ended.
    fault = ""
    try:
        return asyncio.run(drill)
    except* (DrillError, NotPossibleError, grpc.aio.AioRpcError, OSError) as errors:
        fault = _fault(errors)
    click.echo(f"the drill can't go on: {fault}", err=True)
    sys.exit(1)


def _fault(error: BaseException) -> str:
    """In one line; of several, the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return line_of(error) if isinstance(error, grpc.aio.AioRpcError) else str(error) or type(error).__name__
