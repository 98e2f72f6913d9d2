"""What is done with tweets besides posting: retweets, edits, likes, and what they refer to, over the whole mesh."""

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from fanout_svc import core as fanout
from mesh.caches.bodies import Bodies
from mesh.caches.counts import Shard
from mesh.channels import reason_of
from mesh.errors import UnavailableError
from mesh.eventlog.port import LogFullError, Producer
from mesh.eventlog.topics import FANOUT_TASKS_SLOW, TWEET_FANOUT
from mesh.principals import service
from mesh.timelines import port as lists
from starling.graph.v1 import graph_pb2_grpc
from starling.tweet.v1 import tweet_pb2 as t
from tests.cases.test_timeline_cases import people
from tests.harness import Mesh
from tests.waiting import eventually
from tweet_svc import together
from tweet_svc.core import HOT_RETWEETS
from tweet_svc.relay import Relay
from tweet_svc.sqlite import SqliteTweetStore
from tweet_svc.store import EventKind, StoredTweet

SERVICE = service("test")
NOT_FOUND = grpc.StatusCode.NOT_FOUND


async def revisions(mesh: Mesh, reader: int, tweet_id: int, size: int = 20) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    request = t.ListTweetRevisionsRequest(tweet_id=tweet_id, page_size=size)
    while True:
        page = await mesh.tweets.ListTweetRevisions(request, **mesh.as_(reader))
        assert len(page.revisions) <= size
        found += [(revision.version, revision.text) for revision in page.revisions]
        request.page_token = page.next_page_token
        if not request.page_token:
            return found


async def hydrated(mesh: Mesh, tweet_id: int) -> t.Tweet:
    async def requests() -> Any:
        yield t.HydrateTweetsRequest(tweet_ids=[tweet_id])

    replies = [reply async for reply in mesh.tweets.HydrateTweets(requests(), **mesh.as_(SERVICE))]
    return replies[0].tweets[0]


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), reason_of(error.value)


async def test_ten_retweets_of_retweets_are_of_the_original(mesh: Mesh) -> None:
    author, *others = await people(mesh, 11)
    original = await mesh.post(author, "the original")
    chain = [original]
    for other in others:
        chain.append(await mesh.retweet(other, chain[-1].tweet_id))
    for made, other in zip(chain[1:], others, strict=True):
        assert (made.author_id, made.text) == (other, "")
        assert (made.retweeted_tweet_id, made.retweeted_user_id) == (original.tweet_id, author)
        assert await mesh.profile(author, other) == [made.tweet_id]
    again = [await mesh.retweet(others[0], tweet.tweet_id) for tweet in chain]
    assert {tweet.tweet_id for tweet in again} == {chain[1].tweet_id}
    concurrent = await asyncio.gather(*(mesh.retweet(author, chain[5].tweet_id) for _ in range(10)))
    assert len({tweet.tweet_id for tweet in concurrent}) == 1


async def test_answers_and_quotes_of_a_retweet_are_of_its_original(mesh: Mesh) -> None:
    author, retweeter, other = await people(mesh, 3)
    original = await mesh.post(author)
    made = await mesh.retweet(retweeter, original.tweet_id)
    reply = await mesh.post(other, in_reply_to_tweet_id=made.tweet_id)
    assert (reply.in_reply_to_tweet_id, reply.in_reply_to_user_id) == (original.tweet_id, author)
    quote = await mesh.post(other, quoted_tweet_id=made.tweet_id)
    assert (quote.quoted_tweet_id, quote.quoted_user_id) == (original.tweet_id, author)
    await mesh.delete(author, original.tweet_id)
    for field in ("in_reply_to_tweet_id", "quoted_tweet_id"):
        fields: dict[str, Any] = {field: made.tweet_id}
        assert await refused(mesh.post(other, **fields)) == (NOT_FOUND, "TWEET_NOT_FOUND")
    assert await refused(mesh.retweet(other, made.tweet_id)) == (NOT_FOUND, "TWEET_NOT_FOUND")


async def test_a_retweet_is_undone_by_either_id_and_again(mesh: Mesh) -> None:
    author, retweeter, other = await people(mesh, 3)
    original = await mesh.post(author)
    assert not await mesh.undo_retweet(retweeter, original.tweet_id)
    for number, by_original in enumerate((True, False)):
        made = await mesh.retweet(retweeter, original.tweet_id)
        of_another = await mesh.retweet(other, made.tweet_id)
        undone = original if by_original else of_another
        if number:
            await mesh.delete(author, original.tweet_id)
        assert await mesh.undo_retweet(retweeter, undone.tweet_id)
        assert not await mesh.undo_retweet(retweeter, made.tweet_id)
        assert await mesh.profile(author, retweeter) == []
        assert await mesh.profile(author, other) == [of_another.tweet_id]
    assert not await mesh.undo_retweet(retweeter, 1 << 61)


async def test_an_undo_that_could_not_tell_the_cache_is_completed_by_its_retry(mesh: Mesh) -> None:
    author, retweeter = await people(mesh, 2)
    original = await mesh.post(author)
    made = await mesh.retweet(retweeter, original.tweet_id)
    mesh.valkey.down = True
    assert (await refused(mesh.undo_retweet(retweeter, original.tweet_id)))[0] is grpc.StatusCode.UNAVAILABLE
    mesh.valkey.down = False
    key = f"{mesh.valkey.key_prefix}tweet:{made.tweet_id}"
    assert not (await mesh.valkey.call("GET", key)).endswith(b"2:")
    assert not await mesh.undo_retweet(retweeter, original.tweet_id)
    assert await mesh.valkey.call("GET", key) == b"2:"


async def test_references_come_once_and_say_what_is_unavailable(mesh: Mesh) -> None:
    author, other = await people(mesh, 2)
    first, second = await mesh.post(author, "first"), await mesh.post(author, "second")
    reply = await mesh.post(other, in_reply_to_tweet_id=first.tweet_id, quoted_tweet_id=second.tweet_id)
    quote = await mesh.post(other, quoted_tweet_id=first.tweet_id)
    made = await mesh.retweet(other, reply.tweet_id)
    await mesh.delete(author, second.tweet_id)

    got = await mesh.tweets.GetTweet(t.GetTweetRequest(tweet_id=reply.tweet_id), **mesh.as_(author))
    ids = [reply.tweet_id, quote.tweet_id, made.tweet_id]
    batch = await mesh.tweets.BatchGetTweets(t.BatchGetTweetsRequest(tweet_ids=ids), **mesh.as_(author))
    (page,) = await mesh.profile_pages(author, other)
    for reply_of, expected in (
        (got, {first.tweet_id: "first", second.tweet_id: None}),
        (batch, {first.tweet_id: "first", second.tweet_id: None, reply.tweet_id: "hello"}),
        (page, {first.tweet_id: "first", second.tweet_id: None, reply.tweet_id: "hello"}),
    ):
        assert len(reply_of.references) == len(expected)
        assert {r.tweet_id: r.tweet.text if r.HasField("tweet") else None for r in reply_of.references} == expected
    await mesh.delete(other, reply.tweet_id)
    (page,) = await mesh.profile_pages(author, other)
    assert [tweet.tweet_id for tweet in page.tweets] == [made.tweet_id, quote.tweet_id]
    assert not next(r for r in page.references if r.tweet_id == reply.tweet_id).HasField("tweet")


@pytest.mark.parametrize("blocks_author", [True, False])
async def test_who_blocks_or_is_blocked_may_not_answer_quote_or_retweet(mesh: Mesh, blocks_author: bool) -> None:
    author, other = await people(mesh, 2)
    tweet = await mesh.post(author)
    pair = (other, author) if blocks_author else (author, other)
    await mesh.block(*pair)
    denied = (grpc.StatusCode.PERMISSION_DENIED, "BLOCKED")
    assert await refused(mesh.post(other, in_reply_to_tweet_id=tweet.tweet_id)) == denied
    assert await refused(mesh.post(other, quoted_tweet_id=tweet.tweet_id)) == denied
    assert await refused(mesh.retweet(other, tweet.tweet_id)) == denied
    await mesh.post(other, "a post of one's own")
    await mesh.retweet(author, tweet.tweet_id)
    await mesh.unblock(*pair)
    await mesh.post(other, in_reply_to_tweet_id=tweet.tweet_id)
    await mesh.retweet(other, tweet.tweet_id)


async def test_without_graph_svc_posts_go_through_and_answers_to_others_wait(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    author, other = await people(mesh, 2)
    tweet = await mesh.post(author)
    channel = grpc.aio.insecure_channel("127.0.0.1:1")
    monkeypatch.setattr(mesh.tweet_service._accounts, "_stub", graph_pb2_grpc.GraphServiceStub(channel))
    await mesh.post(other)
    await mesh.post(author, in_reply_to_tweet_id=tweet.tweet_id)
    await mesh.retweet(author, tweet.tweet_id)
    for call in (mesh.post(other, in_reply_to_tweet_id=tweet.tweet_id), mesh.retweet(other, tweet.tweet_id)):
        assert (await refused(call))[0] is grpc.StatusCode.UNAVAILABLE
    await channel.close()


async def test_an_edit_is_seen_by_the_next_reader_and_its_texts_are_kept(mesh: Mesh) -> None:
    author, reader = await people(mesh, 2)
    await mesh.follow(reader, author)
    tweet = await mesh.post(author, "one @alice", media_ids=["m"])
    await mesh.settle()
    await mesh.home(reader)
    mesh.clock.advance(1_000)
    for text in ("two @bob", "three", "three"):
        edited = await mesh.edit(author, tweet.tweet_id, text)
        assert (edited.text, edited.tweet_id, list(edited.media_ids)) == (text, tweet.tweet_id, ["m"])
        assert (await hydrated(mesh, tweet.tweet_id)).text == text
        assert [item.tweet.text for item in (await mesh.home(reader)).items] == [text]
    assert (edited.version, list(edited.mentions)) == (3, [])
    assert edited.edited_at.ToMilliseconds() == edited.created_at.ToMilliseconds() + 3_000
    expected = [(3, "three"), (2, "two @bob"), (1, "one @alice")]
    assert await revisions(mesh, reader, tweet.tweet_id) == expected
    assert await revisions(mesh, reader, tweet.tweet_id, 1) == expected
    await mesh.delete(author, tweet.tweet_id)
    assert await refused(revisions(mesh, reader, tweet.tweet_id)) == (NOT_FOUND, "TWEET_NOT_FOUND")


async def test_an_edit_that_a_restarted_cache_lost_is_mended_by_its_event(mesh: Mesh) -> None:
    (author,) = await people(mesh, 1)
    tweet = await mesh.post(author, "old")
    key = f"{mesh.valkey.key_prefix}tweet:{tweet.tweet_id}"
    before = await mesh.valkey.call("GET", key)
    await mesh.edit(author, tweet.tweet_id, "new")
    await mesh.valkey.call("SET", key, before)
    await mesh.deliver_all()
    assert (await mesh.valkey.call("GET", key)).startswith(b"2:")
    assert not (await mesh.consumer.dead_letters())


async def test_an_edit_that_could_not_tell_the_cache_is_completed_by_its_retry(mesh: Mesh) -> None:
    (author,) = await people(mesh, 1)
    tweet = await mesh.post(author, "old")
    mesh.valkey.down = True
    assert (await refused(mesh.edit(author, tweet.tweet_id, "new")))[0] is grpc.StatusCode.UNAVAILABLE
    mesh.valkey.down = False
    assert (await mesh.edit(author, tweet.tweet_id, "new")).version == 2
    assert [item.tweet.text for item in (await mesh.home(author)).items] == ["new"]


async def test_a_retweet_and_anothers_tweet_are_not_edited(mesh: Mesh) -> None:
    author, other = await people(mesh, 2)
    tweet = await mesh.post(author)
    made = await mesh.retweet(other, tweet.tweet_id)
    invalid, denied = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED
    assert await refused(mesh.edit(other, made.tweet_id, "text")) == (invalid, "IS_A_RETWEET")
    assert await refused(mesh.edit(other, tweet.tweet_id, "text")) == (denied, "NOT_THE_AUTHOR")
    await mesh.delete(author, tweet.tweet_id)
    for who in (author, other):
        assert await refused(mesh.edit(who, tweet.tweet_id, "text")) == (NOT_FOUND, "TWEET_NOT_FOUND")


async def counts_of(mesh: Mesh, reader: int, tweet_id: int) -> tuple[int, int, int, int]:
    """Likes, retweets, replies, quotes; on a busy machine a read may come without."""
    found: list[t.TweetCounts] = []

    async def known() -> bool:
        got = await mesh.tweets.GetTweet(t.GetTweetRequest(tweet_id=tweet_id), **mesh.as_(reader))
        found.append(got.tweet.counts)
        return got.tweet.HasField("counts")

    await eventually(known)
    return found[-1].likes, found[-1].retweets, found[-1].replies, found[-1].quotes


async def flush_all(mesh: Mesh) -> None:
    while await mesh.counting.flush():
        pass


async def drop_counts(mesh: Mesh) -> None:
    for key in await mesh.valkey.call("KEYS", f"{mesh.valkey.key_prefix}tweet_counts:*"):
        await mesh.valkey.call("DEL", key)


async def test_what_is_done_with_a_tweet_is_counted_and_uncounted(mesh: Mesh) -> None:
    author, *others = await people(mesh, 4)
    tweet = await mesh.post(author)
    assert await counts_of(mesh, author, tweet.tweet_id) == (0, 0, 0, 0)
    made = [await mesh.retweet(other, tweet.tweet_id) for other in others]
    for other in others:
        assert await mesh.like(other, made[0].tweet_id)
        assert not await mesh.like(other, tweet.tweet_id)
    both = await mesh.post(author, in_reply_to_tweet_id=tweet.tweet_id, quoted_tweet_id=made[1].tweet_id)
    assert await counts_of(mesh, author, tweet.tweet_id) == (3, 3, 1, 1)
    await flush_all(mesh)
    await drop_counts(mesh)
    await mesh.retweet(others[0], tweet.tweet_id)
    assert await counts_of(mesh, author, tweet.tweet_id) == (3, 3, 1, 1)
    for _ in range(2):
        await mesh.undo_retweet(others[0], tweet.tweet_id)
        await mesh.unlike(others[1], made[1].tweet_id)
        await mesh.delete(others[2], made[2].tweet_id)
        await mesh.delete(author, both.tweet_id)
        assert await counts_of(mesh, author, tweet.tweet_id) == (2, 1, 0, 0)
        await drop_counts(mesh)
    ids = [both.tweet_id, tweet.tweet_id]
    assert await mesh.engagements(others[1], ids) == ([], [tweet.tweet_id])
    assert await mesh.engagements(others[0], ids) == ([tweet.tweet_id], [])


async def test_counts_come_with_every_read_and_into_no_cached_body(mesh: Mesh) -> None:
    author, other = await people(mesh, 2)
    tweet = await mesh.post(author)
    made = await mesh.retweet(other, tweet.tweet_id)
    await mesh.like(other, tweet.tweet_id)
    batch = await mesh.tweets.BatchGetTweets(t.BatchGetTweetsRequest(tweet_ids=[made.tweet_id]), **mesh.as_(author))
    (page,) = await mesh.profile_pages(author, other)
    (own,) = await mesh.profile_pages(author, author)
    shown = (batch.references[0].tweet, page.references[0].tweet, own.tweets[0], await hydrated(mesh, tweet.tweet_id))
    assert [(seen.counts.likes, seen.counts.retweets) for seen in shown] == [(1, 1)] * 4
    assert not batch.tweets[0].HasField("counts"), "a retweet has none"
    await mesh.edit(author, tweet.tweet_id, "edited")
    await mesh.deliver_all()
    await hydrated(mesh, tweet.tweet_id)
    (body,) = (await Bodies(mesh.valkey).get([tweet.tweet_id])).values()
    assert body
    assert not body.HasField("counts")


async def test_counts_are_exact_once_when_the_flusher_dies_half_way(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    author, *others = await people(mesh, 4)
    tweet = await mesh.post(author)

    async def die(*_: Any, **__: Any) -> None:
        raise asyncio.CancelledError

    for number, (owner, step) in enumerate(((mesh.tweet_store, "add_counts"), (Shard, "finish"))):
        await mesh.like(others[number], tweet.tweet_id)
        with monkeypatch.context() as dying:
            dying.setattr(owner, step, die)
            with pytest.raises(asyncio.CancelledError):
                await mesh.counting.flush()
        await mesh.retweet(others[number], tweet.tweet_id)
        for _ in range(2):
            await drop_counts(mesh)
            assert await counts_of(mesh, author, tweet.tweet_id) == (number + 1, number + 1, 0, 0)
            await flush_all(mesh)
        stored, _ = await mesh.tweet_store.counts([tweet.tweet_id], "")
        assert stored == {tweet.tweet_id: (number + 1, number + 1, 0, 0)}


async def test_a_like_while_valkey_is_away_is_counted_later(mesh: Mesh) -> None:
    author, other, third = await people(mesh, 3)
    tweet = await mesh.post(author)
    await mesh.like(other, tweet.tweet_id)
    mesh.valkey.down = True
    assert await mesh.like(third, tweet.tweet_id)
    got = await mesh.tweets.GetTweet(t.GetTweetRequest(tweet_id=tweet.tweet_id), **mesh.as_(author))
    assert not got.tweet.HasField("counts")
    assert await mesh.engagements(third, [tweet.tweet_id]) == ([tweet.tweet_id], [])
    mesh.valkey.down = False
    await drop_counts(mesh)  # They have 5 minutes at most.
    assert await counts_of(mesh, author, tweet.tweet_id) == (2, 0, 0, 0)


async def test_who_blocks_or_is_blocked_may_not_like(mesh: Mesh) -> None:
    author, other = await people(mesh, 2)
    tweet = await mesh.post(author)
    await mesh.like(other, tweet.tweet_id)
    await mesh.block(author, other)
    assert await refused(mesh.like(other, tweet.tweet_id)) == (grpc.StatusCode.PERMISSION_DENIED, "BLOCKED")
    await mesh.unlike(other, tweet.tweet_id)
    assert await mesh.engagements(other, [tweet.tweet_id]) == ([], [])


async def test_retweets_of_a_hot_tweet_go_the_slow_way_and_arrive(mesh: Mesh) -> None:
    author, follower, *others = await people(mesh, HOT_RETWEETS + 6)
    for other in others:
        await mesh.follow(follower, other)
    await mesh.home(follower)
    await mesh.warm_all()
    tweet, cold = await mesh.post(author), await mesh.post(author)
    key = f"{mesh.valkey.key_prefix}tweet:{tweet.tweet_id}"
    await mesh.valkey.call("DEL", key)
    made = [await mesh.retweet(other, tweet.tweet_id) for other in others[:-1]]
    assert await mesh.valkey.call("GET", key), "the body is warmed"
    mesh.clock.advance(29_000)
    await mesh.renew_leases()
    made.append(await mesh.retweet(others[-1], tweet.tweet_id))
    ordinary = await mesh.retweet(others[0], cold.tweet_id)
    slow = [row.tweet_id for row in await mesh.tweet_store.unpublished(100, slow=True)]
    assert slow == [retweet.tweet_id for retweet in made[HOT_RETWEETS:]]
    assert ordinary.tweet_id in {row.tweet_id for row in await mesh.tweet_store.unpublished(100)}
    await mesh.relay_all()
    topics = {fanout.tweets_of(fanout.read(record.value))[0]: record.topic for record in await mesh.take(100)}
    assert {tweet_id for tweet_id, topic in topics.items() if topic == FANOUT_TASKS_SLOW.name} == set(slow)
    mesh.new_worker()
    await mesh.settle()
    listed = await mesh.raw_list(lists.home(follower)) or []
    assert {*slow, ordinary.tweet_id} <= set(listed)


async def test_nobody_heats_a_tweet_alone(mesh: Mesh) -> None:
    author, other, third = await people(mesh, 3)
    tweet = await mesh.post(author)
    for _ in range(HOT_RETWEETS + 5):
        again = await mesh.retweet(other, tweet.tweet_id)
        await mesh.undo_retweet(other, tweet.tweet_id)
    theirs = await mesh.retweet(third, tweet.tweet_id)
    ordinary = {row.tweet_id for row in await mesh.tweet_store.unpublished(100)}
    assert theirs.tweet_id in ordinary
    assert again.tweet_id not in ordinary, "who retweets again may wait"


async def test_a_storm_waits_at_the_door_and_not_for_ever(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "CALLS_MAX", 8)
    author, *others = await people(mesh, HOT_RETWEETS + 10)
    tweet = await mesh.post(author)
    for other in others[:HOT_RETWEETS]:
        await mesh.retweet(other, tweet.tweet_id)
    begun, release = list[int](), asyncio.Event()
    create = mesh.tweet_store.create_retweet

    async def held(retweet: StoredTweet, outbox_max: int, *, slow: bool = False) -> StoredTweet:
        begun.append(retweet.author_id)
        await release.wait()
        return await create(retweet, outbox_max, slow=slow)

    monkeypatch.setattr(mesh.tweet_store, "create_retweet", held)
    *storm, late = others[HOT_RETWEETS:][:9]
    calls = [asyncio.create_task(mesh.retweet(other, tweet.tweet_id)) for other in storm]
    await eventually(lambda: begun and sum(gate.calls_in_flight for gate in mesh.gates) == 8)
    first = len(begun)
    too_many = (grpc.StatusCode.RESOURCE_EXHAUSTED, "TWEET_BUSY")
    assert await refused(mesh.retweet(late, tweet.tweet_id)) == too_many
    await mesh.post(author)
    assert len(begun) == first, "the others wait"
    release.set()
    made = await asyncio.gather(*calls)
    assert [retweet.author_id for retweet in made] == storm
    assert len(begun) == 8
    await mesh.retweet(late, tweet.tweet_id)


async def test_a_hot_tweet_that_is_retweeted_through_a_retweet_of_it_is_as_hot(mesh: Mesh) -> None:
    author, *others = await people(mesh, HOT_RETWEETS + 2)
    tweet = await mesh.post(author)
    made = [await mesh.retweet(other, tweet.tweet_id) for other in others[:HOT_RETWEETS]]
    through = await mesh.retweet(others[-1], made[0].tweet_id)
    assert through.retweeted_tweet_id == tweet.tweet_id
    assert [row.tweet_id for row in await mesh.tweet_store.unpublished(100, slow=True)] == [through.tweet_id]


async def test_retweets_of_a_hot_tweet_keep_all_rules(mesh: Mesh) -> None:
    author, blocked, *others = await people(mesh, HOT_RETWEETS + 4)
    tweet = await mesh.post(author)
    for other in others[:HOT_RETWEETS]:
        await mesh.retweet(other, tweet.tweet_id)
    await mesh.block(author, blocked)
    stranger = max(others) + 1
    refusals = asyncio.gather(*(refused(mesh.retweet(user, tweet.tweet_id)) for user in (blocked, stranger)))
    users = (author, others[-1], others[-1], others[0])
    own, first, same, again = await asyncio.gather(*(mesh.retweet(user, tweet.tweet_id) for user in users))
    assert await refusals == [
        (grpc.StatusCode.PERMISSION_DENIED, "BLOCKED"),
        (grpc.StatusCode.NOT_FOUND, "USER_NOT_FOUND"),
    ]
    assert [retweet.author_id for retweet in (own, first, same, again)] == [author, *[others[-1]] * 2, others[0]]
    assert first.tweet_id == same.tweet_id
    assert await counts_of(mesh, author, tweet.tweet_id) == (0, HOT_RETWEETS + 2, 0, 0)
    await mesh.delete(author, tweet.tweet_id)
    assert (await refused(mesh.retweet(others[-2], tweet.tweet_id)))[0] is grpc.StatusCode.NOT_FOUND


async def test_a_tweet_cools_down(mesh: Mesh) -> None:
    author, *others = await people(mesh, HOT_RETWEETS + 3)
    tweet = await mesh.post(author)
    for other in others[: HOT_RETWEETS + 1]:
        await mesh.retweet(other, tweet.tweet_id)
    mesh.clock.advance(30_000)
    await mesh.renew_leases()
    await mesh.retweet(others[-1], tweet.tweet_id)
    assert len(await mesh.tweet_store.unpublished(100, slow=True)) == 1


async def test_without_valkey_no_tweet_is_hot(mesh: Mesh) -> None:
    author, *others = await people(mesh, HOT_RETWEETS + 2)
    tweet = await mesh.post(author)
    mesh.valkey.down = True
    for other in others:
        await mesh.retweet(other, tweet.tweet_id)
    assert await mesh.tweet_store.unpublished(100, slow=True) == []


class SlowTopicFull(Producer):
    """Takes all but what may wait."""

    def __init__(self) -> None:
        self.published: list[str] = []
        self.room = 0
        """So many of each batch go in."""

    async def publish(self, topic: str, records: Sequence[tuple[bytes, bytes]]) -> None:
        if topic == FANOUT_TASKS_SLOW.name:
            raise LogFullError("full", range(self.room, len(records)))
        self.published += [topic] * len(records)

    async def incarnation(self) -> str:
        return "one"


async def test_a_full_slow_topic_holds_up_nothing_else(mesh: Mesh) -> None:
    producer = SlowTopicFull()
    relay = Relay(mesh.tweet_store, producer, mesh.clock)
    stopping = asyncio.Event()
    running = asyncio.create_task(relay.run(stopping))
    for number in range(3):
        retweet = StoredTweet(100 + number, 1, "", retweeted_tweet_id=number + 1, retweeted_user_id=9)
        await mesh.tweet_store.create_retweet(retweet, 100, slow=True)
    relay.nudge(slow=True)
    await mesh.tweet_store.create_tweet(StoredTweet(200, 1, "text"), None, 0, 100)
    relay.nudge()
    await eventually(lambda: producer.published == [TWEET_FANOUT.name])
    stopping.set()
    relay.nudge()
    await running
    assert len(await mesh.tweet_store.unpublished(100, slow=True)) == 3
    producer.room = 1
    with pytest.raises(LogFullError):
        await relay.step(slow=True)
    assert len(await mesh.tweet_store.unpublished(100, slow=True)) == 2, "what went in isn't sent again"


OLDER_SCHEMA = """
CREATE TABLE tweets (tweet_id INTEGER PRIMARY KEY, author_id INTEGER NOT NULL, text TEXT NOT NULL,
    in_reply_to_tweet_id INTEGER NOT NULL, in_reply_to_user_id INTEGER NOT NULL, quoted_tweet_id INTEGER NOT NULL,
    media_ids TEXT NOT NULL, mentions TEXT NOT NULL, version INTEGER NOT NULL, deleted INTEGER NOT NULL);
CREATE TABLE outbox (event_id INTEGER PRIMARY KEY AUTOINCREMENT, author_id INTEGER NOT NULL, tweet_id INTEGER NOT NULL,
    deleted_version INTEGER NOT NULL, published_ms INTEGER, again INTEGER NOT NULL DEFAULT 0);
CREATE INDEX outbox_unpublished ON outbox (event_id) WHERE published_ms IS NULL;
INSERT INTO tweets VALUES (1, 7, 'old', 0, 0, 0, '', '', 1, 0), (2, 8, 'quote', 0, 0, 1, '', '', 1, 0),
    (3, 8, '', 0, 0, 0, '', '', 2, 1);
INSERT INTO outbox (author_id, tweet_id, deleted_version) VALUES (7, 1, 0), (8, 2, 0), (8, 3, 2);
"""


async def test_a_data_folder_from_before_retweets_goes_on(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "tweets.db") as connection:
        connection.executescript(OLDER_SCHEMA)
    for _ in range(2):
        store = SqliteTweetStore(tmp_path / "tweets.db", synchronous="OFF")
        await store.open()
        assert await store.tweets([1, 2, 3]) == [
            StoredTweet(1, 7, "old"),
            StoredTweet(2, 8, "quote", quoted_tweet_id=1, quoted_user_id=7),
            StoredTweet(3, 8, "", version=2, deleted=True),
        ]
        assert [(row.tweet_id, row.kind, row.version) for row in await store.unpublished(10)] == [
            (1, EventKind.CREATED, 1),
            (2, EventKind.CREATED, 1),
            (3, EventKind.DELETED, 2),
        ]
        await store.close()


async def test_whoever_is_not_registered_does_nothing_with_tweets(mesh: Mesh) -> None:
    (author,) = await people(mesh, 1)
    tweet = await mesh.post(author)
    for act in (mesh.retweet, mesh.like):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await act(12_345, tweet.tweet_id)
        assert reason_of(refused.value) == "USER_NOT_FOUND"
    assert await counts_of(mesh, author, tweet.tweet_id) == (0, 0, 0, 0)


async def test_cached_tweets_are_shown_while_their_store_is_away_and_others_refused(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    (author,) = await people(mesh, 1)
    first, gone = [await mesh.post(author, text) for text in ("first", "gone")]
    quote = await mesh.post(author, "look", quoted_tweet_id=first.tweet_id)
    about_gone = await mesh.post(author, "look at that", quoted_tweet_id=gone.tweet_id)
    await mesh.delete(author, gone.tweet_id)

    async def away(_: Sequence[int]) -> Any:
        raise UnavailableError("away", reason="STORE_UNAVAILABLE")

    def get(tweet_id: int) -> Any:
        return mesh.tweets.GetTweet(t.GetTweetRequest(tweet_id=tweet_id), **mesh.as_(author))

    ids = [quote.tweet_id, about_gone.tweet_id, gone.tweet_id]
    batch = t.BatchGetTweetsRequest(tweet_ids=ids)
    usual = [await get(ids[0]), await get(ids[1]), await mesh.tweets.BatchGetTweets(batch, **mesh.as_(author))]
    monkeypatch.setattr(mesh.tweet_store, "tweets", away)
    assert [await get(ids[0]), await get(ids[1]), await mesh.tweets.BatchGetTweets(batch, **mesh.as_(author))] == usual
    assert await refused(get(gone.tweet_id)) == (NOT_FOUND, "TWEET_NOT_FOUND")
    assert await refused(get(12_345)) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"), "it may be there"
    await mesh.valkey.call("DEL", f"{mesh.valkey.key_prefix}tweet:{first.tweet_id}")
    assert await refused(get(quote.tweet_id)) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
