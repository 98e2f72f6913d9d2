"""All lines that the launcher shows, its children's too, in one order, by one thread.

A terminal may be slow, or stopped (Ctrl-S). Nobody waits for it: lines beyond LINES_MAX are dropped and counted.
"""

import os
import queue
import threading
from asyncio import StreamReader
from collections.abc import AsyncIterator

LINES_MAX = 10_000
LINE_BYTES_MAX = 16_384
_CHUNK_BYTES = 65_536
_COLOURS = (36, 32, 35, 34, 33, 96, 92, 95, 94)


class Output:
    """Writes lines to a file descriptor, each with its process's name in front."""

    def __init__(self, descriptor: int, *, coloured: bool, width: int) -> None:
        self._descriptor = descriptor
        self._coloured = coloured
        self._width = width
        self._colours: dict[str, int] = {}
        self._lines: queue.Queue[bytes | None] = queue.Queue(LINES_MAX)
        self._dropped = 0
        # A daemon, and os.write: a terminal that takes nothing more must not hold up the end of the process.
        self._thread = threading.Thread(target=self._write_all, daemon=True, name="output")
        self._thread.start()

    def line(self, name: str, text: str) -> None:
        """Show a line of the process `name`; the launcher's own lines have the empty name. Never waits."""
        if self._dropped and self._put(f"({self._dropped:,} lines were dropped: the terminal is too slow)"):
            self._dropped = 0
        prefix = f"{name:<{self._width}} │ " if name else ""
        if prefix and self._coloured:
            colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        self._dropped += not self._put(prefix + text)

    def _put(self, text: str) -> bool:
        try:
            self._lines.put_nowait(f"{text}\n".encode(errors="replace"))
        except queue.Full:
            return False
        return True

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError:
                pass  # nobody reads any more; the mesh goes on

    def close(self, seconds: float) -> None:
        """Write what is left, for at most so long."""
        try:
            self._lines.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(seconds)


async def lines(reader: StreamReader) -> AsyncIterator[str]:
    """The lines of a stream; one longer than LINE_BYTES_MAX comes in pieces."""
    rest = b""
    while chunk := await reader.read(_CHUNK_BYTES):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace").rstrip("\r")
        if len(rest) > LINE_BYTES_MAX:
            yield rest.decode(errors="replace")
            rest = b""
    if rest:
        yield rest.decode(errors="replace")
