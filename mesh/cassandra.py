"""The Cassandra session that all adapters share: prepared statements, asyncio, errors, and conditional writes.

Reads and plain writes may be repeated, so the driver repeats them elsewhere when a node is slow or gone. Conditional
writes (LWT) are linearised by the servers, and take their timestamps from ballots, which only grow whatever the clocks
say. Where plain writes could meet, the adapters give timestamps that mean something (a version, "written", "erased"),
never a clock's. So no skewed clock turns two operations round.

A conditional write whose answer is lost may have been applied, or may be yet. Only a serial read tells, because it
finishes what is in progress first: `settled` runs an attempt again with `serially` set until one has a clear end.
"""

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from cassandra import ConsistencyLevel, DriverException, InvalidRequest, RequestValidationException
from cassandra.cluster import (
    EXEC_PROFILE_DEFAULT,
    Cluster,
    ExecutionProfile,
    NoHostAvailable,
    ResponseFuture,
    Session,
)
from cassandra.connection import ConnectionException
from cassandra.policies import (
    ConstantSpeculativeExecutionPolicy,
    DCAwareRoundRobinPolicy,
    ExponentialReconnectionPolicy,
    RetryPolicy,
    TokenAwarePolicy,
)
from cassandra.query import BatchStatement, BatchType, BoundStatement, PreparedStatement, tuple_factory

from mesh.config import Where
from mesh.deadlines import remaining
from mesh.errors import ConfigurationError, UnavailableError

logging.getLogger("cassandra").setLevel(logging.CRITICAL)  # What it has to say comes as errors, too.

T = TypeVar("T")
A = TypeVar("A")
Row = tuple[Any, ...]

TIMEOUT_SECONDS = 5.0
"""Of one statement; less when the caller waits less long."""
AT_ONCE = 64
"""Statements of one call in flight."""
PARTITIONS_AT_ONCE = 25
"""Read by one statement where many are: each statement costs this process more than it costs the servers."""
_IN_FLIGHT_MAX = 512
PAGE_ROWS = 5_000
_SPECULATE_SECONDS = 0.15
_RETRIES = 2
_ATTEMPTS_MAX = 200
_UNKNOWN_MAX = 4
_BACKOFF_SECONDS, _BACKOFF_SECONDS_MAX = 0.005, 0.1
_TABLE = re.compile(r"\b(FROM|INTO|UPDATE) ")
_INTEGER_MAX = (1 << 63) - 1

_FAILURES = (
    DriverException,  # time-outs, unavailable, failures of replicas, overloaded
    NoHostAvailable,
    ConnectionException,
    OSError,
)


def key(identifier: int) -> int:
    """An unsigned 64-bit id as a bigint holds it. Ids that we make have 63 bits; greater ones are nobody's."""
    return min(identifier, _INTEGER_MAX)


@dataclass(frozen=True, slots=True)
class Statement:
    """CQL with question marks. `conditional`: an LWT, which must not be sent twice."""

    cql: str
    conditional: bool = False


class UnknownOutcomeError(UnavailableError):
    """The answer to a conditional write is lost."""


class _Retry(RetryPolicy):  # type: ignore[misc]
    """Once more, elsewhere, what may be repeated."""

    def on_read_timeout(self, query: Any, *args: Any, retry_num: int, **kwargs: Any) -> tuple[int, Any]:
        return self._again(query, retry_num)

    def on_write_timeout(self, query: Any, *args: Any, retry_num: int, **kwargs: Any) -> tuple[int, Any]:
        return self._again(query, retry_num)

    def on_unavailable(self, query: Any, *args: Any, retry_num: int, **kwargs: Any) -> tuple[int, Any]:
        return self._again(query, retry_num)

    def on_request_error(self, query: Any, *args: Any, retry_num: int, **kwargs: Any) -> tuple[int, Any]:
        return self._again(query, retry_num)

    def _again(self, query: Any, retry_num: int) -> tuple[int, Any]:
        may = query.is_idempotent and retry_num < _RETRIES
        return (self.RETRY_NEXT_HOST if may else self.RETHROW), None


def cluster_of(where: Where) -> Cluster:
    """The driver's cluster. Protocol 4: with 5 the driver loses bytes where a read ends within a segment's header."""
    profile = ExecutionProfile(
        load_balancing_policy=TokenAwarePolicy(DCAwareRoundRobinPolicy(local_dc=where.local_dc)),
        retry_policy=_Retry(),
        consistency_level=ConsistencyLevel.LOCAL_QUORUM,
        serial_consistency_level=ConsistencyLevel.LOCAL_SERIAL,
        row_factory=tuple_factory,
        speculative_execution_policy=ConstantSpeculativeExecutionPolicy(_SPECULATE_SECONDS, 1),
        request_timeout=TIMEOUT_SECONDS,
    )
    return Cluster(
        list(where.contact_points),
        port=where.port,
        protocol_version=4,
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
        reconnection_policy=ExponentialReconnectionPolicy(0.2, 5.0),
        connect_timeout=TIMEOUT_SECONDS,
    )


@contextmanager
def translated() -> Iterator[None]:
    """The driver's errors that mean "not there, or not now", as UnavailableError."""
    try:
        yield
    except RequestValidationException:  # wrong in itself
        raise
    except _FAILURES as error:
        raise UnavailableError(f"The store doesn't answer: {error}", reason="STORE_UNAVAILABLE") from error


class Cassandra:
    """A session with one keyspace. All methods raise UnavailableError."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._prepared: dict[Statement, PreparedStatement] = {}
        self._is_open = False
        self._cluster: Cluster | None = None
        self._session: Session | None = None
        self._in_flight = asyncio.Semaphore(_IN_FLIGHT_MAX)
        self._locks: dict[object, tuple[asyncio.Lock, list[None]]] = {}

    async def open(self, statements: Iterable[Statement]) -> None:
        """Connect, and prepare all that will be used: preparing blocks. May be called again.

        Raises ConfigurationError where the schema isn't there.
        """
        await asyncio.to_thread(self._open, list(statements))

    def _open(self, statements: Sequence[Statement]) -> None:
        with translated():
            try:
                if self._session is None:
                    self._cluster = cluster_of(self._where)
                    self._session = self._cluster.connect()
                for statement in statements:
                    if statement not in self._prepared:
                        qualified = _TABLE.sub(rf"\g<0>{self._where.keyspace}.", statement.cql)
                        prepared = self._session.prepare(qualified)
                        prepared.is_idempotent = not statement.conditional
                        prepared.fetch_size = PAGE_ROWS
                        self._prepared[statement] = prepared
                self._is_open = True
            except InvalidRequest as error:
                raise ConfigurationError(
                    f"STARLING_CASSANDRA_KEYSPACE: {self._where.keyspace} lacks what this release needs"
                    f" ({error}); run python -m mesh.migrate"
                ) from error

    async def close(self) -> None:
        """Close all connections."""
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.shutdown)
            self._cluster = self._session = None

    async def rows(self, statement: Statement, *args: object, serially: bool = False) -> list[Row]:
        """All rows. `serially`: after whatever conditional write is in progress on that partition has ended."""
        bound = self._bind(statement, args)
        if serially:
            bound.consistency_level = ConsistencyLevel.LOCAL_SERIAL
        with translated():
            return await self._send(bound)

    async def row(self, statement: Statement, *args: object, serially: bool = False) -> Row | None:
        """The first row."""
        found = await self.rows(statement, *args, serially=serially)
        return found[0] if found else None

    async def write(self, statement: Statement, *args: object) -> None:
        """A plain write, which may be repeated."""
        assert not statement.conditional
        with translated():
            await self._send(self._bind(statement, args))

    async def apply(self, *writes: tuple[Statement, Sequence[object]]) -> bool:
        """One conditional write of one partition, whole or not at all; whether its conditions held.

        Raises UnknownOutcomeError when nobody knows.
        """
        assert any(statement.conditional for statement, _ in writes)
        if len(writes) == 1:
            query = self._bind(*writes[0])
        else:
            query = BatchStatement(BatchType.UNLOGGED)
            for statement, args in writes:
                query.add(self._bind(statement, args))
            query.is_idempotent = False
        try:
            with translated():
                (row, *_) = await self._send(query)
        except UnavailableError as error:
            raise UnknownOutcomeError(error.message, reason=error.reason) from error
        return bool(row[0])

    async def settled(self, lock: object, attempt: Callable[[bool], Awaitable[T | None]]) -> T:
        """Run `attempt(serially)` until it gives something: None means that its conditions didn't hold any more.

        It reads, decides, and applies; after an unknown outcome it is run again with `serially`, and must tell by what
        it reads whether it was itself that was applied. Attempts with the same `lock` take turns in this process, since
        those that meet on a partition cost each other a round.
        """
        async with self._turn(lock):
            serially, unknown, wait = False, 0, _BACKOFF_SECONDS
            for _ in range(_ATTEMPTS_MAX):
                try:
                    outcome = await attempt(serially)
                except UnknownOutcomeError:
                    serially, unknown = True, unknown + 1
                    if unknown > _UNKNOWN_MAX or not remaining(TIMEOUT_SECONDS):
                        raise
                    outcome = None
                if outcome is not None:
                    return outcome
                await asyncio.sleep(random.uniform(0, wait))  # noqa: S311
                wait = min(2 * wait, _BACKOFF_SECONDS_MAX)
        raise UnavailableError("Too many write there at once.", reason="STORE_BUSY")

    @asynccontextmanager
    async def _turn(self, lock: object) -> AsyncIterator[None]:
        entry = self._locks.setdefault(lock, (asyncio.Lock(), []))
        entry[1].append(None)
        try:
            async with entry[0]:
                yield
        finally:
            entry[1].pop()
            if not entry[1]:
                self._locks.pop(lock, None)

    def _bind(self, statement: Statement, args: Sequence[object]) -> BoundStatement:
        if not self._is_open:  # A server answers calls before its stores do.
            raise UnavailableError("The store isn't open yet.", reason="STORE_UNAVAILABLE")
        return self._prepared[statement].bind(args)

    async def _send(self, query: BoundStatement | BatchStatement) -> list[Row]:
        """The one way out: a future of the driver's threads, awaited. Raises the driver's errors."""
        assert self._session is not None, "open"
        rows: list[Row] = []
        state: bytes | None = None
        async with self._in_flight:
            while True:
                if not (seconds := remaining(TIMEOUT_SECONDS)):
                    raise UnavailableError("The deadline is over.", reason="STORE_UNAVAILABLE")
                future = self._session.execute_async(query, timeout=seconds, paging_state=state)
                page, state = await first_answer(future)
                rows += page
                if state is None:
                    return rows


async def first_answer(future: ResponseFuture) -> tuple[Sequence[Row], bytes | None]:
    """One page, and where the next one begins. Raises the driver's errors.

    A statement that was sent to a second node, too, since the first one was slow, may be answered twice, and the driver
    then calls back twice: so each page is a request of its own, of which the first answer counts.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Sequence[Row], bytes | None]] = loop.create_future()

    def settle(outcome: tuple[Sequence[Row], bytes | None] | BaseException) -> None:
        if done.done():  # An answer came before; or its waiter has given up.
            return
        if isinstance(outcome, BaseException):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)

    def tell(outcome: tuple[Sequence[Row], bytes | None] | BaseException) -> None:
        """In a thread of the driver's."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, outcome)

    future.add_callbacks(lambda rows: tell((list(rows or ()), future._paging_state)), tell)
    return await done


async def each(work: Callable[[A], Awaitable[T]], items: Sequence[A], at_once: int = AT_ONCE) -> list[T]:
    """The results of `work` on each, some at a time. All are waited for; then the first error, if any, is raised."""
    gate = asyncio.Semaphore(at_once)

    async def one(item: A) -> T:
        async with gate:
            return await work(item)

    results = await asyncio.gather(*map(one, items), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def parts(items: Sequence[A], most: int) -> list[Sequence[A]]:
    """In order, cut into pieces."""
    return [items[start : start + most] for start in range(0, len(items), most)]
