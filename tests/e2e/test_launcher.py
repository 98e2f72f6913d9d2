"""`make run`: starts everything, brings back what crashes, stops in order, and says what is wrong."""

import asyncio
import os
import signal
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from launcher.children import restart_delay_seconds
from launcher.output import Output, lines
from launcher.plan import SLOW_WORKER
from tests.e2e.conftest import RunningMesh, alive
from tests.waiting import eventually

SERVICES = ["graph_svc", "tweet_svc", "fanout_svc", "fanout_svc-slow", "timeline_svc"]


async def test_everything_serves_and_the_banner_says_what_to_try(running_mesh: RunningMesh) -> None:
    async with running_mesh.client() as client:
        assert await client.health() == dict.fromkeys(SERVICES, "SERVING")
        log = running_mesh.log()
        width = len(SLOW_WORKER)
        assert all(f"    {name:<{width}}  {target}\n" in log for name, target in client.targets.named().items())
    assert "user create alice" in log
    assert f"export STARLING_DATA={running_mesh.folder.path}" in log
    assert set(running_mesh.pids) == {"launcher", "valkey", "edge", *SERVICES}


def test_secrets_are_readable_by_their_owner_only_and_never_shown(running_mesh: RunningMesh) -> None:
    secrets = running_mesh.folder.read_secrets()
    mode = (running_mesh.folder.path / "secrets.json").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    assert secrets.auth_secret not in running_mesh.log() + repr(secrets)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a process's policy and environment")
def test_what_may_wait_has_a_worker_of_its_own_which_gives_way(running_mesh: RunningMesh) -> None:
    topics: dict[str, str] = {}
    for name, pid in running_mesh.pids.items():
        if name.startswith("fanout_svc"):
            environment = Path(f"/proc/{pid}/environ").read_text()
            topics[name] = environment.partition("STARLING_FANOUT_TOPICS=")[2].partition("\0")[0]
        assert os.sched_getscheduler(pid) == (os.SCHED_IDLE if name == SLOW_WORKER else os.SCHED_OTHER), name
    assert topics == {"fanout_svc": "tweet-fanout,fanout-tasks", SLOW_WORKER: "fanout-tasks-slow"}


@pytest.mark.parametrize("name", ["fanout_svc", "graph_svc"])
async def test_a_killed_service_comes_back_at_the_same_address(running_mesh: RunningMesh, name: str) -> None:
    async with running_mesh.client() as client:
        before = client.targets.named()[name]
        old = running_mesh.kill(name)
        await running_mesh.comes_back(name, old)
        assert client.targets == running_mesh.client().targets
        assert (await client.health())[name] == "SERVING"
    assert f"{name} ended (SIGKILL)" in running_mesh.log()
    assert before in running_mesh.log()


async def test_a_killed_valkey_comes_back_with_its_data(running_mesh: RunningMesh) -> None:
    async with running_mesh.client() as client:
        author, reader = await client.create_user("kept_author"), await client.create_user("kept_reader")
        await client.follow(reader.user_id, author.user_id)
        first = await client.post(author.user_id, "before the crash")
        old = running_mesh.kill("valkey")
        second = await client.post(author.user_id, "while it is away, or just back")
        await running_mesh.comes_back("valkey", old)

        async def both_are_there() -> bool:
            with suppress(grpc.aio.AioRpcError):
                found = [item.tweet.tweet_id async for item in client.walk_home(reader.user_id)]
                return found == [second.tweet.tweet_id, first.tweet.tweet_id]
            return False

        await eventually(both_are_there)


def test_a_second_launcher_on_the_same_data_is_refused(running_mesh: RunningMesh) -> None:
    second = RunningMesh(running_mesh.folder.path, log=running_mesh.folder.path / "second.log")
    assert second.launch().wait(30) == 1
    assert f"another launcher (process {running_mesh.pids['launcher']}) runs on the data folder" in second.log()
    assert all(alive(pid) for pid in running_mesh.pids.values())


async def test_data_outlive_a_stop_and_a_stop_leaves_nothing_behind(stopped_mesh: RunningMesh) -> None:
    stopped_mesh.start()
    pids = stopped_mesh.pids
    async with stopped_mesh.client() as client:
        author = await client.create_user("author")
        posted = await client.post(author.user_id, "kept")
    assert stopped_mesh.stop(signal.SIGINT) == 0
    assert not any(alive(pid) for pid in pids.values())
    assert stopped_mesh.folder.read_mesh() is None

    stopped_mesh.start(STARLING_FANOUT_WORKERS="2")
    async with stopped_mesh.client() as client:
        assert (await client.user("author")).user_id == author.user_id
        assert [item.tweet.text async for item in client.walk_home(author.user_id)] == ["kept"]
        assert (await client.post(author.user_id, "later")).tweet.tweet_id > posted.tweet.tweet_id
        workers = await client.fanout_status()
        assert list(workers) == ["fanout_svc", "fanout_svc-2", "fanout_svc-slow"]
        assert len({status.worker.name for status in workers.values()}) == 3
    await _second_signal_ends_at_once(stopped_mesh)


async def _second_signal_ends_at_once(mesh: RunningMesh) -> None:
    pids = mesh.pids
    mesh.kill("timeline_svc", signal.SIGSTOP)  # it won't stop by itself
    os.kill(pids["launcher"], signal.SIGTERM)

    async def is_stopping() -> bool:
        return mesh.log().count("Stopping") == 2

    await eventually(is_stopping)
    os.kill(pids["launcher"], signal.SIGTERM)
    assert mesh.wait(10) == 130
    assert not any(alive(pid) for pid in pids.values())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
async def test_children_die_with_a_killed_launcher(stopped_mesh: RunningMesh) -> None:
    stopped_mesh.start()
    pids = stopped_mesh.pids
    assert stopped_mesh.stop(signal.SIGKILL) == -signal.SIGKILL

    async def all_are_gone() -> bool:
        return not any(alive(pid) for pid in pids.values())

    await eventually(all_are_gone)


def test_a_wrong_variable_is_named_and_stops_everything(stopped_mesh: RunningMesh) -> None:
    assert stopped_mesh.launch(STARLING_MAX_MESSAGE_BYTES="abc").wait(30) == 2
    assert "configuration: STARLING_MAX_MESSAGE_BYTES: Input should be a valid integer" in stopped_mesh.log()


def test_a_wrong_variable_of_the_launcher_is_named(stopped_mesh: RunningMesh) -> None:
    assert stopped_mesh.launch(STARLING_FANOUT_WORKERS="0").wait(30) == 2
    assert "configuration: STARLING_FANOUT_WORKERS: " in stopped_mesh.log()


def test_a_taken_port_is_named_with_its_variable(stopped_mesh: RunningMesh) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        base = min(port, 65_000)  # graph_svc's own port, as long as the system gives none above
        if base != port:
            pytest.skip("the system gave a port too high to be a base")
        assert stopped_mesh.launch(STARLING_PORT_BASE=str(base)).wait(30) == 1
    assert f"port {port} for graph_svc can't be used" in stopped_mesh.log()
    assert f"STARLING_PORT_BASE={base} + 0" in stopped_mesh.log()


def test_a_folder_that_cannot_be_written_is_named(stopped_mesh: RunningMesh) -> None:
    stopped_mesh.folder.path.write_text("a file where the folder would be")
    assert stopped_mesh.launch().wait(30) == 1
    assert f"cannot write to the data folder {stopped_mesh.folder.path} (STARLING_DATA)" in stopped_mesh.log()


def test_restarts_are_backed_off_up_to_a_bound() -> None:
    delays = [restart_delay_seconds(crashes) for crashes in (1, 2, 3, 4, 5, 6, 7, 1_000)]
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


async def test_lines_of_any_length_are_shown_whole_or_in_pieces() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"one\r\ntw" + b"o" * 100_000 + b"\nthree")
    reader.feed_eof()
    found = [line async for line in lines(reader)]
    assert found[0] == "one"
    assert "".join(found[1:-1]) + found[-1] == "tw" + "o" * 100_000 + "three"
    assert found[-1] == "three"


def test_a_terminal_that_takes_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.output.LINES_MAX", 3)
    reading, writing = os.pipe()
    output = Output(writing, coloured=False, width=4)
    for _ in range(200):
        output.line("tweet_svc", "x" * 1_000)  # more than the pipe holds
    seen = b""
    while seen.count(b"\n") < 3:
        seen += os.read(reading, 65_536)
    output.line("", "after")
    output.close(5)
    os.set_blocking(reading, False)
    with suppress(BlockingIOError):
        while more := os.read(reading, 65_536):
            seen += more
    os.close(reading)
    os.close(writing)
    assert b"lines were dropped" in seen
