"""The code's own rules."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = {"tweet_svc", "graph_svc", "fanout_svc", "timeline_svc"}
PURE = {f"{service}/core.py" for service in SERVICES} | {
    "graph_svc/pressure.py",
    "mesh/eventlog/progress.py",
    "tweet_svc/text.py",
    "tests/timelines_reference.py",
}
IMPURE_MODULES = {"asyncio", "time", "random", "secrets", "socket", "os", "grpc", "redis", "sqlite3", "threading"}
FUNCTION_LINES_MAX = 60
FILE_KILOBYTES_MAX = 500


def tracked(pattern: str = "*") -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def python_files() -> list[str]:
    return [name for name in tracked("*.py") if not name.startswith("starling/")]


def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text())


def imports(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("name", python_files())
def test_no_service_imports_another_and_mesh_imports_none(name: str) -> None:
    owner = name.partition("/")[0]
    if owner in SERVICES | {"mesh", "cli"}:
        assert not set(imports(tree(name))) & (SERVICES - {owner})


@pytest.mark.parametrize("name", sorted(PURE))
def test_a_core_is_pure(name: str) -> None:
    module = tree(name)
    assert not set(imports(module)) & IMPURE_MODULES
    assert not any(isinstance(node, ast.Await | ast.AsyncFunctionDef) for node in ast.walk(module))


@pytest.mark.parametrize("name", python_files())
def test_a_function_fits_a_screen(name: str) -> None:
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(tree(name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno
        and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert not long


def test_no_file_is_large() -> None:
    assert [name for name in tracked() if (ROOT / name).stat().st_size > FILE_KILOBYTES_MAX * 1_024] == []


def test_a_test_waits_for_conditions_not_for_time() -> None:
    """Only `tests/waiting.py`, which has a bound, may sleep."""
    sleeping = re.compile(r"\b(time|asyncio)\.sleep\(")
    found = [
        name for name in python_files() if name.startswith("tests/") and sleeping.search((ROOT / name).read_text())
    ]
    assert found == ["tests/waiting.py"]


def test_nothing_names_a_place_of_one_machine() -> None:
    places = re.compile(r"(?<![\w.])/(work|root|home)/|https?://(?!127\.0\.0\.1|localhost)[\w.-]*(pypi|proxy\.golang)")
    texts = [name for name in tracked() if not name.endswith((".lock", "test_tidy.py", "LICENSE"))]
    assert [name for name in texts if places.search((ROOT / name).read_text(errors="ignore"))] == []
