"""Workers scale on Kafka's lag, and not one delivery is lost: `python -m k8s.tests.scaling`, or `make test-k8s`.

A real control plane has the workers' manifests as they are, and the autoscaler that reads lag as an external metric; a
real Kafka has the log. Each worker's pod is a real process here (`k8s.tests.nodes`); the other services run beside.
Then big authors post faster than two workers deliver: lag rises, the autoscaler adds workers, these join the group, lag
falls, and it takes them away again. At the end sampled home timelines hold exactly what was posted.

One thing isn't as in the manifests: going down waits for 15 s, not for five minutes, and a worker goes every 5 s.

Exit status: 0 when everything asked for was reached, else 1. It takes minutes. A picture is in `build/drills/k8s.svg`.
"""

import asyncio
import base64
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import requests
import yaml

from backends import kafka
from backends.servers import BackendError, Cluster, Server, free_ports
from cli.client import Client
from drills import picture
from drills.crowd import Crowd, at_rate
from drills.findings import Checks, carry_out, machine
from drills.graphs import evenly
from drills.own_mesh import BUILD, ROOT, DrillError
from drills.picture import Curve, Panel
from drills.raw_lists import RawLists
from k8s.tests import control_plane
from k8s.tests.external_metrics import LagMetrics, registration
from k8s.tests.nodes import Api, Nodes
from launcher import plan
from launcher.config import LauncherConfig
from launcher.data_folder import DataFolder, Mesh
from launcher.valkey_server import find_valkey_server
from mesh.errors import UnavailableError
from mesh.eventlog.kafka import Kafka, KafkaLagReader
from mesh.eventlog.topics import FANOUT_TASKS, FANOUT_TASKS_SLOW, FANOUT_WORKERS, TWEET_FANOUT

COMBINATION = "base+cassandra+kafka+hpa-only"
BIG = dict.fromkeys(range(1, 25), 4_000)
ACCOUNTS, BUCKET_SIZE = 6_000, 500
READERS, WALKS = 600, 200
POSTS, POSTS_PER_SECOND = 500, 50.0
LEAST = 2
_TOPICS = (TWEET_FANOUT, FANOUT_TASKS, FANOUT_TASKS_SLOW)
_LOOK_SECONDS = 1.0
_SERVE_SECONDS_MAX = 60.0
_READY_SECONDS_MAX = 90.0
_WHOLE_SECONDS_MAX = 420.0
_DEPLOYMENT = "/apis/apps/v1/namespaces/starling/deployments/fanout-svc"
_SCALER = "/apis/autoscaling/v2/namespaces/starling/horizontalpodautoscalers/fanout-svc"


@dataclass(frozen=True, slots=True)
class Look:
    """At one moment, `seconds` after the burst began. `lag`: messages by topic."""

    seconds: float
    lag: Mapping[str, int]
    wanted: int
    ready: int


@dataclass(slots=True)
class Findings:
    """What was seen, and what is asked of it."""

    checks: Checks = field(default_factory=Checks)
    looks: list[Look] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)


class Workers:
    """The control plane's side: the pods, the autoscaler's numbers, and a look at both."""

    def __init__(self, plane: Cluster, nodes: Nodes, metrics: LagMetrics, log: KafkaLagReader) -> None:
        self.findings = Findings()
        self._plane, self._nodes, self._metrics, self._log = plane, nodes, metrics, log
        self._began = time.monotonic()

    @property
    def exits(self) -> list[int]:
        """The statuses of those that have ended."""
        return [*self._nodes.exits.values()]

    def begin(self) -> None:
        """The burst's time is 0 now."""
        self._began = time.monotonic()
        self.findings.looks.clear()

    async def look_on(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.to_thread(self._nodes.step)
            lag = dict.fromkeys((topic.name for topic in _TOPICS), 0)
            try:
                for one in await self._log.lag():
                    lag[one.topic] += one.messages
            except UnavailableError as error:
                click.echo(f"the lag isn't known now: {error}", err=True)
                continue
            self._metrics.tell(lag)
            told = await asyncio.to_thread(self._nodes.api.call, "GET", _DEPLOYMENT)
            ready = int(told["status"].get("readyReplicas", 0))
            seconds = time.monotonic() - self._began
            self.findings.looks.append(Look(seconds, lag, int(told["spec"].get("replicas", 0)), ready))
            await asyncio.sleep(_LOOK_SECONDS)

    async def until(self, what: str, seconds_max: float, wanted: int, lag_max: int) -> None:
        """So many pods are wanted and ready, and no more lag is there. Raises DrillError."""
        end = time.monotonic() + seconds_max
        while True:
            if self.findings.looks:
                look = self.findings.looks[-1]
                if look.wanted == look.ready == wanted and sum(look.lag.values()) <= lag_max:
                    return
            if time.monotonic() > end:
                raise DrillError(f"{what}: not after {seconds_max:.0f} s; {self.findings.looks[-1:]}")
            await asyncio.sleep(_LOOK_SECONDS / 2)


async def run(crowd: Crowd, workers: Workers) -> None:
    """The whole of it, on a mesh that serves and is empty."""
    say = crowd.progress.step
    await crowd.sign_up()
    fans = sorted({fan for author in BIG for fan in crowd.graph.followers[author]})
    readers = crowd.chance.sample(fans, READERS)
    await crowd.have_lists(readers)
    say("waiting for two workers")
    await workers.until("two workers, and no lag", _READY_SECONDS_MAX, LEAST, 0)
    say(f"{POSTS} posts, {POSTS_PER_SECOND:.0f} a second, of authors with {BIG[1]:,} followers")
    workers.begin()

    async def post(_: int) -> None:
        await crowd.post(crowd.chance.choice(sorted(BIG)), "a big author's tweet")

    await at_rate(POSTS, POSTS_PER_SECOND, post)
    say("the burst is over")
    workers.findings.loads.append(os.getloadavg()[0])
    await workers.until("lag 0 and two workers again", _WHOLE_SECONDS_MAX, LEAST, 0)
    workers.findings.loads.append(os.getloadavg()[0])
    checks, looks = workers.findings.checks, workers.findings.looks
    checks.at_least("greatest lag, messages", 100, max(sum(look.lag.values()) for look in looks))
    checks.at_least("workers that were ready at once", LEAST + 1, max(look.ready for look in looks))
    checks.equal("workers afterwards", LEAST, looks[-1].ready)
    checks.equal("workers that ended otherwise than in order", 0, sum(map(bool, workers.exits)))
    exact = await crowd.exact_walks(crowd.chance.sample(readers, WALKS))
    checks.equal("sampled home timelines that are exact", WALKS, exact)


# ---- What it runs on ---------------------------------------------------------------------------------


@asynccontextmanager
async def everything(seed: int) -> AsyncIterator[tuple[Crowd, Workers]]:
    """Kafka, the services, the control plane and the nodes."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="k8s-", dir=BUILD)))
        click.echo("starting Kafka, the services and a control plane", err=True)
        log = kafka.start(folder / "kafka", 1, bound=True)
        stack.callback(log.stop)
        data = DataFolder(folder / "data")
        made = await _services(stack, data, folder, log.environment)
        plane = control_plane.start(folder / "plane", bound=True)
        stack.callback(plane.stop)
        overrides = {
            name: made.tweet.environment[name]
            for name in (
                "STARLING_VALKEY_URL",
                "STARLING_EVENTLOG_URL",
                "STARLING_GRAPH_TARGET",
                "STARLING_TWEET_TARGET",
            )
        }
        logs = BUILD / "k8s-pods"
        logs.mkdir(exist_ok=True)
        nodes = Nodes(Api(plane.folder, plane.addresses[0]), logs, frozenset({"fanout-svc"}), overrides)
        stack.callback(nodes.close)
        nodes.register()
        metrics = _metrics(stack, plane)
        apply(plane, data)
        client = await stack.enter_async_context(Client.of(data))
        lists = RawLists(made.valkey_url)
        stack.push_async_callback(lists.close)
        kafka_log = Kafka.at(log.environment["STARLING_EVENTLOG_URL"], prefix="", lists_life=_no_life)
        reader = KafkaLagReader(kafka_log, list(_TOPICS), FANOUT_WORKERS)
        workers = Workers(plane, nodes, metrics, reader)
        looking = asyncio.create_task(workers.look_on())
        stack.callback(looking.cancel)
        graph = evenly(BIG, range(1_001, 1_001 + ACCOUNTS), seed)
        yield Crowd(client, lists, graph, random.Random(seed)), workers  # noqa: S311 - repeatable, not secret
        if looking.done():
            looking.result()


async def _no_life() -> str:
    return ""


async def _services(stack: AsyncExitStack, data: DataFolder, folder: Path, log: Mapping[str, str]) -> plan.Plan:
    """Valkey and all services but the workers."""
    data.open()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STARLING_")}
    told = {**inherited, **log, "STARLING_BUCKET_SIZE": str(BUCKET_SIZE)}
    made = plan.make(LauncherConfig(), data, data.secrets(), find_valkey_server, told)
    assert made.valkey
    specs = (made.valkey, made.graph, made.tweet, made.timeline)
    servers = [Server(spec.name, spec.command, folder / spec.name, spec.environment, bound=True) for spec in specs]
    for server, spec in zip(servers, specs, strict=True):
        server.start()
        stack.callback(server.stop)
        end = time.monotonic() + _SERVE_SECONDS_MAX
        while not await spec.serves():
            if not server.alive() or time.monotonic() > end:
                raise DrillError(f"{spec.name} doesn't serve:\n{server.end_of_log()}")
            await asyncio.sleep(0.1)
    at = {"graph": made.graph.address, "tweet": made.tweet.address, "timeline": made.timeline.address}
    data.write_mesh(Mesh(**at, fanout={}, edge="", valkey_url=made.valkey_url, pids={}, metrics={}))
    return made


def _metrics(stack: AsyncExitStack, plane: Cluster) -> LagMetrics:
    (port,) = free_ports(1)
    pki = plane.folder / "pki"
    metrics = LagMetrics(pki / "metrics.crt", pki / "metrics.key", port)
    stack.callback(metrics.close)
    objects = registration(port, base64.b64encode((pki / "ca.crt").read_bytes()))
    control_plane.kubectl(
        plane.folder / control_plane.KUBECONFIG, "apply", "--filename=-", told=yaml.safe_dump_all(objects)
    )
    return metrics


def apply(plane: Cluster, data: DataFolder) -> None:
    """The workers' manifests as they are, but for how fast they go; and the Secret."""
    built = list(yaml.safe_load_all((ROOT / "build/k8s" / f"{COMBINATION}.yaml").read_text()))
    name = "app.kubernetes.io/name"
    objects = [
        one
        for one in built
        if one["kind"] in {"Namespace", "PriorityClass", "ConfigMap"}
        or one["metadata"].get("labels", {}).get(name) == "fanout-svc"
    ]
    for one in objects:
        if one["kind"] == "HorizontalPodAutoscaler":
            policies = [{"type": "Pods", "value": 1, "periodSeconds": 5}]
            one["spec"]["behavior"]["scaleDown"] = {"stabilizationWindowSeconds": 15, "policies": policies}
    secrets = data.read_secrets()
    keys = {"STARLING_AUTH_SECRET": secrets.auth_secret, "STARLING_PAGE_TOKEN_KEYS": secrets.page_token_key}
    place = {"name": "starling", "namespace": "starling"}
    objects.append({"apiVersion": "v1", "kind": "Secret", "metadata": place, "stringData": keys})
    config = plane.folder / control_plane.KUBECONFIG
    control_plane.kubectl(config, "apply", "--server-side", "--filename=-", told=yaml.safe_dump(objects[0]))
    control_plane.kubectl(config, "apply", "--server-side", "--filename=-", told=yaml.safe_dump_all(objects[1:]))


def story(looks: list[Look]) -> list[str]:
    """When what happened."""
    most = max(look.ready for look in looks)
    peak = max(looks, key=lambda look: sum(look.lag.values()))
    behind = [look.seconds for look in looks if sum(look.lag.values())]
    return [
        f"{peak.seconds:5.0f} s  greatest lag, {sum(peak.lag.values()):,} messages",
        f"{next(look.seconds for look in looks if look.ready == most):5.0f} s  {most} workers are ready",
        f"{max(behind, default=0.0):5.0f} s  lag 0 from here on",
        f"{looks[-1].seconds:5.0f} s  {LEAST} workers again",
    ]


def draw(looks: list[Look]) -> None:
    """To build/drills."""
    lag = [Curve(topic.name, [(look.seconds, look.lag[topic.name]) for look in looks]) for topic in _TOPICS]
    pods = [
        Curve("wanted", [(look.seconds, look.wanted) for look in looks]),
        Curve("ready", [(look.seconds, look.ready) for look in looks]),
    ]
    marks = {"burst ends": POSTS / POSTS_PER_SECOND}
    panels = [Panel("lag, messages", lag), Panel("workers", pods)]
    picture.write(BUILD / "k8s.svg", "Workers follow the lag", panels, marks)


async def _run(seed: int) -> Findings:
    BUILD.mkdir(parents=True, exist_ok=True)
    try:
        async with everything(seed) as (crowd, workers):
            await run(crowd, workers)
    except (BackendError, requests.RequestException) as error:
        raise DrillError(str(error)) from error
    return workers.findings


@click.command()
@click.option("--seed", type=int, default=4, show_default=True, help="Another seed is another graph.")
def main(seed: int) -> None:
    """Have workers scale on lag, on a real control plane."""
    start = time.monotonic()
    findings = carry_out(_run(seed))
    draw(findings.looks)
    click.echo(f"k8s, seed {seed}: {time.monotonic() - start:.0f} s, {machine(findings.loads)}\n")
    for line in (*findings.checks.lines(), "", *story(findings.looks)):
        click.echo(line)
    click.echo(f"\na picture: {(BUILD / 'k8s.svg').relative_to(ROOT)}")
    sys.exit(0 if findings.checks.hold else 1)


if __name__ == "__main__":
    main()
