"""Starts a program that dies with the launcher: `python guard.py LAUNCHER_PID PRIORITY PROGRAM ARGUMENT…`.

On Linux the kernel kills a process that asked for it (PR_SET_PDEATHSIG) when its parent is gone, however the parent
went; the request outlives exec. Elsewhere there is no such thing: after a `kill -9` of the launcher its children
stay, and the next launcher refuses, since they hold the lock of the data folder.

PRIORITY is `normal`, or `idle` for a program that runs only while nobody else wants the processor: on Linux a policy of
its own, under which others needn't even wait for the end of a time slice; elsewhere the lowest priority.

A program of its own, not a `preexec_fn`, which isn't safe in a process with threads.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def run_when_idle() -> None:
    """Give way to every other process, and so do the children."""
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


def main(arguments: list[str]) -> None:
    """Become PROGRAM, unless the launcher is gone already."""
    launcher, priority, program = int(arguments[0]), arguments[1], arguments[2:]
    if priority == "idle":
        run_when_idle()
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - a start costs less without it elsewhere

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == launcher:
        os.execv(program[0], program)  # noqa: S606 - that is the purpose


if __name__ == "__main__":
    main(sys.argv[1:])
