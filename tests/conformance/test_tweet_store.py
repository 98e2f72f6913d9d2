"""The TweetStore contract: see `tweet_svc/store.py`. Adapters come by the fixture `tweet_store`."""

import asyncio

import pytest

from mesh.errors import InvalidArgumentError, ResourceExhaustedError
from mesh.ids import ID_MAX, LEASE_MS, REST_MS, WORKERS
from tweet_svc.store import Request, StoredTweet, TweetStore

NOW = 1_790_000_000_000
DAY_MS = 86_400_000


def tweet(tweet_id: int, author_id: int = 1, text: str = "hello") -> StoredTweet:
    return StoredTweet(tweet_id, author_id, text)


def request(fingerprint: bytes = b"same", expires_ms: int = NOW + DAY_MS) -> Request:
    return Request("6fd3b2a4-0c5e-4f6e-9d55-0b6f8f9c1a2b", fingerprint, expires_ms)


async def create(store: TweetStore, *tweets: StoredTweet) -> None:
    for one in tweets:
        await store.create_tweet(one, None, NOW, 1_000)


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
    await tweet_store.mark_published([row.event_id for row in rows], "first", NOW)
    assert (await tweet_store.create_tweet(tweet(3), request(), NOW, 2)).tweet_id == 3


async def test_an_authors_ids_come_newest_first_below_a_bound(tweet_store: TweetStore) -> None:
    await create(tweet_store, *(tweet(number, author_id=number % 2) for number in range(1, 11)))
    await tweet_store.delete_tweet(7, 1)
    found = await tweet_store.author_tweet_ids([1, 0, 9], [ID_MAX, 8, ID_MAX], [3, 3, 3])
    assert found == [[9, 5, 3], [6, 4, 2], []]


async def test_a_deletion_leaves_a_flag_and_no_text(tweet_store: TweetStore) -> None:
    await create(tweet_store, StoredTweet(5, 1, "secret", media_ids=("m",), mentions=("bob",)))
    deleted = await tweet_store.delete_tweet(5, 1)
    assert deleted == StoredTweet(5, 1, "", version=2, deleted=True)
    assert await tweet_store.tweets([5]) == [deleted]
    assert [(row.tweet_id, row.deleted_version) for row in await tweet_store.unpublished(10)] == [(5, 0), (5, 2)]


async def test_a_deletion_changes_nothing_twice_or_of_others(tweet_store: TweetStore) -> None:
    await create(tweet_store, tweet(5))
    assert await tweet_store.delete_tweet(5, 2) == tweet(5)
    assert await tweet_store.delete_tweet(6, 1) is None
    assert await tweet_store.delete_tweet(5, 1) == await tweet_store.delete_tweet(5, 1)
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
    await tweet_store.mark_published([row.event_id], "first", NOW)
    assert await tweet_store.unpublished(10) == [row]
    await tweet_store.mark_published([row.event_id], "second", NOW)
    assert await tweet_store.unpublished(10) == []


async def test_rows_that_go_out_again_do_not_count_against_the_bound(tweet_store: TweetStore) -> None:
    await tweet_store.republish("first", 0)
    await create(tweet_store, tweet(1), tweet(2), tweet(3))
    await tweet_store.mark_published([row.event_id for row in await tweet_store.unpublished(10)], "first", NOW)
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
    await tweet_store.mark_published([row.event_id for row in rows], "first", NOW)
    assert [row.tweet_id for row in await tweet_store.unpublished(10)] == [2]
    assert await tweet_store.outbox_depth() == 1


async def test_a_new_incarnation_of_the_log_gets_the_last_hour_again_once(tweet_store: TweetStore) -> None:
    await tweet_store.republish("first", 0)
    await create(tweet_store, tweet(1), tweet(2), tweet(3))
    old, *recent = [row.event_id for row in await tweet_store.unpublished(10)]
    await tweet_store.mark_published([old], "first", NOW - 5_000)
    await tweet_store.mark_published(recent, "first", NOW)
    assert await tweet_store.republish("first", NOW - 1_000) == 0
    assert await tweet_store.republish("second", NOW - 1_000) == 2
    assert [row.event_id for row in await tweet_store.unpublished(10)] == recent
    assert await tweet_store.republish("second", 0) == 0


async def test_pruning_forgets_what_is_published_and_old_and_nothing_else(tweet_store: TweetStore) -> None:
    await tweet_store.republish("first", 0)
    await tweet_store.create_tweet(tweet(1), request(expires_ms=NOW), NOW - DAY_MS, 10)
    await create(tweet_store, tweet(2), tweet(3))
    first, second, _ = [row.event_id for row in await tweet_store.unpublished(10)]
    await tweet_store.mark_published([first], "first", NOW - 5_000)
    await tweet_store.mark_published([second], "first", NOW)
    assert not await tweet_store.prune(NOW - 1_000, NOW)
    assert await tweet_store.republish("new", 0) == 1
    assert [row.tweet_id for row in await tweet_store.unpublished(10)] == [2, 3]
    assert len(await tweet_store.tweets([1, 2, 3])) == 3


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
