"""SQLite for asyncio: one writer thread with group commit, and reader threads on snapshots (WAL).

A unit of work is a plain function of a connection, run whole in a thread. Writes that wait together share one
transaction and so one fsync, each behind its own savepoint: one that fails is undone alone.
"""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from mesh.errors import ConfigurationError, ResourceExhaustedError, UnavailableError

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

_QUEUE_MAX = 2_000
_GROUP_MAX = 256
_READERS = 2
_BUSY_MS = 5_000
_CACHE_KILOBYTES = 16_000

_INTEGER_MAX = (1 << 63) - 1


def key(identifier: int) -> int:
    """An unsigned 64-bit id as SQLite can hold it. Ids that we make have 63 bits; greater ones are nobody's."""
    return min(identifier, _INTEGER_MAX)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:  # locked, full, gone; not what is wrong in itself
        raise UnavailableError(f"The store doesn't answer: {error}", reason="STORE_UNAVAILABLE") from error


class Database:
    """One database file. `write` and `read` run work in threads, `look` runs it at once; all raise UnavailableError.

    `schema` makes what is missing, and may run again. `migrations` are scripts, never changed once released: each
    brings a file of the schema before it to the next one (the file's `user_version` says how many it has had).
    """

    def __init__(
        self, path: str | Path, schema: str, *, migrations: Sequence[str] = (), synchronous: str = "FULL"
    ) -> None:
        self._path = str(path)
        self._schema = schema
        self._migrations = tuple(migrations)
        self._synchronous = synchronous
        self._queue: queue.Queue[tuple[Work[Any], Future[Any]] | None] = queue.Queue(_QUEUE_MAX)
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._writing: sqlite3.Connection | None = None
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="sqlite-read")
        self._writer = threading.Thread(target=self._write_loop, name="sqlite-write", daemon=True)

    async def open(self) -> None:
        """Create the file and the tables where they are missing, and bring older ones up to date; may be called again.

        Raises UnavailableError, and ConfigurationError for a file that is something else, or of a newer release.
        """

        def apply() -> None:
            with _translated():
                if self._writing is None:
                    self._writing = self._connect()
                self._bring_up_to_date(self._writing)

        try:
            await asyncio.get_running_loop().run_in_executor(self._readers, apply)
        except sqlite3.DatabaseError as error:
            raise ConfigurationError(f"{self._path} can't be used as a database: {error}") from error
        if not self._writer.is_alive():
            self._writer.start()

    def _bring_up_to_date(self, connection: sqlite3.Connection) -> None:
        newest = len(self._migrations)
        is_new = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        version = newest if is_new else connection.execute("PRAGMA user_version").fetchone()[0]
        if version > newest:
            raise ConfigurationError(f"{self._path} was made by a newer release: it has schema {version}, not {newest}")
        try:
            for number, step in enumerate((*self._migrations[version:], self._schema), version + 1):
                connection.executescript(
                    f"BEGIN IMMEDIATE; {step}; PRAGMA user_version = {min(number, newest)}; COMMIT"
                )
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    async def close(self) -> None:
        """Finish the writes that wait, then close."""
        if self._writer.is_alive():
            await asyncio.to_thread(self._queue.put, None)
            await asyncio.to_thread(self._writer.join)
        await asyncio.to_thread(self._readers.shutdown)
        for connection in self._connections:
            connection.close()

    async def write(self, work: Work[T]) -> T:
        """Run `work` in a transaction; durable when this returns. Beyond the queue's bound: refused."""
        future: Future[T] = Future()
        try:
            self._queue.put_nowait((work, future))
        except queue.Full:
            raise ResourceExhaustedError(
                "Too many writes are waiting.", retry_after_seconds=0.5, reason="STORE_BUSY"
            ) from None
        return await asyncio.wrap_future(future)

    async def read(self, work: Work[T]) -> T:
        """Run `work` on one snapshot."""

        return await asyncio.get_running_loop().run_in_executor(self._readers, self._snapshot, work)

    async def look(self, work: Work[T]) -> T:
        """As `read`, in the event loop's own thread: for what is found by its key in some 10 µs, where another thread
        would cost more, and a turn of a busy loop each way."""
        return self._snapshot(work)

    def _snapshot(self, work: Work[T]) -> T:
        with _translated():
            connection = self._reader()
            connection.execute("BEGIN")
            try:
                return work(connection)
            finally:
                connection.execute("ROLLBACK")

    def _reader(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect()
            connection.execute("PRAGMA query_only = ON")
        return connection

    def _connect(self) -> sqlite3.Connection:
        # Used by one thread; closed by another, after that one ended.
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        self._connections.append(connection)
        connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KILOBYTES}")
        connection.execute(f"PRAGMA synchronous = {self._synchronous}")
        return connection

    def _write_loop(self) -> None:
        connection = self._writing
        assert connection is not None
        open_for_more = True
        while open_for_more:
            group = [self._queue.get()]
            while len(group) < _GROUP_MAX and group[-1] is not None:
                try:
                    group.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            open_for_more = group[-1] is not None
            _commit_group(connection, [entry for entry in group if entry is not None])


def _commit_group(connection: sqlite3.Connection, group: list[tuple[Work[Any], Future[Any]]]) -> None:
    outcomes: list[tuple[Future[Any], Any]] = []
    try:
        with _translated():
            connection.execute("BEGIN IMMEDIATE")
            for work, future in group:
                if future.set_running_or_notify_cancel():
                    outcomes.append((future, _run(connection, work)))
            connection.execute("COMMIT")
    except BaseException as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        for _, future in group:
            with suppress(InvalidStateError):  # done, or its waiter has just given up
                future.set_exception(error)
        return
    for future, outcome in outcomes:
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _run(connection: sqlite3.Connection, work: Work[Any]) -> Any:
    """The work's result, or the exception that it raised, undone to its savepoint."""
    connection.execute("SAVEPOINT work")
    try:
        with _translated():
            result = work(connection)
    except Exception as error:
        connection.execute("ROLLBACK TO work")
        result = error
    connection.execute("RELEASE work")
    return result
