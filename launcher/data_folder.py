"""The data folder: what outlives a run, and what tells the command line where the mesh is.

tweets.db graph.db valkey/   the stores
secrets.json                 made once; readable by its owner only
mesh.json                    addresses and process ids; there while the mesh runs
lock                         held by the launcher and by every process it starts
"""

import fcntl
import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEFAULT = "./data"
VARIABLE = "STARLING_DATA"
_LOCK_SECONDS = 2.0
_LOCK_POLL_SECONDS = 0.05


class DataFolderError(Exception):
    """The folder can't be used; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Secrets:
    """The mesh's secrets; never printed, never logged."""

    auth_secret: str
    page_token_key: str

    def __repr__(self) -> str:
        return "Secrets(…)"


@dataclass(frozen=True, slots=True)
class Mesh:
    """What runs now. Targets are `host:port`, those of `fanout` by process name; `edge` is a URL; `pids` by process
    name ("tweet_svc", "valkey", "launcher" …)."""

    graph: str
    tweet: str
    timeline: str
    fanout: Mapping[str, str]
    edge: str
    valkey_url: str
    pids: Mapping[str, int]


class DataFolder:
    """One data folder. Nothing is touched before `open`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tweet_database = self.path / "tweets.db"
        self.graph_database = self.path / "graph.db"
        self.valkey = self.path / "valkey"
        self._secrets = self.path / "secrets.json"
        self._mesh = self.path / "mesh.json"
        self._lock = self.path / "lock"

    def open(self) -> int:
        """Make the folder where it is missing, and lock it. Raises DataFolderError.

        Returns the lock's file descriptor, to be handed to every child: the lock is free again when the last
        process that has it is gone, so nobody starts beside what a killed launcher may have left behind.
        """
        try:
            self.valkey.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise DataFolderError(
                f"cannot write to the data folder {self.path} ({VARIABLE}): {error.strerror}"
            ) from error
        if not _locked(descriptor):
            holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise DataFolderError(
                f"another launcher (process {holder}) runs on the data folder {self.path}: "
                f"stop it first, or choose another folder with {VARIABLE}"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor

    def secrets(self) -> Secrets:
        """The secrets, made at the first call. Raises DataFolderError."""
        if not self._secrets.exists():
            made = Secrets(auth_secret=secrets.token_urlsafe(48), page_token_key=secrets.token_urlsafe(48))
            _write(self._secrets, asdict(made))
        return self.read_secrets()

    def read_secrets(self) -> Secrets:
        """The secrets that a launcher made. Raises DataFolderError."""
        try:
            return Secrets(**_read(self._secrets))
        except TypeError as error:
            raise DataFolderError(f"{self._secrets} isn't what a launcher wrote") from error

    def write_mesh(self, mesh: Mesh) -> None:
        """Tell the command line what runs now."""
        _write(self._mesh, asdict(mesh))

    def read_mesh(self) -> Mesh | None:
        """What runs now, or None. Raises DataFolderError."""
        if not self._mesh.exists():
            return None
        try:
            return Mesh(**_read(self._mesh))
        except TypeError as error:
            raise DataFolderError(f"{self._mesh} isn't what a launcher wrote") from error

    def remove_mesh(self) -> None:
        """Nothing runs any more."""
        self._mesh.unlink(missing_ok=True)


def _locked(descriptor: int) -> bool:
    """Try for a moment: the children of a killed launcher are on their way out."""
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
        time.sleep(_LOCK_POLL_SECONDS)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file at once, readable by its owner only."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataFolderError(f"{path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise DataFolderError(f"{path} isn't what a launcher wrote")
    return content
