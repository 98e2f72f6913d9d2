"""What `docs/clients.md` shows works as it stands, with the client as people install it; and what wheels carry."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest

from starling.graph.v1 import graph_pb2, graph_pb2_grpc
from starling_client import Starling, connect_aio, explain
from tests.e2e.conftest import ROOT, RunningMesh

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs/clients.md").read_text(), re.DOTALL)


def block(language: str, containing: str) -> str:
    found = [text for kind, text in BLOCKS if kind == language and containing in text]
    assert len(found) == 1
    return str(found[0])


def build(project: Path, folder: Path) -> zipfile.ZipFile:
    """The wheel of a project. It is built from a copy: builds leave things behind."""
    wheel = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--no-index"]
    subprocess.run(
        [sys.executable, "-m", "pip", *wheel, "--wheel-dir", folder / "dist", project], check=True, timeout=200
    )
    (found,) = (folder / "dist").glob("*.whl")
    return zipfile.ZipFile(found)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as it would be committed now."""
    folder = tmp_path_factory.mktemp("copy")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file() and not name.startswith(("edge/", "tests/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def python(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the client from its wheel, gRPC and protobuf from here, and nothing of the repository."""
    folder = tmp_path_factory.mktemp("client")
    with build(copy / "clients/python", folder) as wheel:
        venv.create(folder / "venv")
        site = next((folder / "venv").glob("lib/python*/site-packages"))
        wheel.extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv/bin/python"


@pytest.fixture(scope="module")
def environment(running_mesh: RunningMesh) -> Mapping[str, str]:
    """As somebody has it who has done what the document begins with."""
    at = running_mesh.mesh
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("STARLING_", "PYTHON"))}
    known = {"TWEET_SVC": at.tweet, "TIMELINE_SVC": at.timeline, "GRAPH_SVC": at.graph, "EDGE": at.edge.rstrip("/")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    found = inherited | known | {"STARLING_DATA": str(running_mesh.folder.path), "PATH": path, "CHECKOUT": str(ROOT)}
    run(["bash", "-eu"], found, text=block("sh", "starling user create ada"))
    token = block("sh", "GRAPH_SVC=")
    assert all(f"{name}=" in token for name in known)
    return found | {"TOKEN": run(["starling", "token", "ada"], found).strip()}


def run(command: list[str], environment: Mapping[str, str], *, text: str | None = None, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        command, input=text, env=dict(environment), cwd=cwd, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_python_from_the_wheel(python: Path, environment: Mapping[str, str], tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(block("python", "starling.post("))
    said = run([str(python), "example.py", environment["TOKEN"]], environment, cwd=tmp_path)
    assert said.splitlines()[0] == "@ada: Hello from Python"
    assert said.splitlines()[-1].startswith("TEXT_INVALID {'text':")
    (tmp_path / "reading.py").write_text(block("python", "connect_aio"))
    read = run([str(python), "reading.py", environment["TOKEN"]], environment, cwd=tmp_path)
    assert "@ada: Hello from Python" in read.splitlines()


def test_type_checkers_see_the_types(python: Path, tmp_path: Path) -> None:
    example = block("python", "starling.post(")
    (tmp_path / "right.py").write_text(example)
    (tmp_path / "wrong.py").write_text(example.replace("posted.read_your_write_token", "posted.no_such_field"))
    check = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "--cache-dir", "cache"]
    said = subprocess.run(
        [*check, "right.py", "wrong.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert 'wrong.py:13: error: "CreateTweetResponse" has no attribute "no_such_field"' in said.stdout
    assert "right.py" not in said.stdout


def test_go(environment: Mapping[str, str], tmp_path: Path) -> None:
    go = shutil.which("go", path=environment["PATH"])
    if not go:
        pytest.skip("no go on PATH")
    offline = dict(environment) | {"GOFLAGS": "-mod=mod", "GOPROXY": "off"}
    run(["bash", "-eu"], offline, text=block("sh", "go mod init"), cwd=tmp_path)
    shutil.copy(ROOT / "edge/go.sum", tmp_path)
    (tmp_path / "main.go").write_text(block("go", "package main"))
    with Starling(token=environment["TOKEN"], tweet=environment["TWEET_SVC"]) as starling:
        starling.post("Read me in Go")
    assert "@ada: Read me in Go\n" in run([go, "run", "."], offline, cwd=tmp_path)


def test_grpcurl(environment: Mapping[str, str]) -> None:
    if not shutil.which("grpcurl"):
        pytest.skip("no grpcurl on PATH")
    said = run(["bash", "-eu"], environment, text=block("sh", "grpcurl -plaintext"))
    assert said.count('"Hello from grpcurl"') == 2


def test_curl(environment: Mapping[str, str]) -> None:
    posting = block("sh", "Idempotency-Key")
    said = [run(["bash", "-eu"], environment, text=posting) for _ in range(2)]
    assert [one.count('"Hello from curl"') for one in said] == [2, 2]
    streamed = run(["bash", "-u"], environment, text=block("sh", "curl -sSN"))
    assert "event: heartbeat\ndata: {}\n" in streamed


def test_a_post_is_there_once_though_its_service_was_away(
    running_mesh: RunningMesh, environment: Mapping[str, str]
) -> None:
    with Starling(
        token=environment["TOKEN"], tweet=environment["TWEET_SVC"], timeline=environment["TIMELINE_SVC"]
    ) as starling:
        starling.post("Before")
        before = [item.item_id for item in starling.home()]
        running_mesh.kill("tweet_svc")
        posted = [starling.post("Once", request_id="d5b8c1f4-5a4e-4f53-9a53-3f4f6a1b2c3d") for _ in range(2)]
        assert posted[0].tweet.tweet_id == posted[1].tweet.tweet_id
        came = next(starling.watch(before))
        assert came.tweet.text == "Once"
        assert [item.item_id for item in starling.catch_up(before)] == [came.item_id]
    with (
        Starling(token="no token", graph=environment["GRAPH_SVC"]) as stranger,
        pytest.raises(grpc.RpcError) as refused,
    ):
        stranger.graph.GetUser(graph_pb2.GetUserRequest(user_id=1))
    assert explain(refused.value).reason == "TOKEN_INVALID"


async def test_the_token_goes_with_calls_of_every_kind(
    running_mesh: RunningMesh, environment: Mapping[str, str]
) -> None:
    token = run(["starling", "token", "operator"], environment).strip()
    edges = [graph_pb2.ImportFollowsRequest(edges=[graph_pb2.Edge(follower_id=1, followee_id=2)])]
    refused = graph_pb2.ImportFollowsResponse(refused=1)
    with Starling(token=lambda: token, graph=environment["GRAPH_SVC"]) as starling:
        assert list(starling.graph.ImportFollows(iter(edges))) == [refused]
    async with connect_aio(environment["GRAPH_SVC"], token) as channel:
        stub = graph_pb2_grpc.GraphServiceStub(channel)
        assert [one async for one in stub.ImportFollows(iter(edges))] == [refused]
        with pytest.raises(grpc.aio.AioRpcError) as nobody:
            await stub.GetUser(graph_pb2.GetUserRequest(handle="nobody"))
    assert explain(nobody.value).reason == "USER_NOT_FOUND"


def test_the_main_wheel_carries_all_that_the_mesh_reads(copy: Path, tmp_path: Path) -> None:
    with build(copy, tmp_path) as wheel:
        carried = set(wheel.namelist())
    kinds = {".py", ".pyi", ".lua", ".cql", ".html", ".js", ".css", ".svg", ".typed"}
    folders = {path.parent.name for path in copy.glob("*/*") if path.suffix in {".py", ".html", ".cql"}}
    folders = folders - {"bench", "docs", "drills", "k8s", "monitoring"} | {"starling"}
    wanted = {
        str(path.relative_to(copy))
        for folder in folders
        for path in (copy / folder).rglob("*")
        if path.is_file() and path.suffix in kinds
    }
    assert {
        "mesh/timelines/timelines.lua",
        "schema/001_tweets.cql",
        "web/index.html",
        "mesh/eventlog/kafka.py",
    } <= wanted
    assert not wanted - carried
