"""Processes die under load: what was acknowledged stays, by a ledger on the client's side, and every walk is exact."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import RunningMesh
from tests.e2e.ledger import people


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[RunningMesh]:
    running = RunningMesh(tmp_path / "data")
    running.start()
    try:
        yield running
        assert running.stop() == 0, running.log()[-5_000:]
    finally:
        running.destroy()


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
        await ledger.comes_to_rest()
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
        await ledger.comes_to_rest()
        os.kill(mesh.pids["valkey"], signal.SIGSTOP)  # It hangs: worse than if it were gone.
        attempts = ledger.attempts
        for _ in range(20):
            await ledger.write(chance)
        assert ledger.attempts == attempts + 20, "no post fails"
        await ledger.every_walk_is_exact()  # Nothing is in flight for a reader of the stores.
        os.kill(mesh.pids["valkey"], signal.SIGCONT)
        await ledger.comes_to_rest()
