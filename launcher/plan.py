"""What to start, where, and with which environment."""

import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from launcher import probes
from launcher.children import ROOT, Spec
from launcher.config import (
    PORT_BASE_OFFSET_EDGE,
    PORT_BASE_OFFSET_MORE_WORKERS,
    PORT_BASE_OFFSET_VALKEY,
    LauncherConfig,
)
from launcher.data_folder import DataFolder, Secrets
from mesh.eventlog.topics import FANOUT_TASKS, FANOUT_TASKS_SLOW, TWEET_FANOUT

HOST = "127.0.0.1"
VALKEY = "valkey"
EDGE = "edge"
EDGE_BINARY = ROOT / "build/bin/edge"
EDGE_PORT = 8080
"""Where the page is, if the port is free."""
_BACKLOG = 1_024
SLOW_WORKER = "fanout_svc-slow"
"""Delivers what may wait, with what the others leave of the processor: they never wait for it."""
_DRAIN_SECONDS = "0.1"
"""Nobody else serves here whom clients could turn to meanwhile."""


class NotBuiltError(Exception):
    """The edge has to be built first; the text says how."""


class PortInUseError(Exception):
    """A port that was asked for is taken; the text names the variable."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes in the order to start them; to stop them is the other way round."""

    valkey: Spec | None
    """None: it runs already."""
    valkey_url: str
    graph: Spec
    tweet: Spec
    fanout: tuple[Spec, ...]
    timeline: Spec
    edge: Spec

    @property
    def services(self) -> tuple[Spec, ...]:
        """All but Valkey."""
        return (self.graph, self.tweet, *self.fanout, self.timeline, self.edge)


def make(
    config: LauncherConfig,
    folder: DataFolder,
    secrets: Secrets,
    find_valkey: Callable[[], str],
    inherited: Mapping[str, str],
) -> Plan:
    """The plan; `find_valkey` gives the path of a server binary, if one is to be started. Raises PortInUseError,
    NotBuiltError, and what `find_valkey` raises."""
    if not EDGE_BINARY.exists():
        raise NotBuiltError(f"{EDGE_BINARY.relative_to(ROOT)} isn't there: make it with 'make edge'")
    workers = ["fanout_svc", *(f"fanout_svc-{number}" for number in range(2, config.fanout_workers + 1)), SLOW_WORKER]
    own = [] if config.valkey_url else [VALKEY]
    at = _addresses(["graph_svc", "tweet_svc", *workers, "timeline_svc", *own], config.port_base)
    edge_socket = _edge_socket(config.port_base)
    at[EDGE] = f"{HOST}:{edge_socket.getsockname()[1]}"
    valkey_url = config.valkey_url or f"redis://{at[VALKEY]}/0"
    common = {
        **inherited,
        "STARLING_VALKEY_URL": valkey_url,
        "STARLING_AUTH_SECRET": secrets.auth_secret,
        "STARLING_PAGE_TOKEN_KEYS": secrets.page_token_key,
        "STARLING_TWEET_DATABASE": str(folder.tweet_database.absolute()),
        "STARLING_GRAPH_DATABASE": str(folder.graph_database.absolute()),
        "STARLING_GRAPH_TARGET": at["graph_svc"],
        "STARLING_TWEET_TARGET": at["tweet_svc"],
        "STARLING_TIMELINE_TARGET": at["timeline_svc"],
        "STARLING_FANOUT_TARGETS": ",".join(at[worker] for worker in workers),
        "STARLING_DRAIN_SECONDS": inherited.get("STARLING_DRAIN_SECONDS", _DRAIN_SECONDS),
        "STARLING_ADDRESS_FILE": "",
    }

    def service(name: str) -> Spec:
        module = name.partition("-")[0]
        environment = {**common, "STARLING_LISTEN": at[name]}
        slow = name == SLOW_WORKER
        if module == "fanout_svc":
            taken = [FANOUT_TASKS_SLOW] if slow else [TWEET_FANOUT, FANOUT_TASKS]
            environment["STARLING_FANOUT_TOPICS"] = ",".join(topic.name for topic in taken)
        return Spec(name, at[name], (sys.executable, "-m", module), environment, probes.grpc_service(at[name]), slow)

    return Plan(
        valkey=None if config.valkey_url else _valkey(find_valkey(), at[VALKEY], folder.valkey.absolute(), inherited),
        valkey_url=valkey_url,
        graph=service("graph_svc"),
        tweet=service("tweet_svc"),
        fanout=tuple(service(name) for name in workers),
        timeline=service("timeline_svc"),
        edge=_edge(edge_socket, at[EDGE], common),
    )


def _edge(listening: socket.socket, address: str, common: Mapping[str, str]) -> Spec:
    """It takes over the launcher's socket, which outlives it: who connects while it restarts waits."""
    environment = {
        **common,
        "STARLING_LISTEN": address,
        "STARLING_LISTEN_FD": str(listening.fileno()),
        "STARLING_EDGE_WEB": common.get("STARLING_EDGE_WEB") or str(ROOT / "web"),
    }
    return Spec(EDGE, address, (str(EDGE_BINARY),), environment, probes.http(address), listening=listening)


def without_login(url: str) -> str:
    """As it may be shown."""
    kind, slashes, place = url.partition("://")
    return kind + slashes + place.rpartition("@")[2]


SET_HERE = frozenset(
    {
        *("STARLING_LISTEN", "STARLING_AUTH_SECRET", "STARLING_PAGE_TOKEN_KEYS"),
        *("STARLING_TWEET_DATABASE", "STARLING_GRAPH_DATABASE", "STARLING_GRAPH_TARGET", "STARLING_TWEET_TARGET"),
        *("STARLING_TIMELINE_TARGET", "STARLING_LISTEN_FD"),
        *("STARLING_FANOUT_TARGETS", "STARLING_FANOUT_TOPICS", "STARLING_ADDRESS_FILE"),
    }
)
"""Variables of the services whose value from outside isn't used."""


def _valkey(binary: str, address: str, folder: Path, environment: Mapping[str, str]) -> Spec:
    host, _, port = address.rpartition(":")
    command = (
        binary,
        *("--bind", host, "--port", port, "--protected-mode", "yes", "--daemonize", "no"),
        *("--dir", str(folder), "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
        # Everything that may go has a TTL; streams and locks never go.
        *("--maxmemory-policy", "volatile-lfu", "--loglevel", "warning"),
    )
    return Spec(VALKEY, address, command, environment, probes.valkey(host, int(port)))


def _addresses(names: list[str], base: int) -> dict[str, str]:
    """An address for each process, kept for this launcher's life: who starts again is found at the same place."""
    ports = _fixed_ports(names, base) if base else _free_ports(len(names))
    return {name: f"{HOST}:{port}" for name, port in zip(names, ports, strict=True)}


def _fixed_ports(names: list[str], base: int) -> list[int]:
    offsets = {"graph_svc": 0, "tweet_svc": 1, "fanout_svc": 2, "timeline_svc": 3, VALKEY: PORT_BASE_OFFSET_VALKEY}
    more = [name for name in names if name not in offsets]
    offsets |= {name: PORT_BASE_OFFSET_MORE_WORKERS + index for index, name in enumerate(more)}
    for name in names:
        port = base + offsets[name]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                raise _in_use(name, base, offsets[name], error) from error
    return [base + offsets[name] for name in names]


def _edge_socket(base: int) -> socket.socket:
    """Bound, listening, and open as long as the launcher lives."""
    port = base + PORT_BASE_OFFSET_EDGE if base else EDGE_PORT
    try:
        return socket.create_server((HOST, port), backlog=_BACKLOG)
    except OSError as error:
        if base:
            raise _in_use(EDGE, base, PORT_BASE_OFFSET_EDGE, error) from error
        return socket.create_server((HOST, 0), backlog=_BACKLOG)


def _in_use(name: str, base: int, offset: int, error: OSError) -> PortInUseError:
    return PortInUseError(
        f"port {base + offset} for {name} can't be used ({error.strerror}): it is STARLING_PORT_BASE={base} "
        f"+ {offset}; choose another base, or leave the variable out for free ports"
    )


def _free_ports(count: int) -> list[int]:
    """Different ports that are free now: all are bound before any is let go."""
    with ExitStack() as stack:
        probes_ = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes_:
            probe.bind((HOST, 0))
        return [int(probe.getsockname()[1]) for probe in probes_]
