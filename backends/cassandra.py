"""Cassandra: one node on 127.0.0.1, or three on 127.0.0.1 to 3, which keep a copy each. All have the same ports."""

import os
import socket
from contextlib import suppress
from pathlib import Path
from string import Template

from cassandra import DriverException
from cassandra.cluster import EXEC_PROFILE_DEFAULT, ExecutionProfile, NoHostAvailable
from cassandra.cluster import Cluster as Driver
from cassandra.policies import WhiteListRoundRobinPolicy

from backends.servers import Cluster, Server, free_ports, jars, java, start_all, undone_on_error

NAME = "cassandra"
_HERE = Path(__file__).parent
_POM = _HERE / "cassandra.pom.xml"
_YAML = _HERE / "cassandra.yaml"
_START_SECONDS_MAX = 150.0
_DATA_CENTER = "datacenter1"
"""That of a node which isn't told."""

# As small as it will run. -Xms isn't -Xmx: else all of the heap is pinned at once.
_JVM = (
    f"@{_HERE / 'cassandra.jvm17.options'}",
    *("-Xms64m", "-Xmx512m", "-XX:+UseSerialGC", "-Xss384k", "-XX:MaxDirectMemorySize=128m"),
    *("-XX:MaxMetaspaceSize=160m", "-XX:ReservedCodeCacheSize=96m", "-Djava.net.preferIPv4Stack=true"),
    *(f"-Dlogback.configurationFile={_HERE / 'cassandra.logback.xml'}", "-Dcassandra-foreground=yes"),
    *("-Dcassandra.skip_wait_for_gossip_to_settle=0", "-Dcassandra.ring_delay_ms=2000"),
)


def start(folder: Path, nodes: int, *, bound: bool = False) -> Cluster:
    """See `backends.servers`."""
    program, home_of_jars = java(), jars(_POM)
    classpath = os.pathsep.join(str(jar) for jar in sorted(home_of_jars.glob("*.jar")))
    (agent,) = home_of_jars.glob("jamm-*.jar")
    hosts = [f"127.0.0.{node + 1}" for node in range(nodes)]
    port, storage_port = free_ports(2, "0.0.0.0")
    servers: list[Server] = []
    with undone_on_error(folder, servers):
        for node, host in enumerate(hosts):
            home = folder / f"node{node + 1}"
            home.mkdir(parents=True)
            settings = {"host": host, "port": port, "storage_port": storage_port, "token": _token(node, nodes)}
            settings["seeds"] = ",".join(f"{seed}:{storage_port}" for seed in hosts)
            (home / "cassandra.yaml").write_text(Template(_YAML.read_text()).substitute(settings))
            command = (
                *(program, *_JVM, f"-javaagent:{agent}", f"-Dcassandra.config=file://{home / 'cassandra.yaml'}"),
                *(f"-Dcassandra.storagedir={home}", "-cp", classpath),
                "org.apache.cassandra.service.CassandraDaemon",
            )
            servers.append(Server(f"{NAME}{node + 1}", command, home, bound=bound))
        start_all(servers)
        for server, host in zip(servers, hosts, strict=True):
            server.await_that(lambda host=host: peers(host, port) == nodes - 1, _START_SECONDS_MAX)  # type: ignore[misc]
    environment = {
        "STARLING_CASSANDRA_CONTACT_POINTS": ",".join(hosts),
        "STARLING_CASSANDRA_PORT": str(port),
        "STARLING_CASSANDRA_REPLICATION": f"{{'class': 'NetworkTopologyStrategy', '{_DATA_CENTER}': {nodes}}}",
    }
    return Cluster(NAME, folder, nodes, [f"{host}:{port}" for host in hosts], environment, servers)


def _token(node: int, nodes: int) -> int:
    """Evenly spaced."""
    return -(2**63) + node * (2**64 // nodes)


def peers(host: str, port: int) -> int:
    """How many others a node knows of, when it answers; -1 when it doesn't."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        if probe.connect_ex((host, port)):
            return -1
    profile = ExecutionProfile(load_balancing_policy=WhiteListRoundRobinPolicy([host]), request_timeout=5.0)
    profiles = {EXEC_PROFILE_DEFAULT: profile}
    driver = Driver([host], port=port, protocol_version=4, execution_profiles=profiles, connect_timeout=5.0)
    with suppress(DriverException, NoHostAvailable):
        try:
            return len(list(driver.connect().execute("SELECT peer FROM system.peers")))
        finally:
            driver.shutdown()
    return -1
