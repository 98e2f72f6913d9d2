"""The GraphStore contract: see `graph_svc/store.py`. Adapters come by the fixture `graph_store` (buckets of 3)."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graph_svc import store as port
from graph_svc.sqlite import SqliteGraphStore
from graph_svc.store import AuthorState, DrainTask, GraphStore, ImportCounts, Mode, User
from mesh.errors import ConfigurationError, FailedPreconditionError, NotFoundError
from tests.conformance.conftest import OpenGraphStore

BUCKET_SIZE = 3


async def sign_up(store: GraphStore, *user_ids: int) -> None:
    for user_id in user_ids:
        assert await store.create_user(User(user_id, f"u{user_id}", f"User {user_id}", 1_000))


async def followers_of(store: GraphStore, author_id: int) -> list[list[int]]:
    """By bucket."""
    state = await store.author_state(author_id)
    assert state
    return [await store.followers(author_id, bucket, 0, 100) for bucket in range(state.bucket_count)]


async def test_a_user_comes_back_by_id_and_by_handle_in_any_case(graph_store: GraphStore) -> None:
    alice = User(2**62, "Alice_1", "Alice", 1_000)
    assert await graph_store.create_user(alice)
    assert await graph_store.users([5, 2**62, 2**64 - 1]) == [alice]
    assert await graph_store.user_by_handle("aLICE_1") == alice
    assert await graph_store.user_by_handle("bob") is None


async def test_a_handle_is_one_users_in_any_case(graph_store: GraphStore) -> None:
    assert await graph_store.create_user(User(1, "alice", "A", 1))
    assert not await graph_store.create_user(User(2, "ALICE", "B", 1))
    assert await graph_store.create_user(User(1, "alice", "A", 1))
    assert await graph_store.users([2]) == []


async def test_of_many_who_want_a_handle_one_gets_it(graph_store: GraphStore) -> None:
    outcomes = await asyncio.gather(*(graph_store.create_user(User(n, "same", "", 1)) for n in range(1, 21)))
    assert sum(outcomes) == 1


async def test_a_follow_stands_on_both_sides_once_with_exact_counts(graph_store: GraphStore) -> None:
    await sign_up(graph_store, 1, 2)
    assert await graph_store.follow(1, 2)
    assert not await graph_store.follow(1, 2)
    assert await graph_store.list_following(1, 0, 10) == [2]
    assert await graph_store.list_followers(2, 0, 10) == [1]
    follower, followee = await graph_store.users([1, 2])
    assert (follower.following_count, follower.follower_count) == (1, 0)
    assert (followee.following_count, followee.follower_count) == (0, 1)


async def test_an_unfollow_ends_both_sides_once(graph_store: GraphStore) -> None:
    await sign_up(graph_store, 1, 2)
    await graph_store.follow(1, 2)
    assert await graph_store.unfollow(1, 2)
    assert not await graph_store.unfollow(1, 2)
    assert await graph_store.list_following(1, 0, 10) == []
    assert await followers_of(graph_store, 2) == [[]]
    assert [u.follower_count + u.following_count for u in await graph_store.users([1, 2])] == [0, 0]


async def test_each_change_takes_a_new_version_and_a_follow_keeps_its_own(graph_store: GraphStore) -> None:
    await sign_up(graph_store, 1, 2, 3)
    await graph_store.follow(1, 3)
    await graph_store.follow(1, 2)
    await graph_store.unfollow(1, 3)
    await graph_store.follow(1, 3)
    await graph_store.follow(1, 2)  # Changes nothing.
    viewer = await graph_store.viewer_context(1)
    assert viewer
    assert (viewer.version, list(viewer.followee_ids), list(viewer.since)) == (4, [2, 3], [2, 4])


async def test_unknown_accounts_are_refused(graph_store: GraphStore) -> None:
    await sign_up(graph_store, 1)
    for pair in ((1, 2), (2, 1), (1, 2**64 - 1)):
        for change in (graph_store.follow, graph_store.unfollow):
            with pytest.raises(NotFoundError):
                await change(*pair)
    assert await graph_store.viewer_context(2) is None
    assert await graph_store.author_state(2) is None


async def test_nobody_follows_more_than_the_limit(graph_store: GraphStore) -> None:
    assert port.FOLLOWEES_MAX == 5_000
    await sign_up(graph_store, 1, *range(10_000, 15_001))
    edges = [(1, user_id) for user_id in range(10_000, 15_001)]
    assert await graph_store.import_follows(edges) == ImportCounts(5_000, 0, 1)
    with pytest.raises(FailedPreconditionError) as refused:
        await graph_store.follow(1, 15_000)
    assert refused.value.reason == "FOLLOW_LIMIT_REACHED"
    assert await graph_store.unfollow(1, 10_000)
    assert await graph_store.follow(1, 15_000)


async def test_buckets_fill_one_after_the_other_and_nobody_moves(graph_store: GraphStore) -> None:
    await sign_up(graph_store, *range(1, 10))
    for follower_id in (9, 2, 8, 3, 7, 4, 6):
        await graph_store.follow(follower_id, 1)
    assert await followers_of(graph_store, 1) == [[2, 8, 9], [3, 4, 7], [6]]
    await graph_store.unfollow(8, 1)
    await graph_store.follow(5, 1)
    await graph_store.follow(8, 1)
    assert await followers_of(graph_store, 1) == [[2, 8, 9], [3, 4, 7], [5, 6]]


async def test_an_import_counts_what_it_did_and_refuses_edge_by_edge(graph_store: GraphStore) -> None:
    await sign_up(graph_store, 1, 2, 3)
    edges = [(1, 2), (2, 1), (1, 1), (1, 99), (99, 1), (1, 2), (3, 1)]
    assert await graph_store.import_follows(edges) == ImportCounts(created=3, existing=1, refused=3)
    assert await graph_store.import_follows(edges) == ImportCounts(created=0, existing=4, refused=3)
    assert await graph_store.list_followers(1, 0, 10) == [2, 3]


async def test_lists_come_in_pages_by_id(graph_store: GraphStore) -> None:
    await sign_up(graph_store, *range(1, 9))
    await graph_store.import_follows([(1, n) for n in range(2, 9)] + [(n, 1) for n in range(2, 9)])
    assert await graph_store.list_following(1, 0, 3) == [2, 3, 4]
    assert await graph_store.list_following(1, 4, 3) == [5, 6, 7]
    assert await graph_store.list_followers(1, 7, 3) == [8]
    assert await graph_store.followers(1, 0, 2, 10) == [3, 4]


pairs = st.tuples(st.booleans(), st.integers(1, 6), st.integers(1, 6))


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=st.lists(pairs, max_size=40))
def test_any_changes_leave_both_sides_equal_and_counts_exact(
    changes: list[tuple[bool, int, int]], graph_store_of: OpenGraphStore
) -> None:
    async def check() -> None:
        async with graph_store_of() as store:
            await _both_sides_stay_equal(store, changes)

    asyncio.run(check())


async def _both_sides_stay_equal(store: GraphStore, changes: list[tuple[bool, int, int]]) -> None:
    users = list(range(1, 7))
    await sign_up(store, *users)
    edges: set[tuple[int, int]] = set()
    for follows, follower_id, followee_id in changes:
        if follower_id == followee_id:
            continue
        change = store.follow if follows else store.unfollow
        assert await change(follower_id, followee_id) == (((follower_id, followee_id) in edges) != follows)
        edges = edges | {(follower_id, followee_id)} if follows else edges - {(follower_id, followee_id)}
    following, followed = Counter(a for a, _ in edges), Counter(b for _, b in edges)
    for user in await store.users(users):
        assert (user.following_count, user.follower_count) == (following[user.user_id], followed[user.user_id])
        in_buckets = [i for bucket in await followers_of(store, user.user_id) for i in bucket]
        assert sorted(in_buckets) == sorted(a for a, b in edges if b == user.user_id)
        viewer = await store.viewer_context(user.user_id)
        assert viewer
        assert list(viewer.followee_ids) == sorted(b for a, b in edges if a == user.user_id)
        assert all(1 <= since <= viewer.version for since in viewer.since)


# Authors' modes.

PULL_FROM, PUSH_BELOW = 3, 2


async def celebrity(store: GraphStore) -> int:
    """An author with 4 followers, in two buckets."""
    await sign_up(store, *range(1, 6))
    await store.import_follows([(follower, 1) for follower in range(2, 6)])
    return 1


async def state_of(store: GraphStore, author_id: int) -> AuthorState:
    state = await store.author_state(author_id)
    assert state
    return state


async def move(store: GraphStore, now_ms: int = 1_000) -> int:
    return await store.move_modes(PULL_FROM, PUSH_BELOW, now_ms)


async def leave(store: GraphStore, author_id: int, *follower_ids: int) -> None:
    for follower_id in follower_ids:
        await store.unfollow(follower_id, author_id)


async def test_an_author_is_pulled_from_the_threshold_and_pushed_again_well_below(graph_store: GraphStore) -> None:
    author = await celebrity(graph_store)
    assert (await state_of(graph_store, author)).mode is Mode.PUSH
    assert await move(graph_store, 5_000) == 1
    assert await state_of(graph_store, author) == AuthorState(Mode.PULL, 1, 5_000, 2)
    await leave(graph_store, author, 2, 3)
    assert await move(graph_store) == 0, "2 followers: below the threshold, not below the lower bound"
    await leave(graph_store, author, 4)
    assert await move(graph_store, 6_000) == 1
    assert await state_of(graph_store, author) == AuthorState(Mode.DRAIN, 2, 6_000, 2)
    assert await move(graph_store) == 0


async def draining(store: GraphStore) -> list[DrainTask]:
    author = await celebrity(store)
    await store.republish_drains("first", 0)
    await move(store)
    await leave(store, author, 2, 3, 4)
    await move(store)
    return await store.unpublished_drains(10)


async def test_a_drain_is_complete_when_each_bucket_of_its_epoch_is(graph_store: GraphStore) -> None:
    tasks = await draining(graph_store)
    assert tasks == [DrainTask(1, 2, 0), DrainTask(1, 2, 1)]
    await graph_store.mark_drains_published(tasks, "first", 7_000)
    assert await graph_store.unpublished_drains(10) == []
    assert not await graph_store.complete_drain(DrainTask(1, 1, 1), 8_000), "another epoch's"
    assert not await graph_store.complete_drain(tasks[0], 8_000)
    assert not await graph_store.complete_drain(tasks[0], 8_000), "again"
    assert await graph_store.complete_drain(tasks[1], 8_000)
    assert (await state_of(graph_store, 1)).mode is Mode.PUSH
    assert not await graph_store.complete_drain(tasks[1], 9_000)
    assert (await state_of(graph_store, 1)).epoch == 3


async def test_a_drain_overtaken_by_new_followers_is_over(graph_store: GraphStore) -> None:
    await draining(graph_store)
    await graph_store.import_follows([(2, 1), (3, 1)])
    assert await move(graph_store, 9_000) == 1
    assert await state_of(graph_store, 1) == AuthorState(Mode.PULL, 3, 9_000, 2)
    for bucket in range(2):
        assert not await graph_store.complete_drain(DrainTask(1, 2, bucket), 9_000)
    assert (await state_of(graph_store, 1)).mode is Mode.PULL


async def test_a_new_incarnation_of_the_log_gets_the_last_hours_drains_again(graph_store: GraphStore) -> None:
    first, second = await draining(graph_store)
    await graph_store.mark_drains_published([first], "first", 1_000)
    await graph_store.mark_drains_published([second], "first", 9_000)
    await graph_store.complete_drain(second, 9_000)
    assert await graph_store.republish_drains("first", 5_000) == 0
    assert await graph_store.republish_drains("second", 5_000) == 1
    assert await graph_store.unpublished_drains(10) == [second], "also though it was done"
    await graph_store.mark_drains_published([second], "first", 9_500)
    assert await graph_store.unpublished_drains(10) == [second], "that log is gone"
    await graph_store.mark_drains_published([second], "second", 9_500)
    await graph_store.prune_drains(10_000)
    assert await graph_store.republish_drains("third", 0) == 2, "a drain that goes on isn't forgotten"


async def test_readers_learn_of_all_and_then_of_what_changed(graph_store: GraphStore) -> None:
    author = await celebrity(graph_store)
    assert await graph_store.pulled_authors(0, 10) == []
    assert await graph_store.mode_sequence() == 0
    await move(graph_store)
    assert await graph_store.pulled_authors(0, 10) == [author]
    (change,) = await graph_store.mode_changes(0, 10)
    assert (change.author_id, change.mode) == (author, Mode.PULL)
    assert await graph_store.mode_changes(change.sequence, 10) == []
    await leave(graph_store, author, 2, 3, 4)
    await move(graph_store)
    assert await graph_store.pulled_authors(0, 10) == [author], "still pulled while draining"
    (change,) = await graph_store.mode_changes(change.sequence, 10)
    assert change.mode is Mode.DRAIN
    assert await graph_store.mode_sequence() == change.sequence


async def test_the_operators_threshold_is_kept(graph_store: GraphStore) -> None:
    assert await graph_store.pull_threshold() is None
    await graph_store.set_pull_threshold(50)
    await graph_store.set_pull_threshold(60)
    assert await graph_store.pull_threshold() == 60


async def test_the_size_of_buckets_is_kept_for_ever(tmp_path: Path) -> None:
    for size, refused in ((3, False), (4, True), (3, False)):
        store = SqliteGraphStore(tmp_path / "graph.db", bucket_size=size, synchronous="OFF")
        if refused:
            with pytest.raises(ConfigurationError, match="STARLING_BUCKET_SIZE"):
                await store.open()
        else:
            await store.open()
        await store.close()
