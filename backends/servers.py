"""What all backends share: jars by Maven, free ports, servers that are started, waited for, and stopped.

A backend is a module beside this one, named after its technology, with

    NAME: str
    def start(folder: Path, nodes: int, *, bound: bool = False) -> Cluster

which starts `nodes` servers (1 or 3) on 127.0.0.1, on free ports, with everything they keep below `folder` (which is
its own, and may not exist), waits with a bound until they answer, and raises BackendError, with nothing left running,
when they don't. `python -m backends` uses it, and so do test fixtures, several side by side.

Other files of a backend lie beside its module and begin with its name (`kafka.pom.xml`).

A process is known by its id *and* its time of birth, so none that took over an id is ever signalled.
"""

import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from launcher import guard

HOST = "127.0.0.1"
HOW_TO_GET_JAVA = "Install them; on Debian: apt-get install openjdk-17-jre-headless maven"
_JAVA_MAJOR_MIN = 17
_MAVEN_SECONDS_MAX = 900.0
_LOCK_SECONDS_MAX = 1_200.0
_TERM_SECONDS = 20.0
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.05
_LOG_LINES_SHOWN = 15

# Below the ports that systems give to outgoing connections (Linux: from 32768), so that none of those sits on a
# server's port while it is down.
_PORTS = range(15_000, 32_000)
_PORT_TRIES_MAX = 1_000


class BackendError(Exception):
    """A backend can't be installed or started; the text says what to do, or shows the end of its log."""


class MissingToolError(BackendError):
    """Java or Maven isn't installed here; the text says how it is."""


# ---- Installing --------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where downloads lie that all clones share."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "starling"


def java() -> str:
    """The path of a java that is new enough. Raises MissingToolError, which says what to install."""
    path = shutil.which("java")
    if not path:
        raise MissingToolError(f"No java found. {HOW_TO_GET_JAVA}")
    told = subprocess.run([path, "-version"], check=False, capture_output=True, text=True, timeout=30).stderr
    major = told.partition('version "')[2].partition(".")[0].partition('"')[0]
    if not major.isdigit() or int(major) < _JAVA_MAJOR_MIN:
        raise MissingToolError(f"Java {_JAVA_MAJOR_MIN} or newer is needed, not {major or told!r}. {HOW_TO_GET_JAVA}")
    return path


def jars(pom: Path) -> Path:
    """The folder with the jars that a pom names, fetched once: a folder for each pom's text, whole or not there."""
    name = pom.name.partition(".")[0]
    home = cache_folder() / f"{name}-{hashlib.sha256(pom.read_bytes()).hexdigest()[:12]}"
    if home.is_dir():
        return home
    maven = shutil.which("mvn")
    if not maven:
        raise MissingToolError(f"No mvn (Maven) found, to fetch what {pom} names. {HOW_TO_GET_JAVA}")
    java()
    with locked(home.with_suffix(".lock"), _LOCK_SECONDS_MAX):
        if not home.is_dir():
            print(f"Fetching the jars of {name} into {home} (once)", flush=True)
            _fetch(maven, pom, home)
    return home


def _fetch(maven: str, pom: Path, home: Path) -> None:
    with tempfile.TemporaryDirectory(dir=home.parent) as work:
        command = (
            *(maven, "-q", "-B", "-f", str(shutil.copy(pom, work)), "dependency:copy-dependencies"),
            *("-DincludeScope=runtime", f"-DoutputDirectory={work}/jars"),
        )
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_MAVEN_SECONDS_MAX)
        if done.returncode:
            raise BackendError(f"Maven can't fetch what {pom} names:\n{_end_of(done.stdout + done.stderr)}")
        (Path(work) / "jars").rename(home)


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Only one process at a time is in here, however they end. Raises BackendError after `seconds`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        await_that(lambda: _try_lock(file.fileno()), seconds, f"{path} is held by another process")
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# ---- Ports and waiting -------------------------------------------------------------------------------


def free_ports(count: int, host: str = HOST) -> list[int]:
    """Different ports that are free now: all are bound before any is let go."""
    with ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(_PORTS, _PORT_TRIES_MAX):
            probe = stack.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind((host, port))
                found.append(port)
            if len(found) == count:
                return found
    raise BackendError(f"{count} free ports can't be found between {_PORTS.start} and {_PORTS.stop}")


def await_that(holds: Callable[[], object], seconds: float, otherwise: str) -> None:
    """Wait until it holds. Raises BackendError with `otherwise` after `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise BackendError(f"{otherwise} (waited for {seconds:g} s)")
        time.sleep(_POLL_SECONDS)


# ---- Servers -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Server:
    """One process of a backend. Its output goes to `<folder>/server.log`."""

    name: str
    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside what is inherited."""
    bound: bool = False
    """Whether it dies with the process that started it."""
    pid: int = 0
    born: str = ""
    _process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Start it (again); doesn't wait until it answers."""
        assert not self.alive(), f"{self.name} runs"
        self.folder.mkdir(parents=True, exist_ok=True)
        guarded = (sys.executable, "-S", guard.__file__, str(os.getpid())) if self.bound else ()
        program = shutil.which(self.command[0]) or self.command[0]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*guarded, program, *self.command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                cwd=self.folder,
                # A terminal's Ctrl-C isn't for it.
                start_new_session=True,
            )
        self.pid, self.born = self._process.pid, _born(self._process.pid)

    def alive(self) -> bool:
        """Whether it still runs: this very process, not one that took over its id."""
        if self._process and self._process.poll() is not None:
            return False
        return bool(self.pid and self.born and _born(self.pid) == self.born)

    def signal(self, number: signal.Signals) -> None:
        """Signal it; it being gone is no error."""
        if self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """As a crash does; returns when it is gone."""
        self.signal(signal.SIGKILL)
        await_that(lambda: not self.alive(), _KILL_SECONDS, f"{self.name} outlives SIGKILL")

    def stop(self) -> None:
        """In order, or by force after some seconds; returns when it is gone."""
        self.signal(signal.SIGTERM)
        try:
            await_that(lambda: not self.alive(), _TERM_SECONDS, "")
        except BackendError:
            self.kill()

    def await_that(self, holds: Callable[[], object], seconds: float) -> None:
        """Wait until it holds, as long as the server runs. Raises BackendError with the end of the log."""

        def holds_or_gone() -> bool:
            return not self.alive() or bool(holds())

        try:
            await_that(holds_or_gone, seconds, f"{self.name} doesn't answer")
        except BackendError as error:
            raise BackendError(f"{error}; its log ends with\n{self.end_of_log()}") from error
        if not self.alive():
            raise BackendError(f"{self.name} ended; its log ends with\n{self.end_of_log()}")

    def end_of_log(self) -> str:
        """Its last lines."""
        with suppress(OSError):
            return _end_of((self.folder / "server.log").read_text(errors="replace"))
        return "(no log)"


@dataclass(slots=True)
class Cluster:
    """The servers of one backend, which belong together. `environment`: what tells the services where they are."""

    name: str
    folder: Path
    nodes: int
    addresses: Sequence[str]
    environment: Mapping[str, str]
    servers: Sequence[Server]

    def stop(self) -> None:
        """Stop all, and remove what they kept."""
        for server in self.servers:
            server.signal(signal.SIGTERM)
        for server in self.servers:
            server.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def undone_on_error(folder: Path, servers: Sequence[Server]) -> Iterator[None]:
    """What a backend's start runs in: servers are in `servers` when they are started, and stopped if it fails."""
    try:
        yield
    except BaseException:
        Cluster("", folder, 0, (), {}, servers).stop()
        raise


def start_all(servers: Sequence[Server]) -> None:
    """Start them, each remembered in its folder before the next: `remembered` finds them whatever comes then."""
    for server in servers:
        server.start()
        told = {"name": server.name, "command": [*server.command], "pid": server.pid, "born": server.born}
        told["environment"] = dict(server.environment)
        _write(server.folder / "server.json", told)


def remember(cluster: Cluster) -> None:
    """Write down what runs, for other processes."""
    told = {"name": cluster.name, "nodes": cluster.nodes, "addresses": [*cluster.addresses]}
    told["environment"] = dict(cluster.environment)
    _write(cluster.folder / "cluster.json", told)


def remembered(folder: Path) -> Cluster:
    """What was started below `folder`, by whichever process; without addresses where the start didn't end well."""
    servers = []
    for path in sorted(folder.glob("**/server.json")):
        told = json.loads(path.read_text())
        servers.append(
            Server(told["name"], told["command"], path.parent, told["environment"], pid=told["pid"], born=told["born"])
        )
    told = {"name": folder.name, "nodes": 0, "addresses": [], "environment": {}}
    with suppress(FileNotFoundError):
        told = json.loads((folder / "cluster.json").read_text())
    return Cluster(told["name"], folder, told["nodes"], told["addresses"], told["environment"], servers)


def _write(path: Path, told: Mapping[str, object]) -> None:
    """Whole or not at all."""
    path.with_suffix(".new").write_text(json.dumps(told, indent=1))
    path.with_suffix(".new").replace(path)


def _born(pid: int) -> str:
    """When a process began, in the system's own notation; empty when it is gone, or only its parent hasn't noticed."""
    if sys.platform == "linux":
        with suppress(OSError):
            state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            return "" if state in "ZX" else rest[18]
        return ""
    told = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], check=False, capture_output=True, text=True)
    state, _, born = told.stdout.strip().partition(" ")
    return "" if state.startswith("Z") else born.strip()


def _end_of(text: str) -> str:
    return "\n".join(text.splitlines()[-_LOG_LINES_SHOWN:])
