"""What the README shows works as it stands."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.e2e.conftest import ROOT, RunningMesh

README = (ROOT / "README.md").read_text()


def block(language: str, containing: str) -> str:
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    found = [text for text in blocks if containing in text]
    assert len(found) == 1
    return found[0]


def run(command: list[str], mesh: RunningMesh, text: str | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STARLING_")}
    environment |= {
        "STARLING_DATA": str(mesh.folder.path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        command, input=text, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_first_post_is_read_by_cli_stubs_and_http_as_the_readme_says(running_mesh: RunningMesh) -> None:
    commands = block("sh", "starling user create alice").replace("alias starling=.venv/bin/starling\n", "")
    assert "Hello, world" in run(["bash", "-eu"], running_mesh, commands)
    token = run(["starling", "token", "bob"], running_mesh).strip()
    read = run([sys.executable, "docs/first_read.py", running_mesh.mesh.timeline, token], running_mesh)
    assert read == "@alice: Hello, world\n"
    over_http = block("sh", "curl -sS").partition("\n")[2]
    shown = run(["bash", "-eu"], running_mesh, f"EDGE={running_mesh.mesh.edge}\n{over_http}")
    assert shown.count('"text":"Hello over HTTP"') == 2
    assert '"handle":"alice"' in shown
    assert "event: heartbeat" in shown


def test_the_python_shown_is_the_python_that_runs() -> None:
    shown = textwrap.indent(block("python", "ListHomeTimeline"), "    ")
    assert shown in (ROOT / "docs/first_read.py").read_text()


def test_every_target_of_the_makefile_is_listed() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    assert all(f"make {target} " in listed for target in phony[1].split())
