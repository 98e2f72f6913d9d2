"""What may happen to stores on Cassandra, on a real server: deaths between any two statements, answers that are lost,
clocks that are wrong, timestamps that are equal, tombstones; S1, X7, X10 and R1 of the cases from the field.

A store here dies, or doubts, at its n-th write, for every n: before the write reached the server, or after.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cassandra import OperationTimedOut

from backends import cassandra
from backends.cassandra import peers
from backends.servers import Cluster
from graph_svc.cassandra import CassandraGraphStore, Leftover
from graph_svc.reconcile import STATEMENTS as RECONCILE_STATEMENTS
from graph_svc.reconcile import Reconciler
from graph_svc.store import User
from mesh.cassandra import Cassandra, Statement, cluster_of
from mesh.errors import ConfigurationError, StarlingError, UnavailableError
from mesh.ids import ID_MAX
from mesh.migrate import migrate, statements
from tests.cassandra import Keyspace, new_keyspace, where
from tests.clocks import ManualClock
from tests.running_backends import running
from tests.waiting import eventually
from tweet_svc.cassandra import CassandraTweetStore
from tweet_svc.store import EventKind, Request, StoredTweet

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]

NOW = 1_790_000_000_000
WRITES_MAX = 60
WHEN = ["before", "after"]


class DiedError(Exception):
    """The process is gone: nothing more is sent."""


class Faulty(Cassandra):
    """Shares a session, and fails at a write: `dies`, and sends nothing any more, or only says that time ran out."""

    def __init__(self, healthy: Cassandra, at: int, when: str, *, dies: bool) -> None:
        super().__init__(healthy._where)
        self._prepared, self._session, self._is_open = healthy._prepared, healthy._session, True
        self._at, self._when, self._dies = at, when, dies
        self.writes = 0
        self.failed = False

    async def _send(self, query: Any) -> list[tuple[Any, ...]]:
        if self.failed and self._dies:
            raise DiedError
        text = getattr(query, "prepared_statement", None)
        if text is None or not text.query_string.startswith("SELECT"):
            self.writes += 1
            if self.writes == self._at:
                await self._fails(query)
        return await super()._send(query)

    async def _fails(self, query: Any) -> None:
        if self._when == "after":
            await super()._send(query)
        self.failed = True
        raise DiedError if self._dies else OperationTimedOut()

    async def open(self, statements: Iterable[Statement]) -> None:
        """The healthy one has prepared all."""

    async def close(self) -> None:
        """The session isn't its own."""


@pytest.fixture
async def database(keyspace: Keyspace) -> AsyncIterator[Cassandra]:
    """A session that works, with all statements of both stores."""
    database = Cassandra(keyspace.where)
    await CassandraTweetStore(database).open()
    await graph(database).open()
    await database.open(RECONCILE_STATEMENTS)
    yield database
    await database.close()


def graph(database: Cassandra) -> CassandraGraphStore:
    return CassandraGraphStore(database, bucket_size=3)


def tweets(database: Cassandra) -> CassandraTweetStore:
    """Whose sweeps look at once, and at everything."""
    return CassandraTweetStore(database, sweep_seconds=0.0, adopt_after_ms=0)


async def each_fault(
    database: Cassandra, when: str, attempt: Callable[[Cassandra, int], Awaitable[object]], *, dies: bool
) -> AsyncIterator[tuple[int, object]]:
    """Let `attempt(faulty, number)` fail at its first write, then at its second, and so on, until it has no more."""
    for number in range(1, WRITES_MAX):
        faulty = Faulty(database, number, when, dies=dies)
        outcome: object
        try:
            outcome = await attempt(faulty, number)
        except (DiedError, StarlingError) as error:
            outcome = error
        if not faulty.failed:
            assert number > 1, "it wrote nothing"
            return
        yield number, outcome
    raise AssertionError("too many writes")


# The graph. Each number has users of its own: `people(number)`.

USERS = 8


def people(number: int) -> list[int]:
    return list(range(number * 100 + 1, number * 100 + 1 + USERS))


async def sign_up(store: CassandraGraphStore, number: int) -> list[int]:
    users = people(number)
    for user_id in users:
        assert await store.create_user(User(user_id, f"u{user_id}", "", 1))
    return users


async def edges(keyspace: Keyspace, users: list[int]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """By the tables themselves: who follows whom, and who is among whose followers."""
    following, followers = set(), set()
    for user in users:
        rows = keyspace.session.execute(f"SELECT kind, other_id, state FROM users WHERE user_id = {user}")
        following |= {(user, other) for kind, other, state in rows if (kind, state) == (1, 2)}
        for bucket in range(6):
            text = f"SELECT follower_id, active FROM followers WHERE followee_id = {user} AND bucket = {bucket}"
            followers |= {(follower, user) for follower, active in keyspace.session.execute(text) if active}
    return following, followers


async def blocks(keyspace: Keyspace, users: list[int]) -> set[tuple[int, int]]:
    found = set()
    for user in users:
        rows = keyspace.session.execute(f"SELECT kind, other_id, state FROM users WHERE user_id = {user}")
        found |= {(user, other) for kind, other, state in rows if (kind, state) == (2, 2)}
    return found


async def check_always(keyspace: Keyspace, users: list[int]) -> None:
    """What holds at any moment, also right after a death."""
    following, followers = await edges(keyspace, users)
    assert following <= followers
    for blocker, blocked in await blocks(keyspace, users):
        assert not following & {(blocker, blocked), (blocked, blocker)}


async def check_settled(store: CassandraGraphStore, keyspace: Keyspace, users: list[int]) -> None:
    """What holds when every call has been repeated until it said that it was done."""
    await check_always(keyspace, users)
    following, followers = await edges(keyspace, users)
    assert following == followers
    buckets: dict[tuple[int, int], int] = {}
    for user in users:
        (found,) = await store.users([user])
        assert found.following_count == sum(follower == user for follower, _ in following)
        assert found.follower_count == sum(followee == user for _, followee in following)
        viewer = await store.viewer_context(user)
        assert viewer
        assert list(viewer.followee_ids) == sorted(other for one, other in following if one == user)
        assert len(set(viewer.since)) == len(viewer.since)
        assert all(1 <= since <= viewer.version for since in viewer.since)
        for bucket in range(6):
            for row in keyspace.session.execute(
                f"SELECT follower_id FROM followers WHERE followee_id = {user} AND bucket = {bucket}"
            ):
                if row[0]:
                    assert buckets.setdefault((row[0], user), bucket) == bucket, "a follower never moves"


Change = Callable[[CassandraGraphStore, list[int]], Awaitable[object]]


async def _nothing(store: CassandraGraphStore, users: list[int]) -> None:
    pass


async def _full_bucket(store: CassandraGraphStore, users: list[int]) -> None:
    for follower in users[2:5]:
        await store.follow(follower, users[1])


async def _followed(store: CassandraGraphStore, users: list[int]) -> None:
    await store.follow(users[0], users[1])
    await store.follow(users[1], users[0])


async def _left(store: CassandraGraphStore, users: list[int]) -> None:
    await _followed(store, users)
    await store.unfollow(users[0], users[1])


async def _has_blocked(store: CassandraGraphStore, users: list[int]) -> None:
    await _followed(store, users)
    await store.block(users[0], users[1])


CHANGES: dict[str, tuple[Change, Change]] = {
    "a follow": (_nothing, lambda store, users: store.follow(users[0], users[1])),
    "a follow into a new bucket": (_full_bucket, lambda store, users: store.follow(users[0], users[1])),
    "a follow once more": (_left, lambda store, users: store.follow(users[0], users[1])),
    "an unfollow": (_followed, lambda store, users: store.unfollow(users[0], users[1])),
    "a block": (_followed, lambda store, users: store.block(users[0], users[1])),
    "a block by whom one follows": (_followed, lambda store, users: store.block(users[1], users[0])),
    "an unblock": (_has_blocked, lambda store, users: store.unblock(users[0], users[1])),
    "a mute": (_nothing, lambda store, users: store.mute(users[0], users[1])),
    "an import": (
        _full_bucket,
        lambda store, users: store.import_follows([(users[0], i) for i in users[1:4]] + [(users[5], users[1])]),
    ),
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", CHANGES)
async def test_a_death_between_any_two_statements_of_a_change_is_mended_by_its_retry(
    database: Cassandra, keyspace: Keyspace, name: str, when: str
) -> None:
    before, change = CHANGES[name]
    store = graph(database)

    async def attempt(faulty: Cassandra, number: int) -> object:
        await before(store, await sign_up(store, number))
        return await change(graph(faulty), people(number))

    async for number, outcome in each_fault(database, when, attempt, dies=True):
        assert isinstance(outcome, DiedError)
        users = people(number)
        await check_always(keyspace, users)
        await change(store, users)
        await check_settled(store, keyspace, users)


UNDO: dict[str, Change] = {
    "a follow": lambda store, users: store.unfollow(users[0], users[1]),
    "an unfollow": lambda store, users: store.follow(users[0], users[1]),
    "a block": lambda store, users: store.unblock(users[0], users[1]),
    "an unblock": lambda store, users: store.block(users[0], users[1]),
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", UNDO)
async def test_a_death_is_mended_by_whatever_comes_next_too(
    database: Cassandra, keyspace: Keyspace, name: str, when: str
) -> None:
    """Nobody repeats the call; the opposite comes, and then the other user follows, or is refused."""
    before, change = CHANGES[name]
    store = graph(database)

    async def attempt(faulty: Cassandra, number: int) -> object:
        await before(store, await sign_up(store, number))
        return await change(graph(faulty), people(number))

    async for number, _ in each_fault(database, when, attempt, dies=True):
        users = people(number)
        await UNDO[name](store, users)
        await check_settled(store, keyspace, users)
        are_blocked = await blocks(keyspace, users)
        try:
            await store.follow(users[1], users[0])
        except StarlingError as refused:
            assert refused.reason == "BLOCKED"
            assert are_blocked
        else:
            assert not are_blocked
        await check_settled(store, keyspace, users)


async def test_a_follow_after_a_block_that_died_is_refused_or_stands_as_the_blocker_is_told(
    database: Cassandra, keyspace: Keyspace
) -> None:
    store = graph(database)

    async def attempt(faulty: Cassandra, number: int) -> object:
        await sign_up(store, number)
        return await graph(faulty).block(people(number)[0], people(number)[1])

    async for number, _ in each_fault(database, "after", attempt, dies=True):
        users = people(number)
        try:
            await store.follow(users[1], users[0])
        except StarlingError as refused:
            assert refused.reason == "BLOCKED"
            assert await store.list_blocked(users[0], 0, 10) == [users[1]], "the refusal finished the block"
        assert bool(await store.list_blocked(users[0], 0, 10)) != bool(await store.list_followers(users[0], 0, 10))
        await check_settled(store, keyspace, users)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", CHANGES)
async def test_an_answer_that_is_lost_is_found_out_or_the_retry_is_right(
    database: Cassandra, keyspace: Keyspace, name: str, when: str
) -> None:
    """X7: counts are edges, and of the two calls at most one says that it was the one, whichever was applied."""
    before, change = CHANGES[name]
    store = graph(database)

    async def attempt(faulty: Cassandra, number: int) -> object:
        await before(store, await sign_up(store, number))
        return await change(graph(faulty), people(number))

    async for number, outcome in each_fault(database, when, attempt, dies=False):
        users = people(number)
        if isinstance(outcome, Exception):
            assert isinstance(outcome, UnavailableError)
            await change(store, users)
        elif name != "an import":
            assert outcome is True
        await check_settled(store, keyspace, users)
        assert await change(store, users) is False or name == "an import"


class Held(Faulty):
    """Stands still before its n-th write, until it is let go."""

    def __init__(self, healthy: Cassandra, at: int) -> None:
        super().__init__(healthy, at, "before", dies=False)
        self.stands, self.goes_on = asyncio.Event(), asyncio.Event()

    async def _fails(self, query: Any) -> None:
        self.stands.set()
        await self.goes_on.wait()


MEANWHILE: dict[str, tuple[str, Change]] = {
    **{f"{name}, and its opposite": (name, undo) for name, undo in UNDO.items()},
    "a follow, and a block": ("a follow", lambda store, users: store.block(users[1], users[0])),
    "a follow, and a block by its follower": ("a follow", lambda store, users: store.block(users[0], users[1])),
    "a follow once more, and its end": ("a follow once more", lambda store, users: store.unfollow(users[0], users[1])),
    "a follow into a new bucket, and its end": (
        "a follow into a new bucket",
        lambda store, users: store.unfollow(users[0], users[1]),
    ),
    "a follow, and another": ("a follow", lambda store, users: store.follow(users[0], users[1])),
}


@pytest.mark.parametrize("name", MEANWHILE)
async def test_what_stood_still_between_any_two_statements_changes_nothing_that_came_meanwhile_half(
    database: Cassandra, keyspace: Keyspace, name: str
) -> None:
    """A process that was stopped for long goes on: its next statement may be for a world that is gone."""
    kind, other = MEANWHILE[name]
    before, change = CHANGES[kind]
    store = graph(database)
    for number in range(1, WRITES_MAX):
        users = await sign_up(store, number)
        await before(store, users)
        held = Held(database, number)
        changing = asyncio.ensure_future(change(graph(held), users))
        standing = asyncio.ensure_future(held.stands.wait())
        await asyncio.wait([changing, standing], return_when=asyncio.FIRST_COMPLETED)
        standing.cancel()
        if changing.done():
            assert number > 1
            return
        await other(store, users)
        await check_always(keyspace, users)
        held.goes_on.set()
        try:
            await changing
        except StarlingError as refused:
            assert refused.reason == "BLOCKED"
        await check_settled(store, keyspace, users)
    raise AssertionError("too many writes")


async def reconciled(database: Cassandra) -> Reconciler:
    reconciler = Reconciler(database, graph(database), 1_000_000)
    await reconciler.run(ranges=4)
    return reconciler


@pytest.mark.parametrize("when", WHEN)
async def test_what_nobody_repeats_is_mended_by_the_reconciliation(
    database: Cassandra, keyspace: Keyspace, when: str
) -> None:
    store = graph(database)
    numbers = itertools.count(1)
    everybody: list[int] = []
    for before, change in (CHANGES[name] for name in UNDO):

        async def attempt(faulty: Cassandra, _: int, before: Change = before, change: Change = change) -> object:
            users = await sign_up(store, next(numbers))
            everybody.extend(users)
            await before(store, users)
            return await change(graph(faulty), users)

        async for _ in each_fault(database, when, attempt, dies=True):
            pass
    reconciler = await reconciled(database)
    assert set(reconciler.mended) == set(Leftover)
    for start in range(0, len(everybody), USERS):
        await check_settled(store, keyspace, everybody[start : start + USERS])
    assert not (await reconciled(database)).mended
    keyspace.session.execute("TRUNCATE follower_counts")
    assert (await reconciled(database)).mended.keys() == {Leftover.COUNT}
    await check_settled(store, keyspace, everybody[:USERS])


async def test_a_reconciliation_that_was_stopped_goes_on_where_it_was(database: Cassandra) -> None:
    store = graph(database)
    await sign_up(store, 1)
    stopped = Reconciler(Faulty(database, 6, "after", dies=True), store, 1_000_000)
    with pytest.raises(DiedError):
        await stopped.run(ranges=4)  # It writes where it is after each: all followers, and two ranges of users.
    again, whole = await reconciled(database), await reconciled(database)
    assert stopped.looked_at + again.looked_at == whole.looked_at
    assert again.looked_at < whole.looked_at


async def test_follows_unfollows_and_blocks_at_once_leave_both_sides_equal(
    database: Cassandra, keyspace: Keyspace
) -> None:
    """Two stores, as two processes; what is seen in between is right, too."""
    stores = [graph(database), graph(Faulty(database, 0, "before", dies=False))]
    users = (await sign_up(stores[0], 1))[:4]
    kinds = ["follow", "unfollow", "follow", "block", "unblock", "follow"]

    async def one(number: int) -> None:
        pair = users[number % 4], users[(number + 1 + number // 4 % 3) % 4]
        try:
            await getattr(stores[number % 2], kinds[number % 6])(*pair)
        except StarlingError as refused:
            assert refused.reason == "BLOCKED"

    for start in range(0, 72, 24):
        running = asyncio.gather(*map(one, range(start, start + 24)))
        while not running.done():
            await check_always(keyspace, users)
            await asyncio.wait([running], timeout=0.01)
        await running
        await check_settled(stores[0], keyspace, users)


# Posts.

ids = itertools.count(1 << 22, 1 << 22)
request_ids = itertools.count()


def request() -> Request:
    return Request(f"6fd3b2a4-0c5e-4f6e-9d55-{next(request_ids):012}", b"same", NOW + 86_400_000)


async def published(store: CassandraTweetStore) -> list[tuple[int, EventKind]]:
    """All that a relay now publishes, in the slow lane as well."""
    rows = [row for slow in (False, True) for row in await store.unpublished(1_000, slow=slow)]
    for row in rows:
        (tweet,) = await store.tweets([row.tweet_id])  # What is published is in the store.
        listed = (await store.author_tweet_ids([row.author_id], [row.tweet_id + 1], [1]))[0][:1] == [row.tweet_id]
        assert listed != tweet.deleted
        assert tweet.deleted or row.kind is not EventKind.DELETED
        assert tweet.version >= row.version
    await store.republish("log", 0)
    await store.mark_published(rows, "log", NOW)
    return [(row.tweet_id, row.kind) for row in rows]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("dies", [True, False])
async def test_s1_a_post_that_died_or_timed_out_is_one_tweet_after_the_retry(
    database: Cassandra, dies: bool, when: str
) -> None:
    asked: dict[int, Request] = {}

    async def attempt(faulty: Cassandra, number: int) -> object:
        asked[number] = request()
        return await tweets(faulty).create_tweet(StoredTweet(next(ids), number, "hello"), asked[number], NOW, 1_000)

    async for author, outcome in each_fault(database, when, attempt, dies=dies):
        store, later = tweets(database), StoredTweet(next(ids), author, "hello")
        made = await store.create_tweet(later, asked[author], NOW, 1_000)
        assert outcome == made or isinstance(outcome, DiedError | UnavailableError)
        assert await store.create_tweet(later, asked[author], NOW, 1_000) == made
        assert await store.author_tweet_ids([author], [ID_MAX], [10]) == [[made.tweet_id]]
        assert await published(store) == [(made.tweet_id, EventKind.CREATED)], "once"
        assert await published(tweets(database)) == []


@pytest.mark.parametrize("when", WHEN)
async def test_what_a_post_that_died_has_left_is_whole_before_it_is_published(database: Cassandra, when: str) -> None:
    """Nobody repeats the call: from the outbox row on it is published all the same, and before it never was."""
    written = []

    async def attempt(faulty: Cassandra, number: int) -> object:
        return await tweets(faulty).create_tweet(StoredTweet(next(ids), number, "hello"), None, NOW, 1_000)

    async for number, outcome in each_fault(database, when, attempt, dies=True):
        assert isinstance(outcome, DiedError)
        store = tweets(database)
        events = await published(store)
        (listed,) = await store.author_tweet_ids([number], [ID_MAX], [10])
        assert [tweet_id for tweet_id, _ in events] == listed
        written.append(len(listed))
    assert written == sorted(written)
    assert written[-1] == 1


@pytest.mark.parametrize("kind", ["a post", "an edit"])
async def test_a_write_that_stood_still_while_the_tweet_was_deleted_brings_nothing_back(
    database: Cassandra, keyspace: Keyspace, kind: str
) -> None:
    """The sweep of another process, or the client's retry, did it all meanwhile; and then it was deleted."""
    for number in range(1, WRITES_MAX):
        store, asked, tweet_id = tweets(database), request(), next(ids)
        held = Held(database, number)
        if kind == "a post":
            work: Any = tweets(held).create_tweet(StoredTweet(tweet_id, number, "secret"), asked, NOW, 1_000)
        else:
            await store.create_tweet(StoredTweet(tweet_id, number, "secret"), asked, NOW, 1_000)
            work = tweets(held).update_tweet(tweet_id, number, "secret too", [], NOW, 1_000)
        writing, standing = asyncio.ensure_future(work), asyncio.ensure_future(held.stands.wait())
        await asyncio.wait([writing, standing], return_when=asyncio.FIRST_COMPLETED)
        standing.cancel()
        if writing.done():
            assert number > 1
            return
        await published(store)
        made = await store.create_tweet(StoredTweet(next(ids), number, "secret"), asked, NOW, 1_000)
        assert await store.delete_tweet(made.tweet_id, number)
        held.goes_on.set()
        await writing
        await published(tweets(database))
        (left,) = await store.tweets([made.tweet_id])
        assert left.deleted
        assert await store.author_tweet_ids([number], [ID_MAX], [10]) == [[]]
        for table in ("tweets", "tweet_revisions"):
            assert not [row for row in keyspace.session.execute(f"SELECT text FROM {table}") if row[0]]
    raise AssertionError("too many writes")


async def _posted(store: CassandraTweetStore, author: int) -> int:
    tweet_id = next(ids)
    await store.create_tweet(StoredTweet(tweet_id, author, "one"), None, NOW, 1_000)
    await store.update_tweet(tweet_id, author, "two", [], NOW, 1_000)
    return tweet_id


def _edit(store: CassandraTweetStore, author: int, tweet_id: int) -> Awaitable[object]:
    return store.update_tweet(tweet_id, author, "three", ["bob"], NOW + 1, 1_000)


def _delete(store: CassandraTweetStore, author: int, tweet_id: int) -> Awaitable[object]:
    return store.delete_tweet(tweet_id, author)


def _retweet(store: CassandraTweetStore, author: int, tweet_id: int) -> Awaitable[object]:
    return store.create_retweet(StoredTweet(next(ids), author, "", retweeted_tweet_id=tweet_id), 1_000)


def _undo(store: CassandraTweetStore, author: int, tweet_id: int) -> Awaitable[object]:
    return store.undo_retweet(author, tweet_id)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize("change", [_edit, _delete, _retweet, _undo])
async def test_changes_of_tweets_stand_or_fall_with_their_events(
    database: Cassandra,
    change: Callable[[CassandraTweetStore, int, int], Awaitable[object]],
    dies: bool,
    when: str,
) -> None:
    originals: dict[int, int] = {}

    async def attempt(faulty: Cassandra, number: int) -> object:
        store = tweets(database)
        originals[number] = tweet_id = await _posted(store, number)
        if change is _undo:
            await _retweet(store, number, tweet_id)
        await published(store)
        return await change(tweets(faulty), number, tweet_id)

    async for number, _ in each_fault(database, when, attempt, dies=dies):
        store, tweet_id = tweets(database), originals[number]
        swept = await published(store)  # Before any retry: what is in the store is published, and the other way round.
        state = await _state(store, number, tweet_id)
        assert bool(swept) == (state == _after(change))
        await change(store, number, tweet_id)
        assert await _state(store, number, tweet_id) == _after(change)
        assert len(swept) + len(await published(store)) == 1
        assert await published(tweets(database)) == []


async def _state(store: CassandraTweetStore, author: int, tweet_id: int) -> tuple[object, ...]:
    (tweet,) = await store.tweets([tweet_id])
    retweet = await store.retweet_of(author, tweet_id)
    revisions = await store.revisions(tweet_id, 100, 10)
    return tweet.text, tweet.version, len(revisions or []), bool(retweet and not retweet.deleted)


def _after(change: object) -> tuple[object, ...]:
    return {
        _edit: ("three", 3, 3, False),
        _delete: ("", 3, 0, False),
        _retweet: ("two", 2, 2, True),
        _undo: ("two", 2, 2, False),
    }[change]  # type: ignore[index]


# Clocks, tombstones, and what the driver does.


@asynccontextmanager
async def with_clock(keyspace: Keyspace, now_us: Callable[[], int]) -> AsyncIterator[Cassandra]:
    """A session of a process whose clock says `now_us`: the driver sends it along as the timestamp of each write."""
    database = Cassandra(keyspace.where)
    try:
        await CassandraTweetStore(database).open()
        await graph(database).open()
        assert database._cluster
        database._cluster.timestamp_generator = now_us
        yield database
    finally:
        await database.close()


def us() -> int:
    return time.time_ns() // 1_000


HOUR_US = 3_600_000_000
CLOCKS: dict[str, tuple[Callable[[], int], Callable[[], int]]] = {
    "one is two hours ahead": (lambda: us() + HOUR_US, lambda: us() - HOUR_US),
    "both stand": (lambda: 1_700_000_000_000_000, lambda: 1_700_000_000_000_000),
}


@pytest.mark.parametrize("name", CLOCKS)
async def test_the_last_operation_wins_whatever_the_clocks_say(keyspace: Keyspace, name: str) -> None:
    """Two processes take turns, in both orders; with clocks that stand, all timestamps are equal."""
    first, second = CLOCKS[name]
    async with with_clock(keyspace, first) as one, with_clock(keyspace, second) as other:
        if first() > second():  # Such clocks do harm where they decide.
            keyspace.session.execute("CREATE TABLE IF NOT EXISTS naive (id int PRIMARY KEY, who text)")
            for session, who in ((one._session, "one"), (other._session, "other")):
                assert session
                session.execute(f"INSERT INTO {keyspace.where.keyspace}.naive (id, who) VALUES (1, %s)", (who,))
            assert keyspace.session.execute("SELECT who FROM naive").one()[0] == "one"
            keyspace.session.execute("DROP TABLE naive")
        for author, (a, b) in enumerate(((one, other), (other, one)), 1):
            await _takes_turns(tweets(a), tweets(b), author)
        for number, (a, b) in enumerate(((one, other), (other, one)), 1):
            users = await sign_up(graph(a), number)
            me, you = users[:2]
            for _ in range(2):
                assert await graph(a).follow(me, you)
                assert await graph(b).unfollow(me, you)
                await check_settled(graph(a), keyspace, users)
                assert await graph(b).follow(me, you)
                assert await graph(a).block(you, me)
                assert await graph(b).unblock(you, me)
                assert await graph(b).mute(me, you)
                assert await graph(a).unmute(me, you)
                assert await graph(a).list_followers(you, 0, 9) == []
                await check_settled(graph(b), keyspace, users)


async def _takes_turns(a: CassandraTweetStore, b: CassandraTweetStore, author: int) -> None:
    tweet_id = next(ids)
    for _ in range(2):
        assert await a.like(author, tweet_id)
        assert await b.unlike(author, tweet_id)
        assert not (await a.engagements(author, [tweet_id])).liked
        retweet = StoredTweet(next(ids), author, "", retweeted_tweet_id=tweet_id)
        assert await a.create_retweet(retweet, 1_000) == retweet
        undone = await b.undo_retweet(author, tweet_id)
        assert undone
        assert undone.changed
        assert not (await a.engagements(author, [tweet_id])).retweeted
    await a.create_tweet(StoredTweet(tweet_id, author, "one"), None, NOW, 1_000)
    for store, text in ((b, "two"), (a, "three"), (b, "four")):
        assert await store.update_tweet(tweet_id, author, text, [], NOW, 1_000)
        (tweet,) = await a.tweets([tweet_id])
        assert tweet.text == text
    deleted = await b.delete_tweet(tweet_id, author)
    assert deleted
    assert await a.tweets([tweet_id]) == [deleted.tweet]
    assert await a.author_tweet_ids([author], [tweet_id + 1], [5]) == [[]]


async def test_an_erased_text_stays_erased_when_the_post_is_done_again(database: Cassandra, keyspace: Keyspace) -> None:
    """A sweep or a retry that comes late writes what a deletion has erased, with an older timestamp, at any time."""
    store, tweet_id = tweets(database), next(ids)
    await store.create_tweet(StoredTweet(tweet_id, 1, "secret"), None, NOW, 1_000)
    await store.update_tweet(tweet_id, 1, "secret too", [], NOW, 1_000)
    late = [row[0] for row in keyspace.session.execute("SELECT event_id FROM outbox")]
    await store.delete_tweet(tweet_id, 1)
    assert len(late) == 2
    for event_id in late:
        body = await store._outbox.body(event_id)
        assert body
        await store._complete(event_id, body)
    for table in ("tweets", "tweet_revisions"):
        found = list(keyspace.session.execute(f"SELECT text FROM {table}"))
        assert not [row for row in found if row[0]]
    assert await store.author_tweet_ids([1], [ID_MAX], [5]) == [[]]


async def test_no_read_meets_tombstones(database: Cassandra, keyspace: Keyspace) -> None:
    """After everything has been done and undone, again and again."""
    store, social = tweets(database), graph(database)
    users = await sign_up(social, 1)
    await store.republish("log", 0)
    for round_ in range(6):
        for kind in ("follow", "unfollow", "block", "unblock", "mute", "unmute"):
            await getattr(social, kind)(users[0], users[1])
        tweet_id = next(ids)
        await store.create_tweet(StoredTweet(tweet_id, users[0], "x"), request(), NOW, 1_000)
        await store.update_tweet(tweet_id, users[0], "y", [], NOW, 1_000)
        await store.like(users[0], tweet_id)
        await store.unlike(users[0], tweet_id)
        await store.create_retweet(StoredTweet(next(ids), users[0], "", retweeted_tweet_id=5), 1_000)
        await store.undo_retweet(users[0], 5)
        await store.delete_tweet(tweet_id, users[0])
        await store.add_counts(f"f{round_}", {}, NOW)
        await published(store)
    for user in users:
        await social.viewer_context(user)
        await social.list_followers(user, 0, 10)
        await social.list_following(user, 0, 10)
    await social.users(users)
    await store.author_tweet_ids([users[0]], [ID_MAX], [10])
    assert await published(tweets(database)) == []
    assert _tombstones(keyspace) == {}
    for other in range(6):  # Such deletions are seen.
        keyspace.session.execute(f"DELETE FROM big_authors WHERE size_class = 1 AND author_id = {other}")
    keyspace.session.execute("SELECT * FROM big_authors WHERE size_class = 1")
    assert _tombstones(keyspace).keys() == {"big_authors"}


def _tombstones(keyspace: Keyspace) -> dict[str, float]:
    """Tables of which a read met several. (One and none are the same to this histogram.)"""
    reads = "SELECT table_name, max FROM system_views.tombstones_per_read WHERE keyspace_name = %s ALLOW FILTERING"
    return {table: most for table, most in keyspace.session.execute(reads, (keyspace.where.keyspace,)) if most > 1}


async def test_x10_nothing_is_prepared_after_the_start_and_the_loop_never_waits(keyspace: Keyspace) -> None:
    database = Cassandra(keyspace.where)
    store, social = tweets(database), graph(database)
    await store.open()
    await social.open()
    session = database._session
    assert session
    prepared: list[str] = []
    session.prepare = lambda text, *_: prepared.append(text)
    longest, last, running = 0.0, time.monotonic(), True

    async def watch() -> None:
        nonlocal longest, last
        while running:
            await asyncio.wait([waiting], timeout=0.001)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()

    waiting = asyncio.get_running_loop().create_future()
    watching = asyncio.create_task(watch())
    users = await sign_up(social, 1)
    for kind in ("follow", "unfollow", "block", "unblock", "mute", "unmute"):
        await getattr(social, kind)(users[0], users[1])
    tweet_id = await _posted(store, users[0])
    for change in (_edit, _retweet, _undo, _delete):
        await change(store, users[0], tweet_id)
    await published(store)
    await social.move_modes(100, 80, NOW)
    running = False
    await watching
    await database.close()
    print(f"the longest stall of the event loop: {1_000 * longest:.1f} ms")
    assert prepared == []
    assert longest < 0.25


async def test_r1_a_log_that_lost_its_end_gets_it_again_though_the_relay_dies_over_it(database: Cassandra) -> None:
    """100 posts are in the log, and the log is lost. The relay that learns of it dies half-way: another goes on."""
    author = 77
    store = tweets(database)
    await store.republish("first", 0)
    made = [
        (await store.create_tweet(StoredTweet(next(ids), author, "x"), None, NOW, 1_000)).tweet_id for _ in range(100)
    ]
    await store.mark_published(await store.unpublished(1_000), "first", NOW)
    assert await store.unpublished(1_000) == []
    dying = tweets(Faulty(database, 40, "after", dies=True))
    assert await dying.republish("second", NOW - 1) == 100
    with pytest.raises(DiedError):
        await dying.mark_published(await dying.unpublished(1_000), "second", NOW + 1)
    left = tweets(database)
    rows = await left.unpublished(1_000)
    assert 0 < len(rows) < 100
    assert {row.tweet_id for row in rows} <= set(made)
    await left.mark_published(rows, "first", NOW + 2)  # Late, and of the log that is gone.
    assert len(await left.unpublished(1_000)) == len(rows)
    await left.mark_published(rows, "second", NOW + 2)
    assert await tweets(database).unpublished(1_000) == []


async def test_r1_a_relay_that_had_done_with_a_minute_looks_at_it_again_in_a_new_log(database: Cassandra) -> None:
    """Another process learned of the new log first, and died."""
    clock = ManualClock()
    store, other = (CassandraTweetStore(database, clock, sweep_seconds=0.0) for _ in range(2))
    await store.republish("first", 0)
    await store.create_tweet(StoredTweet(next(ids), 5, "x"), None, NOW, 1_000)
    (row,) = await store.unpublished(10)
    await store.mark_published([row], "first", clock.now_ms())
    clock.advance(900_000)
    assert await store.unpublished(10) == []
    assert await other.republish("second", clock.now_ms() - 3_600_000) == 1
    await store.mark_published([], "second", clock.now_ms())
    assert await store.republish("second", 0) == 0
    assert await store.unpublished(10) == [row]
    await store.mark_published([row], "second", clock.now_ms())
    assert await store.unpublished(10) == []
    clock.advance(7_200_000)
    before = len(await store._outbox._partitions())
    assert not await store.prune(clock.now_ms() - 3_600_000, clock.now_ms())
    assert (before, len(await store._outbox._partitions())) == (1, 0), "a partition is dropped whole"


async def test_two_migrations_at_once_make_one_schema(cassandra_node: Cluster) -> None:
    there = where(cassandra_node)
    try:
        applied = await asyncio.gather(*(asyncio.to_thread(migrate, there) for _ in range(3)))
        assert sorted(name for names in applied for name in names) == [name for name, _ in statements()]
        assert await asyncio.to_thread(migrate, there) == []
        database = Cassandra(there)
        await CassandraTweetStore(database).open()
        await database.close()
    finally:
        cluster = cluster_of(there)
        await asyncio.to_thread(lambda: cluster.connect().execute(f"DROP KEYSPACE {there.keyspace}", timeout=60))
        await asyncio.to_thread(cluster.shutdown)


async def test_a_keyspace_without_the_schema_is_refused_by_name(cassandra_node: Cluster) -> None:
    store = CassandraTweetStore(Cassandra(where(cassandra_node, "test_nobodys")))
    with pytest.raises(ConfigurationError, match="STARLING_CASSANDRA_KEYSPACE"):
        await store.open()
    await store.close()


async def test_a_store_that_is_not_open_yet_is_unavailable(keyspace: Keyspace) -> None:
    with pytest.raises(UnavailableError):
        await tweets(Cassandra(keyspace.where)).tweets([1])


LOADERS = 6


async def test_x10_a_node_is_killed_and_comes_back_under_load_and_no_call_fails(tmp_path: Path) -> None:
    """Three nodes, of which one is gone for a while: nobody notices, and what was acknowledged is there, once."""
    with running(cassandra, tmp_path / "cluster", 3) as cluster, new_keyspace(cluster) as keyspace:
        database = Cassandra(keyspace.where)
        store, social = CassandraTweetStore(database), CassandraGraphStore(database)
        await store.open()
        await social.open()
        users = await sign_up(social, 1)
        made: list[tuple[int, int]] = []
        seconds: list[float] = []
        stopping = asyncio.Event()

        async def load(number: int) -> None:
            author, other = users[number], users[number + 1]
            while not stopping.is_set():
                begun = time.monotonic()
                tweet = StoredTweet(next(ids), author, "hello")
                await store.create_tweet(tweet, request(), NOW, 100_000)
                made.append((author, tweet.tweet_id))
                assert await social.follow(author, other)
                assert await store.tweets([tweet.tweet_id]) == [tweet]
                assert await social.unfollow(author, other)
                assert await social.viewer_context(author)
                seconds.append((time.monotonic() - begun) / 5)

        loading = asyncio.gather(*map(load, range(LOADERS)))
        victim = cluster.servers[1]

        async def goes_on(more: int) -> None:
            enough = len(made) + more
            await eventually(lambda: loading.done() or len(made) >= enough, 120)
            assert not loading.done(), loading.exception()

        async def is_back() -> bool:
            known = await asyncio.to_thread(peers, cluster.addresses[1].partition(":")[0], keyspace.where.port)
            return loading.done() or known == 2

        await goes_on(60)
        await asyncio.to_thread(victim.kill)
        await goes_on(200)
        victim.start()
        await eventually(is_back, 120)
        await goes_on(60)
        stopping.set()
        await loading
        for author in users[:LOADERS]:
            mine = sorted((tweet_id for who, tweet_id in made if who == author), reverse=True)
            (found,) = await store.author_tweet_ids([author], [ID_MAX], [len(made)])
            assert (set(mine) - set(found), set(found) - set(mine), len(found)) == (set(), set(), len(mine))
            assert list(found) == mine
        await check_settled(social, keyspace, users)
        await database.close()
        seconds.sort()
        print(
            f"{len(made)} posts acknowledged, 0 lost, 0 twice; {5 * len(seconds)} calls, 0 errors;"
            f" mean of five: p50 {1_000 * seconds[len(seconds) // 2]:.0f} ms,"
            f" p99 {1_000 * seconds[len(seconds) * 99 // 100]:.0f} ms, longest {1_000 * seconds[-1]:.0f} ms"
        )
