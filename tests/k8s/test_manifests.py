"""What `kubectl apply` would send, held against the services, the log's topics and the README: nothing runs here.

`make k8s` builds each combination of k8s/combinations.txt into build/k8s, decoded strictly into Kubernetes' own types.
"""

import functools
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings

from fanout_svc.__main__ import FanoutConfig
from graph_svc.__main__ import GraphConfig
from graph_svc.reconcile import ReconcileConfig as GraphReconcileConfig
from mesh.eventlog import topics
from mesh.eventlog.kafka import Kafka
from mesh.migrate import MigrateConfig
from timeline_svc.__main__ import TimelineConfig
from timeline_svc.reconcile import ReconcileConfig as TimelineReconcileConfig
from tweet_svc.__main__ import TweetConfig

Object = dict[str, Any]
ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "k8s"
TOOL = ROOT / "build" / "bin" / "manifests"
PROGRAMS: dict[str, type[BaseSettings]] = {
    "graph_svc": GraphConfig,
    "tweet_svc": TweetConfig,
    "timeline_svc": TimelineConfig,
    "fanout_svc": FanoutConfig,
    "mesh.migrate": MigrateConfig,
    "graph_svc.reconcile": GraphReconcileConfig,
    "timeline_svc.reconcile": TimelineReconcileConfig,
}
NAME, PART_OF = "app.kubernetes.io/name", "app.kubernetes.io/part-of"
SECRETS = {"STARLING_AUTH_SECRET": "s" * 32, "STARLING_PAGE_TOKEN_KEYS": "s" * 32}
"""Of a combination that brings none of its own."""
NIGHTLY = {("reconcile-timelines", "tweet-svc")}
"""Calls that aren't a service's: the README's table leaves them out."""


def combinations() -> list[str]:
    lines = (line.partition("#")[0].split() for line in (ROOT / "k8s/combinations.txt").read_text().splitlines())
    return ["+".join(parts).replace("/", "-") for parts in lines if parts]


COMBINATIONS = pytest.mark.parametrize("combination", combinations())


@functools.cache
def objects(combination: str) -> list[Object]:
    path = BUILT / f"{combination}.yaml"
    assert path.exists(), "make k8s builds it"
    return list(yaml.safe_load_all(path.read_text()))


def of_kind(combination: str, *kinds: str) -> list[Object]:
    return [one for one in objects(combination) if one["kind"] in kinds]


def named(combination: str, kind: str, name: str) -> Object:
    (found,) = (one for one in of_kind(combination, kind) if one["metadata"]["name"] == name)
    return found


def pod_of(workload: Object) -> Object:
    spec = workload["spec"]
    template = (spec["jobTemplate"]["spec"] if workload["kind"] == "CronJob" else spec)["template"]
    return dict(template)


def workloads(combination: str, *, ours: bool = False) -> list[Object]:
    found = of_kind(combination, "Deployment", "StatefulSet", "Job", "CronJob")
    return [one for one in found if not ours or PART_OF in pod_of(one)["metadata"]["labels"]]


def environment(combination: str, container: Object) -> dict[str, str]:
    """As the kubelet would make it."""
    made: dict[str, str] = {}

    def source(kind: str, name: str) -> Mapping[str, str]:
        found = [one for one in of_kind(combination, kind) if one["metadata"]["name"] == name]
        if not found:
            assert (kind, name) == ("Secret", "starling"), f"{kind} {name} isn't there"
            return SECRETS
        return found[0]["data"] if kind == "ConfigMap" else _decoded(found[0])

    for each in container.get("envFrom", ()):
        ((how, at),) = each.items()
        made |= source({"configMapRef": "ConfigMap", "secretRef": "Secret"}[how], at["name"])
    for each in container.get("env", ()):
        if "value" in each:
            made[each["name"]] = each["value"]
        else:
            ((how, at),) = each["valueFrom"].items()
            made[each["name"]] = source({"configMapKeyRef": "ConfigMap", "secretKeyRef": "Secret"}[how], at["name"])[
                at["key"]
            ]
    return made


def _decoded(secret: Object) -> dict[str, str]:
    import base64  # noqa: PLC0415

    return {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    exact = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    within = (labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ()))
    return exact and all(within)


def edge_knows() -> tuple[set[str], set[str]]:
    """The variables of edge/config.go, and those that it can't do without."""
    text = (ROOT / "edge/config.go").read_text()
    plain = re.findall(r'e\.(?:text|list|number|seconds|needed)\("(\w+)"', text)
    rates = [f"{name}{end}" for name in re.findall(r'e\.rate\("(\w+)"', text) for end in ("_PER_SECOND", "_BURST")]
    needed = [*re.findall(r'e\.needed\("(\w+)"', text), "FANOUT_TARGETS"]
    return {f"STARLING_{name}" for name in (*plain, *rates)}, {f"STARLING_{name}" for name in needed}


@COMBINATIONS
def test_every_pod_is_restricted_and_asks_for_what_it_needs(combination: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for workload in workloads(combination):
        spec = pod_of(workload)["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, "a Service's name must not become somebody's variable"
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys() & container["resources"]["limits"]
            tag = container["image"].rpartition(":")[2]
            assert re.fullmatch(r"\d+\.\d+\.\d+", tag), container["image"]
            if PART_OF in pod_of(workload)["metadata"]["labels"]:
                assert context["readOnlyRootFilesystem"] is True
                assert tag == version


@COMBINATIONS
def test_every_server_is_probed_and_has_a_port_for_metrics(combination: str) -> None:
    for workload in of_kind(combination, "Deployment"):
        (container,) = pod_of(workload)["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["metrics"] == 9090
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[probe]
            if container["image"].partition(":")[0].endswith("starling"):
                assert asked["grpc"]["port"] == ports["grpc"]
            else:
                assert asked["httpGet"]["port"] in ports


@COMBINATIONS
def test_every_program_accepts_its_environment_and_knows_all_of_it(
    combination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge_variables, edge_needs = edge_knows()
    for workload in workloads(combination, ours=True):
        (container,) = pod_of(workload)["spec"]["containers"]
        told = environment(combination, container)
        if "args" not in container:
            assert told.keys() <= edge_variables | {"GOMEMLIMIT"}
            assert edge_needs <= told.keys()
            loopback = told["STARLING_LISTEN"].startswith("127.")
            assert loopback or "STARLING_EDGE_JWKS_URL" in told or not combination.startswith("overlays")
            continue
        program = PROGRAMS[container["args"][0]]
        assert told.keys() <= {f"STARLING_{field.upper()}" for field in program.model_fields}
        with monkeypatch.context() as patched:
            for variable, value in (told | {k: v for k, v in SECRETS.items() if told.get(k) == "change-me"}).items():
                patched.setenv(variable, value)
            program()


def test_productions_placeholders_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (container,) = pod_of(named("overlays-production", "Deployment", "timeline-svc"))["spec"]["containers"]
    for variable, value in environment("overlays-production", container).items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValidationError) as refused:
        TimelineConfig()
    assert {error["loc"][0] for error in refused.value.errors()} == {"auth_secret", "page_token_keys"}


@COMBINATIONS
def test_a_pod_has_time_to_finish(combination: str) -> None:
    for workload in of_kind(combination, "Deployment"):
        spec = pod_of(workload)["spec"]
        told = environment(combination, spec["containers"][0])
        drain, grace = float(told["STARLING_DRAIN_SECONDS"]), float(told["STARLING_GRACE_SECONDS"])
        drain += float(told.get("STARLING_EDGE_DRAIN_SECONDS", 0))
        assert spec["terminationGracePeriodSeconds"] > drain + 2 * grace


@COMBINATIONS
def test_every_target_is_a_service_with_pods_behind_it(combination: str) -> None:
    pods = [pod_of(workload) for workload in of_kind(combination, "Deployment")]
    for workload in workloads(combination, ours=True):
        (container,) = pod_of(workload)["spec"]["containers"]
        for value in environment(combination, container).values():
            for name, port in re.findall(r"dns:///([\w-]+):(\d+)", value):
                service = named(combination, "Service", name)["spec"]
                assert service["clusterIP"] == "None"
                assert [one["port"] for one in service["ports"]] == [int(port)]
                behind = [
                    pod for pod in pods if matches({"matchLabels": service["selector"]}, pod["metadata"]["labels"])
                ]
                listening = {one["name"]: one["containerPort"] for one in behind[0]["spec"]["containers"][0]["ports"]}
                assert listening[service["ports"][0]["targetPort"]] == int(port)


@COMBINATIONS
def test_what_is_named_is_there(combination: str) -> None:
    classes = {one["metadata"]["name"] for one in of_kind(combination, "PriorityClass")}
    accounts = {one["metadata"]["name"] for one in of_kind(combination, "ServiceAccount")}
    for workload in workloads(combination, ours=True):
        spec = pod_of(workload)["spec"]
        assert spec["priorityClassName"] in classes
        assert spec["serviceAccountName"] in accounts
    for account in of_kind(combination, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


@COMBINATIONS
def test_an_eviction_leaves_a_server_and_each_budget_is_one_deployments(combination: str) -> None:
    budgets = of_kind(combination, "PodDisruptionBudget")
    for workload in of_kind(combination, "Deployment"):
        labels = pod_of(workload)["metadata"]["labels"]
        (budget,) = (one for one in budgets if matches(one["spec"]["selector"], labels))
        assert budget["metadata"]["name"] == workload["metadata"]["name"]
        assert budget["spec"]["maxUnavailable"] == 1


@COMBINATIONS
def test_one_thing_says_how_many_pods_there_are(combination: str) -> None:
    scaled = [
        (one["spec"]["scaleTargetRef"]["name"], one["spec"].get("minReplicas", one["spec"].get("minReplicaCount")))
        for one in of_kind(combination, "HorizontalPodAutoscaler", "ScaledObject")
    ]
    least = 1 if combination.startswith("overlays-kind") else 2
    assert len(dict(scaled)) == len(scaled)
    assert all(minimum >= least for _, minimum in scaled)
    for workload in of_kind(combination, "Deployment"):
        by_scaler = workload["metadata"]["name"] in dict(scaled)
        assert ("replicas" in workload["spec"]) is not by_scaler
        assert by_scaler or workload["spec"]["replicas"] >= least


def lag_numbers(scaler: Object) -> dict[str, tuple[str, str]]:
    """Of each topic the consumer group and the threshold."""
    if scaler["kind"] == "ScaledObject":
        told = (trigger["metadata"] for trigger in scaler["spec"]["triggers"])
        return {one["topic"]: (one["consumerGroup"], one["lagThreshold"]) for one in told}
    external = [metric["external"] for metric in scaler["spec"]["metrics"]]
    chosen = ((one["metric"]["selector"]["matchLabels"], one["target"]["averageValue"]) for one in external)
    return {labels["topic"]: (labels["consumergroup"], value) for labels, value in chosen}


def lag_scalers(combination: str) -> dict[str, Object]:
    found = of_kind(combination, "HorizontalPodAutoscaler", "ScaledObject")
    by_name = {one["spec"]["scaleTargetRef"]["name"]: one for one in found}
    return {name: one for name, one in by_name.items() if name.startswith("fanout-svc")}


@COMBINATIONS
def test_workers_scale_on_the_lag_of_the_topics_that_they_take(combination: str) -> None:
    log = Kafka.at("kafka://127.0.0.1:9092", prefix="", lists_life=None)
    partitions = {
        topic.name: topic.partitions for topic in (topics.TWEET_FANOUT, topics.FANOUT_TASKS, topics.FANOUT_TASKS_SLOW)
    }
    scalers = lag_scalers(combination)
    assert len(scalers) == (2 if "kafka" in combination or "overlays" in combination else 0)
    for name, scaler in scalers.items():
        (container,) = pod_of(named(combination, "Deployment", name))["spec"]["containers"]
        taken = environment(combination, container)["STARLING_FANOUT_TOPICS"].split(",")
        numbers = lag_numbers(scaler)
        assert sorted(numbers) == sorted(taken)
        assert {group for group, _ in numbers.values()} == {log.group(topics.FANOUT_WORKERS, topic) for topic in taken}
        most = scaler["spec"].get("maxReplicaCount") or scaler["spec"]["maxReplicas"]
        assert most == max(partitions[topic] for topic in taken)


@COMBINATIONS
def test_keda_asks_the_kafka_that_the_services_use(combination: str) -> None:
    for scaler in of_kind(combination, "ScaledObject"):
        (container,) = pod_of(named(combination, "Deployment", scaler["spec"]["scaleTargetRef"]["name"]))["spec"][
            "containers"
        ]
        log = environment(combination, container)["STARLING_EVENTLOG_URL"]
        for trigger in scaler["spec"]["triggers"]:
            asked = trigger["metadata"]["bootstrapServers"]
            assert asked.partition(".")[0].partition(":")[0] == log.removeprefix("kafka://").partition(":")[0]
            # KEDA lives in another namespace, where a short name is another service's.
            assert re.fullmatch(r"[\w-]+\.starling\.svc:\d+", asked)
            assert trigger["metadata"]["offsetResetPolicy"] == "earliest"
        assert scaler["spec"]["fallback"]["replicas"] >= 2


def test_an_overlays_word_counts_more_than_a_components() -> None:
    """A laptop has one broker, and production one address for all nodes: kustomize's generators would lose both."""
    told = {
        combination: environment(
            combination, pod_of(named(combination, "Deployment", "tweet-svc"))["spec"]["containers"][0]
        )
        for combination in ("overlays-kind", "overlays-production")
    }
    assert told["overlays-kind"]["STARLING_EVENTLOG_URL"].endswith("?replication=1")
    assert told["overlays-production"]["STARLING_EVENTLOG_URL"].startswith("kafka://starling-kafka-bootstrap:")
    assert told["overlays-production"]["STARLING_CASSANDRA_LOCAL_DC"] == "datacenter1"


def test_both_kinds_of_scaler_have_the_same_numbers() -> None:
    keda = lag_scalers("base+cassandra+kafka+keda+valkey-cluster")
    plain = lag_scalers("base+cassandra+kafka+hpa-only")
    for name, scaler in keda.items():
        assert lag_numbers(scaler) == lag_numbers(plain[name])
        behaviour = scaler["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behaviour == plain[name]["spec"]["behavior"]
        assert behaviour["scaleDown"]["stabilizationWindowSeconds"] == 300


def called() -> set[tuple[str, str]]:
    """The README's table: (caller, service); a user or an operator comes through the edge."""
    rows = re.findall(r"^\| (\w+) \| (\w+_svc) \| \w+(?: ⇉)? \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    through = {"user": "edge", "operator": "edge"}
    return {(through.get(caller, caller).replace("_", "-"), callee.replace("_", "-")) for caller, callee in rows}


def allowed(combination: str, direction: str) -> Iterator[tuple[str, str]]:
    """(who, whom) of all pods of ours, by the policies of one direction alone."""
    names = {pod_of(one)["metadata"]["labels"][NAME] for one in workloads(combination, ours=True)}
    labels = {name: {NAME: name, PART_OF: "starling"} for name in names}
    for policy in of_kind(combination, "NetworkPolicy"):
        chosen = [name for name in names if matches(policy["spec"]["podSelector"], labels[name])]
        for rule in policy["spec"].get(direction.lower(), ()):
            for peer in rule["from" if direction == "Ingress" else "to"]:
                if peer.keys() == {"podSelector"}:
                    others = [name for name in names if matches(peer["podSelector"], labels[name])]
                    pairs = [(one, other) for one in chosen for other in others]
                    yield from (pair[::-1] if direction == "Ingress" else pair for pair in pairs)


@pytest.mark.parametrize("combination", ["overlays-production", "overlays-kind+network-policies+monitoring"])
def test_network_policies_allow_the_readmes_calls_and_no_others(combination: str) -> None:
    deny = named(combination, "NetworkPolicy", "default-deny")["spec"]
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in deny
    assert "egress" not in deny
    assert len(called()) > 8
    for direction in ("Ingress", "Egress"):
        assert set(allowed(combination, direction)) == called() | NIGHTLY


@pytest.mark.parametrize("combination", ["overlays-production", "overlays-kind+network-policies+monitoring"])
def test_network_policies_let_each_program_to_the_stores_that_it_is_told_of(combination: str) -> None:
    wanted = {
        "valkey": "STARLING_VALKEY_URL",
        "kafka": "STARLING_EVENTLOG_URL",
        "cassandra": "STARLING_CASSANDRA_CONTACT_POINTS",
    }
    takes_no_log = {"timeline-svc", "reconcile-timelines"}
    for store, variable in wanted.items():
        selector = named(combination, "NetworkPolicy", f"to-{store}")["spec"]["podSelector"]
        for workload in workloads(combination, ours=True):
            pod = pod_of(workload)
            told = variable in environment(combination, pod["spec"]["containers"][0])
            name = pod["metadata"]["labels"][NAME]
            assert matches(selector, pod["metadata"]["labels"]) == (
                told and not (store == "kafka" and name in takes_no_log)
            )


def test_a_misspelt_field_fails_the_build(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s", ignore=shutil.ignore_patterns("tools", "tests"))
    wrong = tmp_path / "k8s/base/edge.yaml"
    wrong.write_text(wrong.read_text().replace("maxUnavailable: 1", "maxUnavailabel: 1"))
    ran = subprocess.run([TOOL, tmp_path / "k8s", tmp_path / "out"], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert 'unknown field "spec.maxUnavailabel"' in ran.stderr
