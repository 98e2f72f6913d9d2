"""Kafka in KRaft mode: each node is broker and controller. With three, records have three copies, of which two must be
written before a record counts as taken."""

import base64
import os
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kafka import KafkaAdminClient
from kafka.errors import KafkaError

from backends.servers import (
    HOST,
    BackendError,
    Cluster,
    Server,
    free_ports,
    jars,
    java,
    start_all,
    undone_on_error,
)

NAME = "kafka"
T = TypeVar("T")
_HERE = Path(__file__).parent
_POM = _HERE / "kafka.pom.xml"
_LOG4J = _HERE / "kafka.log4j2.properties"
_COPIES = 3
_START_SECONDS_MAX = 90.0
_FORMAT_SECONDS_MAX = 60.0

# Small: beside it live two other backends and the mesh, on a developer's machine.
_JVM = (
    *("-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:MaxDirectMemorySize=64m", "-XX:MaxMetaspaceSize=128m"),
    *("-XX:ReservedCodeCacheSize=64m", "-Xss512k", "-Djava.awt.headless=true"),
    f"-Dlog4j2.configurationFile={_LOG4J}",
)


def start(folder: Path, nodes: int, *, bound: bool = False) -> Cluster:
    """See `backends.servers`."""
    program = java()
    classpath = os.pathsep.join(str(jar) for jar in sorted(jars(_POM).glob("*.jar")))
    ports = free_ports(2 * nodes)
    clients, controllers = ports[:nodes], ports[nodes:]
    cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    servers: list[Server] = []
    with undone_on_error(folder, servers):
        for node in range(nodes):
            home = folder / f"node{node + 1}"
            home.mkdir(parents=True)
            (home / "server.properties").write_text(_properties(node, home, clients, controllers))
            _format(program, classpath, cluster_id, home)
            command = (program, *_JVM, "-cp", classpath, "kafka.Kafka", str(home / "server.properties"))
            servers.append(Server(f"{NAME}{node + 1}", command, home, bound=bound))
        start_all(servers)
        addresses = [f"{HOST}:{port}" for port in clients]
        for server in servers:
            server.await_that(lambda: brokers(addresses) == nodes and _serves_groups(addresses), _START_SECONDS_MAX)
    url = f"kafka://{','.join(addresses)}" + ("" if nodes >= _COPIES else "?replication=1")
    return Cluster(NAME, folder, nodes, addresses, {"STARLING_EVENTLOG_URL": url}, servers)


def brokers(addresses: list[str]) -> int:
    """How many brokers the cluster knows as alive; 0 when none answers."""
    return _asked(addresses, lambda admin: len(admin.describe_cluster()["brokers"]), 0)


def _serves_groups(addresses: list[str]) -> bool:
    """Whether groups find their coordinator; the first that asks has its topic made."""
    return _asked(addresses, lambda admin: admin.list_group_offsets("ready") is not None, False)


def _asked(addresses: list[str], question: Callable[[KafkaAdminClient], T], otherwise: T) -> T:
    try:
        admin = KafkaAdminClient(bootstrap_servers=addresses, bootstrap_timeout_ms=1_000, request_timeout_ms=2_000)
    except KafkaError:
        return otherwise
    try:
        return question(admin)
    except KafkaError:
        return otherwise
    finally:
        admin.close()


def _format(program: str, classpath: str, cluster_id: str, home: Path) -> None:
    command = (
        *(program, "-Xmx128m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dkafka.loglevel=WARN"),
        *(f"-Dlog4j2.configurationFile={_LOG4J}", "-cp", classpath, "kafka.tools.StorageTool"),
        *("format", "-t", cluster_id, "-c", str(home / "server.properties")),
    )
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_FORMAT_SECONDS_MAX)
    if done.returncode:
        raise BackendError(f"Kafka's storage can't be formatted:\n{done.stdout}{done.stderr}")


def _properties(node: int, home: Path, clients: list[int], controllers: list[int]) -> str:
    nodes = len(clients)
    copies, in_sync_min = (_COPIES, _COPIES - 1) if nodes >= _COPIES else (1, 1)
    settings = {
        "process.roles": "broker,controller",
        "node.id": node + 1,
        "controller.quorum.voters": ",".join(f"{i + 1}@{HOST}:{port}" for i, port in enumerate(controllers)),
        "listeners": f"PLAINTEXT://{HOST}:{clients[node]},CONTROLLER://{HOST}:{controllers[node]}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{clients[node]}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": home / "logs",
        # The mesh makes its topics itself, with the shape that it needs.
        "auto.create.topics.enable": "false",
        "default.replication.factor": copies,
        "min.insync.replicas": in_sync_min,
        "offsets.topic.replication.factor": copies,
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": in_sync_min,
        "transaction.state.log.num.partitions": 4,
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": in_sync_min,
        "share.coordinator.state.topic.num.partitions": 1,
        "group.initial.rebalance.delay.ms": 0,
        # A broker that is gone is noticed within seconds.
        "broker.session.timeout.ms": 6_000,
        "broker.heartbeat.interval.ms": 1_000,
        "num.network.threads": 2,
        "num.io.threads": 4,
        "log.cleaner.dedupe.buffer.size": 16 << 20,
        "log.segment.bytes": 64 << 20,
        "log.index.size.max.bytes": 1 << 20,
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())
