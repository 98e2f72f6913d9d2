"""The TweetStore contract: see `tweet_svc/store.py`. Adapters come by the fixture `tweet_store`."""

import asyncio
import random
from dataclasses import replace

import pytest

from mesh.caches.counts import Tally
from mesh.errors import InvalidArgumentError, ResourceExhaustedError
from mesh.ids import ID_MAX, LEASE_MS, REST_MS, WORKERS
from tweet_svc.store import Change, Engagements, EventKind, Request, Revision, StoredTweet, TweetStore

NOW = 1_790_000_000_000
DAY_MS = 86_400_000


def tweet(tweet_id: int, author_id: int = 1, text: str = "hello") -> StoredTweet:
    return StoredTweet(tweet_id, author_id, text)


def request(fingerprint: bytes = b"same", expires_ms: int = NOW + DAY_MS) -> Request:
    return Request("6fd3b2a4-0c5e-4f6e-9d55-0b6f8f9c1a2b", fingerprint, expires_ms)


async def create(store: TweetStore, *tweets: StoredTweet) -> None:
    for one in tweets:
        await store.create_tweet(one, None, NOW, 1_000)


async def events(store: TweetStore) -> list[tuple[int, EventKind, int]]:
    return [(row.tweet_id, row.kind, row.version) for row in await store.unpublished(1_000)]


async def test_a_tweet_comes_back_as_it_was_stored(tweet_store: TweetStore) -> None:
    stored = StoredTweet(2**62, 7, "héllo 👨‍👩‍👧‍👦", 5, 6, 4, ("m1", "m2"), ("alice", "bob"))
    assert await tweet_store.create_tweet(stored, None, NOW, 10) == stored
    assert await tweet_store.tweets([1, 2**62, 2**64 - 1]) == [stored]


async def test_a_repeated_request_gives_the_first_tweet(tweet_store: TweetStore) -> None:
    first = await tweet_store.create_tweet(tweet(10), request(), NOW, 10)
    again = await tweet_store.create_tweet(tweet(11), request(), NOW, 10)
    assert first == again == tweet(10)
    assert await tweet_store.tweets([11]) == []
    assert await tweet_store.outbox_depth() == 1


async def test_concurrent_repeats_give_one_tweet(tweet_store: TweetStore) -> None:
    attempts = [tweet_store.create_tweet(tweet(number), request(), NOW, 100) for number in range(10, 30)]
    assert len({made.tweet_id for made in await asyncio.gather(*attempts)}) == 1
    assert await tweet_store.outbox_depth() == 1


async def test_a_request_id_belongs_to_one_author_one_content_and_one_day(tweet_store: TweetStore) -> None:
    await tweet_store.create_tweet(tweet(10), request(), NOW, 10)
    assert (await tweet_store.create_tweet(tweet(11, author_id=2), request(), NOW, 10)).tweet_id == 11
    with pytest.raises(InvalidArgumentError) as reused:
        await tweet_store.create_tweet(tweet(12), request(b"other"), NOW, 10)
    assert (reused.value.field, reused.value.reason) == ("request_id", "REQUEST_ID_REUSED")
    assert (await tweet_store.create_tweet(tweet(13), request(b"other"), NOW + DAY_MS, 10)).tweet_id == 13


async def test_a_full_outbox_refuses_posts_and_keeps_nothing_of_them(tweet_store: TweetStore) -> None:
    await tweet_store.republish("first", 0)
    await create(tweet_store, tweet(1), tweet(2))
    with pytest.raises(ResourceExhaustedError) as full:
        await tweet_store.create_tweet(tweet(3), request(), NOW, 2)
    assert full.value.retry_after_seconds > 0
    assert await tweet_store.tweets([3]) == []
    rows = await tweet_store.unpublished(10)
    await tweet_store.mark_published(rows, "first", NOW)
    assert (await tweet_store.create_tweet(tweet(3), request(), NOW, 2)).tweet_id == 3


async def test_an_authors_ids_come_newest_first_below_a_bound(tweet_store: TweetStore) -> None:
    await create(tweet_store, *(tweet(number, author_id=number % 2) for number in range(1, 11)))
    await tweet_store.delete_tweet(7, 1)
    found = await tweet_store.author_tweet_ids([1, 0, 9], [ID_MAX, 8, ID_MAX], [3, 3, 3])
    assert found == [[9, 5, 3], [6, 4, 2], []]


async def test_a_deletion_leaves_a_flag_and_no_text(tweet_store: TweetStore) -> None:
    await create(tweet_store, StoredTweet(5, 1, "secret", media_ids=("m",), mentions=("bob",)))
    deleted = StoredTweet(5, 1, "", version=2, deleted=True)
    assert await tweet_store.delete_tweet(5, 1) == Change(deleted, changed=True)
    assert await tweet_store.tweets([5]) == [deleted]
    assert await events(tweet_store) == [(5, EventKind.CREATED, 1), (5, EventKind.DELETED, 2)]


async def test_a_deletion_changes_nothing_twice_or_of_others(tweet_store: TweetStore) -> None:
    await create(tweet_store, tweet(5))
    assert await tweet_store.delete_tweet(5, 2) == Change(tweet(5), changed=False)
    assert await tweet_store.delete_tweet(6, 1) is None
    deleted = await tweet_store.delete_tweet(5, 1)
    assert deleted
    assert await tweet_store.delete_tweet(5, 1) == replace(deleted, changed=False)
    assert await tweet_store.outbox_depth() == 2


async def test_a_repeated_request_of_a_deleted_tweet_gives_what_is_left(tweet_store: TweetStore) -> None:
    await tweet_store.create_tweet(tweet(10), request(), NOW, 10)
    await tweet_store.delete_tweet(10, 1)
    assert (await tweet_store.create_tweet(tweet(11), request(), NOW, 10)).deleted


async def test_what_was_published_to_a_log_that_is_gone_is_not_marked(tweet_store: TweetStore) -> None:
    """Another relay may have seen the new one already: then the row must go out again."""
    await tweet_store.republish("first", 0)
    await create(tweet_store, tweet(1))
    (row,) = await tweet_store.unpublished(10)
    await tweet_store.republish("second", 0)
    assert not await tweet_store.mark_published([row], "first", NOW)
    assert await tweet_store.unpublished(10) == [row]
    assert await tweet_store.mark_published([row], "second", NOW)
    assert await tweet_store.unpublished(10) == []


async def test_rows_that_go_out_again_do_not_count_against_the_bound(tweet_store: TweetStore) -> None:
    await tweet_store.republish("first", 0)
    await create(tweet_store, tweet(1), tweet(2), tweet(3))
    await tweet_store.mark_published(await tweet_store.unpublished(10), "first", NOW)
    assert await tweet_store.republish("second", 0) == 3
    assert (await tweet_store.create_tweet(tweet(4), None, NOW, 2)).tweet_id == 4


async def test_a_request_made_before_is_told_without_a_new_tweet(tweet_store: TweetStore) -> None:
    assert await tweet_store.made_before(1, request(), NOW) is None
    await tweet_store.create_tweet(tweet(10), request(), NOW, 10)
    assert await tweet_store.made_before(1, request(), NOW) == tweet(10)
    assert await tweet_store.made_before(2, request(), NOW) is None
    with pytest.raises(InvalidArgumentError):
        await tweet_store.made_before(1, request(b"other"), NOW)


async def test_the_outbox_gives_what_is_unpublished_in_order(tweet_store: TweetStore) -> None:
    await tweet_store.republish("first", 0)
    await create(tweet_store, tweet(3), tweet(1), tweet(2))
    rows = await tweet_store.unpublished(2)
    assert [row.tweet_id for row in rows] == [3, 1]
    await tweet_store.mark_published(rows, "first", NOW)
    assert [row.tweet_id for row in await tweet_store.unpublished(10)] == [2]
    assert await tweet_store.outbox_depth() == 1


async def test_a_new_incarnation_of_the_log_gets_the_last_hour_again_once(tweet_store: TweetStore) -> None:
    await tweet_store.republish("first", 0)
    await create(tweet_store, tweet(1), tweet(2), tweet(3))
    old, *recent = await tweet_store.unpublished(10)
    await tweet_store.mark_published([old], "first", NOW - 5_000)
    await tweet_store.mark_published(recent, "first", NOW)
    assert await tweet_store.republish("first", NOW - 1_000) == 0
    assert await tweet_store.republish("second", NOW - 1_000) == 2
    assert await tweet_store.unpublished(10) == recent
    assert await tweet_store.republish("second", 0) == 0


async def test_pruning_forgets_what_is_published_and_old_and_nothing_else(tweet_store: TweetStore) -> None:
    await tweet_store.republish("first", 0)
    await tweet_store.create_tweet(tweet(1), request(expires_ms=NOW), NOW - DAY_MS, 10)
    await create(tweet_store, tweet(2), tweet(3))
    first, second, _ = await tweet_store.unpublished(10)
    await tweet_store.mark_published([first], "first", NOW - 5_000)
    await tweet_store.mark_published([second], "first", NOW)
    assert not await tweet_store.prune(NOW - 1_000, NOW)
    assert await tweet_store.republish("new", 0) == 1
    assert [row.tweet_id for row in await tweet_store.unpublished(10)] == [2, 3]
    assert len(await tweet_store.tweets([1, 2, 3])) == 3


def retweet(tweet_id: int, original_id: int, author_id: int = 1) -> StoredTweet:
    return StoredTweet(tweet_id, author_id, "", retweeted_tweet_id=original_id, retweeted_user_id=9)


async def test_a_retweet_stands_in_its_authors_timeline_and_in_the_outbox(tweet_store: TweetStore) -> None:
    await create(tweet_store, tweet(5, author_id=9), tweet(6))
    assert await tweet_store.create_retweet(retweet(7, 5), 10) == retweet(7, 5)
    assert await tweet_store.tweets([7]) == [retweet(7, 5)]
    assert await tweet_store.author_tweet_ids([1], [ID_MAX], [10]) == [[7, 6]]
    assert (await events(tweet_store))[-1] == (7, EventKind.CREATED, 1)
    assert await tweet_store.retweet_of(1, 5) == retweet(7, 5)
    assert await tweet_store.retweet_of(2, 5) is None
    assert await tweet_store.retweet_of(1, 6) is None


async def test_there_is_one_retweet_of_an_account_and_an_original(tweet_store: TweetStore) -> None:
    attempts = [tweet_store.create_retweet(retweet(number, 5), 100) for number in range(10, 30)]
    (made,) = {made.tweet_id for made in await asyncio.gather(*attempts)}
    others = (retweet(40, 6), retweet(41, 5, author_id=2))
    assert [await tweet_store.create_retweet(other, 100) for other in others] == list(others)
    assert await events(tweet_store) == [(tweet_id, EventKind.CREATED, 1) for tweet_id in (made, 40, 41)]


async def test_a_retweet_that_was_undone_may_be_made_again(tweet_store: TweetStore) -> None:
    assert await tweet_store.undo_retweet(1, 5) is None
    for tweet_id in (10, 11):
        await tweet_store.create_retweet(retweet(tweet_id, 5), 100)
        undone = replace(retweet(tweet_id, 5), version=2, deleted=True)
        assert await tweet_store.undo_retweet(1, 5) == Change(undone, changed=True)
        assert await tweet_store.undo_retweet(1, 5) == Change(undone, changed=False)
        assert await tweet_store.retweet_of(1, 5) == undone
    assert [kind for _, kind, _ in await events(tweet_store)] == [EventKind.CREATED] * 2
    waiting = await tweet_store.unpublished(10, slow=True)
    assert [(row.tweet_id, row.kind) for row in waiting] == [(10, EventKind.DELETED), (11, EventKind.DELETED)]
    await tweet_store.create_retweet(retweet(12, 5), 100)
    await tweet_store.delete_tweet(12, 1)
    undone = replace(retweet(12, 5), version=2, deleted=True)
    assert await tweet_store.undo_retweet(1, 5) == Change(undone, changed=False)


async def test_an_edit_keeps_the_texts_before(tweet_store: TweetStore) -> None:
    first = StoredTweet(9 << 22, 1, "one", media_ids=("m",), mentions=("alice",))
    await create(tweet_store, first)
    (written,) = await tweet_store.revisions(9 << 22, 100, 10) or []
    assert (written.version, written.text) == (1, "one")
    two = replace(first, text="two", mentions=("bob",), version=2, edited_ms=NOW)
    assert await tweet_store.update_tweet(9 << 22, 1, "two", ["bob"], NOW, 10) == Change(two, changed=True)
    assert await tweet_store.update_tweet(9 << 22, 1, "two", ["bob"], NOW + 1, 10) == Change(two, changed=False)
    await tweet_store.update_tweet(9 << 22, 1, "one", [], NOW + 2, 10)
    revisions = [Revision(3, "one", NOW + 2), Revision(2, "two", NOW), written]
    assert await tweet_store.revisions(9 << 22, 100, 10) == revisions
    assert await tweet_store.revisions(9 << 22, 100, 2) == revisions[:2]
    assert await tweet_store.revisions(9 << 22, 3, 2) == revisions[1:]
    assert await tweet_store.revisions(9 << 22, 1, 2) == []
    assert (await events(tweet_store))[1:] == [(9 << 22, EventKind.UPDATED, version) for version in (2, 3)]


async def test_what_cannot_be_edited_is_given_back_unchanged(tweet_store: TweetStore) -> None:
    await create(tweet_store, tweet(5), tweet(6))
    await tweet_store.create_retweet(retweet(7, 5), 10)
    await tweet_store.delete_tweet(6, 1)
    for tweet_id, author in ((5, 2), (6, 1), (7, 1)):
        (before,) = await tweet_store.tweets([tweet_id])
        assert await tweet_store.update_tweet(tweet_id, author, "new", [], NOW, 10) == Change(before, changed=False)
    assert await tweet_store.update_tweet(8, 1, "new", [], NOW, 10) is None
    assert await tweet_store.outbox_depth() == 4
    with pytest.raises(ResourceExhaustedError):
        await tweet_store.update_tweet(5, 1, "new", [], NOW, 4)
    assert await tweet_store.tweets([5]) == [tweet(5)]


async def test_an_edit_of_another_version_than_expected_changes_nothing(tweet_store: TweetStore) -> None:
    await create(tweet_store, tweet(5))
    two = replace(tweet(5), text="two", version=2, edited_ms=NOW)
    assert await tweet_store.update_tweet(5, 1, "two", [], NOW, 10, expected_version=1) == Change(two, changed=True)
    for text in ("three", "two"):
        edited = await tweet_store.update_tweet(5, 1, text, [], NOW + 1, 10, expected_version=1)
        assert edited == Change(two, changed=False)
    assert (await tweet_store.update_tweet(5, 1, "three", [], NOW + 1, 10, expected_version=2)) != Change(two, False)


async def test_a_deletion_erases_the_texts_before(tweet_store: TweetStore) -> None:
    await create(tweet_store, tweet(5))
    await tweet_store.update_tweet(5, 1, "new", [], NOW, 10)
    await tweet_store.delete_tweet(5, 1)
    assert await tweet_store.tweets([5]) == [StoredTweet(5, 1, "", version=3, deleted=True)]
    assert await tweet_store.revisions(5, 100, 10) is None
    assert await tweet_store.revisions(6, 100, 10) is None


@pytest.mark.parametrize("seed", range(5))
async def test_likes_and_retweets_are_exact_whatever_is_done(tweet_store: TweetStore, seed: int) -> None:
    chance = random.Random(seed)
    liked, retweeted = set[tuple[int, int]](), set[tuple[int, int]]()
    for number in range(200):
        user, original = who = (chance.randint(1, 3), chance.randint(1, 4))
        match chance.choice(["like", "unlike", "retweet", "undo"]):
            case "like":
                assert await tweet_store.like(user, original) == (who not in liked)
                liked.add(who)
            case "unlike":
                assert await tweet_store.unlike(user, original) == (who in liked)
                liked.discard(who)
            case "retweet":
                made = await tweet_store.create_retweet(retweet(1_000 + number, original, user), 1_000)
                assert (made.tweet_id == 1_000 + number) == (who not in retweeted)
                retweeted.add(who)
            case _:
                change = await tweet_store.undo_retweet(user, original)
                assert bool(change and change.changed) == (who in retweeted)
                retweeted.discard(who)
    for user in (1, 2, 3):
        assert await tweet_store.engagements(user, [4, 3, 2, 1, 99]) == Engagements(
            frozenset(original for who, original in liked if who == user),
            frozenset(original for who, original in retweeted if who == user),
        )


async def test_counts_are_added_once_for_each_flush(tweet_store: TweetStore) -> None:
    assert await tweet_store.counts([1, 2], "first") == ({1: Tally(), 2: Tally()}, False)
    assert await tweet_store.add_counts("first", {1: Tally(likes=2, quotes=1), 3: Tally(retweets=5)}, NOW)
    assert not await tweet_store.add_counts("first", {1: Tally(likes=2), 2: Tally(likes=9)}, NOW)
    assert await tweet_store.add_counts("second", {1: Tally(likes=-1, replies=4)}, NOW)
    counts = {1: Tally(likes=1, quotes=1, replies=4), 2: Tally(), 3: Tally(retweets=5)}
    assert await tweet_store.counts([1, 2, 3], "second") == (counts, True)
    await tweet_store.prune(NOW, NOW + DAY_MS - 1)
    assert not await tweet_store.add_counts("first", {1: Tally(likes=2)}, NOW)
    await tweet_store.prune(NOW, NOW + DAY_MS)
    assert await tweet_store.counts([3], "first") == ({3: Tally(retweets=5)}, False)


async def test_rows_that_may_wait_are_apart_with_a_bound_of_their_own(tweet_store: TweetStore) -> None:
    await tweet_store.republish("first", 0)
    await create(tweet_store, tweet(1))
    for number in (2, 3, 4):
        await tweet_store.create_retweet(retweet(number, number), 3, slow=True)
    await tweet_store.create_tweet(tweet(5), None, NOW, 2)
    with pytest.raises(ResourceExhaustedError):
        await tweet_store.create_retweet(retweet(6, 6), 2)
    with pytest.raises(ResourceExhaustedError):
        await tweet_store.create_retweet(retweet(6, 6), 3, slow=True)
    slow = await tweet_store.unpublished(10, slow=True)
    assert [(row.tweet_id, row.slow) for row in slow] == [(2, True), (3, True), (4, True)]
    assert [(row.tweet_id, row.slow) for row in await tweet_store.unpublished(10)] == [(1, False), (5, False)]
    assert await tweet_store.unpublished(1, slow=True) == slow[:1]
    assert await tweet_store.outbox_depth() == 5
    await tweet_store.mark_published(slow[:2], "first", NOW)
    assert await tweet_store.unpublished(10, slow=True) == slow[2:]
    assert len(await tweet_store.unpublished(10)) == 2
    assert await tweet_store.republish("second", NOW) == 2
    assert await tweet_store.unpublished(10, slow=True) == slow
    await tweet_store.mark_published(slow, "second", NOW)
    await tweet_store.prune(NOW + 1, NOW)
    assert await tweet_store.republish("third", 0) == 0


async def test_worker_numbers_are_held_by_one_and_rest_before_another(tweet_store: TweetStore) -> None:
    first = await tweet_store.acquire_worker("a", NOW, NOW + LEASE_MS)
    second = await tweet_store.acquire_worker("b", NOW, NOW + LEASE_MS)
    assert first
    assert second
    assert first.worker != second.worker
    await tweet_store.release_worker("a", first.worker, NOW, NOW + 5)
    third = await tweet_store.acquire_worker("c", NOW + REST_MS - 1, NOW)
    assert third
    assert third.worker not in {first.worker, second.worker}
    again = await tweet_store.acquire_worker("d", NOW + REST_MS, NOW)
    assert again
    assert (again.worker, again.high_ms) == (first.worker, NOW + 5)


async def test_a_worker_number_taken_over_is_lost_to_its_holder(tweet_store: TweetStore) -> None:
    lease = await tweet_store.acquire_worker("a", NOW, NOW + LEASE_MS)
    assert lease
    assert await tweet_store.renew_worker("a", lease.worker, NOW + 1, NOW + 99_000)
    taken = await tweet_store.acquire_worker("b", NOW + 1 + LEASE_MS + REST_MS, NOW)
    assert taken
    assert (taken.worker, taken.high_ms) == (lease.worker, NOW + 99_000)
    assert not await tweet_store.renew_worker("a", lease.worker, NOW, NOW)


async def test_worker_numbers_end_at_their_bits(tweet_store: TweetStore) -> None:
    holders = [tweet_store.acquire_worker(f"h{number}", NOW, NOW) for number in range(WORKERS + 1)]
    leases = await asyncio.gather(*holders)
    assert sorted(lease.worker for lease in leases if lease) == list(range(WORKERS))
