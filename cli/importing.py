"""Imports a graph: accounts first, then who follows whom. Doing it again changes nothing, so it can be resumed.

Memory holds one number per account, and one batch of edges: files may be large.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import grpc

from cli.client import CALL_SECONDS, Client, NotPossibleError
from mesh.channels import streaming
from mesh.principals import OPERATOR
from starling.graph.v1 import graph_pb2

BATCH_DEFAULT = 500
BATCH_MAX = 1_000
LABEL_MAX = 10**14 - 1
"""`u` and 14 digits make the longest handle."""
_CALLS_AT_ONCE = 32
_STREAM_SECONDS = 4.0
"""Servers end connections of a certain age, and with them streams that go on; so none goes on for long."""
_PATIENCE_SECONDS = 60.0
_RETRY_SECONDS = 0.5
_TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}

Edge = tuple[int, int]
"""Labels of follower and followee."""
T = TypeVar("T")


class EdgeFileError(NotPossibleError):
    """A line that is no edge; the text names it."""


class EdgeFile:
    """An edge list: `u v` a line, "u follows v"; `#` and `%` begin comments. Each iteration reads it from the start.

    `undirected`: each line means that both follow each other.
    """

    def __init__(self, path: str | Path, *, undirected: bool = False) -> None:
        self._path = Path(path)
        self._undirected = undirected

    def __iter__(self) -> Iterator[Edge]:
        """Raises EdgeFileError, OSError."""
        with self._path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                edge = self._parsed(number, line)
                if edge is not None:
                    yield edge
                    if self._undirected:
                        yield edge[::-1]

    def _parsed(self, number: int, line: str) -> Edge | None:
        words = line.split()
        if not words or words[0][0] in "#%":
            return None
        if len(words) != 2 or not all(word.isascii() and word.isdigit() and len(word) < 20 for word in words):
            raise EdgeFileError(f"{self._path}:{number}: expected two numbers, found {line.strip()[:60]!r}")
        follower, followee = int(words[0]), int(words[1])
        if max(follower, followee) > LABEL_MAX:
            raise EdgeFileError(f"{self._path}:{number}: a number has at most 14 digits")
        return follower, followee


@dataclass(slots=True)
class ImportReport:
    """What became of an import, or what has so far. `user_ids`: by handle.

    After a connection was lost, edges that were sent again may count as existing instead of new.
    """

    users_total: int = 0
    users_created: int = 0
    users_existing: int = 0
    users_seconds: float = 0.0
    edges_total: int = 0
    follows_created: int = 0
    follows_existing: int = 0
    follows_refused: int = 0
    follows_seconds: float = 0.0
    user_ids: dict[str, int] = field(default_factory=dict)

    @property
    def users_done(self) -> int:
        """Accounts that are there."""
        return self.users_created + self.users_existing

    @property
    def edges_done(self) -> int:
        """Edges that were answered."""
        return self.follows_created + self.follows_existing + self.follows_refused


Progress = Callable[[ImportReport], None]


def handle_of(label: int) -> str:
    """The handle of an account in an imported graph."""
    return f"u{label}"


async def import_graph(
    client: Client, edges: Iterable[Edge], *, on_progress: Progress = lambda _: None, batch: int = BATCH_DEFAULT
) -> ImportReport:
    """Import the edges, and an account for each label in them. `edges` is iterated twice.

    Outages of up to a minute are waited out. Raises AioRpcError, and what the iteration raises.
    """
    if iter(edges) is edges:
        raise TypeError("edges are read twice: give a list or an EdgeFile, no iterator")
    report = ImportReport()
    labels: set[int] = set()
    for edge in edges:
        labels.update(edge)
        report.edges_total += 1
    report.users_total = len(labels)
    on_progress(report)
    started = time.monotonic()
    ids = await _import_users(client, sorted(labels), report, on_progress)
    report.users_seconds = time.monotonic() - started
    started = time.monotonic()
    await _import_follows(client, _batches(edges, ids, batch), report, on_progress)
    report.follows_seconds = time.monotonic() - started
    return report


async def _import_users(
    client: Client, labels: list[int], report: ImportReport, on_progress: Progress
) -> dict[int, int]:
    ids: dict[int, int] = {}
    left = iter(labels)

    async def some() -> None:
        for label in left:
            handle = handle_of(label)
            user, created = await _patiently(partial(_user, client, handle))
            ids[label] = report.user_ids[handle] = user.user_id
            report.users_created += created
            report.users_existing += not created
            on_progress(report)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(_CALLS_AT_ONCE, len(labels))):
                group.create_task(some())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return ids


async def _user(client: Client, handle: str) -> tuple[graph_pb2.User, bool]:
    """The account, and whether it is new."""
    try:
        return await client.create_user(handle), True
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
            raise
    return await client.user(handle), False


def _batches(edges: Iterable[Edge], ids: dict[int, int], size: int) -> Iterator[graph_pb2.ImportFollowsRequest]:
    messages = (graph_pb2.Edge(follower_id=ids[u], followee_id=ids[v]) for u, v in edges)
    while some := list(islice(messages, size)):
        yield graph_pb2.ImportFollowsRequest(edges=some)


async def _import_follows(
    client: Client, batches: Iterator[graph_pb2.ImportFollowsRequest], report: ImportReport, on_progress: Progress
) -> None:
    """One batch at a time: the store writes one at a time, too."""
    waiting = next(batches, None)

    async def send() -> None:
        """One stream's worth. What isn't answered stays in `waiting`, and is sent again: a repeat changes nothing."""
        nonlocal waiting
        end = time.monotonic() + _STREAM_SECONDS
        timeout = _STREAM_SECONDS + CALL_SECONDS
        async with streaming(client.graph.ImportFollows(timeout=timeout, metadata=client.as_(OPERATOR))) as call:
            while waiting is not None and time.monotonic() < end:
                with suppress(asyncio.InvalidStateError):  # the call is over: reading says why
                    await call.write(waiting)
                reply = await call.read()
                if not isinstance(reply, graph_pb2.ImportFollowsResponse):
                    raise NotPossibleError("graph_svc ended the import early")
                report.follows_created += reply.created
                report.follows_existing += reply.existing
                report.follows_refused += reply.refused
                on_progress(report)
                waiting = next(batches, None)
            await call.done_writing()

    while waiting is not None:  # each turn sends a batch, or raises
        await _patiently(send)


async def _patiently(attempt: Callable[[], Awaitable[T]]) -> T:
    """Wait out what may pass."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return await attempt()
        except grpc.aio.AioRpcError as error:
            if error.code() not in _TRANSIENT or time.monotonic() > end:
                raise
        await asyncio.sleep(_RETRY_SECONDS)
