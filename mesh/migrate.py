"""`python -m mesh.migrate`: makes the keyspace, and brings its tables up to `schema/`.

Files are never changed once released. Each statement is applied once, in order, and noted; a migration that died goes
on where it stopped. Of several that run at once one holds the lease, and the others wait for it: concurrent changes of
a schema are what Cassandra is worst at. The two tables that this needs itself have fixed ids, so that making them
twice at once makes the same tables.
"""

import hashlib
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cassandra import AlreadyExists, ConsistencyLevel, OperationTimedOut, WriteTimeout
from cassandra.cluster import Session
from cassandra.query import SimpleStatement

from mesh.cassandra import cluster_of, translated
from mesh.config import CassandraConfig, Where, load
from mesh.errors import ConfigurationError, StarlingError, UnavailableError

SCHEMA = Path(__file__).parents[1] / "schema"
DEFAULT_REPLICATION = "{'class': 'SimpleStrategy', 'replication_factor': 1}"
_LEASE_SECONDS = 60
_WAIT_SECONDS = 180.0
_POLL_SECONDS = 0.2


class MigrateConfig(CassandraConfig):
    """What the migration is told besides."""

    cassandra_replication: str = DEFAULT_REPLICATION
    """Of a keyspace that is made; one that exists keeps its own."""


def statements() -> Iterator[tuple[str, str]]:
    """All of `schema/`, in order, named `<file>/<number>`."""
    for path in sorted(SCHEMA.glob("*.cql")):
        lines = (line.partition("--")[0].rstrip() for line in path.read_text().splitlines())
        parts = [part.strip() for part in "\n".join(line for line in lines if line).split(";")]
        for number, cql in enumerate(filter(None, parts), 1):
            yield f"{path.stem}/{number:02}", cql


def migrate(where: Where, replication: str = DEFAULT_REPLICATION) -> Sequence[str]:
    """Bring the keyspace up to date; returns the names of what was applied now.

    Raises UnavailableError, and ConfigurationError for a keyspace of a newer release or with another history.
    """
    cluster = cluster_of(where)
    # Changes of a schema take long on a busy machine, and must not be sent twice.
    cluster.profile_manager.default.request_timeout = float(_LEASE_SECONDS) / 2
    try:
        with translated():
            session = cluster.connect()
            session.execute(f"CREATE KEYSPACE IF NOT EXISTS {where.keyspace} WITH replication = {replication}")
            session.set_keyspace(where.keyspace)
            for name, columns in (
                ("schema_lease", "only int PRIMARY KEY, holder text"),
                ("schema_migrations", "only int, name text, digest text, PRIMARY KEY (only, name)"),
            ):
                fixed = uuid5(NAMESPACE_URL, f"starling/{where.keyspace}/{name}")
                session.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns}) WITH ID = '{fixed}'")
            with _lease(session) as holder:
                return _apply(session, holder)
    finally:
        cluster.shutdown()


@contextmanager
def _lease(session: Session) -> Iterator[str]:
    """Hold the lease, as the holder whose name is given; it ends by itself when its holder dies."""
    holder = secrets.token_hex(8)
    take = f"INSERT INTO schema_lease (only, holder) VALUES (1, %s) IF NOT EXISTS USING TTL {_LEASE_SECONDS}"
    end = time.monotonic() + _WAIT_SECONDS
    while True:
        with suppress(WriteTimeout, OperationTimedOut):  # The answer is lost: the next one tells.
            row = session.execute(take, (holder,)).one()
            if row[0] or row[-1] == holder:
                break
        if time.monotonic() > end:
            raise UnavailableError("Another migration doesn't end.", reason="SCHEMA_LOCKED")
        time.sleep(_POLL_SECONDS)
    try:
        yield holder
    finally:
        session.execute("DELETE FROM schema_lease WHERE only = 1 IF holder = %s", (holder,))


def _apply(session: Session, holder: str) -> Sequence[str]:
    renew = f"UPDATE schema_lease USING TTL {_LEASE_SECONDS} SET holder = %s WHERE only = 1 IF holder = %s"
    read = SimpleStatement(
        "SELECT name, digest FROM schema_migrations WHERE only = 1", consistency_level=ConsistencyLevel.QUORUM
    )
    noted = dict(session.execute(read))
    wanted = dict(statements())
    if strange := sorted(noted.keys() - wanted.keys()):
        raise ConfigurationError(f"this keyspace was made by a newer release: it has {', '.join(strange)}")
    applied = []
    for name, cql in wanted.items():
        digest = hashlib.sha256(cql.encode()).hexdigest()
        if name in noted:
            if noted[name] != digest:
                raise ConfigurationError(f"this keyspace was made with another {name}")
            continue
        if not session.execute(renew, (holder, holder)).one()[0]:
            raise UnavailableError("The lease was lost to another migration.", reason="SCHEMA_LOCKED")
        with suppress(AlreadyExists):  # One that died before it was noted.
            session.execute(cql)
        session.execute("INSERT INTO schema_migrations (only, name, digest) VALUES (1, %s, %s)", (name, digest))
        applied.append(name)
    return applied


def main() -> int:
    """The command."""
    config = load(MigrateConfig)
    where = config.cassandra()
    if where is None:
        print("migrate: STARLING_CASSANDRA_CONTACT_POINTS names no node", file=sys.stderr)  # noqa: T201
        return 2
    try:
        applied = migrate(where, config.cassandra_replication)
    except (StarlingError, ConfigurationError) as error:
        print(f"migrate: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(f"{where.keyspace}: {', '.join(applied) or 'up to date'}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
