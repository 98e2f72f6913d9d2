"""The Valkey client that all adapters share: one pool, function libraries, and the server's `run_id`."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    ExecAbortError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)

from mesh.errors import UnavailableError

Command = tuple[str | bytes | int | float, ...]

# Once is enough to leave behind a pooled connection to a server that was restarted. Time-outs aren't tried again.
_RETRIES = 1
_REFUSALS = {"OOM", "MISCONF", "NOREPLICAS", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY", "EXECABORT"}
_REFUSAL_TYPES = (OutOfMemoryError, ReadOnlyError, ExecAbortError)
_AWAY_SECONDS = 0.5
"""After a failure, calls fail at once for so long, but for one that looks again: a server that hangs would else cost
each reader its time-outs, one after the other."""


def _refusal(error: ResponseError) -> str:
    """What a server that answers, but can't do it now, says (no memory, no disk, a replica, …); empty for a command
    that is wrong. In a pipeline the text stands behind the command's number."""
    text = str(error.__cause__ or error)
    words = set(text.replace("(", " ").replace(")", " ").split())
    return text if words & _REFUSALS or isinstance(error, _REFUSAL_TYPES) else ""


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
        connections_max: int = 64,
        libraries: Sequence[str] = (),
    ) -> None:
        self.key_prefix = key_prefix
        # Of the server process that answers. Learned on each new connection before anything else goes over
        # it, so no reply of a restarted server is ever read with the run_id of the one before.
        self.run_id = ""
        self._libraries = tuple(libraries)
        self._timeout_seconds = timeout_seconds
        self._away = False
        self._look_again = 0.0
        self._redis = Redis(
            connection_pool=BlockingConnectionPool.from_url(
                url,
                max_connections=connections_max,
                timeout=timeout_seconds,
                socket_timeout=timeout_seconds,
                socket_connect_timeout=timeout_seconds,
                retry=Retry(NoBackoff(), _RETRIES, supported_errors=(ConnectionError,)),
                redis_connect_func=self._on_connect,
            )
        )

    async def _on_connect(self, connection: Any) -> None:
        await connection.on_connect()
        await connection.send_command("INFO", "server")
        info = await connection.read_response()
        text = info.decode() if isinstance(info, bytes) else str(info)
        self.run_id = text.partition("run_id:")[2].partition("\r")[0]

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
        except (ConnectionError, TimeoutError, BusyLoadingError, OSError) as error:
            self._away, self._look_again = True, time.monotonic() + _AWAY_SECONDS
            raise UnavailableError(f"Valkey doesn't answer: {error}", reason="VALKEY_UNAVAILABLE") from error
        except ResponseError as error:
            if refusal := _refusal(error):
                raise UnavailableError(f"Valkey refuses: {refusal}", reason="VALKEY_REFUSES") from error
            raise
        self._away = False

    async def call(self, *command: str | bytes | int | float) -> Any:
        """One command. Replies come as redis-py gives them, strings as bytes."""
        with self._reaching():
            return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]

    async def pipeline(self, commands: Sequence[Command], *, atomic: bool = False) -> list[Any]:
        """Many commands in one round trip; `atomic`: inside MULTI. The first error reply is raised."""
        with self._reaching():
            async with self._redis.pipeline(transaction=atomic) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                return list(await pipe.execute())

    async def fcall(self, function: str, keys: Sequence[str], *args: str | bytes | int | float) -> Any:
        """Call a function of the libraries, loading them first where the server doesn't have them."""
        return (await self.fcalls([(function, keys, args)]))[0]

    async def fcalls(
        self, calls: Sequence[tuple[str, Sequence[str], Sequence[str | bytes | int | float]]]
    ) -> list[Any]:
        """Many function calls in one round trip. They run again where the functions had to be loaded, and after a lost
        connection: those that aren't idempotent count what may be a little off."""
        commands = [("FCALL", name, len(keys), *keys, *args) for name, keys, args in calls]
        try:
            return await self.pipeline(commands)
        except ResponseError as error:
            if "function not found" not in str(error).lower():
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
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()
