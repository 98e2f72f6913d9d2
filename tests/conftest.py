"""Servers that tests start for themselves: each pytest process has its own Valkey, on loopback, port 0."""

import itertools
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.valkey_server import find_valkey_server

_prefixes = itertools.count()


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of this test process's own Valkey (a unix socket: no port to lose to somebody else)."""
    folder: Path = tmp_path_factory.mktemp("valkey")
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
