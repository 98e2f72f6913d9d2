"""X4 at the edge: deadlines go through to the last service, and nobody works for a client who is gone."""

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import RunningMesh
from tests.e2e.rest import API, Rest, new_user, problem
from tests.waiting import eventually


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[RunningMesh]:
    """A mesh that says of each call how it ended, with a tweet_svc that hangs when it is to."""
    running = RunningMesh(tmp_path / "data")
    running.start(STARLING_LOG_REQUESTS="true")
    try:
        yield running
        running.kill("tweet_svc", signal.SIGCONT)
        assert running.stop() == 0
    finally:
        running.destroy()


def ends(mesh: RunningMesh) -> list[tuple[str, float]]:
    """How timeline_svc's reads ended, and after how many seconds."""
    found = re.findall(r"method=\S+/ListHomeTimeline code=(\w+) ms=([\d.]+)", mesh.log())
    return [(code, float(ms) / 1_000) for code, ms in found]


def reader_of(mesh: RunningMesh) -> Rest:
    author, author_id = new_user(mesh.folder, "author")
    reader, _ = new_user(mesh.folder, "reader")
    author.ok("POST", "/tweets", {"text": "hello"})
    reader.ok("POST", "/follows", {"targetId": author_id})
    return reader


async def test_a_deadline_ends_the_work_behind_and_so_does_going_away(mesh: RunningMesh) -> None:
    reader = reader_of(mesh)
    assert len(reader.ok("GET", "/timeline/home", headers={"Grpc-Timeout": "2S"})["items"]) == 1
    await eventually(lambda: [code for code, _ in ends(mesh)] == ["OK"], 5)
    fresh, _ = new_user(mesh.folder, "fresh")  # Has no list: tweet_svc must be asked.
    mesh.kill("tweet_svc", signal.SIGSTOP)
    problem(fresh.call("GET", "/timeline/home", headers={"Grpc-Timeout": "300m"}), 504, "DEADLINE_EXCEEDED")
    await eventually(lambda: len(ends(mesh)) == 2, 5)
    code, seconds = ends(mesh)[-1]
    assert code in {"DEADLINE_EXCEEDED", "CANCELLED"}
    assert seconds < 1.0

    host, _, port = fresh.base.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"GET {API}/timeline/home HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {fresh.token}\r\n\r\n"
        client.sendall(head.encode())
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
    await eventually(lambda: len(ends(mesh)) == 3, 5)  # The edge's own time-out is 10 s.
    code, seconds = ends(mesh)[-1]
    assert code == "CANCELLED"
    assert seconds < 5.0
