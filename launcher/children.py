"""One child process: started, watched, started again, stopped."""

import asyncio
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher import guard
from launcher.output import Output, lines

ROOT = Path(__file__).resolve().parents[1]
"""Children run here: the services are packages of this folder."""
RESTART_SECONDS_MIN = 0.2
RESTART_SECONDS_MAX = 5.0
HEALTHY_SECONDS = 30.0
"""After so long without a fault a crash counts as the first one again."""
_MISCONFIGURED_STATUS = 2
_PROBE_SECONDS = 0.05
_LAST_LINES_SECONDS = 1.0


class MisconfiguredError(Exception):
    """A child refuses its configuration; to start it again can't help."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What to start. `serves` says whether it answers now, within about a second, and never raises. `gives_way`:
    once it serves, it runs only while nobody else wants the processor. `listening`: a socket that it inherits."""

    name: str
    address: str
    command: Sequence[str]
    environment: Mapping[str, str]
    serves: Callable[[], Awaitable[bool]]
    gives_way: bool = False
    listening: socket.socket | None = None


def give_way(pid: int) -> None:
    """Let a process run only while nobody else wants the processor; that it is gone is no error. On Linux there is a
    policy for it, under which others needn't even wait for the end of a time slice; elsewhere, the lowest priority."""
    with suppress(ProcessLookupError, FileNotFoundError):
        if sys.platform == "linux":
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
        else:
            os.setpriority(os.PRIO_PROCESS, pid, 19)


def restart_delay_seconds(crashes: int) -> float:
    """How long to wait after so many crashes in a row (from 1)."""
    return float(min(RESTART_SECONDS_MIN * 2 ** min(crashes - 1, 16), RESTART_SECONDS_MAX))


class Child:
    """Keeps one process running. `lock` is the descriptor that it holds as long as it lives."""

    def __init__(self, spec: Spec, output: Output, lock: int, on_start: Callable[[], None]) -> None:
        self.spec = spec
        self.serving = asyncio.Event()
        self._output = output
        self._lock = lock
        self._on_start = on_start
        self._process: Process | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The process now, or None between two lives."""
        return self._process.pid if self._process else None

    def end_restarts(self) -> None:
        """From now on an end is an end."""
        self._stopping.set()

    def signal(self, number: signal.Signals) -> None:
        """Signal the process and all that it started; none is no error."""
        if self._process and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def keep(self) -> None:
        """Run the process, and again when it ends, until `end_restarts`. Raises MisconfiguredError."""
        crashes = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            status = await self._live()
            if self._stopping.is_set():
                return
            if status == _MISCONFIGURED_STATUS and not self.serving.is_set():
                raise MisconfiguredError(self.spec.name)
            crashes = 1 if time.monotonic() - started > HEALTHY_SECONDS else crashes + 1
            delay = restart_delay_seconds(crashes)
            self.serving.clear()
            self._output.line("", f"{self.spec.name} ended ({_described(status)}); it starts again in {delay:g} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    async def _live(self) -> int:
        """One life, from start to exit status."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", guard.__file__, str(os.getpid())),
            *self.spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env=self.spec.environment,
            cwd=ROOT,
            pass_fds=(self._lock, *([self.spec.listening.fileno()] if self.spec.listening else [])),
            # A terminal's Ctrl-C is for the launcher, which stops its children in order.
            start_new_session=True,
        )
        if self._stopping.is_set():  # in the meantime: whoever asked had nothing to signal
            self.signal(signal.SIGTERM)
        self._on_start()
        showing = asyncio.create_task(self._show(self._process))
        probing = asyncio.create_task(self._probe())
        try:
            status = await self._process.wait()
            await asyncio.wait([showing], timeout=_LAST_LINES_SECONDS)
        finally:
            self._process = None
            showing.cancel()
            probing.cancel()
        return status

    async def _show(self, process: Process) -> None:
        assert process.stdout is not None
        async for line in lines(process.stdout):
            self._output.line(self.spec.name, line)

    async def _probe(self) -> None:
        started = time.monotonic()
        while not await self.spec.serves():  # noqa: ASYNC110 - another process: no event tells of it
            await asyncio.sleep(_PROBE_SECONDS)
        if self.spec.gives_way and self.pid:
            give_way(self.pid)
        self.serving.set()
        self._output.line("", f"{self.spec.name} is ready ({time.monotonic() - started:.1f} s)")


def _described(status: int) -> str:
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name
