"""Worker numbers (`mesh.ids.WorkerLeases`) in a service's own SQLite file."""

import sqlite3

from mesh.ids import LEASE_MS, REST_MS, WORKERS, WorkerLease
from mesh.sqlite import Database

SCHEMA = """
CREATE TABLE IF NOT EXISTS worker_leases (
    worker INTEGER PRIMARY KEY,
    holder TEXT NOT NULL,
    expires_ms INTEGER NOT NULL,
    high_ms INTEGER NOT NULL
);
"""


class SqliteWorkerLeases:
    """One row per number that was ever held; a released one expires at once, and rests from then."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def acquire_worker(self, holder: str, now_ms: int, high_ms: int) -> WorkerLease | None:
        """See the port."""

        def work(connection: sqlite3.Connection) -> WorkerLease | None:
            worker, high_before = _free_worker(connection, now_ms)
            if worker >= WORKERS:
                return None
            connection.execute(
                "INSERT OR REPLACE INTO worker_leases VALUES (?, ?, ?, ?)",
                (worker, holder, now_ms + LEASE_MS, max(high_ms, high_before)),
            )
            return WorkerLease(worker, high_before)

        return await self._database.write(work)

    async def renew_worker(self, holder: str, worker: int, now_ms: int, high_ms: int) -> bool:
        """See the port. A lapsed lease that nobody took is still the holder's."""

        def work(connection: sqlite3.Connection) -> bool:
            changed = connection.execute(
                "UPDATE worker_leases SET expires_ms = ?, high_ms = max(high_ms, ?) WHERE worker = ? AND holder = ?",
                (now_ms + LEASE_MS, high_ms, worker, holder),
            )
            return changed.rowcount == 1

        return await self._database.write(work)

    async def release_worker(self, holder: str, worker: int, now_ms: int, high_ms: int) -> None:
        """See the port."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE worker_leases SET holder = '', expires_ms = ?, high_ms = ? WHERE worker = ? AND holder = ?",
                (now_ms, high_ms, worker, holder),
            )

        await self._database.write(work)


def _free_worker(connection: sqlite3.Connection, now_ms: int) -> tuple[int, int]:
    """A rested number and its bound, or the lowest never used (WORKERS: there is none) and 0."""
    rested = connection.execute(
        "SELECT worker, high_ms FROM worker_leases WHERE expires_ms + ? <= ? ORDER BY worker LIMIT 1",
        (REST_MS, now_ms),
    ).fetchone()
    if rested:
        return int(rested[0]), int(rested[1])
    (used,) = connection.execute("SELECT count(*) FROM worker_leases").fetchone()
    return int(used), 0
