"""The judge: any operations, in any order, with any faults, against the model.

At every step a page is a descending subset of the model without repeats, in the middle of everything. When nothing
is in flight, every walk equals the model, and only its last page has no token.
"""

import asyncio
import itertools
import random
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import TypeVar

import grpc
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mesh.errors import UnavailableError
from mesh.eventlog.port import Record
from mesh.timelines import port as lists
from starling.timeline.v1 import timeline_pb2
from tests.cassandra import Keyspace
from tests.harness import Mesh, Sizes, running_mesh
from tests.model import reference
from tests.model.reference import Model, ModelTweet
from timeline_svc.core import CATCH_UP_MARGIN_MS, catch_up_bound

T = TypeVar("T")

STEP_SECONDS = 20.0
SLOW_POST_SECONDS = 120.0
USERS_MAX = 6
SIZES = Sizes(pull_threshold=3)
_serial = itertools.count()


class OutOfTimeError(Exception):
    """Nothing was found in the time given."""


@dataclass
class World:
    """What all examples of one test share: its own loop, and its own Valkey, which may be emptied."""

    runner: asyncio.Runner
    valkey_url: str
    libraries: Sequence[str] = ()
    rules_run: int = 0
    until: float = 0.0
    """When to give up, on the monotonic clock; 0: never."""
    complaints: list[str] = field(default_factory=list)
    """What services logged as errors: a list that breaks its own rules, say, which they survive."""
    keyspace: Keyspace | None = None
    """Where the stores are on Cassandra. It is emptied for each example."""


@dataclass
class OpenWalk:
    """A walk that somebody has begun: pages come in the middle of everything."""

    viewer: int
    token: str = ""
    below: int = 1 << 64


@dataclass
class CatchingUp:
    """A viewer who held the whole timeline at `since_ms`, and has only caught up since then."""

    since_ms: int
    held: set[int]


picks = st.integers(0, 1_000)
page_sizes = st.integers(1, 7)
skips = st.integers(0, 6)
changes = st.sampled_from(["follow", "unfollow", "block", "unblock", "mute", "unmute", "delete", "edit"])


class HomeTimelineMachine(RuleBasedStateMachine):
    """Rules are what people do, what runs in the background, and what breaks."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.world.complaints.clear()
        self.model = Model()
        self.walks: list[OpenWalk] = []
        self.written: dict[int, int] = {}
        self.catching_up: dict[int, CatchingUp] = {}
        self.slow_posts: list[asyncio.Task[None]] = []
        self.glimpses: dict[int, set[int]] = {}
        self.held: list[Record] = []
        self.to_try_again: list[Callable[[], Awaitable[object]]] = []
        self.folder = Path(tempfile.mkdtemp(prefix="starling-model-"))
        self.stack = AsyncExitStack()
        self.mesh: Mesh = self.run(self._start())

    def run(self, work: Awaitable[T]) -> T:
        async def bounded() -> T:
            return await asyncio.wait_for(work, STEP_SECONDS)

        self.world.rules_run += 1
        if self.world.until and time.monotonic() > self.world.until:
            raise OutOfTimeError
        done = self.world.runner.run(bounded())
        assert not self.world.complaints, self.world.complaints
        return done

    async def _start(self) -> Mesh:
        prefix = f"m{next(_serial)}:"
        keyspace = self.world.keyspace
        if keyspace:
            keyspace.empty()
        where = keyspace.where if keyspace else None
        mesh = running_mesh(self.world.valkey_url, self.folder, prefix, SIZES, self.world.libraries, where)
        return await self.stack.enter_async_context(mesh)

    def teardown(self) -> None:
        try:
            self.everything_settles_and_every_walk_is_exact(3)
        finally:
            self.run(self.stack.aclose())
            shutil.rmtree(self.folder, ignore_errors=True)

    def user(self, pick: int) -> int:
        return self.model.users[pick % len(self.model.users)]

    # People.

    @initialize(count=st.integers(3, 4))
    def some_people_sign_up(self, count: int) -> None:
        for _ in range(count):
            self.someone_signs_up()

    @precondition(lambda self: len(self.model.users) < USERS_MAX)
    @rule()
    def someone_signs_up(self) -> None:
        self.model.users.append(self.run(self.mesh.create_user(f"u{len(self.model.users)}")))

    @rule(who=picks, whom=picks)
    def someone_follows(self, who: int, whom: int) -> None:
        self._follow_or_unfollow(self.user(who), self.user(whom), follows=True)

    @rule(who=picks, whom=picks)
    def someone_unfollows(self, who: int, whom: int) -> None:
        self._follow_or_unfollow(self.user(who), self.user(whom), follows=False)

    @rule(whom=picks, follows=st.booleans())
    def everybody_follows_or_leaves_someone(self, whom: int, follows: bool) -> None:
        """So that thresholds are crossed, up and down. One who doesn't leave is left."""
        others = [user for user in self.model.users if user != self.user(whom)]
        for who in others if follows else others[1:]:
            self._follow_or_unfollow(who, self.user(whom), follows=follows)

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule(whom=picks, ms=st.sampled_from([1, 14_000, 21_000]), comes=st.booleans(), readers_hear=st.booleans())
    def fame_comes_or_goes_overnight(self, whom: int, ms: int, comes: bool, readers_hear: bool) -> None:
        """From a quiet evening, when everybody's list is made: an author crosses a threshold, time passes, the author
        posts; and readers have heard of it by the morning, or not yet."""
        self.everything_settles_and_every_walk_is_exact(3)
        self.everybody_follows_or_leaves_someone(whom, comes)
        self.authors_modes_follow_their_counts()
        self.time_passes(ms)
        self._post(self.user(whom))
        self.everything_settles_and_every_walk_is_exact(3, readers_hear=readers_hear)

    def _follow_or_unfollow(self, who: int, whom: int, *, follows: bool) -> None:
        act = self.mesh.follow if follows else self.mesh.unfollow
        if who == whom:
            self._is_refused(lambda: act(who, whom), grpc.StatusCode.INVALID_ARGUMENT)
            return
        if follows and self.model.blocked(who, whom):
            self._is_refused(lambda: act(who, whom), grpc.StatusCode.PERMISSION_DENIED)
            return
        stood = (who, whom) in self.model.follows
        self._tell_readers(lambda: act(who, whom))
        stood = (who, whom) in self.model.follows
        self._now_follows(who, whom, follows=follows)
        self._check_first_page(who, must_have=self.model.profile(whom) if follows and not stood else [])

    def _now_follows(self, who: int, whom: int, *, follows: bool) -> None:
        if follows:
            self.model.follows.add((who, whom))
            self.catching_up.pop(who, None)  # Catch-up brings only the last minute of a new followee.
        else:
            self.model.follows.discard((who, whom))

    def _is_refused(self, act: Callable[[], Awaitable[object]], code: grpc.StatusCode) -> None:
        with suppress(grpc.aio.AioRpcError):
            try:
                self.run(act())
            except grpc.aio.AioRpcError as error:
                assert error.code() is code
                raise
            raise AssertionError(f"{code} expected")

    @rule(who=picks, whom=picks, mutes=st.booleans(), stands=st.booleans())
    def someone_blocks_or_mutes(self, who: int, whom: int, mutes: bool, stands: bool) -> None:
        """Or takes it back."""
        one, other = self.user(who), self.user(whom)
        if one == other:
            return
        act = {
            (False, True): self.mesh.block,
            (False, False): self.mesh.unblock,
            (True, True): self.mesh.mute,
            (True, False): self.mesh.unmute,
        }[mutes, stands]
        self._tell_readers(lambda: act(one, other))
        self._now_hides(one, other, mutes=mutes, stands=stands)
        self._check_first_page(one, must_have=[])
        self._check_first_page(other, must_have=[])

    def _now_hides(self, who: int, whom: int, *, mutes: bool, stands: bool) -> None:
        pairs = self.model.mutes if mutes else self.model.blocks
        if stands:
            pairs.add((who, whom))
            if not mutes:
                self.model.follows -= {(who, whom), (whom, who)}
        else:
            pairs.discard((who, whom))
            self.catching_up.pop(who, None)  # Catch-up brings only the last minute of what is hidden no more.
            self.catching_up.pop(whom, None)

    @rule(who=picks, lines=st.integers(1, 4))
    def someone_posts(self, who: int, lines: int) -> None:
        """A few at a time, so that lists pass their cap."""
        for _ in range(lines):
            self._post(self.user(who))

    def _original(self, what: int) -> int:
        """Some tweet, which a retweet stands for."""
        tweet_id = self._tweet(what)
        return self.model.tweets[tweet_id].original or tweet_id

    def _tweet(self, what: int) -> int:
        return sorted(self.model.tweets)[what % len(self.model.tweets)]

    def _refused(self, who: int, tweet_id: int, act: Callable[[], Awaitable[object]]) -> bool:
        """Whether something mustn't be done with a tweet; then it isn't."""
        tweet = self.model.tweets[tweet_id]
        original = self.model.tweets[tweet.original] if tweet.original else tweet
        if tweet.deleted or original.deleted:
            self._is_refused(act, grpc.StatusCode.NOT_FOUND)
        elif self.model.blocked(who, original.author):
            self._is_refused(act, grpc.StatusCode.PERMISSION_DENIED)
        else:
            return False
        return True

    @precondition(lambda self: self.model.tweets)
    @rule(who=picks, what=picks, quotes=st.booleans())
    def someone_replies_or_quotes(self, who: int, what: int, quotes: bool) -> None:
        author, original = self.user(who), self._original(what)
        refers = (0, original) if quotes else (original, 0)
        refused = {"in_reply_to_tweet_id": refers[0], "quoted_tweet_id": refers[1]}
        if not self._refused(author, original, lambda: self.mesh.post(author, "refused", **refused)):
            self._post(author, *refers)

    def _post(self, author: int, answers: int = 0, quotes: int = 0) -> None:
        text = f"tweet {len(self.model.tweets)}"
        tweet = self.run(self.mesh.post(author, text, in_reply_to_tweet_id=answers, quoted_tweet_id=quotes))
        self._wrote(tweet.tweet_id, ModelTweet(author, text, answers, quotes))

    def _wrote(self, tweet_id: int, tweet: ModelTweet) -> None:
        self.model.tweets[tweet_id] = tweet
        self.written[tweet.author] = tweet_id
        self._check_first_page(tweet.author, must_have=[tweet_id], written=tweet_id)

    @precondition(lambda self: self.model.tweets)
    @rule(who=picks, what=picks)
    def someone_retweets(self, who: int, what: int) -> None:
        author, tweet_id, original = self.user(who), self._tweet(what), self._original(what)
        if self._refused(author, tweet_id, lambda: self.mesh.retweet(author, tweet_id)):
            return
        made = self.run(self.mesh.retweet(author, tweet_id))
        assert made.retweeted_tweet_id == original
        if known := self.model.retweet_of(author, original):
            assert made.tweet_id == known, "one for each account and original"
        else:
            self._wrote(made.tweet_id, ModelTweet(author, "", original=original))

    @precondition(lambda self: self.model.tweets)
    @rule(who=picks, what=picks)
    def someone_takes_a_retweet_back(self, who: int, what: int) -> None:
        author, original = self.user(who), self._original(what)
        if retweet := self.model.retweet_of(author, original):
            self._tell_readers(lambda: self.mesh.undo_retweet(author, original))
            self.model.tweets[retweet].deleted = True
        elif not self.mesh.valkey.down:
            self.run(self.mesh.undo_retweet(author, original))

    @precondition(lambda self: self.model.tweets)
    @rule(what=picks)
    def someone_edits(self, what: int) -> None:
        tweet_id = self._original(what)
        tweet = self.model.tweets[tweet_id]
        text = f"{tweet.text} once more"
        if not tweet.deleted:
            self._tell_readers(lambda: self.mesh.edit(tweet.author, tweet_id, text))
            tweet.text = text

    @precondition(lambda self: self.model.tweets)
    @rule(who=picks, what=picks, likes=st.booleans())
    def someone_likes_or_doesnt(self, who: int, what: int, likes: bool) -> None:
        user, tweet_id, original = self.user(who), self._tweet(what), self._original(what)
        if likes and self._refused(user, tweet_id, lambda: self.mesh.like(user, tweet_id)):
            return
        if self.model.tweets[tweet_id].deleted or self.model.tweets[original].deleted:
            return
        self.run((self.mesh.like if likes else self.mesh.unlike)(user, tweet_id))
        (self.model.likes.add if likes else self.model.likes.discard)((user, original))
        retweeted = [original] if self.model.retweet_of(user, original) else []
        assert self.run(self.mesh.engagements(user, [original])) == ([original] if likes else [], retweeted)

    @precondition(lambda self: len(self.slow_posts) < 2)
    @rule(who=picks)
    def a_post_takes_its_time(self, who: int) -> None:
        """It has its id, and is committed after others that have greater ones."""
        author, text = self.user(who), f"slow tweet {len(self.slow_posts)} of {len(self.model.tweets)}"

        async def post() -> None:
            tweet = await self.mesh.post(author, text, timeout=SLOW_POST_SECONDS)
            self.model.tweets[tweet.tweet_id] = ModelTweet(author, text)

        async def begin() -> None:
            self.mesh.faults.hold = asyncio.Event()
            self.slow_posts.append(asyncio.create_task(post()))
            await self.mesh.faults.hold.wait()

        self.run(begin())

    @rule()
    def slow_posts_are_done(self) -> None:
        async def finish() -> None:
            for held in self.mesh.faults.held:
                held.set()
            await asyncio.gather(*self.slow_posts)

        self.run(finish())
        self.mesh.faults.held, self.slow_posts = [], []

    @precondition(lambda self: self.model.tweets)
    @rule(what=picks)
    def someone_deletes(self, what: int) -> None:
        tweet_id = self._tweet(what)
        author = self.model.tweets[tweet_id].author
        self._tell_readers(lambda: self.mesh.delete(author, tweet_id))
        self.model.tweets[tweet_id].deleted = True

    def _tell_readers(self, change: Callable[[], Awaitable[object]]) -> None:
        """A change that counts from the next read on is acknowledged only when readers' caches know of it; else its
        client is told to try again."""
        try:
            self.run(change())
            assert not self.mesh.valkey.down
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert self.mesh.valkey.down
            self.to_try_again.append(change)

    # Readers, in the middle of everything.

    @rule(who=picks)
    def someone_opens_their_home(self, who: int) -> None:
        self.walks = [*self.walks[-3:], OpenWalk(self.user(who))]

    @rule(which=picks, size=page_sizes)
    def someone_reads_a_page(self, which: int, size: int) -> None:
        if not self.walks:
            return
        walk = self.walks[which % len(self.walks)]
        page = self.run(self.mesh.home(walk.viewer, size, walk.token))
        self._check_page(walk.viewer, page, size, walk.below)
        walk.token = page.next_page_token
        walk.below = page.items[-1].item_id if page.items else walk.below
        if not walk.token:
            self.walks.remove(walk)

    @rule(who=picks, size=page_sizes)
    def someone_reads_the_first_page(self, who: int, size: int) -> None:
        """With the token of what they wrote last, as clients do."""
        viewer = self.user(who)
        written = self.written.get(viewer, 0)
        self._check_page(viewer, self.run(self.mesh.home(viewer, size, written=written)), size)
        self._check_first_page(viewer, must_have=[written], written=written)

    @rule(who=picks, whom=picks)
    def someone_looks_at_a_profile(self, who: int, whom: int) -> None:
        author = self.user(whom)
        ids = self.run(self.mesh.profile(self.user(who), author, 4))
        assert ids == sorted(set(ids), reverse=True)
        assert set(ids) <= set(self.model.profile(author))

    def _check_page(
        self, viewer: int, page: timeline_pb2.ListHomeTimelineResponse, size: int, below: int = 1 << 64
    ) -> None:
        ids = [item.item_id for item in page.items]
        assert len(ids) <= size
        assert ids == sorted(set(ids), reverse=True), "descending, no repeats"
        assert all(tweet_id < below for tweet_id in ids), "below the page before"
        assert set(ids) <= self.model.could_see(viewer), "nothing but what the viewer may see"
        retweeted = [item.tweet.tweet_id for item in page.items if item.HasField("retweeted_by")]
        windows = zip(*(retweeted[n:] for n in range(reference.RETWEETS_REMEMBERED + 1)), strict=False)
        assert all(len(set(window)) == len(window) for window in windows), "shown once among the last retweets"
        for item in page.items:
            self._check_item(viewer, item)

    def _check_item(self, viewer: int, item: timeline_pb2.HomeTimelineItem) -> None:
        entry = self.model.tweets[item.item_id]
        assert item.tweet.tweet_id == (entry.original or item.item_id)
        tweet = self.model.tweets[item.tweet.tweet_id]
        assert (item.tweet.author_id, item.tweet.text) == (tweet.author, tweet.text)
        assert (item.author.user_id, item.author.handle) == (tweet.author, f"u{self.model.users.index(tweet.author)}")
        assert item.retweeted_by.user_id == (entry.author if entry.original else 0)
        assert [beside.tweet_id for beside in item.references] == [i for i in (tweet.answers, tweet.quotes) if i]
        for beside in item.references:
            referred = self.model.tweets[beside.tweet_id]
            shown = not referred.deleted and not self.model.hides(viewer, referred.author)
            assert beside.HasField("tweet") == shown == beside.HasField("author")
            assert beside.tweet.text == (referred.text if shown else "")

    def _check_first_page(self, viewer: int, must_have: Sequence[int], written: int = 0) -> None:
        """What counts from the very next read on is there, unless its place is on a later page."""
        page = self.run(self.mesh.home(viewer, 3, written=written))
        self._check_page(viewer, page, 3)
        ids = [item.item_id for item in page.items]
        end = ids[-1] if page.next_page_token and ids else 0
        if page.next_page_token and not ids:
            return
        expected = {i for i in must_have if i > end and not self._another_retweet(i)} & set(self.model.home(viewer))
        assert expected <= set(ids)

    def _another_retweet(self, tweet_id: int) -> bool:
        """Whether a tweet is one of several retweets of one original: which is shown depends on what is in flight."""
        original = self.model.tweets[tweet_id].original if tweet_id else 0
        return bool(original) and sum(t.original == original for t in self.model.tweets.values()) > 1

    # Background work, step by step.

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule(slow=st.booleans())
    def the_relay_publishes(self, slow: bool) -> None:
        self.run(self.mesh.relay.step(slow=slow))

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule(count=st.integers(1, 5))
    def the_worker_works(self, count: int) -> None:
        self.run(self.mesh.work_on(self.run(self.mesh.take(count))))

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule(count=st.integers(1, 5))
    def the_worker_takes_events_and_keeps_them(self, count: int) -> None:
        self.held += self.run(self.mesh.take(count))

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule(order=st.randoms(use_true_random=False), share=st.floats(0, 1))
    def late_events_are_worked_on_out_of_order(self, order: random.Random, share: float) -> None:
        """Some of those held; the others are lost, and come again."""
        order.shuffle(self.held)
        late, self.held = self.held[: ceil(share * len(self.held))], []
        self.run(self.mesh.work_on(late))

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule(pushes=st.integers(0, 3))
    def the_worker_is_cancelled_between_batches(self, pushes: int) -> None:
        self.mesh.faults.pushes_left = pushes
        self.run(self._work_or_die(self.run(self.mesh.take(3))))
        self.mesh.faults.pushes_left = None

    async def _work_or_die(self, records: Sequence[Record]) -> None:
        with suppress(asyncio.CancelledError):
            await self.mesh.work_on(records)

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule(chunks=st.integers(0, 2))
    def a_stream_of_followers_breaks_half_way(self, chunks: int) -> None:
        self.mesh.faults.chunks_left = chunks
        with suppress(UnavailableError):
            self.run(self.mesh.work_on(self.run(self.mesh.take(3))))
        self.mesh.faults.chunks_left = None

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule()
    def authors_modes_follow_their_counts(self) -> None:
        self.run(self.mesh.mover.step())

    @rule()
    def readers_learn_of_authors_modes(self) -> None:
        self.run(self.mesh.watch_modes())

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule()
    def half_a_minute_passes_as_it_should(self) -> None:
        """Modes follow counts, readers hear of it, and they are old enough to count."""
        self.authors_modes_follow_their_counts()
        self.time_passes(21_000)
        self.readers_learn_of_authors_modes()

    @rule()
    def the_worker_dies_and_another_starts(self) -> None:
        self.mesh.new_worker()

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule()
    def the_log_is_replayed_from_the_start(self) -> None:
        self.run(self.mesh.consumer.replay(0))

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule(defer=st.booleans())
    def lists_are_made_and_mended(self, defer: bool) -> None:
        """`defer`: everything is read, and what is to be written comes late, or never."""
        self.mesh.faults.defer = defer
        self.run(self.mesh.warm_all())
        self.mesh.faults.defer = False

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule(which=picks)
    def a_late_rebuild_or_cover_comes_in(self, which: int) -> None:
        deferred = self.mesh.faults.deferred
        if deferred:
            self.run(deferred.pop(which % len(deferred))())

    # In the middle of one read, or of the making of one list.

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule(who=picks, whom=picks, skip=skips, lines=st.integers(1, 8), change=changes)
    def a_lot_happens_while_lists_are_made(self, who: int, whom: int, skip: int, lines: int, change: str) -> None:
        happens = self._something(self.user(who), self.user(whom), lines, change)
        self.mesh.faults.between, self.mesh.faults.skip = happens, skip
        self.run(self.mesh.warm_all())
        self._let_happen()

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule(who=picks, whom=picks, skip=st.integers(0, 6), lines=st.integers(1, 8), change=changes, size=page_sizes)
    def a_lot_happens_while_someone_reads(
        self, who: int, whom: int, skip: int, lines: int, change: str, size: int
    ) -> None:
        """What is seen then may be from before or after; the page itself, and all later ones, must be right."""
        viewer = self.user(who)
        happens = self._something(viewer, self.user(whom), lines, change)
        self.mesh.faults.between, self.mesh.faults.skip = happens, skip
        page = self.run(self.mesh.home(viewer, size))
        self._let_happen()
        self._check_glimpse(viewer, [item.item_id for item in page.items])
        self._check_first_page(viewer, must_have=[])

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule(who=picks, whom=picks, skip=st.integers(0, 20), lines=st.integers(0, 8), change=changes, size=page_sizes)
    def a_lot_happens_while_someone_catches_up(
        self, who: int, whom: int, skip: int, lines: int, change: str, size: int
    ) -> None:
        viewer = self.user(who)
        known = self.catching_up.get(viewer)
        happens = self._something(viewer, self.user(whom), lines, change)
        self.mesh.faults.between, self.mesh.faults.skip = happens, skip
        came = self.run(self.mesh.walk(viewer, size, newer_than=max(known.held, default=0) if known else 0))
        self._let_happen()
        self._check_glimpse(viewer, came)
        if known:
            known.held |= set(came)

    def _check_glimpse(self, viewer: int, ids: Sequence[int]) -> None:
        """What was read while a lot happened: any of it may have been there, or not yet, or no more."""
        assert list(ids) == sorted(set(ids), reverse=True)
        assert set(ids) <= self.glimpses.pop(viewer) | self.model.could_see(viewer)

    def _something(self, who: int, whom: int, lines: int, change: str) -> Callable[[], Awaitable[None]]:
        """Someone posts and all of it is delivered; then something changes between the two."""
        self.glimpses[who] = self.model.could_see(who)

        async def happens() -> None:
            for _ in range(lines):
                text = f"tweet {len(self.model.tweets)}"
                tweet = await self.mesh.post(whom, text)
                self.model.tweets[tweet.tweet_id] = ModelTweet(whom, text)
            await self.mesh.deliver_all()
            self.glimpses[who] |= self.model.could_see(who)
            if who != whom:
                await self._change(who, whom, change)

        return happens

    async def _change(self, who: int, whom: int, change: str) -> None:
        newest = max(self.model.profile(whom), default=0)
        match change:
            case "follow" | "unfollow" if change == "unfollow" or not self.model.blocked(who, whom):
                await (self.mesh.follow if change == "follow" else self.mesh.unfollow)(who, whom)
                self._now_follows(who, whom, follows=change == "follow")
            case "block" | "unblock":
                await (self.mesh.block if change == "block" else self.mesh.unblock)(whom, who)
                self._now_hides(whom, who, mutes=False, stands=change == "block")
            case "mute" | "unmute":
                await (self.mesh.mute if change == "mute" else self.mesh.unmute)(who, whom)
                self._now_hides(who, whom, mutes=True, stands=change == "mute")
            case "delete" if newest:
                await self.mesh.delete(whom, newest)
                self.model.tweets[newest].deleted = True
            case "edit" if newest and not self.model.tweets[newest].original:
                self.model.tweets[newest].text += " again"
                await self.mesh.edit(whom, newest, self.model.tweets[newest].text)

    def _let_happen(self) -> None:
        """What found no place in the middle happens now."""
        happens, self.mesh.faults.between = self.mesh.faults.between, None
        if happens:
            self.run(happens())

    # What breaks.

    @rule(ms=st.sampled_from([1, 5, 1_000, 14_000, 21_000, 31_000, 61_000]))
    def time_passes(self, ms: int) -> None:
        if ms >= 1_000:
            self.slow_posts_are_done()  # Their deadline is over.
        self.mesh.clock.advance(ms)
        self.run(self.mesh.renew_leases())

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule(who=picks)
    def a_home_list_vanishes(self, who: int) -> None:
        self.run(self.mesh.timelines.drop(lists.home(self.user(who))))

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule(who=picks)
    def an_author_list_vanishes(self, who: int) -> None:
        self.run(self.mesh.timelines.drop(lists.author(self.user(who))))

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule(what=st.sampled_from(["timeline", "user_tweets", "tweet", "viewer_version"]), pick=picks)
    def something_is_evicted(self, what: str, pick: int) -> None:
        async def evict() -> None:
            pattern = f"{self.mesh.valkey.key_prefix}{what}:*"
            keys = sorted(await self.mesh.valkey.call("KEYS", pattern))
            if keys:
                await self.mesh.valkey.call("DEL", keys[pick % len(keys)])

        self.run(evict())

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule()
    def lists_are_rid_of_deleted_tweets(self) -> None:
        async def tidy() -> set[int]:
            await self.mesh.reconcile_lists()
            return {tweet_id async for some in self.mesh.timelines.walk() for _, ids in some for tweet_id in ids}

        assert not any(self.model.tweets[tweet_id].deleted for tweet_id in self.run(tidy()))

    @precondition(lambda self: not self.mesh.valkey.down)
    @rule()
    def all_of_valkeys_data_is_dropped(self) -> None:
        self.run(self.mesh.valkey.call("FLUSHALL"))
        self.run(self.mesh.valkey.call("FUNCTION", "FLUSH"))

    @rule()
    def valkey_is_out_of_reach(self) -> None:
        self.mesh.valkey.down = True

    @precondition(lambda self: self.mesh.valkey.down)
    @rule()
    def valkey_is_back(self) -> None:
        self.mesh.valkey.down = False
        for change in self.to_try_again:
            try:
                self.run(change())
            except grpc.aio.AioRpcError as error:
                # Who follows is blocked before they try again; what was edited is deleted.
                assert error.code() in {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.NOT_FOUND}
        self.to_try_again = []

    # The judgement.

    @rule(size=page_sizes, readers_hear=st.booleans())
    def everything_settles_and_every_walk_is_exact(self, size: int, readers_hear: bool = True) -> None:
        """`readers_hear`: of authors' modes; if not, what they know, or know that they don't, must do."""
        if self.mesh.valkey.down:
            self.valkey_is_back()
        self.held = []
        self.slow_posts_are_done()
        self.run(self.mesh.quiesce(readers_hear=readers_hear))
        self._who_caught_up_has_all(size)
        self._every_walk_is_exact(size)
        self.run(self.mesh.warm_all())
        self._every_walk_is_exact(size)

    @rule(size=page_sizes)
    def walks_from_the_stores_are_exact_at_any_time(self, size: int) -> None:
        """With the lists out of reach nothing is ever in flight."""
        before, self.mesh.valkey.down = self.mesh.valkey.down, True
        for viewer in self.model.users:
            assert self.run(self.mesh.walk(viewer, size)) == self.model.home(viewer)
        self.mesh.valkey.down = before

    def _every_walk_is_exact(self, size: int) -> None:
        for user in self.model.users:
            home = self.model.home(user)
            assert self.run(self.mesh.walk(user, size)) == home
            if home:
                known = home[size % len(home)]
                caught_up = self.run(self.mesh.walk(user, size, newer_than=known))
                assert caught_up == [tweet_id for tweet_id in home if tweet_id >= catch_up_bound(known)]
            self._profile_is_exact(user, size)
            self.catching_up[user] = CatchingUp(self.mesh.clock.now_ms(), set(home))

    def _profile_is_exact(self, user: int, size: int) -> None:
        pages = self.run(self.mesh.profile_pages(user, user, size))
        assert [tweet.tweet_id for page in pages for tweet in page.tweets] == self.model.profile(user)
        for page in pages:
            for tweet in page.tweets:
                model = self.model.tweets[tweet.tweet_id]
                assert (tweet.text, tweet.retweeted_tweet_id) == (model.text, model.original)
            for beside in page.references:
                referred = self.model.tweets[beside.tweet_id]
                assert beside.HasField("tweet") != referred.deleted
                assert beside.tweet.text == ("" if referred.deleted else referred.text)

    def _who_caught_up_has_all(self, size: int) -> None:
        """Whatever came in between, in whatever order, after one more catch-up: if deliveries kept within a minute."""
        for user, known in self.catching_up.items():
            known.held |= set(self.run(self.mesh.walk(user, size, newer_than=max(known.held, default=0))))
            if self.mesh.clock.now_ms() - known.since_ms <= CATCH_UP_MARGIN_MS:
                posts = {i for i in self.model.home(user) if not self.model.tweets[i].original}
                assert known.held >= posts, "what hides a retweet may go, and it may be older"
