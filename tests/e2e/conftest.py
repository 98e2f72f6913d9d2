"""The mesh as people run it: a launcher, and real processes, on a data folder of the test's own."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from cli.client import Client
from launcher import probes
from launcher.data_folder import DataFolder, Mesh
from launcher.plan import EDGE
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60.0
STOP_SECONDS = 40.0
_POLL_SECONDS = 0.05
_CHROMIUM_ARGUMENTS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def alive(pid: int) -> bool:
    """Whether a process runs (one that nobody has waited for yet does not)."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self/stat").exists()  # gone meanwhile; or no Linux, and alive


class RunningMesh:
    """A launcher and all that it starts. Reusable: `start` again after `stop`, and the data are there."""

    def __init__(self, data: Path, log: Path | None = None) -> None:
        self.folder = DataFolder(data)
        self._log = log or data.with_name(f"{data.name}.log")
        self._launcher: subprocess.Popen[bytes] | None = None

    def launch(self, **environment: str) -> "subprocess.Popen[bytes]":
        """Start a launcher, without waiting. Variables of the mesh are only those given here."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("STARLING_")}
        with self._log.open("ab") as log:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "launcher"],
                env={**inherited, "STARLING_DATA": str(self.folder.path), **environment},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self._launcher

    def start(self, **environment: str) -> None:
        """Start, and wait until everything serves."""
        launcher = self.launch(**environment)
        end = time.monotonic() + START_SECONDS
        while (mesh := self.folder.read_mesh()) is None or mesh.pids["launcher"] != launcher.pid:
            if self._ends_within(_POLL_SECONDS) or time.monotonic() > end:
                self.destroy()
                raise AssertionError(f"the mesh doesn't come up:\n{self.log()}")

    def _ends_within(self, seconds: float) -> bool:
        assert self._launcher is not None
        try:
            self._launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop as an operator would; returns the launcher's exit status."""
        assert self._launcher is not None
        self._launcher.send_signal(number)
        return self.wait()

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Wait for the launcher's end; returns its exit status."""
        assert self._launcher is not None
        return self._launcher.wait(seconds)

    def destroy(self) -> None:
        """End everything at once, if it runs: whatever the test came to, nothing stays."""
        if self._launcher is None or self._launcher.poll() is not None:
            return
        mesh = self.folder.read_mesh()
        self._launcher.kill()
        self._launcher.wait(STOP_SECONDS)
        for name, pid in (mesh.pids if mesh else {}).items():
            # Where nothing ends children with their parent. Their ids can't be others' yet: they were just alive.
            if name != "launcher" and sys.platform != "linux" and alive(pid):
                os.kill(pid, signal.SIGKILL)

    @property
    def mesh(self) -> Mesh:
        """Addresses and process ids now."""
        mesh = self.folder.read_mesh()
        assert mesh is not None, "the mesh doesn't run"
        return mesh

    @property
    def pids(self) -> dict[str, int]:
        """Process ids now, by name: launcher, valkey, graph_svc, tweet_svc, fanout_svc, timeline_svc, edge."""
        return dict(self.mesh.pids)

    def log(self) -> str:
        """All that the launcher has shown, over all its runs."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def client(self) -> Client:
        """A client, to be used as `async with`."""
        return Client.of(self.folder)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Kill one process; returns the id that it had. See `comes_back`."""
        pid = self.pids[name]
        os.kill(pid, number)
        return pid

    async def comes_back(self, name: str, old_pid: int, seconds: float = 30.0) -> None:
        """Wait until the launcher has started a process again, and it serves."""

        async def back() -> bool:
            return self.pids.get(name, old_pid) != old_pid and await self.serves(name)

        await eventually(back, seconds)

    async def serves(self, name: str) -> bool:
        """Whether a process answers that it serves."""
        mesh = self.mesh
        if name == "valkey":
            host, _, port = mesh.valkey_url.removeprefix("redis://").partition("/")[0].partition(":")
            return await probes.valkey(host, int(port))()
        if name == EDGE:
            return await probes.http(mesh.edge.removeprefix("http://"))()
        async with self.client() as client:
            target = client.targets.named()[name]
        return await probes.grpc_service(target)()


@pytest.fixture(scope="session", autouse=True)
def built_edge() -> None:
    """The edge as its sources are: parallel runs wait for one another."""
    with (ROOT / "Makefile").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "--no-print-directory", "edge"], cwd=ROOT, check=True, timeout=900)


@pytest.fixture(scope="module")
def running_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """A mesh for the tests of one module."""
    mesh = RunningMesh(tmp_path_factory.mktemp("mesh") / "data")
    mesh.start()
    try:
        yield mesh
        status = mesh.stop()
        assert status == 0, mesh.log()
    finally:
        mesh.destroy()


@pytest.fixture
def stopped_mesh(tmp_path: Path) -> Iterator[RunningMesh]:
    """A mesh that the test starts itself."""
    mesh = RunningMesh(tmp_path / "data")
    try:
        yield mesh
    finally:
        mesh.destroy()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A Chromium that this machine has. Skips without one."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not found:
        pytest.skip("no Chromium here (on Debian: apt-get install chromium)")
    expect.set_options(timeout=20_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=_CHROMIUM_ARGUMENTS)
        yield browser
        browser.close()
