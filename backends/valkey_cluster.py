"""A Valkey cluster: three masters; with three nodes each, six servers, a replica to each master.

One master alone would hold all slots: no test on it could meet a batch that spans nodes.
"""

import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from backends.servers import HOST, Cluster, MissingToolError, Server, free_ports, start_all, undone_on_error
from launcher.valkey_server import NoValkeyServerError, find_valkey_server
from mesh.valkey_cluster import SCHEME

NAME = "valkey"
_MASTERS = 3
_SLOTS = 16_384
_START_SECONDS_MAX = 60.0
_CALL_SECONDS = 2.0
_NODE_TIMEOUT_MS = 2_000


def start(folder: Path, nodes: int, *, bound: bool = False) -> Cluster:
    """See `backends.servers`."""
    try:
        binary = find_valkey_server()
    except NoValkeyServerError as error:
        raise MissingToolError(str(error)) from error
    count = _MASTERS * (2 if nodes > 1 else 1)
    ports = free_ports(2 * count)
    clients, buses = ports[:count], ports[count:]
    servers = [
        Server(f"{NAME}{i + 1}", _command(binary, client, bus), folder / f"node{i + 1}", bound=bound)
        for i, (client, bus) in enumerate(zip(clients, buses, strict=True))
    ]
    with undone_on_error(folder, servers):
        start_all(servers)
        for server, port in zip(servers, clients, strict=True):
            server.await_that(partial(_answers, port), _START_SECONDS_MAX)
        _form(servers, clients, buses)
    addresses = [f"{HOST}:{port}" for port in clients]
    return Cluster(NAME, folder, nodes, addresses, {"STARLING_VALKEY_URL": SCHEME + ",".join(addresses)}, servers)


def _command(binary: str, port: int, bus: int) -> tuple[str, ...]:
    return (
        *(binary, "--bind", HOST, "--port", str(port), "--cluster-port", str(bus), "--protected-mode", "yes"),
        *("--daemonize", "no", "--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"),
        *("--cluster-node-timeout", str(_NODE_TIMEOUT_MS), "--appendonly", "yes", "--appendfsync", "everysec"),
        *("--save", "", "--maxmemory-policy", "volatile-lfu", "--loglevel", "notice"),
    )


def _form(servers: Sequence[Server], clients: Sequence[int], buses: Sequence[int]) -> None:
    """Slots to the masters, all introduced to the first, replicas to their masters; until every node sees it so."""
    for number, port in enumerate(clients):
        # Each starts with an epoch of its own, so that no two ever have to settle a tie.
        ask(port, "CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
    for number, port in enumerate(clients[:_MASTERS]):
        first, end = number * _SLOTS // _MASTERS, (number + 1) * _SLOTS // _MASTERS
        ask(port, "CLUSTER", "ADDSLOTSRANGE", str(first), str(end - 1))
    for port in clients[1:]:
        ask(port, "CLUSTER", "MEET", HOST, str(clients[0]), str(buses[0]))
    for server, port in zip(servers, clients, strict=True):
        server.await_that(partial(_knows, port, len(clients)), _START_SECONDS_MAX)
    for port, master in zip(clients[_MASTERS:], clients, strict=False):
        ask(port, "CLUSTER", "REPLICATE", ask(master, "CLUSTER", "MYID"))
    for server, port in zip(servers, clients, strict=True):
        server.await_that(partial(_is_settled, port, len(clients)), _START_SECONDS_MAX)


def _answers(port: int) -> bool:
    return ask(port, "PING") == "PONG"


def _knows(port: int, nodes: int) -> bool:
    """Whether it has shaken hands with all, itself included."""
    lines = ask(port, "CLUSTER", "NODES").splitlines()
    return sum("handshake" not in line and "noaddr" not in line for line in lines) == nodes


def _is_settled(port: int, nodes: int) -> bool:
    """Whether the node sees all slots served, and all replicas, and is itself in step if it is one."""
    lines = ask(port, "CLUSTER", "NODES").splitlines()
    replicas = sum(" slave " in line or ",slave " in line for line in lines)
    role = ask(port, "INFO", "replication")
    return (
        "cluster_state:ok" in ask(port, "CLUSTER", "INFO")
        and replicas == nodes - _MASTERS
        and ("role:master" in role or "master_link_status:up" in role)
    )


def ask(port: int, *command: str) -> str:
    """One command to one node; its reply or error as text, empty when it doesn't answer."""
    parts = [part.encode() for part in command]
    request = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
    try:
        with socket.create_connection((HOST, port), _CALL_SECONDS) as connection, connection.makefile("rb") as reply:
            connection.sendall(request)
            line = reply.readline().decode().rstrip()
            if line.startswith("$"):
                return reply.read(max(0, int(line[1:]))).decode()
            return line[1:]
    except OSError:
        return ""
