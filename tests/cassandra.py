"""A keyspace for tests: made once, since changes of a schema take long, and emptied before each test."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from cassandra.cluster import Session

from backends.servers import Cluster
from mesh.cassandra import cluster_of
from mesh.config import Where
from mesh.migrate import migrate

_NOT_DATA = {"schema_lease", "schema_migrations"}


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
        """Forget all rows."""
        for table in self._tables:
            if self.session.execute(f"SELECT * FROM {table} LIMIT 1").one():
                self.session.execute(f"TRUNCATE {table}")


def where(cluster: Cluster, keyspace: str = "") -> Where:
    """A keyspace there, named at random unless told."""
    hosts, ports = zip(*(address.split(":") for address in cluster.addresses), strict=True)
    return Where(hosts, keyspace or f"test_{secrets.token_hex(6)}", int(ports[0]))


@contextmanager
def new_keyspace(cluster: Cluster) -> Iterator[Keyspace]:
    """With all tables, a copy on each node; dropped afterwards."""
    there = where(cluster)
    migrate(there, cluster.environment["STARLING_CASSANDRA_REPLICATION"])
    driver = cluster_of(there)
    driver.profile_manager.default.request_timeout = 30.0
    session = driver.connect(there.keyspace)
    try:
        yield Keyspace(there, session)
    finally:
        session.execute(f"DROP KEYSPACE {there.keyspace}")
        driver.shutdown()
