"""What timeline_svc decides, without I/O: which list serves, what a viewer sees, when a page is done.

Theory of operation. A *source* is a descending stream of tweet ids. The home list is one, exact down to its floor
for the authors that it covers; followees followed since (`since > version`) are another, read from the store; below
the floor the store's stream over all followees and the viewer replaces them. Authors who are pulled are sources, too:
their own lists, each continued by the store below its floor. A page merges the sources lazily,
hydrates what it takes, drops what the viewer may not see, and goes on until it is full. So a list's length, its
floor and the filters decide what a page costs, never what a walk holds.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from mesh.ids import first_id_of, time_ms_of
from mesh.timelines.port import ListState, TailRecord
from starling.tweet.v1 import tweet_pb2

MODES_AGE_MS = 15_000
"""How old what is known of authors' modes may be; older, and home lists aren't read. Shorter than the time that workers
go on pushing a pulled author (`fanout_svc.core.PULL_AGE_SECONDS`)."""
COPY_AGE_MS = 1_000
"""How long a pulled author's list is served from the copy in this process: no list is read more often than once a
second by one process, however many read it."""
CATCH_UP_MARGIN_MS = 60_000
"""Catch-up goes so far below the known tweet's time: a smaller id may be committed later."""
COVER_MAX = 64
"""A list that lacks more followees than this is made anew."""
EXAMINED_MAX = 1_000
"""Ids that one page may look at; then it is short, with a token."""
BATCH_MAX = 200
"""Ids hydrated at once."""
RETWEETS_REMEMBERED = 256
"""A tweet is shown once among so many retweets that are shown one after the other, over all pages of a walk."""
DEADLINE_SHARE = 0.7
"""Share of a call's time after which a page ends short, with a token."""


@dataclass(frozen=True, slots=True)
class ViewerContext:
    """One viewer at one version: `followee_ids` ascending, `since` beside them; whom they block and mute, ascending.

    Whoever blocks the viewer follows them no more and isn't followed; so `blockers`, what is known of others at this
    version, is of those only whose tweets are shown by others: True where they block the viewer.
    """

    viewer_id: int
    version: int
    followee_ids: Sequence[int]
    since: Sequence[int]
    blocked_ids: Sequence[int] = ()
    muted_ids: Sequence[int] = ()
    blockers: dict[int, bool] = field(default_factory=dict, compare=False)

    @property
    def size(self) -> int:
        """Ids that it holds (what is known of blockers aside, which has a bound of its own)."""
        return 2 * len(self.followee_ids) + len(self.blocked_ids) + len(self.muted_ids)

    def follows(self, user_id: int) -> bool:
        """Whether the viewer follows a user."""
        return _among(user_id, self.followee_ids)

    def near(self, user_id: int) -> bool:
        """Whether a user is the viewer or followed."""
        return user_id == self.viewer_id or self.follows(user_id)

    def hides(self, user_id: int) -> bool:
        """Whether a user is muted, or blocked either way."""
        return _among(user_id, self.muted_ids) or _among(user_id, self.blocked_ids) or self.blockers.get(user_id, False)

    def authors(self) -> list[int]:
        """Whose tweets a home list holds: the followees and the viewer."""
        return [*self.followee_ids, self.viewer_id]

    def shown(self, user_ids: Iterable[int]) -> list[int]:
        """Those of some users who aren't hidden, ascending."""
        if not (ids := set(user_ids)):
            return []
        blockers = (user_id for user_id, blocks in self.blockers.items() if blocks)
        return sorted(ids.difference(self.muted_ids, self.blocked_ids, blockers))

    def unknown_blockers(self, user_ids: Collection[int]) -> list[int]:
        """Those of whom must be found out whether they block the viewer."""
        return sorted(
            u for u in set(user_ids) if u and not self.near(u) and not self.hides(u) and u not in self.blockers
        )

    def followed_after(self, version: int) -> list[int]:
        """The followees that a list of that version doesn't cover."""
        return [
            followee_id for followee_id, since in zip(self.followee_ids, self.since, strict=True) if since > version
        ]


def _among(user_id: int, ascending: Sequence[int]) -> bool:
    at = bisect_left(ascending, user_id)
    return at < len(ascending) and ascending[at] == user_id


def catch_up_bound(newer_than_id: int) -> int:
    """The smallest id that a catch-up from a known tweet looks at."""
    since_ms = time_ms_of(newer_than_id) - CATCH_UP_MARGIN_MS
    return first_id_of(since_ms)


class Verdict(Enum):
    """`SERVE`: the list is read. `BUILD`: there is none, or one that died half-way: the store is read, and a list is
    made. `REPLACE`: there is one that can't be mended: as BUILD, after it is dropped. `WAIT`: somebody is building."""

    SERVE = "serve"
    BUILD = "build"
    REPLACE = "replace"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Assessment:
    """What to do with a list; for SERVE, `uncovered` followees are a source of their own until covered."""

    verdict: Verdict
    uncovered: Sequence[int] = ()


def assess(record: TailRecord | None, viewer: ViewerContext, now_ms: int) -> Assessment:
    """Judge a list by its record. The cases, in order: none; being built (or the builder died); of a version that the
    graph doesn't know; lacking too many followees; fit to serve."""
    if record is None:
        return Assessment(Verdict.BUILD)
    if record.state is ListState.BUILDING:
        return Assessment(Verdict.WAIT if now_ms < record.lease_until_ms else Verdict.BUILD)
    if record.version > viewer.version:
        return Assessment(Verdict.REPLACE)
    uncovered = viewer.followed_after(record.version)
    if len(uncovered) > COVER_MAX:
        return Assessment(Verdict.REPLACE)
    return Assessment(Verdict.SERVE, uncovered)


def visible(tweet: tweet_pb2.Tweet, viewer: ViewerContext) -> bool:
    """Whether a home timeline shows a tweet that is no retweet: its author is the viewer, or followed now and not
    hidden; and a reply shows when the viewer wrote it, is the one whom it answers, or follows the one whom it answers.
    """
    if tweet.author_id == viewer.viewer_id:
        return True
    if not viewer.follows(tweet.author_id) or viewer.hides(tweet.author_id):
        return False
    return not tweet.in_reply_to_user_id or viewer.near(tweet.in_reply_to_user_id)


class Filter(Enum):
    """Why a home timeline doesn't show a tweet; the proto says more."""

    NONE = "none"
    GONE = "gone"
    NOT_FOLLOWED = "not_followed"
    HIDDEN_AUTHOR = "hidden_author"
    REPLY = "reply"
    ORIGINAL_SHOWN = "original_shown"
    ORIGINAL_GONE = "original_gone"


def hidden_by(tweet: tweet_pb2.Tweet | None, original: tweet_pb2.Tweet | None, viewer: ViewerContext) -> Filter:
    """What keeps a tweet out of a home timeline, if all is read; `original` is a retweet's. Other retweets of it aside,
    it is what `visible` and `retweet_visible` decide."""
    if tweet is None:
        return Filter.GONE
    if not viewer.near(tweet.author_id):
        return Filter.NOT_FOLLOWED
    if viewer.hides(tweet.author_id):
        return Filter.HIDDEN_AUTHOR
    if tweet.retweeted_tweet_id:
        return _retweet_hidden_by(tweet, original, viewer)
    return Filter.NONE if visible(tweet, viewer) else Filter.REPLY


def _retweet_hidden_by(retweet: tweet_pb2.Tweet, original: tweet_pb2.Tweet | None, viewer: ViewerContext) -> Filter:
    if original is None:
        return Filter.ORIGINAL_GONE
    if viewer.hides(original.author_id):
        return Filter.HIDDEN_AUTHOR
    return Filter.NONE if retweet_visible(retweet, original, viewer) else Filter.ORIGINAL_SHOWN


def retweet_visible(retweet: tweet_pb2.Tweet, original: tweet_pb2.Tweet, viewer: ViewerContext) -> bool:
    """Whether a home timeline shows a retweet, if it shows none of the same original before: neither author is hidden,
    and the original has no place of its own in it."""
    near = viewer.near(retweet.author_id) and not viewer.hides(retweet.author_id)
    return near and not viewer.hides(original.author_id) and not visible(original, viewer)


@dataclass(frozen=True, slots=True)
class Shown:
    """An item of a page: `tweet` is what is shown, for a retweet the original; `item_id` is its place; `retweeter_id`
    is 0 for what is no retweet."""

    item_id: int
    tweet: tweet_pb2.Tweet
    retweeter_id: int = 0


@dataclass(slots=True)
class Page:
    """A page being filled. `down_to`: no id below it belongs here; `retweeted`: originals of the retweets shown last,
    those of pages before included; `last_id`: the last id examined (0: none yet)."""

    size: int
    down_to: int = 0
    retweeted: Sequence[int] = ()
    items: list[Shown] = field(default_factory=list)
    examined: set[int] = field(default_factory=set)
    last_id: int = 0

    @property
    def full(self) -> bool:
        """Whether nothing more may be examined."""
        return len(self.items) >= self.size or len(self.examined) >= EXAMINED_MAX

    def wanted(self) -> int:
        """How many ids to look at next: at first as many as the page lacks; when that wasn't enough, as many again as
        were examined, so that a filter that hides much doesn't cost a round trip for each id."""
        lacking = self.size - len(self.items)
        return min(max(lacking, min(len(self.examined), BATCH_MAX)), EXAMINED_MAX - len(self.examined))

    def examine(
        self,
        tweet_id: int,
        tweet: tweet_pb2.Tweet | None,
        viewer: ViewerContext,
        original: tweet_pb2.Tweet | None = None,
    ) -> None:
        """Take the next id, with its body if there is one, and for a retweet the original's if there is one."""
        assert not self.full
        assert not self.last_id or tweet_id < self.last_id, "strictly descending"
        self.examined.add(tweet_id)
        self.last_id = tweet_id
        if tweet is None:
            return
        if not tweet.retweeted_tweet_id:
            if visible(tweet, viewer):
                self.items.append(Shown(tweet_id, tweet))
        elif original is not None and self._shows(tweet, original, viewer):
            self.retweeted = [*self.retweeted, original.tweet_id][-RETWEETS_REMEMBERED:]
            self.items.append(Shown(tweet_id, original, tweet.author_id))

    def _shows(self, retweet: tweet_pb2.Tweet, original: tweet_pb2.Tweet, viewer: ViewerContext) -> bool:
        return original.tweet_id not in self.retweeted and retweet_visible(retweet, original, viewer)

    def lacks(self, own_tweet_id: int, *, more: bool) -> bool:
        """Whether the viewer's tweet belongs here and isn't: it lies above the end of the page, or nothing follows."""
        if own_tweet_id in self.examined or own_tweet_id < self.down_to:
            return False
        return not more or own_tweet_id > self.last_id
