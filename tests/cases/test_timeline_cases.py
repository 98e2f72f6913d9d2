"""Failures that people report of systems like this one, as inputs with the right value (F: timelines, X: faults)."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from mesh.errors import UnavailableError
from mesh.ids import Snowflakes
from mesh.timelines import port as lists
from mesh.timelines.port import ListState
from starling.tweet.v1 import tweet_pb2
from tests.conftest import running_valkey
from tests.harness import Mesh, running_mesh
from timeline_svc.author_lists import AuthorLists
from timeline_svc.core import ViewerContext
from timeline_svc.sources import HomeSources, home_ids
from tweet_svc.store import Request, StoredTweet


async def people(mesh: Mesh, count: int) -> list[int]:
    return [await mesh.create_user(f"person{n}") for n in range(count)]


async def posts(mesh: Mesh, author: int, count: int) -> list[int]:
    """Ids of new tweets, newest first."""
    return [(await mesh.post(author, f"tweet {n}")).tweet_id for n in range(count)][::-1]


async def drop_caches(mesh: Mesh) -> None:
    keys = await mesh.valkey.call("KEYS", f"{mesh.valkey.key_prefix}t*:*")
    for key in keys:
        await mesh.valkey.call("DEL", key)


async def with_ids(mesh: Mesh, ids: Sequence[int], monkeypatch: pytest.MonkeyPatch, author: int) -> None:
    """Post with these very ids."""
    remaining = list(ids)
    monkeypatch.setattr(Snowflakes, "next_id", lambda self: remaining.pop(0))
    for _ in ids:
        await mesh.post(author)


async def test_f3_ids_past_2_to_the_53_stay_apart_and_in_order(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    author, follower = await people(mesh, 2)
    await mesh.follow(follower, author)
    await mesh.home(follower)
    await mesh.warm_all()
    first = 2102038470456250368
    await with_ids(mesh, [first + n for n in range(10)], monkeypatch, author)
    await mesh.settle()

    async def low_digits() -> list[list[int]]:
        return [[tweet_id - first for tweet_id in page] for page in await mesh.pages(follower, 4)]

    assert await low_digits() == [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]]
    await drop_caches(mesh)
    assert await low_digits() == [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]]


@pytest.mark.parametrize("authors", [1, 2])
async def test_f4_two_tweets_of_one_millisecond_are_two_pages(mesh: Mesh, authors: int) -> None:
    *writers, follower = await people(mesh, authors + 1)
    for writer in writers:
        await mesh.follow(follower, writer)
    first = await mesh.post(writers[0])  # The clock stands.
    second = await mesh.post(writers[-1])
    assert first.created_at == second.created_at
    for _ in range(2):
        assert await mesh.pages(follower, 1) == [[second.tweet_id], [first.tweet_id]]
        await mesh.settle()
    if authors == 1:
        assert await mesh.profile(follower, writers[0], 1) == [second.tweet_id, first.tweet_id]


async def test_f5_a_filter_after_the_limit_does_not_end_the_walk(mesh: Mesh) -> None:
    author, follower = await people(mesh, 2)
    await mesh.follow(follower, author)
    ids = await posts(mesh, author, 50)
    await mesh.settle()
    for deleted in (ids[3], ids[17]):
        await mesh.delete(author, deleted)
    pages = await mesh.pages(follower, 30)
    assert [i for page in pages for i in page] == [i for i in ids if i not in {ids[3], ids[17]}]
    assert [len(page) for page in pages] == [30, 18]


async def test_f5_a_filter_that_empties_a_whole_page_does_not_end_the_walk(mesh: Mesh) -> None:
    author, follower = await people(mesh, 2)
    await mesh.follow(follower, author)
    ids = await posts(mesh, author, 30)
    await mesh.home(follower)
    await mesh.settle()
    for deleted in ids[:20]:
        await mesh.delete(author, deleted)
    assert await mesh.walk(follower, 5) == ids[20:]
    await mesh.settle()
    assert await mesh.walk(follower, 5) == ids[20:]


async def test_f6_a_tweet_gone_from_the_store_leaves_the_rest_of_its_page(mesh: Mesh) -> None:
    author, follower = await people(mesh, 2)
    await mesh.follow(follower, author)
    await mesh.home(follower)
    await mesh.warm_all()
    ids = await posts(mesh, author, 5)
    await mesh.settle()
    lost = ids[2]
    await mesh.tweet_store._database.write(
        lambda connection: connection.execute("DELETE FROM tweets WHERE tweet_id = ?", (lost,)).rowcount
    )
    await mesh.valkey.call("DEL", f"{mesh.valkey.key_prefix}tweet:{lost}")
    assert lost in (await mesh.raw_list(lists.home(follower)) or [])
    page = await mesh.home(follower, 20)
    assert [item.tweet.tweet_id for item in page.items] == [i for i in ids if i != lost]
    assert await mesh.walk(follower, 2) == [i for i in ids if i != lost]


async def test_f6_a_home_polled_while_the_store_is_slow_never_shows_an_empty_item(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    author, follower = await people(mesh, 2)
    await mesh.follow(follower, author)
    await mesh.home(follower)
    await mesh.warm_all()
    create, written = mesh.tweet_store.create_tweet, asyncio.Event()

    async def slow(tweet: StoredTweet, request: Request | None, now_ms: int, outbox_max: int) -> StoredTweet:
        await asyncio.wait_for(written.wait(), 10)
        return await create(tweet, request, now_ms, outbox_max)

    monkeypatch.setattr(mesh.tweet_store, "create_tweet", slow)
    posting = asyncio.create_task(mesh.post(author, "late"))
    for round_number in range(30):
        page = await mesh.home(follower)
        assert all(item.tweet.text == "late" for item in page.items)
        if round_number == 10:
            written.set()
        await mesh.deliver_all()
    tweet = await posting
    await mesh.settle()
    assert await mesh.walk(follower) == [tweet.tweet_id]


async def test_f7_what_arrives_between_two_pages_moves_nothing(mesh: Mesh) -> None:
    author, follower = await people(mesh, 2)
    await mesh.follow(follower, author)
    ids = await posts(mesh, author, 30)
    await mesh.settle()
    first = await mesh.home(follower, 10)
    await posts(mesh, author, 3)
    await mesh.settle()
    second = await mesh.home(follower, 10, first.next_page_token)
    assert [item.tweet.tweet_id for item in second.items] == ids[10:20]


async def test_f8_a_person_who_returns_sees_everything(mesh: Mesh) -> None:
    a, b, c, follower = await people(mesh, 4)
    for author in (a, b, c):
        await mesh.follow(follower, author)
    for author in (a, b):
        await posts(mesh, author, 5)
    await mesh.settle()
    await mesh.timelines.drop(lists.home(follower))
    await mesh.post(c)
    await mesh.deliver_all()
    assert await mesh.raw_list(lists.home(follower)) is None
    assert len(await mesh.walk(follower)) == 11
    await mesh.settle()
    assert len(await mesh.walk(follower)) == 11
    assert await mesh.raw_list(lists.home(follower)) is not None


async def test_f10_a_delete_that_overtakes_the_creation_leaves_nothing(mesh: Mesh) -> None:
    author, follower = await people(mesh, 2)
    await mesh.follow(follower, author)
    await mesh.home(follower)
    await mesh.warm_all()
    tweet = await mesh.post(author)
    await mesh.delete(author, tweet.tweet_id)
    await mesh.relay_all()
    records = await mesh.take(10)
    assert len(records) == 2
    for record in reversed(records):  # The deletion first.
        await mesh.work_on([record])
    for _ in range(2):
        assert await mesh.walk(follower) == []
        assert await mesh.walk(author) == []
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await mesh.tweets.GetTweet(tweet_pb2.GetTweetRequest(tweet_id=tweet.tweet_id), **mesh.as_(follower))
        assert gone.value.code() is grpc.StatusCode.NOT_FOUND
        await mesh.consumer.replay(0)
        await mesh.deliver_all()


async def test_f11_tweets_of_someone_unfollowed_neither_stay_nor_arrive(mesh: Mesh) -> None:
    author, follower = await people(mesh, 2)
    await mesh.follow(follower, author)
    await mesh.home(follower)
    await mesh.warm_all()
    first = await mesh.post(author)
    await mesh.settle()
    assert await mesh.walk(follower) == [first.tweet_id]
    second = await mesh.post(author)  # The worker is away.
    await mesh.unfollow(follower, author)
    assert await mesh.walk(follower) == []
    await mesh.settle()
    assert await mesh.walk(follower) == []
    await mesh.follow(follower, author)
    both = [second.tweet_id, first.tweet_id]
    assert await mesh.walk(follower) == both
    await mesh.settle()
    assert await mesh.walk(follower) == both
    assert await mesh.raw_list(lists.home(follower)) == both


async def test_x9_a_rebuild_that_died_hinders_nobody_and_is_done_again(mesh: Mesh) -> None:
    author, follower = await people(mesh, 2)
    await mesh.follow(follower, author)
    ids = await posts(mesh, author, 3)
    await mesh.home(follower)
    mesh.faults.defer = True  # The process dies before it finishes.
    await mesh.warm_all()
    mesh.faults.defer = False
    view = await mesh.timelines.read(lists.home(follower), 0)
    assert view
    assert view.record.state is ListState.BUILDING
    assert await mesh.walk(follower, 2) == ids
    await mesh.warm_all()
    assert await mesh.walk(follower, 2) == ids
    mesh.clock.advance(31_000)  # Its lease is over.
    assert await mesh.walk(follower, 2) == ids
    await mesh.warm_all()
    view = await mesh.timelines.read(lists.home(follower), 10)
    assert view
    assert (view.record.state, list(view.ids)) == (ListState.READY, ids)
    assert await mesh.walk(follower, 2) == ids


async def test_x7_counts_do_not_drift_on_retries(mesh: Mesh) -> None:
    follower, followee = await people(mesh, 2)
    mesh.valkey.down = True
    with pytest.raises(grpc.aio.AioRpcError) as unknown:  # Written, then the reply is lost.
        await mesh.follow(follower, followee)
    assert unknown.value.code() is grpc.StatusCode.UNAVAILABLE
    mesh.valkey.down = False
    await mesh.follow(follower, followee)
    await mesh.follow(follower, followee)
    (user,) = await mesh.graph_store.users([followee])
    assert user.follower_count == 1 == len(await mesh.graph_store.list_followers(followee, 0, 10))
    (user,) = await mesh.graph_store.users([follower])
    assert user.following_count == 1 == len(await mesh.graph_store.list_following(follower, 0, 10))


async def test_s1_a_post_whose_answer_was_lost_is_one_post(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    author, follower = await people(mesh, 2)
    await mesh.follow(follower, author)
    create = mesh.tweet_store.create_tweet
    made: list[int] = []

    async def times_out_after_the_write(*arguments: object) -> StoredTweet:
        made.append((await create(*arguments)).tweet_id)  # type: ignore[arg-type]
        await asyncio.Event().wait()
        raise AssertionError

    request_id = "6fd3b2a4-0c5e-4f6e-9d55-0b6f8f9c1a2b"
    monkeypatch.setattr(mesh.tweet_store, "create_tweet", times_out_after_the_write)
    request = tweet_pb2.CreateTweetRequest(text="once", request_id=request_id)
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await mesh.tweets.CreateTweet(request, **(mesh.as_(author) | {"timeout": 0.3}))
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    monkeypatch.setattr(mesh.tweet_store, "create_tweet", create)
    again = [(await mesh.post(author, "once", request_id=request_id)).tweet_id for _ in range(2)]
    assert made == again[:1] == again[1:]
    await mesh.settle()
    assert await mesh.walk(follower) == made
    assert mesh.figures.deliveries == 1
    with pytest.raises(grpc.aio.AioRpcError) as reused:
        await mesh.post(author, "something else", request_id=request_id)
    assert reused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_request_id_is_forgotten_after_a_day(mesh: Mesh) -> None:
    (author,) = await people(mesh, 1)
    request_id = "6fd3b2a4-0c5e-4f6e-9d55-0b6f8f9c1a2b"
    first = await mesh.post(author, "hello", request_id=request_id)
    mesh.clock.advance(86_400_001)
    await mesh.renew_leases()
    second = await mesh.post(author, "hello", request_id=request_id)
    assert first.tweet_id != second.tweet_id


async def test_x3_a_mention_of_nobody_is_accepted_and_makes_no_list(mesh: Mesh) -> None:
    (author,) = await people(mesh, 1)
    tweet = await mesh.post(author, "ask @nobody_962 and @person0")
    assert list(tweet.mentions) == ["nobody_962", "person0"]
    await mesh.settle()
    keys = await mesh.valkey.call("KEYS", f"{mesh.valkey.key_prefix}timeline:*")
    assert keys == []


async def test_w1_ids_past_2_to_the_53_pass_unchanged(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    (author,) = await people(mesh, 1)
    await with_ids(mesh, [9007199254740993], monkeypatch, author)
    request = tweet_pb2.GetTweetRequest(tweet_id=9007199254740993)
    assert (await mesh.tweets.GetTweet(request, **mesh.as_(author))).tweet.tweet_id == 9007199254740993
    assert await mesh.walk(author) == [9007199254740993]


async def test_a_profile_holds_all_of_a_list_that_is_longer_than_its_cap(mesh: Mesh) -> None:
    (author,) = await people(mesh, 1)
    assert await mesh.profile(author, author) == []
    await mesh.warm_all()
    ids = await posts(mesh, author, mesh.sizes.cap + mesh.sizes.slack)
    await mesh.settle()
    assert len(await mesh.raw_list(lists.author(author)) or []) > mesh.sizes.cap
    assert await mesh.profile(author, author, 3) == ids


async def test_a_list_trimmed_while_it_is_read_costs_no_error_and_no_repeat(mesh: Mesh) -> None:
    """The page begins in a list, needs more of it than it read at first, and finds its floor above by then."""
    author, follower = await people(mesh, 2)
    await mesh.follow(follower, author)
    await mesh.home(follower)
    await mesh.warm_all()
    ids = await posts(mesh, author, 7)
    await mesh.settle()
    for deleted in ids[:3]:
        await mesh.delete(author, deleted)
    view = await mesh.timelines.read(lists.home(follower), 2)
    assert view
    viewer = ViewerContext(follower, 1, [author], [1])
    found: list[int] = []
    tweets = mesh.timeline_service._tweets
    authors = AuthorLists(mesh.timelines, tweets, mesh.clock)
    async for tweet_id in home_ids(mesh.timelines, authors, tweets, viewer, HomeSources(view), 1 << 63):
        found.append(tweet_id)
        if len(found) == 2:
            newer = await posts(mesh, author, 8)
            await mesh.deliver_all()
    assert newer
    assert found == sorted(set(found), reverse=True)
    assert set(ids[3:]) <= set(found)


async def test_the_retry_of_a_reply_stands_though_what_it_answers_is_gone(mesh: Mesh) -> None:
    author, other = await people(mesh, 2)
    answered = await mesh.post(other)
    request_id = "6fd3b2a4-0c5e-4f6e-9d55-0b6f8f9c1a2b"
    reply = await mesh.post(author, "yes", in_reply_to_tweet_id=answered.tweet_id, request_id=request_id)
    await mesh.delete(other, answered.tweet_id)
    again = await mesh.post(author, "yes", in_reply_to_tweet_id=answered.tweet_id, request_id=request_id)
    assert again == reply


async def test_a_valkey_that_is_full_keeps_nobody_from_posting_and_reading(valkey_url: str, tmp_path: Path) -> None:
    with running_valkey(tmp_path) as url:
        async with running_mesh(url, tmp_path, "full:") as mesh:
            author, follower = await people(mesh, 2)
            await mesh.follow(follower, author)
            ids = await posts(mesh, author, 3)
            await mesh.settle()
            await mesh.valkey.call("CONFIG", "SET", "maxmemory", "1")
            ids = [*await posts(mesh, author, 3), *ids]
            assert await mesh.walk(author) == ids
            with pytest.raises(UnavailableError):
                await mesh.relay.step()
            await mesh.valkey.call("CONFIG", "SET", "maxmemory", "0")
            await mesh.settle()
            assert await mesh.walk(follower) == ids


async def test_a_list_or_body_that_cannot_be_read_counts_as_missing(mesh: Mesh) -> None:
    (author,) = await people(mesh, 1)
    ids = await posts(mesh, author, 3)
    await mesh.home(author)
    await mesh.settle()
    (name,) = await mesh.valkey.call("KEYS", f"{mesh.valkey.key_prefix}timeline:*:{author}")
    await mesh.valkey.call("LSET", name, 0, "nonsense")
    await mesh.valkey.call("SET", f"{mesh.valkey.key_prefix}tweet:{ids[1]}", b"1:\xff\xff")
    assert await mesh.walk(author) == ids
    await mesh.warm_all()
    assert await mesh.raw_list(lists.home(author)) == ids
