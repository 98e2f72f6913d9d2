"""Every panel's query returns data from a real Prometheus that scraped a real mesh."""

import asyncio
import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from mesh import principals
from monitoring.dashboards import DASHBOARDS
from monitoring.local import configure
from tests.e2e.conftest import RunningMesh
from tests.waiting import eventually

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture
def prometheus(running_mesh: RunningMesh, tmp_path: Path) -> Iterator[str]:
    """The address of one that scrapes the mesh each second."""
    if not shutil.which("prometheus"):
        pytest.skip("no Prometheus here (on Debian: apt-get install prometheus)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = configure(tmp_path, running_mesh.mesh.metrics, every="1s")
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        yield address
    finally:
        server.terminate()
        server.wait(20)


def answers(address: str, query: str) -> bool:
    """Whether a query has any result."""
    asked = urllib.parse.quote(query.replace("$__rate_interval", "1m"))
    try:
        with _DIRECT.open(f"http://{address}/api/v1/query?query={asked}", timeout=10) as answer:
            return bool(json.load(answer)["data"]["result"])
    except urllib.error.URLError as error:
        refused = isinstance(error, urllib.error.HTTPError) and error.code != HTTPStatus.SERVICE_UNAVAILABLE
        assert not refused, f"{query}: {error}"
        return False  # It isn't up yet.


async def test_every_panel_returns_data(running_mesh: RunningMesh, prometheus: str) -> None:
    panels = {(name, panel.title): panel.query for name, many in DASHBOARDS.items() for panel in many}
    async with running_mesh.client() as client:
        author, reader = [(await client.create_user(f"{who}_of_panels")).user_id for who in ("a", "r")]
        await client.follow(reader, author)

        async def silent() -> list[tuple[str, str]]:
            await client.post(author, "hello")
            await client.home_page(reader)
            token = client.as_(principals.user(reader))[0][1]
            wanted = urllib.request.Request(
                f"{running_mesh.mesh.edge}/api/v1/timeline/home", headers={"Authorization": token}
            )
            await asyncio.to_thread(lambda: _DIRECT.open(wanted, timeout=10).close())
            return [at for at, query in panels.items() if not await asyncio.to_thread(answers, prometheus, query)]

        left: list[tuple[str, str]] = []

        async def all_answer() -> bool:
            left[:] = await silent()
            return not left

        try:
            await eventually(all_answer, 90.0)
        finally:
            assert not left, "panels without data"
