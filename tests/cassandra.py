"""Cassandra for tests marked `backends`: one server for all test processes, a keyspace for each, emptied before a test.

STARLING_TEST_CASSANDRA names a node that runs already; else the first process that asks starts one, and stops it when
no other uses it any more. No Java: the tests are skipped, but where STARLING_SHARED is set (see `tests.shared_data`)
they fail.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cassandra.cluster import Session

from backends import cassandra
from backends.servers import BackendError, all_run, await_that, locked, remember, remembered
from mesh.cassandra import Where, cluster_of
from mesh.migrate import migrate

_NOT_DATA = {"schema_lease", "schema_migrations"}
_LOCK_SECONDS = 300.0
_OTHERS_SECONDS = 1_200.0


def require_java() -> None:
    """Skip or fail without it."""
    try:
        cassandra.classpath()
    except BackendError as error:
        if os.environ.get("STARLING_SHARED"):
            pytest.fail(f"STARLING_SHARED is set, but: {error}", pytrace=False)
        pytest.skip(str(error))


@contextmanager
def shared_server(folder: Path) -> Iterator[str]:
    """The address of a node that all processes of a test run use; `folder` is theirs."""
    if named := os.environ.get("STARLING_TEST_CASSANDRA"):
        yield named
        return
    require_java()
    home, lock, users = folder / "cassandra", folder / "cassandra.lock", folder / "cassandra.users"
    mine = None
    with locked(lock, _LOCK_SECONDS):
        node = remembered(home)
        if not all_run(node):
            node = mine = cassandra.start(home, 1, bound=True)
            remember(node)
        with users.open("a") as file:
            file.write("+")
    try:
        yield node.addresses[0]
    finally:
        with locked(lock, _LOCK_SECONDS), users.open("a") as file:
            file.write("-")
        if mine:
            await_that(lambda: _in_use(users) == 0, _OTHERS_SECONDS, "other test processes still use Cassandra")
            mine.stop()


def _in_use(users: Path) -> int:
    text = users.read_text()
    return text.count("+") - text.count("-")


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
