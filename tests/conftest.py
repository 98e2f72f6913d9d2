"""Servers that tests start for themselves: each pytest process has its own Valkey, on loopback, port 0."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before grpc is imported: servers that stop aren't news

import itertools
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import settings

from backends import cassandra, kafka
from backends import valkey_cluster as valkey_backend
from backends.servers import Cluster
from launcher.valkey_server import find_valkey_server
from tests.cassandra import Keyspace, new_keyspace
from tests.harness import Mesh, running_mesh
from tests.running_backends import running

# A timing is no test; and what passed once passes again, unless new examples are asked for.
_seeks = os.environ.get("STARLING_MODEL_SEED") == "random"
settings.register_profile("starling", settings.get_profile("default"), deadline=None, derandomize=not _seeks)
settings.load_profile("starling")

_prefixes = itertools.count()


@contextmanager
def running_valkey(folder: Path) -> Iterator[str]:
    """A Valkey of one's own, without persistence; yields its URL (a unix socket: no port to lose to others)."""
    path = folder / "valkey.sock"
    server = subprocess.Popen(
        [
            *(find_valkey_server(), "--port", "0", "--unixsocket", str(path)),
            *("--save", "", "--appendonly", "no", "--dir", str(folder)),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        _await_socket(path, server)
        yield f"unix://{path}"
    finally:
        server.kill()
        server.wait(10)


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of this test process's own Valkey, which its tests share: nobody flushes it."""
    with running_valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture(scope="session")
def kafka_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One broker, which the tests of this process share; topics and groups are named at random."""
    with running(kafka, tmp_path_factory.mktemp("kafka") / "cluster") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def valkey_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three masters, which the tests of this process share."""
    with running(valkey_backend, tmp_path_factory.mktemp("valkey-cluster") / "cluster") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cassandra_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One node, which the tests of this process share."""
    with running(cassandra, tmp_path_factory.mktemp("cassandra") / "cluster") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cassandra_keyspace(cassandra_node: Cluster) -> Iterator[Keyspace]:
    """A keyspace there."""
    with new_keyspace(cassandra_node) as keyspace:
        yield keyspace


@pytest.fixture
def keyspace(cassandra_keyspace: Keyspace) -> Keyspace:
    """The same, empty."""
    cassandra_keyspace.empty()
    return cassandra_keyspace


def _await_socket(path: Path, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(500):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(0.02)
            try:
                probe.connect(str(path))
                return
            except OSError:
                pass
        try:
            raise RuntimeError(f"valkey-server ended with {server.wait(0.02)}")
        except subprocess.TimeoutExpired:
            continue
    raise RuntimeError("valkey-server doesn't answer within 10 s")


@pytest.fixture
def key_prefix() -> str:
    """A prefix of this test's own: nothing shared is ever flushed."""
    return f"t{next(_prefixes)}:"


@pytest_asyncio.fixture
async def mesh(valkey_url: str, key_prefix: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    """The whole mesh in this process, with small sizes; see `tests.harness`."""
    async with running_mesh(valkey_url, tmp_path, key_prefix) as running:
        yield running
