"""The services' pure cores, as tables and properties."""

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanout_svc import core as fanout
from fanout_svc.core import Action, Author, InvalidEventError
from fanout_svc.worker import Figures
from mesh.timelines.port import ListState, TailRecord
from starling.event.v1.event_pb2 import (
    BucketDelivery,
    BucketDrain,
    TweetCreated,
    TweetDeleted,
    TweetEvent,
    TweetUpdated,
)
from starling.tweet.v1.tweet_pb2 import Tweet
from timeline_svc.core import COVER_MAX, MODES_AGE_MS, Assessment, Page, Verdict, ViewerContext, assess, visible
from tweet_svc.core import AuthorMerge

NOW = 1_000_000
MANY = list(range(1, COVER_MAX + 1))


@given(
    timelines=st.dictionaries(st.integers(1, 9), st.sets(st.integers(1, 500), max_size=60), min_size=1),
    below=st.integers(1, 600),
    limit=st.integers(1, 100),
    take=st.integers(1, 20),
)
def test_authors_merge_to_all_their_ids_in_order(
    timelines: dict[int, set[int]], below: int, limit: int, take: int
) -> None:
    owned = {author: {number * 10 + author for number in numbers} for author, numbers in timelines.items()}
    merge = AuthorMerge(list(owned), below, limit)
    taken: list[int] = []
    for _ in range(2_000):
        if merge.exhausted:
            break
        taken += merge.take(take)
        wanted, bounds, counts = merge.wanted()
        if wanted:
            asked = zip(wanted, bounds, counts, strict=True)
            merge.feed([sorted((i for i in owned[a] if i < b), reverse=True)[:count] for a, b, count in asked])
    assert merge.exhausted
    assert taken == sorted((i for ids in owned.values() for i in ids if i < below), reverse=True)


def viewer(version: int = 10, followees: dict[int, int] | None = None) -> ViewerContext:
    since = followees if followees is not None else {2: 5, 3: 8}
    return ViewerContext(1, version, array("Q", sorted(since)), array("Q", [since[f] for f in sorted(since)]))


def record(state: ListState = ListState.READY, version: int = 10, lease_until_ms: int = 0) -> TailRecord:
    return TailRecord(state, 0, version, "token", lease_until_ms)


@pytest.mark.parametrize(
    ("tail", "context", "expected"),
    [
        (None, viewer(), Assessment(Verdict.BUILD)),
        (record(ListState.BUILDING, lease_until_ms=NOW + 1), viewer(), Assessment(Verdict.WAIT)),
        (record(ListState.BUILDING, lease_until_ms=NOW), viewer(), Assessment(Verdict.BUILD)),
        (record(version=11), viewer(), Assessment(Verdict.REPLACE)),
        (record(version=10), viewer(), Assessment(Verdict.SERVE, [])),
        (record(version=8), viewer(), Assessment(Verdict.SERVE, [])),
        (record(version=7), viewer(), Assessment(Verdict.SERVE, [3])),
        (record(version=0), viewer(), Assessment(Verdict.SERVE, [2, 3])),
        (record(version=0), viewer(99, {n: n for n in MANY}), Assessment(Verdict.SERVE, MANY)),
        (record(version=0), viewer(99, {n: n for n in [*MANY, 500]}), Assessment(Verdict.REPLACE)),
    ],
)  # fmt: skip
def test_a_list_is_judged_by_its_record(tail: TailRecord | None, context: ViewerContext, expected: Assessment) -> None:
    assert assess(tail, context, NOW) == expected


@pytest.mark.parametrize(
    ("author", "answered", "shown"),
    [
        (1, 0, True),  # one's own
        (1, 9, True),  # one's own answer to a stranger
        (2, 0, True),  # a followee's
        (2, 1, True),  # … who answers the viewer
        (2, 2, True),  # … who goes on
        (2, 3, True),  # … who answers another followee
        (2, 9, False),  # … who answers a stranger
        (9, 0, False),  # a stranger's
        (9, 1, False),  # … who answers the viewer
        (9, 2, False),  # … who answers a followee
    ],
)
def test_what_a_home_timeline_shows(author: int, answered: int, shown: bool) -> None:
    assert visible(Tweet(tweet_id=5, author_id=author, in_reply_to_user_id=answered), viewer()) is shown


@given(st.lists(st.booleans(), max_size=300), st.integers(1, 30))
def test_a_page_examines_no_more_than_it_needs(hidden: list[bool], size: int) -> None:
    page = Page(size)
    for number, hide in enumerate(hidden):
        if page.full:
            break
        assert 1 <= page.wanted() <= 1_000
        tweet_id = 1_000 - number
        page.examine(tweet_id, None if hide else Tweet(tweet_id=tweet_id, author_id=1), viewer())
    assert len(page.items) == min(size, hidden.count(False))
    assert all(a.item_id > b.item_id for a, b in pairwise(page.items))


def test_a_page_lacks_what_was_written_only_where_its_place_is() -> None:
    page = Page(2)
    for tweet_id in (50, 40):
        page.examine(tweet_id, Tweet(tweet_id=tweet_id, author_id=1), viewer())
    assert not page.lacks(50, more=True)
    assert page.lacks(45, more=True)
    assert not page.lacks(30, more=True)
    assert page.lacks(30, more=False)


def created() -> TweetEvent:
    return TweetEvent(author_id=7, created=TweetCreated(tweet_id=9))


def bucket() -> TweetEvent:
    return TweetEvent(author_id=7, bucket=BucketDelivery(tweet_ids=[9, 8], bucket=3))


@pytest.mark.parametrize(
    ("event", "author", "action"),
    [
        (created(), Author(pulled=False, mode_age_seconds=99, bucket_count=1), Action.INLINE),
        (created(), Author(pulled=False, mode_age_seconds=99, bucket_count=2), Action.SPLIT),
        (created(), Author(pulled=True, mode_age_seconds=19.9, bucket_count=1), Action.INLINE),
        (created(), Author(pulled=True, mode_age_seconds=19.9, bucket_count=2), Action.SPLIT),
        (created(), Author(pulled=True, mode_age_seconds=20.0, bucket_count=2), Action.OWN),
        (bucket(), Author(pulled=False, mode_age_seconds=99, bucket_count=4), Action.BUCKET),
        (bucket(), Author(pulled=True, mode_age_seconds=19.9, bucket_count=4), Action.BUCKET),
        (bucket(), Author(pulled=True, mode_age_seconds=20.0, bucket_count=4), Action.NOTHING),
        (TweetEvent(author_id=7, deleted=TweetDeleted(tweet_id=9, version=3)), None, Action.ERASE),
        (TweetEvent(author_id=7, updated=TweetUpdated(tweet_id=9, version=3)), None, Action.REFRESH),
        (TweetEvent(author_id=7, drain=BucketDrain(epoch=1, bucket=0)), None, Action.DRAIN),
    ],
)
def test_what_fan_out_does_with_an_event(event: TweetEvent, author: Author | None, action: Action) -> None:
    read = fanout.read(event.SerializeToString())
    assert fanout.needs_author(read) == (author is not None)
    assert fanout.plan(read, author) is action


@pytest.mark.parametrize(
    "event",
    [
        TweetEvent(author_id=7, created=TweetCreated()),
        TweetEvent(created=TweetCreated(tweet_id=9)),
        TweetEvent(author_id=7, updated=TweetUpdated(version=2)),
        TweetEvent(author_id=7, bucket=BucketDelivery(bucket=1)),
        TweetEvent(author_id=7, bucket=BucketDelivery(tweet_ids=[0])),
        TweetEvent(author_id=7, bucket=BucketDelivery(tweet_ids=range(1, 66))),
        TweetEvent(drain=BucketDrain(epoch=1)),
        TweetEvent(author_id=7),
    ],
)
def test_an_event_that_lacks_something_can_never_succeed(event: TweetEvent) -> None:
    with pytest.raises(InvalidEventError):
        fanout.read(event.SerializeToString())


def test_the_parts_of_a_split_are_all_buckets_each_with_its_own_key() -> None:
    records = fanout.bucket_tasks(7, [9, 8], 5)
    events = [fanout.read(value) for _, value in records]
    assert [event.bucket.bucket for event in events] == [0, 1, 2, 3, 4]
    assert all(list(event.bucket.tweet_ids) == [9, 8] and event.author_id == 7 for event in events)
    assert len({key for key, _ in records}) == 5


def test_workers_wait_longer_than_readers_believe() -> None:
    assert fanout.PULL_AGE_SECONDS * 1_000 >= MODES_AGE_MS + 5_000


def test_bytes_that_are_no_event_can_never_succeed() -> None:
    with pytest.raises(InvalidEventError):
        fanout.read(b"\xff\xfe")


def test_delays_are_weighted_by_their_deliveries() -> None:
    figures = Figures()
    assert figures.percentiles(0.5, 0.99) == [0.0, 0.0]
    for delay, followers in ((1.0, 50), (2.0, 45), (30.0, 5)):
        figures.delivered(followers, followers, delay)
    assert figures.percentiles(0.5, 0.95, 0.96) == [1.0, 2.0, 30.0]
