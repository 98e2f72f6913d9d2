"""Where the data lies that the project's tests read and must not copy: `shared/`."""

import os
from pathlib import Path

import pytest

_BESIDE_THE_REPOSITORY = Path(__file__).resolve().parents[2] / "shared"


def shared_path(name: str) -> Path:
    """The path of `name` within the folder that STARLING_SHARED names (default: `../shared`).

    Skips the test, or the whole module if called at its import, when it's missing from the default
    folder. Fails when STARLING_SHARED is set: who sets it means those tests to run.
    """
    named = os.environ.get("STARLING_SHARED")
    path = (Path(named) if named else _BESIDE_THE_REPOSITORY) / name
    if path.exists():
        return path
    if named:
        pytest.fail(f"STARLING_SHARED is set but has no {name}", pytrace=False)
    pytest.skip(f"no {name} in ../shared: set STARLING_SHARED to its folder", allow_module_level=True)
