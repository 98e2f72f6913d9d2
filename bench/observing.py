"""What it costs a warm home read to be measured and traced: `python -m bench.observing`, about a minute.

Two timeline_svc processes read the same lists, one without metrics and traces, one with both (metrics scraped every
second, one trace of a hundred recorded); rounds alternate between them, and the CPU time is what the kernel says of
each process. Needs Linux.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.client import Client
from drills.own_mesh import ROOT, OwnMesh
from launcher import probes
from launcher.data_folder import DataFolder
from mesh import channels
from mesh.principals import Credentials, user
from starling.graph.v1 import graph_pb2
from starling.timeline.v1 import timeline_pb2, timeline_pb2_grpc
from starling.tweet.v1 import tweet_pb2

ROUNDS = 16
READS = 400
TWEETS = 40
_AT_ONCE = 8
_METRICS = "127.0.0.1:{port}"


def cpu_seconds(pid: int) -> float:
    """What all threads of a process have had of the processor."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@contextmanager
def timeline_svc(mesh: OwnMesh, folder: Path, name: str, **environment: str) -> Iterator[tuple[int, str]]:
    """One more timeline_svc of a mesh; yields its process id and address."""
    now, secrets = mesh.mesh, DataFolder(mesh.data).read_secrets()
    at = folder / name
    process = subprocess.Popen(
        [sys.executable, "-m", "timeline_svc"],
        cwd=ROOT,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("STARLING_")},
            "STARLING_ADDRESS_FILE": str(at),
            "STARLING_VALKEY_URL": now.valkey_url,
            "STARLING_AUTH_SECRET": secrets.auth_secret,
            "STARLING_PAGE_TOKEN_KEYS": secrets.page_token_key,
            "STARLING_GRAPH_TARGET": now.graph,
            "STARLING_TWEET_TARGET": now.tweet,
            **environment,
        },
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            if at.exists() and at.read_text():
                break
            threading.Event().wait(0.05)
        yield process.pid, at.read_text()
    finally:
        process.terminate()
        process.wait(30)


async def _people(client: Client, secret: str) -> int:
    """A reader whose home has TWEETS tweets; returns the id."""
    author, reader = [(await client.create_user(name)).user_id for name in ("author", "reader")]
    as_reader = Credentials(secret, user(reader)).metadata()
    await client.graph.Follow(graph_pb2.FollowRequest(followee_id=author), metadata=as_reader)
    for number in range(TWEETS):
        request = tweet_pb2.CreateTweetRequest(text=f"tweet {number}")
        await client.tweet.CreateTweet(request, metadata=Credentials(secret, user(author)).metadata())
    return reader


async def _read(target: str, credentials: Credentials, reads: int) -> None:
    async with channels.connect(target) as channel:
        stub = timeline_pb2_grpc.TimelineServiceStub(channel)

        async def some() -> None:
            for _ in range(reads // _AT_ONCE):
                page = await stub.ListHomeTimeline(
                    timeline_pb2.ListHomeTimelineRequest(), metadata=credentials.metadata(), timeout=10.0
                )
                assert len(page.items) == 20

        await asyncio.gather(*(some() for _ in range(_AT_ONCE)))


async def _measure(mesh: OwnMesh, plain: tuple[int, str], observed: tuple[int, str]) -> list[tuple[float, float]]:
    """CPU milliseconds of a read, without and with, of each round."""
    folder = DataFolder(mesh.data)
    secret = folder.read_secrets().auth_secret
    async with Client.of(folder) as client:
        credentials = Credentials(secret, user(await _people(client, secret)))
    for _, target in (plain, observed):
        assert await probes.grpc_service(target)()
        await _read(target, credentials, READS)  # Warm.
    rounds: list[tuple[float, float]] = []
    for number in range(ROUNDS):
        found: dict[int, float] = {}
        for pid, target in (plain, observed) if number % 2 else (observed, plain):
            before = cpu_seconds(pid)
            await _read(target, credentials, READS)
            found[pid] = (cpu_seconds(pid) - before) / READS * 1_000
        rounds.append((found[plain[0]], found[observed[0]]))
    return rounds


def _scrape(address: str, ended: threading.Event) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while not ended.wait(1.0):
        with direct.open(f"http://{address}/metrics", timeout=10) as answer:
            answer.read()


def main() -> None:
    """Print both costs, and what the difference is."""
    with OwnMesh("observing") as mesh, tempfile.TemporaryDirectory() as folder:
        address = mesh.mesh.metrics["timeline_svc"]
        port = int(address.rpartition(":")[2]) + 1
        traced = {
            "STARLING_METRICS_LISTEN": _METRICS.format(port=port),
            # Nobody need listen: spans are made and queued all the same, and dropped at the end.
            "STARLING_OTLP_ENDPOINT": f"http://127.0.0.1:{port + 1}",
            "STARLING_TRACE_RATIO": "0.01",
        }
        ended = threading.Event()
        with (
            timeline_svc(mesh, Path(folder), "plain") as plain,
            timeline_svc(mesh, Path(folder), "observed", **traced) as observed,
        ):
            scraping = threading.Thread(target=_scrape, args=(traced["STARLING_METRICS_LISTEN"], ended))
            scraping.start()
            try:
                rounds = asyncio.run(_measure(mesh, plain, observed))
            finally:
                ended.set()
                scraping.join()
    without, with_both = (statistics.median(column) for column in zip(*rounds, strict=True))
    more = statistics.median(b / a - 1 for a, b in rounds)
    print(f"CPU of a warm home read of 20, median of {ROUNDS} rounds of {READS} reads:")
    print(f"  without metrics and traces  {without:.3f} ms")
    print(f"  with both, 1 % traced       {with_both:.3f} ms  ({more:+.1%}; asked: at most +5 %)")


if __name__ == "__main__":
    main()
