"""Worker numbers (`mesh.ids.WorkerLeases`) on Cassandra: one partition a service, changed by LWT on its revision."""

from mesh.cassandra import Cassandra, Statement
from mesh.ids import LEASE_MS, REST_MS, WORKERS, WorkerLease

_ALL = Statement("SELECT worker, holder, expires_ms, high_ms, revision FROM worker_leases WHERE service = ?")
_ONE = Statement("SELECT holder, high_ms, revision, expires_ms FROM worker_leases WHERE service = ? AND worker = ?")
_FIRST = Statement("UPDATE worker_leases SET revision = 1 WHERE service = ? IF revision = null", conditional=True)
_NEXT = Statement("UPDATE worker_leases SET revision = ? WHERE service = ? IF revision = ?", conditional=True)
_PUT = Statement(
    "UPDATE worker_leases SET holder = ?, expires_ms = ?, high_ms = ? WHERE service = ? AND worker = ?"
    " IF expires_ms = ?",
    conditional=True,
)
"""Of the number itself, too: a number is never given twice, even if its row was read older than the revision."""
STATEMENTS = (_ALL, _ONE, _FIRST, _NEXT, _PUT)


class CassandraWorkerLeases:
    """A row for each number that was ever held. A released one expires at once, and rests from then."""

    def __init__(self, database: Cassandra, service: str) -> None:
        self._leases_database = database
        self._service = service

    async def acquire_worker(self, holder: str, now_ms: int, high_ms: int) -> WorkerLease | None:
        """See the port."""

        async def attempt(serially: bool) -> tuple[WorkerLease | None] | None:
            rows = await self._leases_database.rows(_ALL, self._service, serially=serially)
            held = {worker: row for worker, *row in rows if worker is not None}
            if serially and (mine := [worker for worker, row in held.items() if row[0] == holder]):
                # What was there before isn't known any more: above its bound is safe.
                return (WorkerLease(mine[0], held[mine[0]][2]),)
            revision = rows[0][4] if rows else None
            worker, high_before = _free_worker(held, now_ms)
            if worker >= WORKERS:
                return (None,)
            before_ms = held[worker][1] if worker in held else None
            high = max(high_ms, high_before)
            applied = await self._put_lease(revision, worker, before_ms, (holder, now_ms + LEASE_MS, high))
            return (WorkerLease(worker, high_before),) if applied else None

        (lease,) = await self._leases_database.settled(("leases", self._service), attempt)
        return lease

    async def renew_worker(self, holder: str, worker: int, now_ms: int, high_ms: int) -> bool:
        """See the port. A lapsed lease that nobody took is still the holder's."""
        return await self._change_lease(holder, worker, holder, now_ms + LEASE_MS, high_ms, keep_high=True)

    async def release_worker(self, holder: str, worker: int, now_ms: int, high_ms: int) -> None:
        """See the port."""
        await self._change_lease(holder, worker, "", now_ms, high_ms, keep_high=False)

    async def _change_lease(
        self, holder: str, worker: int, next_holder: str, expires_ms: int, high_ms: int, *, keep_high: bool
    ) -> bool:
        async def attempt(serially: bool) -> bool | None:
            row = await self._leases_database.row(_ONE, self._service, worker, serially=serially)
            if row is None or row[0] != holder:
                return False
            high = max(high_ms, row[1]) if keep_high else high_ms
            return await self._put_lease(row[2], worker, row[3], (next_holder, expires_ms, high)) or None

        return await self._leases_database.settled(("leases", self._service), attempt)

    async def _put_lease(self, revision: int | None, worker: int, before_ms: object, row: tuple[str, int, int]) -> bool:
        """`row`: holder, expires_ms, high_ms. `before_ms`: when the number expired until now; None: it is new."""
        service = self._service
        step = (_NEXT, (revision + 1, service, revision)) if revision is not None else (_FIRST, (service,))
        return await self._leases_database.apply(step, (_PUT, (*row, service, worker, before_ms)))


def _free_worker(held: dict[int, list[object]], now_ms: int) -> tuple[int, int]:
    """A rested number and its bound, or the lowest never used (WORKERS: there is none) and 0."""
    for worker, (_, expires_ms, high_ms, _) in sorted(held.items()):
        assert isinstance(expires_ms, int)
        assert isinstance(high_ms, int)
        if expires_ms + REST_MS <= now_ms:
            return worker, high_ms
    return len(held), 0
