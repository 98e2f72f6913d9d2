"""Production backends that tests start for themselves, and stop."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from backends.servers import Cluster, MissingToolError


class Backend(Protocol):
    """A module of `backends`."""

    NAME: str

    def start(self, folder: Path, nodes: int, *, bound: bool = False) -> Cluster: ...


@contextmanager
def running(backend: Backend, folder: Path, nodes: int = 1) -> Iterator[Cluster]:
    """The backend's servers, which die with this process. Without Java or Maven the test is skipped; it fails where
    STARLING_SHARED is set: who sets it means all tests to run."""
    try:
        cluster = backend.start(folder, nodes, bound=True)
    except MissingToolError as error:
        if os.environ.get("STARLING_SHARED"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
    try:
        yield cluster
    finally:
        cluster.stop()
