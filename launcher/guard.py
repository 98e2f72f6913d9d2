"""Starts a program that dies with the launcher: `python guard.py LAUNCHER_PID PROGRAM ARGUMENT…`.

On Linux the kernel kills a process that asked for it (PR_SET_PDEATHSIG) when its parent is gone, however the parent
went; the request outlives exec. Elsewhere there is no such thing: after a `kill -9` of the launcher its children
stay, and the next launcher refuses, since they hold the lock of the data folder.

A program of its own, not a `preexec_fn`, which isn't safe in a process with threads.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Become PROGRAM, unless the launcher is gone already."""
    launcher, program = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - a start costs less without it elsewhere

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == launcher:
        os.execv(program[0], program)  # noqa: S606 - that is the purpose


if __name__ == "__main__":
    main(sys.argv[1:])
