"""The Valkey client that all adapters share: its connections, function libraries, and the server's `run_id`."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from mesh import metrics
from mesh.errors import UnavailableError
from mesh.valkey_connection import Command, Connection, connect

__all__ = ["Call", "Command", "Valkey"]

T = TypeVar("T")

Call = tuple[str, Sequence[str], Sequence[str | bytes | int | float]]
"""Of a function: its name, keys and arguments."""

# Once is enough to leave behind a connection to a server that was restarted. Time-outs aren't tried again.
_ATTEMPTS = 2
_REFUSALS = {"OOM", "MISCONF", "NOREPLICAS", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY", "EXECABORT"}
_REFUSALS |= {"LOADING", "NOAUTH", "WRONGPASS"}
_SCAN_KEYS = 500
_AWAY_SECONDS = 0.5
"""After a failure, calls fail at once for so long, but for one that looks again: a server that hangs would else cost
each reader its time-outs, one after the other."""


def _refusal(error: ResponseError) -> str:
    """What a server that answers, but can't do it now, says (no memory, no disk, a replica, …); empty for a command
    that is wrong."""
    words = set(str(error).replace("(", " ").replace(")", " ").split())
    return str(error) if words & _REFUSALS else ""


def raise_first(replies: Sequence[Any]) -> None:
    """Raise the first error reply: UnavailableError when the server can't now, else the ResponseError."""
    for reply in replies:
        if isinstance(reply, ResponseError):
            if refusal := _refusal(reply):
                metrics.cache_errors.inc()
                raise UnavailableError(f"Valkey refuses: {refusal}", reason="VALKEY_REFUSES") from reply
            raise reply


def function_is_missing(error: ResponseError) -> bool:
    """Whether a server says so of a function library's function."""
    return "function not found" in str(error).lower()


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items in pieces of `size`, the last one shorter."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


class Valkey:
    """A client for one server, whose failures are `UnavailableError`.

    `libraries` are the Lua sources of function libraries, loaded where a function turns out to be missing
    (function *names* carry a version, so old and new releases live side by side).
    """

    def __init__(
        self,
        url: str,
        *,
        key_prefix: str = "",
        timeout_seconds: float = 1.0,
        libraries: Sequence[str] = (),
    ) -> None:
        self.key_prefix = key_prefix
        # Of the server process that answers. Learned on each new connection before anything else goes over
        # it, so no reply of a restarted server is ever read with the run_id of the one before.
        self.run_id = ""
        self._url = url
        self._libraries = tuple(libraries)
        self._timeout_seconds = timeout_seconds
        self._away = False
        self._look_again = 0.0
        self._shared: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._idle: list[Connection] = []

    async def _connect(self) -> Connection:
        connection, self.run_id = await connect(self._url, self._timeout_seconds)
        return connection

    async def _connect_shared(self) -> None:
        try:
            self._shared = await self._connect()
        finally:
            self._connecting = None

    async def _connection(self) -> Connection:
        """The one that all share; who needs it while it's being made waits for the same."""
        if self._shared is None or self._shared.is_lost:
            self._connecting = self._connecting or asyncio.ensure_future(self._connect_shared())
            await asyncio.shield(self._connecting)
        assert self._shared is not None
        return self._shared

    async def _execute(self, commands: Sequence[Command]) -> list[Any]:
        for attempt in range(_ATTEMPTS):
            try:
                return await (await self._connection()).execute(commands)
            except ConnectionError:
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Turn what means "not there, or not now" into UnavailableError; a wrong command stays an error."""
        now = time.monotonic()
        if self._away and now < self._look_again:
            raise UnavailableError("Valkey doesn't answer.", reason="VALKEY_UNAVAILABLE")
        if self._away:
            self._look_again = now + self._timeout_seconds
        try:
            yield
        except (ConnectionError, TimeoutError, OSError) as error:
            self._away, self._look_again = True, time.monotonic() + _AWAY_SECONDS
            metrics.cache_errors.inc()
            raise UnavailableError(f"Valkey doesn't answer: {error}", reason="VALKEY_UNAVAILABLE") from error
        except ResponseError as error:
            if refusal := _refusal(error):
                raise UnavailableError(f"Valkey refuses: {refusal}", reason="VALKEY_REFUSES") from error
            raise
        self._away = False

    def run_id_of(self, key: str) -> str:
        """Of the server process that has the key."""
        return self.run_id

    async def life(self) -> str:
        """Names what must be another when data may have been lost. Raises UnavailableError."""
        if not self.is_connected:  # A server that ends takes its connections along.
            await self.ping()
        return self.run_id

    @property
    def is_connected(self) -> bool:
        """As far as is known here."""
        return self._shared is not None and not self._shared.is_lost

    def batches(self, keys: Sequence[str], size: int) -> Iterator[Sequence[str]]:
        """The keys, in any order, in pieces of at most `size` that one function call may be given."""
        return chunks(keys, size)

    async def replies(self, commands: Sequence[Command]) -> list[Any]:
        """Many commands in one round trip; error replies are among the replies."""
        with self._reaching():
            return await self._execute(commands)

    async def call(self, *command: str | bytes | int | float) -> Any:
        """One command. Replies are as RESP3 has them, strings as bytes."""
        return (await self.pipeline([command]))[0]

    async def call_blocking(self, *command: str | bytes | int | float) -> Any:
        """One command that may wait in the server, less than the time-out: it has a connection to itself meanwhile."""
        with self._reaching():
            self._idle = [connection for connection in self._idle if not connection.is_lost]
            connection = self._idle.pop() if self._idle else await self._connect()
            try:
                replies = await connection.execute([command])
            except BaseException:
                connection.close()  # The server forgets the wait with it.
                raise
            self._idle.append(connection)
        raise_first(replies)
        return replies[0]

    async def pipeline(self, commands: Sequence[Command], *, atomic: bool = False) -> list[Any]:
        """Many commands in one round trip; `atomic`: inside MULTI. The first error reply is raised."""
        if not commands:
            return []
        replies = await self.replies([("MULTI",), *commands, ("EXEC",)] if atomic else commands)
        raise_first(replies)
        if atomic:
            replies = replies[-1]
            raise_first(replies)
        return replies

    async def scan(self, pattern: str) -> AsyncIterator[list[str]]:
        """Names of keys like `pattern`, some at a time, as SCAN has it: those that are there throughout come at least
        once."""
        cursor = b"0"
        while True:  # To the cursor's end, which the server promises.
            cursor, names = (await self.replies([("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_KEYS)]))[0]
            yield [name.decode() for name in names]
            if cursor == b"0":
                return

    async def fcall(self, function: str, keys: Sequence[str], *args: str | bytes | int | float) -> Any:
        """Call a function of the libraries, loading them first where the server doesn't have them."""
        return (await self.fcalls([(function, keys, args)]))[0]

    async def fcalls(self, calls: Sequence[Call]) -> list[Any]:
        """Many function calls in one round trip. They run again where the functions had to be loaded, and after a lost
        connection: those that aren't idempotent count what may be a little off."""
        commands = [("FCALL", name, len(keys), *keys, *args) for name, keys, args in calls]
        try:
            return await self.pipeline(commands)
        except ResponseError as error:
            if not function_is_missing(error):
                raise
        await self.load()
        return await self.pipeline(commands)

    async def load(self) -> None:
        """Load the libraries (again)."""
        for source in self._libraries:
            await self.call("FUNCTION", "LOAD", "REPLACE", source)

    async def ping(self) -> None:
        """Raises UnavailableError unless the server answers."""
        await self.call("PING")

    async def close(self) -> None:
        """Close all connections."""
        if self._connecting:
            self._connecting.cancel()
        for connection in (self._shared, *self._idle):
            if connection:
                connection.close()
