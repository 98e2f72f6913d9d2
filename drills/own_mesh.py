"""A mesh of a drill's own: a launcher as people start it, on a data folder that goes with it."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from cli.client import Client
from launcher.data_folder import DataFolder, Mesh

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "drills"
_START_SECONDS = 60.0
_STOP_SECONDS = 40.0
_POLL_SECONDS = 0.1
_LOG_CHARS = 3_000


class DrillError(Exception):
    """The drill can't go on; the text is for people."""


class OwnMesh:
    """To be used as `with OwnMesh(name) as mesh`: when the block begins everything serves, when it ends nothing is left
    but the log. Variables of the mesh are only those given here. `begins_with`: a data folder of a mesh that has ended.
    """

    def __init__(self, name: str, begins_with: Path | None = None, **environment: str) -> None:
        BUILD.mkdir(parents=True, exist_ok=True)
        self.log = BUILD / f"{name}.log"
        # One of its own for each run: two at once don't meet.
        self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=BUILD))
        self._data = DataFolder(self.folder / "data")
        if begins_with:
            shutil.copytree(begins_with, self._data.path)
        self._environment = environment

    def __enter__(self) -> "OwnMesh":
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("STARLING_")}
        with self.log.open("wb") as log:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "launcher"],
                env={**inherited, "STARLING_DATA": str(self._data.path), **self._environment},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the drill, which then stops the mesh in order.
            )
        try:
            self._wait_until_it_serves()
        except BaseException:
            self.close()
            raise
        return self

    def _wait_until_it_serves(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while (mesh := self._data.read_mesh()) is None or mesh.pids["launcher"] != self._launcher.pid:
            if self._launcher.poll() is not None or time.monotonic() > end:
                raise DrillError(f"the mesh doesn't come up:\n{self.log.read_text(errors='replace')[-_LOG_CHARS:]}")
            time.sleep(_POLL_SECONDS)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def stop(self) -> None:
        """End every process."""
        self._launcher.terminate()
        try:
            self._launcher.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._launcher.kill()  # On Linux its children die with it; elsewhere they would have to be ended by hand.
            self._launcher.wait(_STOP_SECONDS)

    def close(self) -> None:
        """End every process, and remove the data."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def data(self) -> Path:
        """The data folder, of which a client can be made in another process."""
        return self._data.path

    @property
    def mesh(self) -> Mesh:
        """Addresses and process ids."""
        mesh = self._data.read_mesh()
        if mesh is None:
            raise DrillError(f"the mesh has ended; {self.log.relative_to(ROOT)} says why")
        return mesh

    def client(self) -> Client:
        """A client, to be used as `async with`."""
        return Client.of(self._data)
