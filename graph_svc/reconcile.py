"""`python -m graph_svc.reconcile`: finds, and mends, what calls that died, and that nobody repeated, left on Cassandra.

It goes over the followers' buckets and the users' partitions, one range of tokens after the other, at most so many
rows a second, and notes how far it has come: a run that was stopped goes on there. All that it does are the steps of
the protocols themselves, which anybody may do again, so it may run beside everything, and beside another one.

A run prints one line of what it mended. Exit status: 0, or 1 when the store didn't answer.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable

from pydantic import Field

from graph_svc.cassandra import CassandraGraphStore, Leftover
from mesh.cassandra import Cassandra, Statement
from mesh.config import CassandraConfig, load
from mesh.errors import ConfigurationError, StarlingError

RANGES = 256
_FIRST, _LAST = -(1 << 63), (1 << 63) - 1
_PROGRESS = Statement("SELECT done_to FROM reconciliations WHERE name = ?")
_NOTE = Statement("INSERT INTO reconciliations (name, done_to) VALUES (?, ?)")
_BUCKETS = Statement(
    "SELECT DISTINCT followee_id, bucket FROM followers WHERE token(followee_id, bucket) > ?"
    " AND token(followee_id, bucket) <= ?"
)
_USERS = Statement("SELECT DISTINCT user_id FROM users WHERE token(user_id) > ? AND token(user_id) <= ?")
STATEMENTS = (_PROGRESS, _NOTE, _BUCKETS, _USERS)


class ReconcileConfig(CassandraConfig):
    """What the reconciliation is told."""

    bucket_size: int = Field(10_000, ge=1)
    """As graph_svc is told."""
    reconcile_rows_per_second: int = Field(2_000, ge=1)
    """How many rows are looked at."""


class Reconciler:
    """See the module. `run` raises UnavailableError; what was noted stands."""

    def __init__(self, database: Cassandra, store: CassandraGraphStore, rows_per_second: int) -> None:
        self._database = database
        self._store = store
        self._rows_per_second = rows_per_second
        self.looked_at = 0
        self.mended: Counter[Leftover] = Counter()

    async def run(self, ranges: int = RANGES) -> None:
        """Go over all that is left of the last run, or over everything."""
        await self._database.open(STATEMENTS)
        for name in ("followers", "users"):
            row = await self._database.row(_PROGRESS, name)
            done_to = row[0] if row else _FIRST
            for number in range(1, ranges + 1):
                end = _FIRST + (1 << 64) // ranges * number - (number == ranges)
                if end > done_to:
                    await self._range(name, done_to, end)
                    done_to = end
                    await self._database.write(_NOTE, name, end)
        for name in ("followers", "users"):
            await self._database.write(_NOTE, name, _FIRST)

    async def _range(self, name: str, after: int, to: int) -> None:
        if name == "followers":
            for followee_id, bucket in await self._database.rows(_BUCKETS, after, to):
                await self._count(self._store.reconcile_bucket(followee_id, bucket))
        else:
            for (user_id,) in await self._database.rows(_USERS, after, to):
                await self._count(self._store.reconcile_user(user_id))

    async def _count(self, work: Awaitable[tuple[int, Counter[Leftover]]]) -> None:
        """One partition's, and a rest as long as its rows may take."""
        begun = time.monotonic()
        rows, mended = await work
        self.looked_at += rows
        self.mended += mended
        await asyncio.sleep(max(0.0, rows / self._rows_per_second - (time.monotonic() - begun)))


async def _main(config: ReconcileConfig, database: Cassandra) -> None:
    store = CassandraGraphStore(database, bucket_size=config.bucket_size)
    try:
        await store.open()
        reconciler = Reconciler(database, store, config.reconcile_rows_per_second)
        await reconciler.run()
        mended = ", ".join(f"{count} {kind.value}" for kind, count in sorted(reconciler.mended.items()))
        print(f"{reconciler.looked_at:,} rows; mended: {mended or 'nothing'}")  # noqa: T201
    finally:
        await store.close()


def main() -> int:
    """The command."""
    config = load(ReconcileConfig)
    where = config.cassandra()
    if where is None:
        print("reconcile: STARLING_CASSANDRA_CONTACT_POINTS names no node", file=sys.stderr)  # noqa: T201
        return 2
    try:
        asyncio.run(_main(config, Cassandra(where)))
    except (StarlingError, ConfigurationError) as error:
        print(f"reconcile: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
