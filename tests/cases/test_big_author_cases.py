"""Authors with many followers: modes, splits, catch-up (F1, X6)."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from mesh.eventlog.topics import FANOUT_TASKS
from mesh.principals import OPERATOR
from mesh.timelines import port as lists
from starling.graph.v1 import graph_pb2
from tests.cases.test_timeline_cases import people, posts
from tests.harness import Mesh, Sizes, running_mesh
from timeline_svc.core import CATCH_UP_MARGIN_MS


@pytest.fixture
async def mesh(valkey_url: str, key_prefix: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    """Three followers make a celebrity; lists hold many."""
    sizes = Sizes(cap=50, slack=5, bucket_size=2, pull_threshold=3)
    async with running_mesh(valkey_url, tmp_path, key_prefix, sizes) as running:
        yield running


async def time_passes(mesh: Mesh, seconds: int) -> None:
    """Everybody keeps up with the modes meanwhile."""
    mesh.clock.advance(seconds * 1_000)
    await mesh.renew_leases()
    await mesh.watch_modes()


async def mode_of(mesh: Mesh, author: int) -> str:
    state = await mesh.graph_store.author_state(author)
    assert state
    return state.mode.name


async def test_f1_an_author_who_goes_from_push_to_pull_and_back_loses_nothing(mesh: Mesh) -> None:
    author, *others = await people(mesh, 5)
    for follower in others[:2]:
        await mesh.follow(follower, author)
    reader = others[0]
    await mesh.home(reader)
    await mesh.settle()
    posted = await posts(mesh, author, 5)
    await mesh.settle()
    assert (await mode_of(mesh, author), await mesh.walk(reader, 4)) == ("PUSH", posted)

    for follower in others[2:]:
        await mesh.follow(follower, author)
    await mesh.move_modes()
    await time_passes(mesh, 21)
    posted = [*await posts(mesh, author, 5), *posted]
    pushed_before = await mesh.raw_list(lists.home(reader))
    await mesh.settle()
    assert (await mode_of(mesh, author), await mesh.walk(reader, 4)) == ("PULL", posted)
    assert await mesh.raw_list(lists.home(reader)) == pushed_before, "workers left the followers out"

    for follower in others[2:]:
        await mesh.unfollow(follower, author)
    await mesh.move_modes()
    posted = [*await posts(mesh, author, 5), *posted]
    await mesh.settle()
    assert await mode_of(mesh, author) == "PULL", "2 of 3 is no less than 80 % of the threshold"
    await mesh.unfollow(others[1], author)
    await mesh.move_modes()
    assert await mode_of(mesh, author) == "DRAIN"
    assert await mesh.walk(reader, 4) == posted
    await mesh.settle()
    assert (await mode_of(mesh, author), await mesh.walk(reader, 4)) == ("PUSH", posted)
    assert await mesh.raw_list(lists.home(reader)) == posted, "the list has it all again"
    assert len(posted) == len(set(posted)) == 15


async def test_a_pulled_author_is_still_pushed_until_every_reader_must_know(mesh: Mesh) -> None:
    author, *others = await people(mesh, 5)
    for follower in others:
        await mesh.follow(follower, author)
    await mesh.home(others[0])
    await mesh.warm_all()
    await mesh.move_modes()
    mesh.clock.advance(14_000)  # This reader has heard nothing yet, and believes what it knew.
    await mesh.renew_leases()
    (first,) = await posts(mesh, author, 1)
    await mesh.deliver_all()
    assert await mesh.walk(others[0]) == [first]
    mesh.clock.advance(7_000)  # Now workers leave followers out, and the reader knows that it knows nothing.
    await mesh.renew_leases()
    (second,) = await posts(mesh, author, 1)
    await mesh.deliver_all()
    assert await mesh.raw_list(lists.home(others[0])) == [first]
    assert await mesh.walk(others[0]) == [second, first]
    await mesh.watch_modes()
    assert await mesh.walk(others[0]) == [second, first]


async def test_a_pulled_authors_list_is_read_once_a_second_by_one_process(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    author, *others = await people(mesh, 5)
    for follower in others:
        await mesh.follow(follower, author)
        await mesh.home(follower)
    await mesh.home(author)
    await mesh.settle()
    await time_passes(mesh, 21)
    await mesh.post(author)
    for _ in range(2):  # The first read has the author's list made.
        for follower in others:
            await mesh.home(follower)
        await mesh.settle()
    reads: list[int] = []
    looks: list[int] = []
    read_many, bounds = mesh.timelines.read_many, mesh.timelines.bounds

    async def counted(keys: Sequence[lists.ListKey], count: int) -> list[lists.ListView | None]:
        reads.append(len(keys))
        return await read_many(keys, count)

    async def looked(keys: Sequence[lists.ListKey]) -> list[int | None]:
        looks.append(len(keys))
        return await bounds(keys)

    monkeypatch.setattr(mesh.timelines, "read_many", counted)
    monkeypatch.setattr(mesh.timelines, "bounds", looked)
    for follower in others * 3:
        await mesh.home(follower)
    assert (reads, looks) == ([1], [1])


async def test_an_operator_moves_the_threshold_and_the_modes_follow(mesh: Mesh) -> None:
    author, *others = await people(mesh, 4)
    for follower in others:
        await mesh.follow(follower, author)
    await mesh.move_modes()
    assert await mode_of(mesh, author) == "PULL"
    policy = graph_pb2.FanoutPolicy(pull_threshold=10)
    operator = mesh.as_(OPERATOR)
    await mesh.graph.UpdateFanoutPolicy(graph_pb2.UpdateFanoutPolicyRequest(policy=policy), **operator)
    assert (await mesh.graph.GetFanoutPolicy(graph_pb2.GetFanoutPolicyRequest(), **operator)).policy == policy
    await mesh.settle()
    assert await mode_of(mesh, author) == "PUSH"


async def test_a_drain_interrupted_by_new_followers_leaves_a_pulled_author(mesh: Mesh) -> None:
    author, *others = await people(mesh, 5)
    for follower in others[:3]:
        await mesh.follow(follower, author)
    await mesh.settle()
    for follower in others[:2]:
        await mesh.unfollow(follower, author)
    await mesh.move_modes()
    assert await mode_of(mesh, author) == "DRAIN"
    for follower in others[:2]:
        await mesh.follow(follower, author)
    await mesh.move_modes()
    assert await mode_of(mesh, author) == "PULL"
    await mesh.settle()  # The old epoch's tasks come in.
    assert await mode_of(mesh, author) == "PULL"


async def test_x6_a_big_authors_delivery_spreads_over_partitions(
    valkey_url: str, key_prefix: str, tmp_path: Path
) -> None:
    assert FANOUT_TASKS.partitions == 16
    sizes = Sizes(bucket_size=1_000, stream_chunk=500, pull_threshold=100_000)
    async with running_mesh(valkey_url, tmp_path, key_prefix, sizes) as mesh:
        author, reader = await people(mesh, 2)
        await followers(mesh, author, 9_999)
        await mesh.follow(reader, author)
        await mesh.home(reader)
        await mesh.warm_all()
        (posted,) = await posts(mesh, author, 1)
        await mesh.relay_all()
        await mesh.work_on(await mesh.take(1))
        lag = [each for each in await mesh.consumer.lag() if each.topic == FANOUT_TASKS.name and each.messages]
        assert sum(each.messages for each in lag) == 10
        assert len(lag) >= 4
        await mesh.deliver_all()
        assert mesh.figures.deliveries == 10_000
        assert await mesh.raw_list(lists.home(reader)) == [posted]


async def test_g3_followers_beyond_one_message_are_all_delivered_to(
    valkey_url: str, key_prefix: str, tmp_path: Path
) -> None:
    sizes = Sizes(bucket_size=10_000, stream_chunk=4_096, pull_threshold=100_000, message_bytes=65_536)
    async with running_mesh(valkey_url, tmp_path, key_prefix, sizes) as mesh:
        (author,) = await people(mesh, 1)
        await followers(mesh, author, 10_000)
        await posts(mesh, author, 1)
        await mesh.deliver_all()
        assert mesh.figures.deliveries == 10_000


async def test_several_tweets_of_an_author_are_delivered_in_one_pass(mesh: Mesh) -> None:
    author, follower = await people(mesh, 2)
    await mesh.follow(follower, author)
    await mesh.home(follower)
    await mesh.warm_all()
    posted = await posts(mesh, author, 4)
    await mesh.relay_all()
    batches = await mesh.worker.batches(await mesh.take(10))
    assert [sorted(batch.tweet_ids, reverse=True) for batch in batches] == [posted]
    await mesh.worker.process(batches[0])
    assert await mesh.raw_list(lists.home(follower)) == posted
    assert not any(lag.messages for lag in await mesh.consumer.lag())


async def test_catch_up_brings_what_came_since_and_what_came_late(mesh: Mesh) -> None:
    author, follower = await people(mesh, 2)
    await mesh.follow(follower, author)
    old = await posts(mesh, author, 2)
    mesh.clock.advance(CATCH_UP_MARGIN_MS + 1_000)
    await mesh.renew_leases()
    (known,) = await posts(mesh, author, 1)
    since = await posts(mesh, author, 7)
    await mesh.settle()
    assert await mesh.walk(follower, 3, newer_than=known) == [*since, known]
    assert await mesh.walk(follower, 3) == [*since, known, *old]


async def followers(mesh: Mesh, author: int, count: int) -> None:
    """Accounts that only follow, straight into the store."""

    def work(connection: object) -> None:
        assert hasattr(connection, "executemany")
        rows = [(number, f"f{number}", "", 0) for number in range(1, count + 1)]
        connection.executemany(
            "INSERT INTO users (user_id, handle, display_name, created_ms) VALUES (?, ?, ?, ?)", rows
        )

    await mesh.graph_store._database.write(work)
    edges = [(number, author) for number in range(1, count + 1)]
    counts = await mesh.graph_store.import_follows(edges)
    assert counts.created == count
