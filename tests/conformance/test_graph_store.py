"""The GraphStore contract: see `graph_svc/store.py`. Adapters come by the fixture `graph_store` (buckets of 3)."""

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graph_svc import store as port
from graph_svc.store import AuthorState, Busy, DrainTask, FanoutPolicy, GraphStore, ImportCounts, Limits, Mode, User
from mesh.errors import ConfigurationError, FailedPreconditionError, NotFoundError, PermissionDeniedError
from tests.conformance.conftest import OpenGraphStore

BUCKET_SIZE = 3
T = TypeVar("T")


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
        for kind in ("follow", "unfollow", "block", "unblock", "mute", "unmute"):
            with pytest.raises(NotFoundError) as refused:
                await getattr(graph_store, kind)(*pair)
            assert refused.value.reason == "USER_NOT_FOUND"
    assert await graph_store.viewer_context(2) is None
    assert await graph_store.author_state(2) is None


def test_the_limits_are_what_is_promised() -> None:
    assert (port.FOLLOWEES_MAX, port.BLOCKS_MAX, port.MUTES_MAX) == (5_000, 10_000, 10_000)


async def test_nobody_follows_more_than_the_limit(graph_store: GraphStore, graph_limits: Limits) -> None:
    first, last = 10_000, 10_000 + graph_limits.followees
    await sign_up(graph_store, 1, *range(first, last + 1))
    edges = [(1, user_id) for user_id in range(first, last + 1)]
    assert await graph_store.import_follows(edges) == ImportCounts(graph_limits.followees, 0, 1)
    with pytest.raises(FailedPreconditionError) as refused:
        await graph_store.follow(1, last)
    assert refused.value.reason == "FOLLOW_LIMIT_REACHED"
    assert await graph_store.unfollow(1, first)
    assert await graph_store.follow(1, last)


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
    await graph_store.import_follows([(1, n) for n in range(2, 9)])
    for follower in range(2, 9):  # One after the other, so that it is known who is in which bucket.
        await graph_store.follow(follower, 1)
    assert await graph_store.list_following(1, 0, 3) == [2, 3, 4]
    assert await graph_store.list_following(1, 4, 3) == [5, 6, 7]
    assert await graph_store.list_followers(1, 7, 3) == [8]
    assert await graph_store.followers(1, 0, 2, 10) == [3, 4]


class GraphModel:
    """What the store is held against: sets of pairs, and each user's version."""

    def __init__(self) -> None:
        self.follows: set[tuple[int, int]] = set()
        self.blocks: set[tuple[int, int]] = set()
        self.mutes: set[tuple[int, int]] = set()
        self.versions: Counter[int] = Counter()

    def change(self, kind: str, user: int, other: int) -> bool | None:
        """Whether it changes anything; None: it is refused."""
        pairs = {"follow": self.follows, "block": self.blocks, "mute": self.mutes}[kind.removeprefix("un")]
        pair, both = (user, other), {(user, other), (other, user)}
        if kind == "follow" and both & self.blocks:
            return None
        if (pair in pairs) != kind.startswith("un"):
            return False
        pairs ^= {pair}
        if kind == "block":
            self.follows -= both
        self.versions.update(pair if kind.endswith("block") else [user])
        return True

    def of(self, pairs: set[tuple[int, int]], user: int) -> list[int]:
        return sorted(b for a, b in pairs if a == user)


kinds = st.sampled_from(["follow", "follow", "unfollow", "block", "unblock", "mute", "unmute"])
changes_of_four = st.lists(st.tuples(kinds, st.integers(1, 4), st.integers(1, 4)), max_size=40)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=changes_of_four)
def test_any_changes_leave_both_sides_equal_and_counts_exact(
    changes: list[tuple[str, int, int]], graph_store_of: OpenGraphStore
) -> None:
    async def check() -> None:
        async with graph_store_of() as store:
            await _is_as_the_model(store, changes)

    asyncio.run(check())


async def _is_as_the_model(store: GraphStore, changes: list[tuple[str, int, int]]) -> None:
    users = list(range(1, 5))
    await sign_up(store, *users)
    model = GraphModel()
    for kind, user, other in changes:
        if user == other:
            continue
        expected = model.change(kind, user, other)
        if expected is None:
            with pytest.raises(PermissionDeniedError):
                await getattr(store, kind)(user, other)
        else:
            assert await getattr(store, kind)(user, other) == expected
    following, followed = Counter(a for a, _ in model.follows), Counter(b for _, b in model.follows)
    for user_id in users:
        (found,) = await store.users([user_id])
        assert (found.following_count, found.follower_count) == (following[user_id], followed[user_id])
        in_buckets = [i for bucket in await followers_of(store, user_id) for i in bucket]
        assert sorted(in_buckets) == sorted(a for a, b in model.follows if b == user_id)
        viewer = await store.viewer_context(user_id)
        assert viewer
        assert viewer.version == model.versions[user_id]
        assert list(viewer.followee_ids) == model.of(model.follows, user_id)
        assert list(viewer.blocked_ids) == model.of(model.blocks, user_id)
        assert list(viewer.muted_ids) == model.of(model.mutes, user_id)
        assert all(1 <= since <= viewer.version for since in viewer.since)


# Blocks and mutes.


async def versions(store: GraphStore, *user_ids: int) -> list[int]:
    viewers = [await store.viewer_context(user_id) for user_id in user_ids]
    return [viewer.version for viewer in viewers if viewer]


async def test_a_block_ends_follows_both_ways_and_is_one_change_to_either(graph_store: GraphStore) -> None:
    await sign_up(graph_store, 1, 2, 3)
    await graph_store.import_follows([(1, 2), (2, 1), (3, 1)])
    assert await versions(graph_store, 1, 2, 3) == [1, 1, 1]
    assert await graph_store.block(1, 2)
    assert await versions(graph_store, 1, 2, 3) == [2, 2, 1]
    assert [(u.following_count, u.follower_count) for u in await graph_store.users([1, 2])] == [(0, 1), (0, 0)]
    assert (await followers_of(graph_store, 1), await followers_of(graph_store, 2)) == ([[3]], [[]])
    assert not await graph_store.block(1, 2)
    assert await versions(graph_store, 1, 2) == [2, 2]
    assert await graph_store.unblock(1, 2)
    assert not await graph_store.unblock(1, 2)
    assert await versions(graph_store, 1, 2) == [3, 3]
    assert await graph_store.list_following(1, 0, 10) == [], "what the block ended doesn't come back"


async def test_no_follow_passes_a_block_either_way(graph_store: GraphStore) -> None:
    await sign_up(graph_store, 1, 2)
    await graph_store.block(1, 2)
    await graph_store.block(2, 1)
    for blocks_left in (2, 1):
        for pair in ((1, 2), (2, 1)):
            with pytest.raises(PermissionDeniedError) as refused:
                await graph_store.follow(*pair)
            assert refused.value.reason == "BLOCKED"
        assert await graph_store.import_follows([(1, 2), (2, 1)]) == ImportCounts(0, 0, 2)
        assert await graph_store.unblock(*((1, 2) if blocks_left == 2 else (2, 1)))
    assert await versions(graph_store, 1, 2) == [4, 4]
    assert await graph_store.follow(1, 2)


async def test_of_a_follow_and_a_block_at_once_the_block_stands(graph_store: GraphStore) -> None:
    await sign_up(graph_store, 1, 2)
    changes = (graph_store.follow(2, 1), graph_store.block(1, 2), graph_store.follow(1, 2))
    followed, blocked, refused = await asyncio.gather(*changes, return_exceptions=True)
    assert blocked is True
    assert followed is True or isinstance(followed, PermissionDeniedError)
    assert refused is True or isinstance(refused, PermissionDeniedError)
    assert await followers_of(graph_store, 1) == await followers_of(graph_store, 2) == [[]]


async def test_a_mute_is_the_muters_own_and_ends_no_follow(graph_store: GraphStore) -> None:
    await sign_up(graph_store, 1, 2)
    await graph_store.follow(1, 2)
    assert await graph_store.mute(1, 2)
    assert not await graph_store.mute(1, 2)
    viewer = await graph_store.viewer_context(1)
    assert viewer
    assert (viewer.version, list(viewer.followee_ids), list(viewer.muted_ids)) == (2, [2], [2])
    assert await graph_store.unmute(1, 2)
    assert not await graph_store.unmute(1, 2)
    assert await versions(graph_store, 1, 2) == [3, 0]
    assert (await graph_store.list_muted(1, 0, 10), await graph_store.list_muted(2, 0, 10)) == ([], [])


async def test_blocks_between_some_are_told_either_way(graph_store: GraphStore) -> None:
    await sign_up(graph_store, 1, 2, 3, 4)
    for pair in ((1, 3), (1, 2), (4, 1), (3, 1), (2, 4)):
        await graph_store.block(*pair)
    assert await graph_store.check_blocks(1, [4, 3, 2]) == ([3, 4], [2, 3])
    assert await graph_store.check_blocks(1, [2]) == ([], [2])
    assert await graph_store.check_blocks(4, [1, 2, 3, 99, 2**64 - 1]) == ([2], [1])
    with pytest.raises(NotFoundError):
        await graph_store.check_blocks(2**64 - 1, [1, 2**63 + 1])


async def test_whom_one_blocks_and_mutes_comes_in_pages_by_id(graph_store: GraphStore) -> None:
    await sign_up(graph_store, *range(1, 9))
    for other in (5, 3, 8, 2):
        await graph_store.block(1, other)
        await graph_store.mute(1, other)
    for page in (graph_store.list_blocked, graph_store.list_muted):
        assert await page(1, 0, 3) == [2, 3, 5]
        assert await page(1, 5, 3) == [8]
        assert await page(2, 0, 3) == []
    viewer = await graph_store.viewer_context(1)
    assert viewer
    assert (list(viewer.blocked_ids), list(viewer.muted_ids)) == ([2, 3, 5, 8], [2, 3, 5, 8])


async def test_nobody_blocks_or_mutes_more_than_the_limit(graph_store: GraphStore, graph_limits: Limits) -> None:
    for change, end, most, reason in (
        (graph_store.block, graph_store.unblock, graph_limits.blocks, "BLOCK_LIMIT_REACHED"),
        (graph_store.mute, graph_store.unmute, graph_limits.mutes, "MUTE_LIMIT_REACHED"),
    ):
        others = range(2, 2 + most)
        await sign_up(graph_store, 1, one_more := 2 + most)
        await in_parts(others, lambda other: sign_up(graph_store, other))
        assert all(await in_parts(others, functools.partial(change, 1)))
        with pytest.raises(FailedPreconditionError) as refused:
            await change(1, one_more)
        assert refused.value.reason == reason
        assert not await change(1, others[-1]), "one that stands"
        assert await end(1, 2)
        assert await change(1, one_more)
    assert await versions(graph_store, 1) == [graph_limits.blocks + graph_limits.mutes + 4]


async def in_parts(numbers: Sequence[int], work: Callable[[int], Coroutine[object, object, T]]) -> list[T]:
    """Some at a time: a store's queue is bounded."""
    return [
        result
        for start in range(0, len(numbers), 1_000)
        for result in await asyncio.gather(*map(work, numbers[start : start + 1_000]))
    ]


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
    assert not await graph_store.is_draining()
    tasks = await draining(graph_store)
    assert tasks == [DrainTask(1, 2, 0), DrainTask(1, 2, 1)]
    assert await graph_store.is_draining()
    await graph_store.mark_drains_published(tasks, "first", 7_000)
    assert await graph_store.unpublished_drains(10) == []
    assert not await graph_store.complete_drain(DrainTask(1, 1, 1), 8_000), "another epoch's"
    assert not await graph_store.complete_drain(tasks[0], 8_000)
    assert not await graph_store.complete_drain(tasks[0], 8_000), "again"
    assert await graph_store.complete_drain(tasks[1], 8_000)
    assert (await state_of(graph_store, 1)).mode is Mode.PUSH
    assert not await graph_store.is_draining()
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


async def test_authors_who_post_are_pulled_from_a_bound_of_their_own(graph_store: GraphStore) -> None:
    await sign_up(graph_store, *range(1, 11))
    edges = [(f, author) for author, count in ((1, 4), (2, 4), (3, 2), (4, 6)) for f in range(5, 5 + count)]
    await graph_store.import_follows(edges)

    async def modes() -> str:
        return " ".join([(await state_of(graph_store, author)).mode.name for author in (1, 2, 3, 4)])

    busy = Busy([1, 3, 99, 2**64 - 1], pull_from=3)
    assert await graph_store.move_modes(6, 2, 1_000, busy) == 2
    assert await modes() == "PULL PUSH PUSH PULL", "3 posts, and has too few; 2 has as many as 1, and doesn't post"
    assert await graph_store.move_modes(6, 2, 2_000, busy) == 0
    assert await graph_store.move_modes(6, 2, 2_000) == 0, "who was pulled stays so, posting or not"
    assert await graph_store.move_modes(6, 5, 3_000) == 1
    assert await modes() == "DRAIN PUSH PUSH PULL"
    assert await graph_store.move_modes(6, 2, 4_000, Busy([], pull_from=3)) == 0
    assert await graph_store.move_modes(6, 2, 5_000, busy) == 1
    assert await state_of(graph_store, 1) == AuthorState(Mode.PULL, 3, 5_000, 2)


async def test_the_operators_policy_is_kept(graph_store: GraphStore) -> None:
    assert await graph_store.fanout_policy() is None
    for policy in (FanoutPolicy(50, 20), FanoutPolicy(60)):
        await graph_store.set_fanout_policy(policy)
        assert await graph_store.fanout_policy() == policy


async def test_the_size_of_buckets_is_kept_for_ever(graph_store_of: OpenGraphStore) -> None:
    async with graph_store_of(3):
        pass
    with pytest.raises(ConfigurationError, match="STARLING_BUCKET_SIZE"):
        async with graph_store_of(4, again=True):
            pass
    async with graph_store_of(3, again=True):
        pass
