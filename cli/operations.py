"""Commands for who runs the mesh."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import grpc
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from cli.app import Session, mesh_command, to_json
from cli.failures import line_of
from cli.importing import BATCH_DEFAULT, BATCH_MAX, EdgeFile, ImportReport, import_graph
from launcher.plan import without_login
from mesh.errors import UnavailableError
from mesh.valkey_cluster import connect_to
from starling.fanout.v1 import fanout_pb2
from starling.graph.v1 import graph_pb2
from starling.timeline.v1 import timeline_pb2

_SERVING = "SERVING"
_UINT64_MAX = (1 << 64) - 1


@click.command("import-graph")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--undirected", is_flag=True, help="Each line is two follows, one in each direction.")
@click.option(
    "--batch",
    type=click.IntRange(1, BATCH_MAX),
    default=BATCH_DEFAULT,
    show_default=True,
    help="Follows to a transaction.",
)
@mesh_command
async def import_graph_command(session: Session, file: Path, undirected: bool, batch: int) -> None:
    """Import who follows whom from an edge list.

    FILE has two numbers a line, "u v": u follows v; # and % begin comments. Number n becomes the handle u<n>. May be
    stopped and run again: it ends with the same graph.
    """
    report = ImportReport()
    with _progress() as progress:
        users, follows = progress.add_task("accounts", total=None), progress.add_task("follows", total=None)

        def on_progress(now: ImportReport) -> None:
            nonlocal report
            report = now
            progress.update(users, total=now.users_total, completed=now.users_done)
            progress.update(follows, total=now.edges_total, completed=now.edges_done)

        try:
            await import_graph(
                session.client, EdgeFile(file, undirected=undirected), on_progress=on_progress, batch=batch
            )
        except (asyncio.CancelledError, grpc.aio.AioRpcError):
            progress.stop()
            click.echo(
                f"stopped after {report.users_done:,} accounts, {report.edges_done:,} follows; run it again to go on",
                err=True,
            )
            raise
    session.answer(_import_json(report), *_import_lines(report))


class _RateColumn(ProgressColumn):
    """Steps per second."""

    def render(self, task: Task) -> Text:
        """See rich."""
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f}/s" if speed else "", style="progress.data.speed")


def _progress() -> Progress:
    """Bars on a terminal, nothing elsewhere. On stderr: stdout is for the answer."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(),
        MofNCompleteColumn(),
        _RateColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _import_lines(report: ImportReport) -> list[str]:
    users_rate = report.users_done / max(report.users_seconds, 1e-9)
    follows_rate = report.edges_done / max(report.follows_seconds, 1e-9)
    return [
        f"{report.users_done:,} accounts: {report.users_created:,} new, {report.users_existing:,} existing "
        f"({report.users_seconds:.1f} s, {users_rate:,.0f}/s)",
        f"{report.edges_done:,} follows: {report.follows_created:,} new, {report.follows_existing:,} existing, "
        f"{report.follows_refused:,} refused ({report.follows_seconds:.1f} s, {follows_rate:,.0f}/s)",
    ]


def _import_json(report: ImportReport) -> dict[str, Any]:
    return {
        "users": {
            "created": report.users_created,
            "existing": report.users_existing,
            "seconds": round(report.users_seconds, 3),
        },
        "follows": {
            "created": report.follows_created,
            "existing": report.follows_existing,
            "refused": report.follows_refused,
            "seconds": round(report.follows_seconds, 3),
        },
    }


@click.command()
@click.argument("user", metavar="USER")
@mesh_command
async def rebuild(session: Session, user: str) -> None:
    """Make USER's home list anew from the stores.

    It changes what a page costs, never what it holds.
    """
    viewer = await session.user(user)
    entries = await session.client.rebuild(viewer.user_id)
    session.answer({"entries": entries}, f"Rebuilt the list of @{viewer.handle}, entries: {entries:,}")


@click.command()
@click.argument("user", metavar="USER")
@mesh_command
async def verify(session: Session, user: str) -> None:
    """Hold the first pages of USER's home against what the stores say.

    What is younger than a minute may be in flight, and doesn't count. The exit status is 1 when they differ.
    """
    viewer = await session.user(user)
    found = await session.client.verify(viewer.user_id)
    wrong = [*(f"missing: {i}" for i in found.missing_item_ids), *(f"too much: {i}" for i in found.extra_item_ids)]
    verdict = "differs from the stores" if wrong else "is exact"
    content = {
        "compared": found.compared,
        "missing": [str(i) for i in found.missing_item_ids],
        "extra": [str(i) for i in found.extra_item_ids],
    }
    session.answer(content, f"The home of @{viewer.handle} {verdict}; items compared: {found.compared:,}", *wrong)
    if wrong:
        raise click.exceptions.Exit(1)


_SOURCES = {
    "NONE": "no tweet of @{handle}'s, or of somebody whom they follow",
    "PUSHED": "in the list of @{handle}: pushed, or put there when the list was made or a follow covered",
    "PULLED": "in its author's own list: the author is pulled",
    "UNCOVERED": "in the store: the follow is younger than the list, which will cover it",
    "BELOW_LIST": "in the store, below the list's floor",
    "REBUILT": "in the store: no list serves, it is being made anew",
    "LACKING": "not in the list, where it belongs: on its way if it is younger than a minute, else a fault",
}
_FILTERS = {
    "NONE": "it is shown (but for a retweet, when a newer one of the same tweet is among the last 256)",
    "GONE": "it isn't shown: deleted, or it never was",
    "NOT_FOLLOWED": "it isn't shown: its author isn't followed now",
    "HIDDEN_AUTHOR": "it isn't shown: its author, or the original's, is muted, or blocked either way",
    "REPLY": "it isn't shown: a reply to somebody who isn't followed",
    "ORIGINAL_SHOWN": "it isn't shown: a retweet of what has a place of its own there",
    "ORIGINAL_GONE": "it isn't shown: a retweet of what is gone",
}


@click.command()
@click.argument("user", metavar="USER")
@click.argument("tweet_id", metavar="TWEET", type=click.IntRange(1, _UINT64_MAX))
@mesh_command
async def explain(session: Session, user: str, tweet_id: int) -> None:
    """Say why TWEET is in USER's home, or isn't."""
    viewer = await session.user(user)
    found = await session.client.explain(viewer.user_id, tweet_id)
    source = timeline_pb2.ItemSource.Name(found.source).removeprefix("ITEM_SOURCE_")
    hidden = timeline_pb2.ItemFilter.Name(found.filter).removeprefix("ITEM_FILTER_")
    session.answer(
        {"source": source.lower(), "filter": hidden.lower(), "list_floor": str(found.list_floor)},
        f"Found {_SOURCES[source].format(handle=viewer.handle)}"
        if source not in {"NONE", "LACKING"}
        else f"It is {_SOURCES[source].format(handle=viewer.handle)}",
        f"And {_FILTERS[hidden]}",
    )


@click.command()
@mesh_command
async def status(session: Session) -> None:
    """Show every service's health, fan-out's lag, and its policy.

    The exit status is 1 unless all of them serve.
    """
    health = await session.client.health()
    targets = session.client.targets.named()
    if mesh := session.where.mesh():
        targets["valkey"] = without_login(mesh.valkey_url)
        health["valkey"] = await _valkey_health(mesh.valkey_url)
    faults: list[str] = []
    workers, policy = dict[str, fanout_pb2.GetFanoutStatusResponse](), None
    if session.client.targets.fanout:
        with _noting("fan-out", faults):
            workers = await session.client.fanout_status()
    if health.get("graph_svc") == _SERVING:  # else its health says enough
        with _noting("policy", faults):
            policy = await session.client.fanout_policy()
    content = {
        "services": [{"name": name, "target": targets[name], "status": health[name]} for name in targets],
        "metrics": {name: f"http://{at}/metrics" for name, at in mesh.metrics.items()} if mesh else {},
        "fanout": {name: to_json(worker) for name, worker in workers.items()},
        "policy": _policy_json(policy) if policy else None,
    }
    policy_lines = ["", *_policy_lines(policy)] if policy else []
    session.answer(content, *_health_lines(targets, health), *_fanout_lines(workers), *policy_lines)
    for fault in faults:
        click.echo(fault, err=True)
    if faults or set(health.values()) != {_SERVING}:
        raise click.exceptions.Exit(1)


async def _valkey_health(url: str) -> str:
    valkey = connect_to(url)
    try:
        await valkey.ping()
    except UnavailableError:
        return "UNREACHABLE"
    finally:
        await valkey.close()
    return _SERVING


@contextmanager
def _noting(what: str, faults: list[str]) -> Iterator[None]:
    """A call that fails is a line; what else there is to show is shown."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        faults.append(f"{what}: {line_of(error)}")


def _health_lines(targets: dict[str, str], health: dict[str, str]) -> list[str]:
    width = max(map(len, targets.values()))
    return [
        f"{name:<16}  {target:<{width}}  {click.style(health[name], fg='green' if health[name] == _SERVING else 'red')}"
        for name, target in targets.items()
    ]


def _fanout_lines(workers: dict[str, fanout_pb2.GetFanoutStatusResponse]) -> list[str]:
    if not workers:
        return []
    log = next(iter(workers.values()))
    lines = ["", f"{'topic':<20} {'partition':>9} {'messages behind':>15} {'seconds behind':>14}"]
    lines += [
        f"{lag.topic:<20} {lag.partition:>9} {lag.lag_messages:>15,} {lag.lag_seconds:>14.1f}" for lag in log.partitions
    ]
    lines += [f"dead letters: {log.dead_letters:,}"]
    columns = ("events", "deliveries", "to lists", "retries", "p50 s", "p95 s", "p99 s", "max s")
    lines += ["", f"{'worker':<16} " + " ".join(f"{column:>10}" for column in columns)]
    for name, worker in ((name, answer.worker) for name, answer in workers.items()):
        counts = (worker.events, worker.deliveries, worker.deliveries_to_lists, worker.retries)
        delay = worker.delay
        delays = (delay.p50_seconds, delay.p95_seconds, delay.p99_seconds, delay.max_seconds)
        figures = [*(f"{count:>10,}" for count in counts), *(f"{seconds:>10.3f}" for seconds in delays)]
        lines.append(f"{name:<16} " + " ".join(figures))
    lines.append("(p50 to max: delay from post to a follower's list)")
    return lines


@click.command()
@click.option(
    "--pull-threshold",
    type=click.IntRange(1, _UINT64_MAX),  # What fits the message; graph_svc says what it takes.
    default=None,
    metavar="N",
    help="Pull authors with N followers or more.",
)
@click.option(
    "--pull-threshold-min",
    type=click.IntRange(0, _UINT64_MAX),
    default=None,
    metavar="N",
    help="Under lag the threshold falls no lower than N; 0: 10,000.",
)
@mesh_command
async def policy(session: Session, pull_threshold: int | None, pull_threshold_min: int | None) -> None:
    """Show the policy of fan-out, or set it.

    Authors with as many followers as the pull threshold are pulled by readers instead of pushed to them, and pushed
    again below 80 % of it. Their modes follow a change within seconds. While fan-out is behind, tasks of big authors
    wait for others first, and then the threshold in force falls, for those who post; it rises again afterwards.
    """
    reply = await session.client.fanout_policy()
    wanted = {"pull_threshold": pull_threshold, "pull_threshold_min": pull_threshold_min}
    given = {name: value for name, value in wanted.items() if value is not None}
    if given:
        for name, value in given.items():
            setattr(reply.policy, name, value)
        await session.client.set_fanout_policy(reply.policy)
        reply = await session.client.fanout_policy()
    session.answer(_policy_json(reply), *_policy_lines(reply))


def _policy_json(reply: graph_pb2.GetFanoutPolicyResponse) -> dict[str, Any]:
    return to_json(reply.policy) | {"pressure": to_json(reply.pressure)}


def _policy_lines(reply: graph_pb2.GetFanoutPolicyResponse) -> list[str]:
    minimum = reply.policy.pull_threshold_min
    under_lag = f", no lower than {minimum:,} under lag" if minimum else ""
    pressure = reply.pressure
    stage = "big authors' tasks wait" if pressure.big_tasks_slow else "none"
    return [
        f"pull threshold: {reply.policy.pull_threshold:,} followers{under_lag}",
        f"pressure: {stage}; {pressure.lag_seconds:.1f} s behind; {pressure.pull_threshold:,} followers in force, "
        f"changed {pressure.changes:,} times",
    ]


COMMANDS: tuple[click.Command, ...] = (import_graph_command, policy, status, rebuild, verify, explain)
