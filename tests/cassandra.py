"""Cassandra for tests marked `backends`: one server for all test processes, a keyspace for each, emptied before a test.

STARLING_TEST_CASSANDRA names a node that runs already; else one is started, by the first process that asks, and stopped
by the last. No Java: the tests are skipped, but where STARLING_SHARED is set (see `tests.shared_data`) they fail.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cassandra.cluster import Session

from mesh.cassandra import Where, cluster_of
from mesh.migrate import migrate

_NOT_DATA = {"schema_lease", "schema_migrations"}


def require_java() -> None:
    """Skip or fail without it."""
    if shutil.which("java") and shutil.which("mvn"):
        return
    if os.environ.get("STARLING_SHARED"):
        pytest.fail("STARLING_SHARED is set but there is no java and mvn", pytrace=False)
    pytest.skip("no java and mvn: Cassandra isn't started")


class Keyspace:
    """A keyspace of one's own on that server, with a session for what tests do behind the stores' backs."""

    def __init__(self, where: Where, session: Session) -> None:
        self.where = where
        self.session = session
        rows = session.execute(
            "SELECT table_name FROM system_schema.tables WHERE keyspace_name = %s", (where.keyspace,)
        )
        self._tables = [row[0] for row in rows if row[0] not in _NOT_DATA]

    def empty(self) -> None:
        """Forget all rows. (No `drop`: schema changes are what takes long.)"""
        for table in self._tables:
            if self.session.execute(f"SELECT * FROM {table} LIMIT 1").one():
                self.session.execute(f"TRUNCATE {table}")


@contextmanager
def new_keyspace(address: str) -> Iterator[Keyspace]:
    """With all tables; dropped afterwards."""
    host, _, port = address.partition(":")
    where = Where([host], f"test_{secrets.token_hex(6)}", int(port or 9042))
    migrate(where)
    cluster = cluster_of(where)
    cluster.profile_manager.default.request_timeout = 30.0
    session = cluster.connect(where.keyspace)
    try:
        yield Keyspace(where, session)
    finally:
        session.execute(f"DROP KEYSPACE {where.keyspace}")
        cluster.shutdown()
