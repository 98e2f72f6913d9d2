"""The production backends on this machine: `python -m backends up [NODES] | down | status`.

`up` is idempotent, and safe beside another one; it prints where everything is, and writes it to
`build/backends/environment`, for a shell to source. `down` stops what `up` started, and leaves nothing.

Exit status: 0, or 1 with a line that says what to do.
"""

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from backends import cassandra, kafka, valkey_cluster
from backends.servers import BackendError, Cluster, locked, remember, remembered

FOLDER = Path(__file__).resolve().parents[1] / "build" / "backends"
BACKENDS = (cassandra, kafka, valkey_cluster)
_LOCK_SECONDS_MAX = 600.0


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m backends", description="The production backends, on loopback.")
    parser.add_argument("command", choices=("up", "down", "status"))
    parser.add_argument("nodes", nargs="?", type=int, choices=(1, 3), default=1, help="how many of each (up)")
    asked = parser.parse_args(arguments)
    try:
        with locked(FOLDER.with_suffix(".lock"), _LOCK_SECONDS_MAX):
            {"up": up, "down": down, "status": status}[asked.command](asked.nodes)
    except BackendError as error:
        print(f"backends: {error}", file=sys.stderr)
        return 1
    return 0


def up(nodes: int) -> None:
    """Start what doesn't run; what is there but incomplete is started anew."""
    for backend in BACKENDS:
        folder = FOLDER / backend.NAME
        before = remembered(folder)
        if before.nodes and before.nodes != nodes and all_run(before):
            raise BackendError(f"{backend.NAME} runs with {before.nodes} nodes: run 'make backends-down' first")
        if not before.nodes or not all_run(before):
            before.stop()
            print(f"Starting {backend.NAME}", flush=True)
            remember(backend.start(folder, nodes))
    (FOLDER / "environment").write_text("\n".join(exports()) + "\n")
    status(nodes)
    print(f"\nFor the services, or as a file to source, {FOLDER / 'environment'}:\n", *exports(), sep="\n  ")


def down(_nodes: int) -> None:
    """Stop what was started here, and remove what it kept."""
    for backend in BACKENDS:
        remembered(FOLDER / backend.NAME).stop()
    shutil.rmtree(FOLDER, ignore_errors=True)
    print("Backends are down")


def status(_nodes: int) -> None:
    """Say what runs, and where."""
    for backend in BACKENDS:
        cluster = remembered(FOLDER / backend.NAME)
        running = sum(server.alive() for server in cluster.servers)
        if not cluster.servers:
            print(f"{backend.NAME:<10} down")
            continue
        pids = " ".join(str(server.pid) for server in cluster.servers)
        print(
            f"{backend.NAME:<10} {running} of {len(cluster.servers)} run  {','.join(cluster.addresses)}  (pids {pids})"
        )


def exports() -> list[str]:
    """What a shell is to source."""
    told = [remembered(FOLDER / backend.NAME).environment for backend in BACKENDS]
    return [f"export {name}={shlex.quote(value)}" for one in told for name, value in one.items()]


def all_run(cluster: Cluster) -> bool:
    """Whether all of its servers do."""
    return bool(cluster.servers) and all(server.alive() for server in cluster.servers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
