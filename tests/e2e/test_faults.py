"""Processes die under load: what was acknowledged stays, by a ledger on the client's side, and every walk is exact;
with either log."""

import os
import random
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends import kafka
from tests.e2e.conftest import RunningMesh
from tests.e2e.ledger import people
from tests.running_backends import running
from tests.waiting import eventually


@pytest.fixture(params=["valkey", pytest.param("kafka", marks=pytest.mark.backends)])
def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningMesh]:
    environment = {}
    if request.param == "kafka":
        environment = dict(request.getfixturevalue("kafka_cluster").environment)
        # Two workers, so that one takes over what the other held; and topics of this mesh alone.
        environment |= {"STARLING_FANOUT_WORKERS": "2", "STARLING_KEY_PREFIX": f"e2e{secrets.token_hex(4)}:"}
    mesh = RunningMesh(tmp_path / "data")
    mesh.start(**environment)
    try:
        yield mesh
        assert mesh.stop() == 0, mesh.log()[-5_000:]
    finally:
        mesh.destroy()


@pytest.mark.timeout(300)
async def test_processes_killed_under_load_lose_nothing(mesh: RunningMesh) -> None:
    async with mesh.client() as client:
        ledger = await people(client)
        async with ledger.load():
            for victim in ("fanout_svc", "timeline_svc", "valkey", "tweet_svc", "graph_svc", "valkey"):
                await ledger.more_posts()
                old_pid = mesh.kill(victim)
                await mesh.comes_back(victim, old_pid)
            await ledger.more_posts()
        await ledger.drained()
        await ledger.every_walk_is_exact()
        print(
            f"\nposts acknowledged {len(ledger.posted)} ({ledger.attempts} attempts), lost 0;"
            f" reads {ledger.reads}, failed while timeline_svc or a store was dead {ledger.read_errors}"
        )


@pytest.mark.timeout(300)
async def test_with_valkey_down_posts_succeed_and_reads_are_right(mesh: RunningMesh) -> None:
    async with mesh.client() as client:
        ledger = await people(client)
        chance = random.Random(1)
        for _ in range(20):
            await ledger.write(chance)
        await ledger.drained()
        await ledger.every_walk_is_exact()
        os.kill(mesh.pids["valkey"], signal.SIGSTOP)  # It hangs: worse than if it were gone.
        attempts = ledger.attempts
        for _ in range(20):
            await ledger.write(chance)
        assert ledger.attempts == attempts + 20, "no post fails"
        await ledger.every_walk_is_exact()  # Nothing is in flight for a reader of the stores.
        os.kill(mesh.pids["valkey"], signal.SIGCONT)
        await eventually(ledger.is_exact, 60)  # The log is empty, too, while the relay hasn't noticed yet.


@pytest.mark.backends
@pytest.mark.timeout(300)
async def test_with_all_of_kafka_gone_posts_succeed_and_are_delivered_later(tmp_path: Path) -> None:
    with running(kafka, tmp_path / "kafka") as cluster:
        mesh = RunningMesh(tmp_path / "data")
        mesh.start(**cluster.environment)
        try:
            async with mesh.client() as client:
                ledger = await people(client)
                chance = random.Random(1)
                for _ in range(20):
                    await ledger.write(chance)
                await ledger.drained()
                await ledger.every_walk_is_exact()  # Now everybody's list is made.
                cluster.servers[0].kill()
                attempts = ledger.attempts
                for _ in range(100):
                    await ledger.write(chance)
                    await ledger.read(chance)
                assert ledger.attempts == attempts + 100, "no post fails"
                assert ledger.read_errors == 0
                cluster.servers[0].start()
                await eventually(ledger.is_exact, 60)
                await ledger.drained()
            assert mesh.stop() == 0, mesh.log()[-5_000:]
        finally:
            mesh.destroy()
