"""One connection to Valkey, shared by everybody in the process: what is sent in one turn of the event loop goes out in
one write, and replies come in order.

redis-py's own commands cost several times as much processor time, since each reply is awaited by itself; its parser
(hiredis), addresses and errors serve here, too.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from hiredis import ProtocolError, Reader, pack_command
from redis.asyncio.connection import SSLConnection, parse_url
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from mesh.errors import UnavailableError

Command = tuple[str | bytes | int | float, ...]

_WAITING_MAX = 10_000
"""Batches that are sent and not answered; more are refused."""
_INCOMPLETE = object()


class _Batch:
    """Commands that were sent together, and what has come back."""

    __slots__ = ("count", "future", "replies", "sent")

    def __init__(self, count: int, future: "asyncio.Future[list[Any]]", sent: float) -> None:
        self.count = count
        self.future = future
        self.sent = sent
        self.replies: list[Any] = []


class Connection(asyncio.Protocol):
    """Made by `connect`. Once it is lost it stays so, and whoever calls or waits gets redis-py's ConnectionError, or
    TimeoutError when the server had been silent for the time-out."""

    def __init__(self, timeout_seconds: float) -> None:
        self.is_lost = False
        self._loop = asyncio.get_running_loop()
        self._timeout = timeout_seconds
        self._reader = Reader(replyError=ResponseError, notEnoughData=_INCOMPLETE)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[_Batch] = deque()
        self._unsent: list[bytes] = []
        self._heard = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._cause: Exception = ConnectionError("The connection was closed.")

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        """The replies, in order; error replies are ResponseErrors among them. Nothing of others' comes between these
        commands. A caller that is cancelled leaves the connection as it is. Raises UnavailableError when too many
        wait."""
        if self.is_lost:
            raise self._cause
        if len(self._waiting) >= _WAITING_MAX:
            raise UnavailableError("Too many commands wait for Valkey.", reason="VALKEY_UNAVAILABLE")
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent += map(pack_command, commands)  # type: ignore[arg-type]
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        now = self._loop.time()
        self._waiting.append(_Batch(len(commands), future, now))
        if self._watch is None:
            self._watch = self._loop.call_later(self._timeout, self._look)
        return await future

    def _send(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if self._transport is not None and not self.is_lost:
            self._transport.write(data)

    def _look(self) -> None:
        """Give up a server that has been silent for too long."""
        self._watch = None
        if not self._waiting or self.is_lost:
            return
        silent_since = max(self._waiting[0].sent, self._heard)
        rest = silent_since + self._timeout - self._loop.time()
        if rest > 0:
            self._watch = self._loop.call_later(rest, self._look)
        else:
            self._lose(TimeoutError(f"No answer within {self._timeout} s."))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._heard = self._loop.time()
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _INCOMPLETE:
                batch = self._waiting[0]
                batch.replies.append(reply)
                if len(batch.replies) == batch.count:
                    self._waiting.popleft()
                    if not batch.future.done():  # Who waited may have gone.
                        batch.future.set_result(batch.replies)
        except (ProtocolError, IndexError) as error:
            self._lose(ConnectionError(f"Valkey isn't understood: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._lose(ConnectionError(f"The connection was lost: {error or 'closed by the server'}"))

    def close(self) -> None:
        """Close it; who still waits gets ConnectionError."""
        self._lose(self._cause)

    def _lose(self, cause: Exception) -> None:
        if self.is_lost:
            return
        self.is_lost, self._cause = True, cause
        if self._watch:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()
        waiting, self._waiting = self._waiting, deque()
        for batch in waiting:
            if not batch.future.done():
                batch.future.set_exception(cause)


async def connect(url: str, timeout_seconds: float) -> tuple[Connection, str]:
    """A connection to `redis://`, `rediss://` or `unix://`, and the `run_id` of the server process that answers. Raises
    OSError, ConnectionError, TimeoutError or ResponseError."""
    at = parse_url(url)
    loop = asyncio.get_running_loop()
    connection: Connection | None = None

    def make() -> Connection:
        nonlocal connection
        connection = Connection(timeout_seconds)
        return connection

    try:
        async with asyncio.timeout(timeout_seconds):
            if "path" in at:
                await loop.create_unix_connection(make, at["path"])
            else:
                secure = ssl.create_default_context() if at.get("connection_class") is SSLConnection else None
                await loop.create_connection(make, at.get("host", "localhost"), at.get("port", 6379), ssl=secure)
            assert connection
            return connection, await _introduce(connection, at)
    except BaseException:
        if connection:
            connection.close()
        raise


async def _introduce(connection: Connection, at: Mapping[str, Any]) -> str:
    hello: list[str | bytes | int | float] = ["HELLO", 3]
    if at.get("password"):
        hello += ["AUTH", at.get("username") or "default", at["password"]]
    replies = await connection.execute([tuple(hello), ("SELECT", at.get("db", 0)), ("INFO", "server")])
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise reply
    return str(replies[-1], "ascii", "replace").partition("run_id:")[2].partition("\r")[0]
