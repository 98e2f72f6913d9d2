"""The manifests on a real API server, with the real controllers and scheduler: `make test-k8s`.

Nodes are played (`k8s.tests.nodes`); everything else is what runs in a cluster.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
import yaml

from backends.servers import await_that
from k8s.tests import binaries, control_plane
from k8s.tests.control_plane import kubectl
from k8s.tests.nodes import Api, Nodes
from tests.running_backends import running

pytestmark = pytest.mark.kubernetes
BUILT = Path(__file__).parents[2] / "build" / "k8s"
WHOLE = "base+cassandra+kafka+hpa-only+valkey-cluster+network-policies+monitoring+ingress"
"""What is applied: no operator is needed for it, but for one object, which is left out."""
OPERATORS = {"PodMonitor", "Kafka", "KafkaNodePool", "K8ssandraCluster", "ValkeyCluster", "ScaledObject"}
SERVED = {"ScaledObject"} if binaries.KEDA_CONFIG.is_dir() else set()
"""Operators' kinds that this API server knows."""
SECONDS_MAX = 90.0
PODS = "/api/v1/namespaces/starling/pods"


class Plane:
    """A control plane, its nodes, and the manifests on it."""

    def __init__(self, folder: Path, address: str, logs: Path) -> None:
        self.kubeconfig = folder / control_plane.KUBECONFIG
        self.api = Api(folder, address)
        self.nodes = Nodes(self.api, logs)

    def kubectl(self, *arguments: str, told: str = "") -> str:
        return kubectl(self.kubeconfig, *arguments, told=told)

    def await_that(self, holds: Callable[[], object], otherwise: str) -> None:
        """With the nodes at work meanwhile."""

        def look() -> bool:
            self.nodes.step()
            return bool(holds())

        await_that(look, SECONDS_MAX, otherwise)

    def ready(self, name: str) -> int:
        told = self.api.call("GET", f"/apis/apps/v1/namespaces/starling/deployments/{name}")
        return int(told["status"].get("readyReplicas", 0))


def manifests(combination: str, *, without: set[str]) -> str:
    all_of_it = yaml.safe_load_all((BUILT / f"{combination}.yaml").read_text())
    return yaml.safe_dump_all([one for one in all_of_it if one["kind"] not in without])


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    with running(control_plane, tmp_path_factory.mktemp("kubernetes") / "plane") as cluster:
        made = Plane(cluster.folder, cluster.addresses[0], tmp_path_factory.mktemp("pods"))
        made.nodes.register()
        if SERVED:
            made.kubectl("apply", "--server-side", f"--filename={binaries.KEDA_CONFIG / 'crd' / 'bases'}")
        namespace, *_ = yaml.safe_load_all((BUILT / f"{WHOLE}.yaml").read_text())
        assert namespace["kind"] == "Namespace"
        made.kubectl("apply", "--server-side", "--filename=-", told=yaml.safe_dump(namespace))
        made.kubectl(
            *("apply", "--server-side", "--filename=-"), told=manifests(WHOLE, without=OPERATORS | {"Namespace"})
        )
        try:
            yield made
        finally:
            made.nodes.close()


def test_all_deployments_come_up_under_pod_security_restricted(plane: Plane) -> None:
    wanted = {one["metadata"]["name"] for one in plane.api.items("/apis/apps/v1/namespaces/starling/deployments")}
    assert {"edge", "fanout-svc", "fanout-svc-slow", "graph-svc", "timeline-svc", "tweet-svc"} == wanted
    plane.await_that(
        lambda: all(plane.ready(name) >= 1 for name in wanted),
        "not all Deployments have pods that are ready",
    )


def test_pods_are_spread_over_the_zones(plane: Plane) -> None:
    plane.await_that(lambda: plane.ready("timeline-svc") == 2, "the autoscaler's least isn't there")
    selector = "?labelSelector=app.kubernetes.io/name%3Dtimeline-svc"
    assert len({pod["spec"]["nodeName"] for pod in plane.api.items(PODS + selector)}) == 2


def test_a_pod_that_isnt_restricted_is_refused(plane: Plane) -> None:
    pod = {"metadata": {"name": "root"}, "spec": {"containers": [{"name": "root", "image": "starling:0.1.0"}]}}
    with pytest.raises(requests.HTTPError, match="violates PodSecurity") as refused:
        plane.api.call("POST", PODS, pod)
    assert refused.value.response.status_code == 403


def test_an_eviction_waits_for_the_budget(plane: Plane) -> None:
    plane.await_that(lambda: plane.ready("timeline-svc") == 2, "the autoscaler's least isn't there")
    first, second = plane.api.items(PODS + "?labelSelector=app.kubernetes.io/name%3Dtimeline-svc")

    def evict(pod: dict[str, dict[str, str]]) -> None:
        name = pod["metadata"]["name"]
        plane.api.call("POST", f"{PODS}/{name}/eviction", {"metadata": {"name": name}})

    plane.await_that(lambda: _allowed(plane, "timeline-svc") == 1, "the budget isn't known")
    evict(first)
    with pytest.raises(requests.HTTPError, match="disruption budget") as refused:
        evict(second)
    assert refused.value.response.status_code == 429
    plane.await_that(lambda: _allowed(plane, "timeline-svc") == 1, "the evicted pod has no successor")
    evict(second)


def _allowed(plane: Plane, name: str) -> int:
    told = plane.api.call("GET", f"/apis/policy/v1/namespaces/starling/poddisruptionbudgets/{name}")
    return int(told.get("status", {}).get("disruptionsAllowed", 0))


@pytest.mark.parametrize("combination", sorted(path.stem for path in BUILT.glob("*.yaml")))
def test_the_server_would_take_every_combination(plane: Plane, combination: str) -> None:
    # The same Job with another template is refused: an upgrade comes when the last one has made room.
    plane.kubectl("delete", "job", "migrate", "--namespace=starling", "--ignore-not-found", "--cascade=background")
    plane.kubectl(
        *("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "--filename=-"),
        told=manifests(combination, without=OPERATORS - SERVED),
    )
