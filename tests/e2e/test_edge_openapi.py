"""The OpenAPI document holds: every documented path answers, and every answer is one that is documented."""

import os
import subprocess
import sys

import pytest

from mesh.principals import OPERATOR
from tests.e2e.conftest import ROOT, RunningMesh
from tests.e2e.rest import Rest, as_, new_user

STREAM = "/api/v1/timeline/home/stream"  # Has no end; tests of its own.
OPERATORS = "^/api/v1/(fanout/.*|users)$"


def run(who: Rest, user_ids: list[str], *options: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", "tests/e2e/schemathesis.toml"),
            *("run", f"{who.base}/openapi.json", "--checks", "all", "--exclude-path", STREAM),
            *("-H", f"Authorization: Bearer {who.token}", "--max-examples", "20", "--seed", "1"),
            *("--generation-database", "none", "--no-color", *options),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "SCHEMATHESIS_HOOKS": "tests.e2e.openapi_hooks",
            "STARLING_TEST_USER_IDS": ",".join(user_ids),
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 operations" not in done.stdout


@pytest.mark.parametrize("caller", ["user", "operator"])
def test_schemathesis_finds_nothing(tmp_path_factory: pytest.TempPathFactory, caller: str) -> None:
    mesh = RunningMesh(tmp_path_factory.mktemp("mesh") / "data")
    # It sends as fast as it can.
    mesh.start(STARLING_EDGE_USER_PER_SECOND="0", STARLING_EDGE_ADDRESS_PER_SECOND="0")
    try:
        others = [new_user(mesh.folder, f"other_{n}")[1] for n in range(3)]
        who, _ = new_user(mesh.folder, "tester")
        if caller == "operator":
            run(as_(mesh.folder, OPERATOR), others, "--include-path-regex", OPERATORS)
        else:
            run(who, others)
        assert mesh.stop() == 0
    finally:
        mesh.destroy()
