"""What people do with each other: blocks, mutes, retweets, thousands of celebrities, years away, live news."""

import asyncio
import dataclasses
import gc
import random
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import grpc
import pytest

import fanout_svc.service
import timeline_svc.live
import timeline_svc.reader
import timeline_svc.service
from fanout_svc.deliveries import Listener
from mesh.errors import UnavailableError
from mesh.ids import first_id_of
from mesh.media import MediaUrls
from mesh.timelines import port as lists
from starling.timeline.v1 import timeline_pb2
from tests.cases.test_timeline_cases import people
from tests.harness import SECRET, Mesh, Sizes, running_mesh
from tests.waiting import eventually
from tweet_svc.store import StoredTweet


async def test_f9_taking_a_retweet_back_leaves_the_original_at_its_place(mesh: Mesh) -> None:
    a, b, f = await people(mesh, 3)
    await mesh.follow(f, a)
    await mesh.follow(f, b)
    a1 = (await mesh.post(a)).tweet_id
    between = (await mesh.post(b)).tweet_id
    await mesh.retweet(b, a1)
    await mesh.settle()
    assert await mesh.walk(f) == [between, a1], "a tweet that has its own place isn't shown again"
    await mesh.undo_retweet(b, a1)
    await mesh.settle()
    assert await mesh.walk(f) == [between, a1]


async def test_f12_a_block_hides_others_retweets_of_the_blocked_from_the_very_next_read(mesh: Mesh) -> None:
    b, x, f = await people(mesh, 3)
    await mesh.follow(f, b)
    older = [(await mesh.post(b, f"older {n}")).tweet_id for n in range(15)]
    x1 = (await mesh.post(x)).tweet_id
    retweet = (await mesh.retweet(b, x1)).tweet_id
    await mesh.settle()
    first = (await mesh.home(f, 10)).items
    assert (first[0].item_id, first[0].tweet.tweet_id, first[0].retweeted_by.user_id) == (retweet, x1, b)
    await mesh.block(f, x)
    page = await mesh.home(f, 10)
    assert [item.item_id for item in page.items] == older[::-1][:10]
    await mesh.unblock(f, x)
    await mesh.block(x, f)
    page = await mesh.home(f, 10)
    assert [item.item_id for item in page.items] == older[::-1][:10], "whoever blocks isn't seen either"


async def test_a_retweet_of_several_is_shown_once_and_the_next_one_when_that_goes(mesh: Mesh) -> None:
    x, *retweeters, f = await people(mesh, 5)
    original = (await mesh.post(x)).tweet_id
    for retweeter in retweeters:
        await mesh.follow(f, retweeter)
    made = [(await mesh.retweet(retweeter, original)).tweet_id for retweeter in retweeters]
    await mesh.settle()
    for size in (1, 20):
        assert await mesh.walk(f, size) == made[2:]
    await mesh.mute(f, retweeters[2])
    assert await mesh.walk(f) == made[1:2]
    await mesh.undo_retweet(retweeters[1], original)
    assert await mesh.walk(f) == made[:1]
    await mesh.delete(x, original)
    assert await mesh.walk(f) == []


async def test_a_muted_account_stays_followed(mesh: Mesh) -> None:
    a, f = await people(mesh, 2)
    await mesh.follow(f, a)
    await mesh.mute(f, a)
    a1 = (await mesh.post(a)).tweet_id
    await mesh.settle()
    assert await mesh.walk(f) == []
    await mesh.unmute(f, a)
    assert await mesh.walk(f) == [a1], "it was delivered all the same"


async def test_hidden_and_deleted_references_are_tombstones(mesh: Mesh) -> None:
    a, b, f = await people(mesh, 3)
    await mesh.follow(f, a)
    quoted, gone = (await mesh.post(b, "quoted")).tweet_id, (await mesh.post(b, "gone")).tweet_id
    await mesh.post(a, "1", quoted_tweet_id=quoted)
    await mesh.post(a, "2", quoted_tweet_id=gone)
    await mesh.delete(b, gone)

    async def references() -> list[tuple[int, str, str]]:
        items = (await mesh.home(f)).items
        return [(r.tweet_id, r.tweet.text, r.author.handle) for item in items for r in item.references]

    assert await references() == [(gone, "", ""), (quoted, "quoted", "person1")]
    await mesh.block(b, f)
    assert await references() == [(gone, "", ""), (quoted, "", "")]


async def test_media_urls_are_made_when_a_tweet_is_read(mesh: Mesh) -> None:
    (a,) = await people(mesh, 1)
    await mesh.post(a, "with media", media_ids=["m1", "m-2"])

    async def urls() -> Sequence[str]:
        return (await mesh.home(a)).items[0].tweet.media_urls

    signed = re.compile(r"https://media\.example/m1\?expires=\d+&signature=[\w-]{43}")
    before = await urls()
    assert len(before) == 2
    assert signed.fullmatch(before[0])
    assert await urls() == before, "the same within an hour"
    mesh.timeline_service._reader._media = MediaUrls("https://elsewhere.example", SECRET[::-1], mesh.clock)
    after = await urls()
    assert after[0].startswith("https://elsewhere.example/m1?")
    assert after[0].rpartition("=")[2] != before[0].rpartition("=")[2]


async def test_whoever_is_away_for_30_days_costs_a_check_and_comes_back_to_all(mesh: Mesh) -> None:
    a, f = await people(mesh, 2)
    await mesh.follow(f, a)
    await mesh.home(f)
    await mesh.warm_all()
    key = f"{mesh.valkey.key_prefix}{mesh.timelines._name(lists.home(f)).removeprefix(mesh.valkey.key_prefix)}"
    left = await mesh.valkey.call("TTL", key)
    assert 30 * 86_400 - 10 < left <= 30 * 86_400
    mesh.clock.advance(86_400_000)
    await mesh.renew_leases()
    await mesh.valkey.call("EXPIRE", key, 29 * 86_400)  # What a day makes of it.
    posted = [(await mesh.post(a)).tweet_id]
    await mesh.settle()
    assert await mesh.valkey.call("TTL", key) <= 29 * 86_400, "deliveries don't keep it"
    await mesh.home(f)
    assert await mesh.valkey.call("TTL", key) > 29 * 86_400, "a read does"
    await mesh.valkey.call("PEXPIRE", key, 1)
    await eventually(lambda: _missing(mesh, key))
    posted += [(await mesh.post(a)).tweet_id for _ in range(3)]
    before = mesh.figures.deliveries_to_lists
    await mesh.settle()
    assert await _missing(mesh, key), "a delivery makes no list"
    assert mesh.figures.deliveries_to_lists == before
    assert await mesh.walk(f) == posted[::-1]
    await mesh.warm_all()
    assert await mesh.raw_list(lists.home(f)) == posted[::-1]


async def _missing(mesh: Mesh, key: str) -> bool:
    return not await mesh.valkey.call("EXISTS", key)


CELEBRITIES = 5_000


async def celebrities(mesh: Mesh) -> list[int]:
    """Accounts that are pulled, each with some tweets, straight into the stores; returns all ids, newest first."""
    chance = random.Random(1)
    begin = first_id_of(mesh.clock.now_ms() - 86_400_000) >> 22
    ids = [(begin + chance.randrange(86_400_000)) << 22 | n for n in range(CELEBRITIES + 1_000)]
    authors = range(1, CELEBRITIES + 1)

    def graph(connection: object) -> None:
        assert hasattr(connection, "executemany")
        connection.executemany(
            "INSERT INTO users (user_id, handle, display_name, created_ms, mode, epoch) VALUES (?, ?, '', 0, 1, 1)",
            [(number, f"star{number}") for number in authors],
        )

    def tweets(connection: object) -> None:
        assert hasattr(connection, "executemany")
        columns = [field.name for field in dataclasses.fields(StoredTweet)]
        rows = [
            StoredTweet(tweet_id, 1 + n if n < CELEBRITIES else chance.randrange(1, 99), "hello")
            for n, tweet_id in enumerate(ids)
        ]
        connection.executemany(
            f"INSERT INTO tweets ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
            [tuple("" if value == () else value for value in dataclasses.astuple(row)) for row in rows],
        )

    await mesh.graph_store._database.write(graph)
    await mesh.tweet_store._database.write(tweets)
    return sorted(ids, reverse=True)


async def make_author_lists(mesh: Mesh, newest_first: Sequence[int]) -> None:
    """What the warmer would do one by one."""
    theirs: dict[int, list[int]] = {author: [] for author in range(1, CELEBRITIES + 1)}
    for tweet in await mesh.tweet_store.tweets(newest_first):
        theirs[tweet.author_id].append(tweet.tweet_id)

    async def make(author: int, ids: Sequence[int]) -> None:
        cap = mesh.timelines.cap
        await mesh.timelines.create(lists.author(author), "made", 1_000)
        await mesh.timelines.finish(lists.author(author), "made", 0, ids, ids[cap - 1] if len(ids) >= cap else 0)

    for start in range(0, CELEBRITIES, 50):
        some = range(start + 1, start + 51)
        await asyncio.gather(*(make(author, theirs[author]) for author in some))


async def test_a_viewer_of_5000_celebrities_is_served_from_few_lists(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await celebrities(mesh)
    viewer = await mesh.create_user("fan")
    counts = await mesh.graph_store.import_follows([(viewer, author) for author in range(1, CELEBRITIES + 1)])
    assert counts.created == CELEBRITIES
    await mesh.watch_modes()
    await mesh.home(viewer)
    await make_author_lists(mesh, ids)
    read_many = mesh.timelines.read_many
    whole: list[int] = []

    async def counted(keys: Sequence[lists.ListKey], count: int) -> list[lists.ListView | None]:
        whole.append(len(keys))
        return await read_many(keys, count)

    monkeypatch.setattr(mesh.timelines, "read_many", counted)
    await mesh.home(viewer)
    await mesh.warm_all()
    mesh.clock.advance(2_000)
    whole.clear()
    first = [item.item_id for item in (await mesh.home(viewer, 20)).items]
    assert first == ids[:20]
    assert 0 < sum(whole) <= 64, "of 5,000 lists only those are read whose newest tweet is new enough"
    assert await mesh.walk(viewer, 100) == ids


class Watching:
    """A client that watches, and keeps what it is told."""

    def __init__(self, mesh: Mesh, viewer: int, newer_than: int = 0) -> None:
        self.items: list[int] = []
        self.kinds: set[str] = set()
        self.task = asyncio.create_task(self._watch(mesh, viewer, newer_than))

    async def _watch(self, mesh: Mesh, viewer: int, newer_than: int) -> None:
        request = timeline_pb2.WatchHomeTimelineRequest(newer_than_id=newer_than)
        with suppress(asyncio.CancelledError):
            async for message in mesh.timeline.WatchHomeTimeline(request, **(mesh.as_(viewer) | {"timeout": 30})):
                self.kinds.add(str(message.WhichOneof("kind")))
                if message.HasField("item"):
                    self.items.append(message.item.item_id)


@pytest.fixture
async def live_mesh(valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    """A mesh whose deliveries are listened to."""
    monkeypatch.setattr(timeline_svc.service, "_WATCH_SECONDS", 30.0)
    monkeypatch.setattr(timeline_svc.service, "_HEARTBEAT_SECONDS", 0.5)
    monkeypatch.setattr(timeline_svc.live, "_TAKE_OVER_SECONDS", 30.0)  # What a worker that is back tells isn't wanted.
    monkeypatch.setattr(fanout_svc.service, "_STREAM_SECONDS", 60.0)
    async with running_mesh(valkey_url, tmp_path, f"live{random.random()}:", Sizes(pull_threshold=3)) as mesh:
        stopping = asyncio.Event()
        running = asyncio.create_task(mesh.live.run(stopping))
        yield mesh
        stopping.set()
        mesh.timeline_service.stopping.set()
        await running


async def test_what_is_delivered_is_told_to_those_who_watch_and_to_nobody_else(live_mesh: Mesh) -> None:
    mesh = live_mesh
    a, b, f = await people(mesh, 3)
    await mesh.follow(f, a)
    old = (await mesh.post(a, "old")).tweet_id
    await mesh.settle()
    follower, stranger = Watching(mesh, f, newer_than=old - 1), Watching(mesh, b)
    await eventually(lambda: follower.items == [old])

    async def listened() -> bool:
        return bool(mesh.deliveries._listeners) and mesh.deliveries._listeners[-1]._viewers == {b, f}

    await eventually(listened)
    new = (await mesh.post(a, "new")).tweet_id
    await mesh.deliver_all()
    await eventually(lambda: follower.items == [old, new])
    await mesh.mute(f, a)
    await mesh.post(a, "not seen")
    after = (await mesh.post(f, "one's own")).tweet_id
    await mesh.deliver_all()
    await eventually(lambda: after in follower.items)
    await mesh.unmute(f, a)
    last = (await mesh.post(a, "last")).tweet_id
    await mesh.deliver_all()
    await eventually(lambda: last in follower.items)
    assert follower.items == [old, new, after, last]
    assert stranger.items == []
    await eventually(lambda: "heartbeat" in stranger.kinds)
    mesh.timeline_service.stopping.set()
    await asyncio.wait([follower.task, stranger.task], timeout=15)
    assert follower.task.done(), "a watch ends with the process, and is taken up again from the last id"
    mesh.timeline_service.stopping.clear()
    again = Watching(mesh, f, newer_than=last)
    await eventually(lambda: set(again.items) >= {old, new, after})  # A minute below what is known.
    again.task.cancel()


async def test_pulled_authors_are_watched_too(live_mesh: Mesh) -> None:
    mesh = live_mesh
    a, *fans = await people(mesh, 4)
    for fan in fans:
        await mesh.follow(fan, a)
    await mesh.settle()
    await mesh.profile(a, a)
    await mesh.settle()
    watch = Watching(mesh, fans[0])
    await eventually(lambda: watch.kinds == {"heartbeat"})  # So it knows what was there before.
    mesh.clock.advance(2_000)
    new = (await mesh.post(a)).tweet_id  # In the author's own list at once; nobody delivers it.
    mesh.clock.advance(2_000)
    await eventually(lambda: watch.items == [new])
    watch.task.cancel()


async def test_a_watch_looks_again_where_a_list_was_read_before_its_newest_id(
    live_mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = live_mesh
    a, *fans = await people(mesh, 4)
    for fan in fans:
        await mesh.follow(fan, a)
    await mesh.post(a)
    await mesh.settle()
    for _ in range(2):
        await mesh.home(fans[1])
        await mesh.settle()
    watch = Watching(mesh, fans[0])
    await eventually(lambda: watch.kinds == {"heartbeat"})
    reader = mesh.timeline_service._reader
    newer, found = reader.newer, list[Sequence[int]]()

    async def noted(author_id: int, than_id: int) -> Sequence[int]:
        found.append(await newer(author_id, than_id))
        return found[-1]

    monkeypatch.setattr(reader, "newer", noted)
    mesh.clock.advance(600)
    await reader.newer(a, 0)  # Somebody else has the list read, and copied.
    new = (await mesh.post(a)).tweet_id
    mesh.clock.advance(600)
    await eventually(lambda: len(found) > 1)
    assert found[1] == [], "the list's copy is older than the post"
    mesh.clock.advance(600)
    await eventually(lambda: watch.items == [new])
    watch.task.cancel()


async def test_a_watcher_who_is_too_slow_is_told_of_a_gap(live_mesh: Mesh) -> None:
    (f,) = await people(live_mesh, 1)
    with live_mesh.live.watch(f) as watch:
        watch.offer(range(1, 1_000))
        assert await watch.take(0) == ([], True)
        watch.offer([7])
        assert await watch.take(0) == ([7], False)


async def test_nobody_reads_anothers_home(mesh: Mesh) -> None:
    """There is no field to ask for one: who reads is who the token says; and a page token is its reader's only."""
    a, b = await people(mesh, 2)
    await mesh.follow(a, b)
    for number in range(3):
        await mesh.post(b, f"{number}")
    await mesh.settle()
    token = (await mesh.home(a, 1)).next_page_token
    assert token
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.home(b, 1, token)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.timeline.ListHomeTimeline(timeline_pb2.ListHomeTimelineRequest(), timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("known_max", [1, 1_000])
async def test_whoever_blocks_stays_known_however_many_others_are_looked_up(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, known_max: int
) -> None:
    monkeypatch.setattr(timeline_svc.reader, "_BLOCKERS_MAX", known_max)
    f, b, x, *strangers = await people(mesh, 9)
    await mesh.follow(f, b)
    await mesh.block(x, f)
    await mesh.retweet(b, (await mesh.post(x, "secret")).tweet_id)
    shown: list[int] = []
    for stranger in strangers:  # Each is unknown when those before are known.
        shown.append((await mesh.retweet(b, (await mesh.post(stranger)).tweet_id)).tweet_id)
        await mesh.settle()
        for size in (1, 3, 20):
            assert await mesh.walk(f, size) == shown[::-1]


async def test_a_moment_without_graph_svc_is_a_gap_for_those_who_watch(
    live_mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = live_mesh
    a, f = await people(mesh, 2)
    await mesh.follow(f, a)
    await mesh.settle()
    await eventually(lambda: mesh.deliveries._listeners)
    watch = Watching(mesh, f)
    await eventually(lambda: mesh.deliveries._listeners and f in mesh.deliveries._listeners[-1]._viewers)

    async def away(*_: object) -> None:
        raise UnavailableError("away", reason="AWAY")

    with monkeypatch.context() as patch:
        patch.setattr(mesh.timeline_service._reader, "items", away)
        await mesh.post(a)
        await mesh.deliver_all()
        await eventually(lambda: "gap" in watch.kinds)
    watch.task.cancel()


async def test_streams_of_deliveries_leave_nothing_behind(live_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout_svc.service, "_STREAM_SECONDS", 0.3)
    monkeypatch.setattr(timeline_svc.live, "_TAKE_OVER_SECONDS", 0.2)
    (f,) = await people(live_mesh, 1)
    opened: list[object] = []
    listening = live_mesh.deliveries.listening

    def counted() -> AbstractContextManager[Listener]:
        opened.append(None)
        return listening()

    monkeypatch.setattr(live_mesh.deliveries, "listening", counted)
    gc.disable()  # It would hide what nobody ended.
    try:
        with live_mesh.live.watch(f):
            await eventually(lambda: len(opened) > 10, 30)
        before = len(asyncio.all_tasks())
        await eventually(lambda: len(opened) > 30, 30)
        assert len(asyncio.all_tasks()) < before + 10
    finally:
        gc.enable()


async def test_watches_leave_room_for_reads_and_for_others(mesh: Mesh) -> None:
    f, other = await people(mesh, 2)
    watches = [Watching(mesh, f) for _ in range(5)]
    await eventually(lambda: not mesh.live.has_room(f))
    assert mesh.live.has_room(other)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in mesh.timeline.WatchHomeTimeline(timeline_pb2.WatchHomeTimelineRequest(), **mesh.as_(f)):
            pass
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for watch in watches:
        watch.task.cancel()
    await eventually(lambda: mesh.live.has_room(f))
