"""Fan-out that is behind: big authors' tasks wait, then thresholds fall, and rise again."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from graph_svc.pressure import Pressure
from mesh.eventlog.topics import FANOUT_TASKS, FANOUT_TASKS_SLOW
from mesh.principals import OPERATOR
from mesh.timelines import port as lists
from starling.graph.v1 import graph_pb2
from tests.cases.test_big_author_cases import mode_of
from tests.cases.test_timeline_cases import people, posts
from tests.harness import Mesh, Sizes, running_mesh


@pytest.fixture
async def mesh(valkey_url: str, key_prefix: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    """Two followers to a bucket; authors are pulled from 8 on, under lag from 4 and then from 2."""
    sizes = Sizes(cap=50, slack=5, bucket_size=2)
    async with running_mesh(valkey_url, tmp_path, key_prefix, sizes) as running:
        await set_policy(running, 8, 2)
        yield running


async def set_policy(mesh: Mesh, threshold: int, minimum: int) -> None:
    policy = graph_pb2.FanoutPolicy(pull_threshold=threshold, pull_threshold_min=minimum)
    await mesh.graph.UpdateFanoutPolicy(graph_pb2.UpdateFanoutPolicyRequest(policy=policy), **mesh.as_(OPERATOR))


async def pressure(mesh: Mesh) -> tuple[bool, int, int]:
    """(big authors' tasks are slow, threshold in force, its changes)"""
    reply = await mesh.graph.GetFanoutPolicy(graph_pb2.GetFanoutPolicyRequest(), **mesh.as_(OPERATOR))
    assert reply.pressure.lag_seconds == mesh.mover.pressure.lag_seconds
    return reply.pressure.big_tasks_slow, reply.pressure.pull_threshold, reply.pressure.changes


async def lag_is(mesh: Mesh, lag_seconds: float | None, for_seconds: int) -> None:
    """Second by second, as graph_svc sees it; readers keep up with the modes."""
    mesh.fanout_lag.seconds = lag_seconds
    for _ in range(for_seconds):
        mesh.clock.advance(1_000)
        await mesh.renew_leases()
        await mesh.move_modes()
    await mesh.watch_modes()


async def authors_with_four_followers(mesh: Mesh, count: int) -> tuple[list[int], list[int]]:
    """The authors, and their followers, who read."""
    everybody = await people(mesh, count + 4)
    authors, followers = everybody[:count], everybody[count:]
    for follower in followers:
        for author in authors:
            await mesh.follow(follower, author)
        await mesh.home(follower)
    await mesh.settle()
    return authors, followers


async def tasks(mesh: Mesh) -> tuple[int, int]:
    """Unacknowledged (tasks, slow tasks)."""
    lag = await mesh.consumer.lag()
    count = {
        t.name: sum(each.messages for each in lag if each.topic == t.name) for t in (FANOUT_TASKS, FANOUT_TASKS_SLOW)
    }
    return count[FANOUT_TASKS.name], count[FANOUT_TASKS_SLOW.name]


async def test_big_authors_tasks_wait_while_fan_out_is_behind(mesh: Mesh) -> None:
    (author,), (reader, *_) = await authors_with_four_followers(mesh, 1)
    posted: list[int] = []
    for lag_seconds, expected in ((0.0, (2, 0)), (9.0, (0, 2)), (None, (0, 2))):
        await lag_is(mesh, lag_seconds, 8)
        posted = [*await posts(mesh, author, 1), *posted]
        await mesh.relay_all()
        await mesh.work_on(await mesh.take(1))
        assert await tasks(mesh) == expected
        await mesh.deliver_all()
        assert await mesh.raw_list(lists.home(reader)) == await mesh.walk(reader) == posted
    assert await pressure(mesh) == (True, 8, 0)
    await lag_is(mesh, 0.0, 62)
    assert await pressure(mesh) == (False, 8, 0)


async def test_small_authors_are_delivered_to_as_ever_while_fan_out_is_behind(mesh: Mesh) -> None:
    author, reader = await people(mesh, 2)
    await mesh.follow(reader, author)
    await mesh.home(reader)
    await mesh.settle()
    await lag_is(mesh, 9.0, 60)
    assert (await pressure(mesh))[:2] == (True, 2)
    posted = await posts(mesh, author, 1)
    await mesh.relay_all()
    await mesh.work_on(await mesh.take(1))
    assert await tasks(mesh) == (0, 0)
    assert await mesh.raw_list(lists.home(reader)) == posted


async def test_a_burst_has_who_posts_pulled_and_pushed_again_and_nobody_misses_anything(mesh: Mesh) -> None:
    (busy, quiet), (reader, *_) = await authors_with_four_followers(mesh, 2)
    posted = await posts(mesh, busy, 2)
    await mesh.deliver_all()
    await lag_is(mesh, 9.0, 21)
    assert await pressure(mesh) == (True, 4, 1)
    assert (await mode_of(mesh, busy), await mode_of(mesh, quiet)) == ("PULL", "PUSH")

    await lag_is(mesh, 9.0, 21)  # Now workers leave followers out.
    posted = [*await posts(mesh, busy, 2), *posted]
    await mesh.deliver_all()
    assert await mesh.walk(reader, 3) == posted
    assert await mesh.raw_list(lists.home(reader)) == posted[2:]
    assert await pressure(mesh) == (True, 2, 2)

    posted = [*await posts(mesh, quiet, 1), *posted]
    await mesh.deliver_all()
    await lag_is(mesh, 9.0, 2)
    assert await mode_of(mesh, quiet) == "PULL", "who begins to post counts, too"

    await lag_is(mesh, 0.0, 62)
    assert await pressure(mesh) == (True, 4, 3)
    assert await mode_of(mesh, busy) == "PULL", "4 is no less than 80 % of 4"
    await lag_is(mesh, 0.0, 60)
    assert await pressure(mesh) == (True, 8, 4)
    assert await mode_of(mesh, busy) == "DRAIN"
    assert await mesh.walk(reader, 3) == posted
    await mesh.settle()
    assert (await mode_of(mesh, busy), await mode_of(mesh, quiet)) == ("PUSH", "PUSH")
    assert await mesh.walk(reader, 3) == await mesh.raw_list(lists.home(reader)) == posted
    states = [await mesh.graph_store.author_state(author) for author in (busy, quiet)]
    assert [state.epoch for state in states if state] == [3, 3], "there, and back through the drain, once"
    await lag_is(mesh, 0.0, 61)
    assert await pressure(mesh) == (False, 8, 4)


async def test_an_operator_forbids_the_threshold_to_fall(mesh: Mesh) -> None:
    (author,), _ = await authors_with_four_followers(mesh, 1)
    await posts(mesh, author, 1)
    await mesh.deliver_all()
    await lag_is(mesh, 9.0, 40)
    assert await mode_of(mesh, author) == "PULL"
    await set_policy(mesh, 8, 8)
    await lag_is(mesh, 9.0, 2)
    assert (await pressure(mesh))[:2] == (True, 8)
    await mesh.settle()
    assert await mode_of(mesh, author) == "PUSH"


async def test_a_log_that_is_away_changes_nothing(mesh: Mesh) -> None:
    await lag_is(mesh, 9.0, 25)
    before = await pressure(mesh)
    assert before == (True, 4, 1)
    await lag_is(mesh, None, 200)
    assert await pressure(mesh) == before


async def test_big_authors_tasks_that_wait_are_lag_but_drains_that_wait_are_not(mesh: Mesh) -> None:
    (author,), (reader, *_) = await authors_with_four_followers(mesh, 1)
    mesh.fanout_lag.slow_seconds = 9.0
    await lag_is(mesh, 0.0, 60)
    assert await pressure(mesh) == (False, 8, 0), "what is slow may wait"
    posted = await posts(mesh, author, 1)
    await mesh.deliver_all()
    await lag_is(mesh, 9.0, 7)
    assert await pressure(mesh) == (True, 8, 0)
    await lag_is(mesh, 0.0, 15)
    assert await pressure(mesh) == (True, 4, 1), "now its lag is that of tasks which followers wait for"
    assert await mode_of(mesh, author) == "PULL"
    mesh.fanout_lag.slow_seconds = 0.0
    await lag_is(mesh, 0.0, 62)
    assert await pressure(mesh) == (True, 8, 2)
    assert await mode_of(mesh, author) == "DRAIN"
    mesh.fanout_lag.slow_seconds = 9.0
    await lag_is(mesh, 0.0, 50)
    assert await pressure(mesh) == (True, 8, 2), "drains wait there"
    await mesh.settle()
    assert await mode_of(mesh, author) == "PUSH"
    assert await mesh.walk(reader, 3) == await mesh.raw_list(lists.home(reader)) == posted


async def test_a_graph_svc_that_starts_in_a_burst_pushes_nobody_again(mesh: Mesh) -> None:
    (busy,), (reader, *_) = await authors_with_four_followers(mesh, 1)
    posted = await posts(mesh, busy, 2)
    await mesh.deliver_all()
    await lag_is(mesh, 9.0, 21)
    assert await mode_of(mesh, busy) == "PULL"
    mesh.mover.pressure = Pressure()  # What a process that starts knows.
    await lag_is(mesh, 9.0, 8)
    assert await mode_of(mesh, busy) == "PULL"
    await lag_is(mesh, 0.0, 130)
    assert (await mode_of(mesh, busy), await pressure(mesh)) == ("DRAIN", (False, 8, 0))
    await mesh.settle()
    assert await mode_of(mesh, busy) == "PUSH"
    assert await mesh.raw_list(lists.home(reader)) == await mesh.walk(reader) == posted
