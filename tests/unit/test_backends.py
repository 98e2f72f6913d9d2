"""How backends are installed, started, found again and stopped, with programs that are on every machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends import __main__ as command
from backends import servers, valkey_cluster
from backends.servers import BackendError, Cluster, MissingToolError, Server, remember, remembered, start_all
from tests.running_backends import running

SLEEPER = (sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two processes that do nothing."""
    folder = tmp_path / "sleepers"
    ours = [Server(f"sleeper{i}", SLEEPER, folder / f"node{i}", bound=True) for i in (1, 2)]
    start_all(ours)
    made = Cluster("sleepers", folder, 1, ["here"], {"WHERE": "here"}, ours)
    remember(made)
    try:
        yield made
    finally:
        made.stop()


def test_another_process_finds_what_was_started_and_stops_it_and_nothing_is_left(cluster: Cluster) -> None:
    found = remembered(cluster.folder)
    assert (found.nodes, found.addresses, found.environment) == (1, ["here"], {"WHERE": "here"})
    assert [server.alive() for server in found.servers] == [True, True]
    found.stop()
    assert [server.alive() for server in cluster.servers] == [False, False]
    assert not cluster.folder.exists()


def test_a_process_that_took_over_an_id_is_not_touched(cluster: Cluster) -> None:
    victim, bystander = cluster.servers
    victim.kill()
    other = Server("other", SLEEPER, victim.folder, pid=bystander.pid, born=f"{bystander.born}0")
    assert not other.alive()
    other.stop()
    assert bystander.alive()


def test_a_server_that_was_killed_can_be_started_again(cluster: Cluster) -> None:
    server = cluster.servers[0]
    before = server.pid
    server.kill()
    assert not server.alive()
    server.start()
    assert server.alive()
    assert server.pid != before


def test_a_server_that_ends_shows_the_end_of_its_log(tmp_path: Path) -> None:
    server = Server("broken", (sys.executable, "-c", "raise SystemExit('what is wrong')"), tmp_path)
    server.start()
    with pytest.raises(BackendError, match="what is wrong"):
        server.await_that(lambda: False, 10)


def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    ours = [Server("sleeper", SLEEPER, tmp_path / "folder", bound=True)]

    def start() -> None:
        with servers.undone_on_error(tmp_path / "folder", ours):
            start_all(ours)
            ours[0].await_that(lambda: False, 0)

    with pytest.raises(BackendError, match="doesn't answer"):
        start()
    assert not ours[0].alive()
    assert not (tmp_path / "folder").exists()


def test_servers_die_with_who_started_them(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal, sys; from backends.servers import Server;"
        f"server = Server('bound', {SLEEPER!r}, pathlib.Path({str(tmp_path)!r}), bound=True); server.start();"
        "server.await_that(lambda: 'up' in server.end_of_log(), 10);"
        "print(server.pid, server.born, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    told = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=30)
    pid, born = told.stdout.split()
    server = Server("bound", SLEEPER, tmp_path, pid=int(pid), born=born)
    servers.await_that(lambda: not server.alive(), 10, "it lives")


def test_ports_are_free_and_different() -> None:
    assert len(set(servers.free_ports(50))) == 50


def test_without_java_or_maven_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MissingToolError, match="apt-get install openjdk-17-jre-headless maven"):
        servers.java()
    with pytest.raises(MissingToolError, match="apt-get install openjdk-17-jre-headless maven"):
        servers.jars(Path(servers.__file__).with_name("kafka.pom.xml"))
    monkeypatch.setattr(command, "FOLDER", tmp_path / "backends")
    assert command.main(["up"]) == 1
    assert "apt-get install" in capsys.readouterr().err
    assert command.main(["status"]) == 0
    assert command.main(["down"]) == 0
    assert os.listdir(tmp_path) == ["backends.lock"]


@pytest.mark.backends
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_valkey_cluster_serves_all_slots(tmp_path: Path, nodes: int) -> None:
    with running(valkey_cluster, tmp_path / "valkey", nodes) as cluster:
        assert len(cluster.addresses) == (6 if nodes == 3 else 3)
        for address in cluster.addresses:
            info = valkey_cluster.ask(int(address.rpartition(":")[2]), "CLUSTER", "INFO")
            assert "cluster_state:ok" in info
            assert "cluster_slots_ok:16384" in info
