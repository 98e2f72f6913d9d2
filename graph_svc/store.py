"""The GraphStore port: users, follows in both directions, blocks and mutes.

Every method may raise `UnavailableError`; nothing is then known of its effect, and all may be repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from mesh.ids import WorkerLeases

FOLLOWEES_MAX = 5_000
BLOCKS_MAX = 10_000
MUTES_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Limits:
    """How many a user may follow, block and mute."""

    followees: int = FOLLOWEES_MAX
    blocks: int = BLOCKS_MAX
    mutes: int = MUTES_MAX


@dataclass(frozen=True, slots=True)
class User:
    """A user with exact counts. `handle` as it was registered; unique without regard to case."""

    user_id: int
    handle: str
    display_name: str
    created_ms: int
    follower_count: int = 0
    following_count: int = 0


@dataclass(frozen=True, slots=True)
class ViewerContext:
    """One viewer at one moment: `followee_ids` ascending, `since` beside them (versions); whom the viewer blocks and
    mutes, ascending."""

    version: int
    followee_ids: Sequence[int]
    since: Sequence[int]
    blocked_ids: Sequence[int]
    muted_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ImportCounts:
    """What became of a batch of edges."""

    created: int
    existing: int
    refused: int


class Mode(IntEnum):
    """How an author's tweets reach followers; see the proto. The numbers are stored."""

    PUSH = 0
    PULL = 1
    DRAIN = 2


@dataclass(frozen=True, slots=True)
class AuthorState:
    """An author's mode, since when, and the number of follower buckets (at least 1, never falls)."""

    mode: Mode
    epoch: int
    since_ms: int
    bucket_count: int


@dataclass(frozen=True, slots=True)
class ModeChange:
    """A change of mode. `sequence` orders all changes of all authors."""

    sequence: int
    author_id: int
    mode: Mode


@dataclass(frozen=True, slots=True)
class DrainTask:
    """One bucket of an author in DRAIN, to be mended."""

    author_id: int
    epoch: int
    bucket: int


@dataclass(frozen=True, slots=True)
class FanoutPolicy:
    """From how many followers on an author is pulled, and to what that may fall under lag (0: see the proto)."""

    pull_threshold: int
    pull_threshold_min: int = 0


@dataclass(frozen=True, slots=True)
class Busy:
    """Authors who post, at most 10,000, are pulled from `pull_from` on already."""

    author_ids: Sequence[int]
    pull_from: int


class AuthorModes(Protocol):
    """Authors' modes: durable, and changed only here."""

    async def author_state(self, author_id: int) -> AuthorState | None:
        """Read afresh, with all that was committed before; None: no such user."""
        ...

    async def move_modes(self, pull_from: int, push_below: int, now_ms: int, busy: Busy | None = None) -> int:
        """Move authors by their counts of followers, each to a new epoch; returns how many moved (a bounded number
        at a time: call again until 0).

        PUSH with `pull_from` or more → PULL; PULL below `push_below` → DRAIN, with a drain task for each bucket;
        DRAIN with `pull_from` or more → PULL, its tasks forgotten. For those in `busy` its bound stands for `pull_from`
        (when it is the lower one).
        """
        ...

    async def is_draining(self) -> bool:
        """Whether any author is in DRAIN."""
        ...

    async def unpublished_drains(self, limit: int) -> list[DrainTask]:
        """Drain tasks not yet in the log."""
        ...

    async def mark_drains_published(self, tasks: Sequence[DrainTask], incarnation: str, now_ms: int) -> None:
        """They are in the log of that incarnation. Nothing changes when `republish_drains` has seen another since."""
        ...

    async def republish_drains(self, incarnation: str, since_ms: int) -> int:
        """When the log's incarnation isn't the one seen last: tasks published at or after `since_ms`, done or not,
        count as unpublished, and the incarnation is remembered, in one write. Returns how many."""
        ...

    async def complete_drain(self, task: DrainTask, now_ms: int) -> bool:
        """A bucket is mended. True when it was the last of the author's epoch: the author is in PUSH now. A repeat, or
        a task of an epoch that is over, changes nothing."""
        ...

    async def prune_drains(self, published_before_ms: int) -> None:
        """Forget tasks published before then whose author isn't in their epoch's DRAIN any more."""
        ...

    async def pulled_authors(self, after_id: int, limit: int) -> list[int]:
        """Authors in PULL or DRAIN above `after_id`, ascending, at most `limit`."""
        ...

    async def mode_changes(self, after_sequence: int, limit: int) -> list[ModeChange]:
        """The last change of each author that changed after that sequence, in order."""
        ...

    async def mode_sequence(self) -> int:
        """The sequence of the last change."""
        ...

    async def fanout_policy(self) -> FanoutPolicy | None:
        """The operator's policy; None: never set."""
        ...

    async def set_fanout_policy(self, policy: FanoutPolicy) -> None:
        """Set it, whole."""
        ...


class GraphStore(WorkerLeases, AuthorModes, Protocol):
    """What graph_svc owns.

    A viewer's version counts up by one with each of its follows, unfollows, mutes and unmutes, and with each block and
    unblock by or of it. `follow` gives the row `since` = the new version. Always following ⊆ followers, also after a
    crash at any point, for whoever reads: a follow writes the followers' side first, an unfollow removes it last.
    Nobody follows whom they block, or who blocks them.
    """

    async def create_user(self, user: User) -> bool:
        """Register; False, and no change, when the handle is somebody else's. The same user again: True."""
        ...

    async def users(self, user_ids: Sequence[int]) -> list[User]:
        """Those that exist, in the order asked for."""
        ...

    async def user_by_handle(self, handle: str) -> User | None:
        """Without regard to case."""
        ...

    async def follow(self, follower_id: int, followee_id: int) -> bool:
        """True when this call made the follow, False when it stood. An author's buckets are filled one after the other.

        Raises NotFoundError (USER_NOT_FOUND), PermissionDeniedError (BLOCKED: either blocks the other) and
        FailedPreconditionError (FOLLOW_LIMIT_REACHED).
        """
        ...

    async def unfollow(self, follower_id: int, followee_id: int) -> bool:
        """True when this call ended the follow, False when there was none. Raises NotFoundError."""
        ...

    async def import_follows(self, edges: Sequence[tuple[int, int]]) -> ImportCounts:
        """(follower, followee) pairs at once; what `follow` would refuse, and oneself, is only counted."""
        ...

    async def block(self, blocker_id: int, blocked_id: int) -> bool:
        """True when this call made the block, False when it stood. Follows between the two end with it, for each side
        at the moment of its new version; whom somebody blocks is told first, so at no moment a block stands beside a
        follow.

        Raises NotFoundError (USER_NOT_FOUND) and FailedPreconditionError (BLOCK_LIMIT_REACHED).
        """
        ...

    async def unblock(self, blocker_id: int, blocked_id: int) -> bool:
        """True when this call ended the block, False when there was none. Raises NotFoundError."""
        ...

    async def mute(self, muter_id: int, muted_id: int) -> bool:
        """True when this call made the mute, False when it stood.

        Raises NotFoundError (USER_NOT_FOUND) and FailedPreconditionError (MUTE_LIMIT_REACHED).
        """
        ...

    async def unmute(self, muter_id: int, muted_id: int) -> bool:
        """True when this call ended the mute, False when there was none. Raises NotFoundError."""
        ...

    async def check_blocks(self, user_id: int, other_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Those of the others who block the user, and those whom the user blocks, each ascending, read afresh at one
        moment. Unknown others neither block nor are blocked. Raises NotFoundError for an unknown user."""
        ...

    async def followers(self, author_id: int, bucket: int, after_id: int, limit: int) -> list[int]:
        """Follower ids of one bucket above `after_id`, ascending, at most `limit`."""
        ...

    async def list_followers(self, user_id: int, after_id: int, limit: int) -> list[int]:
        """Follower ids above `after_id` over all buckets, ascending, at most `limit`."""
        ...

    async def list_following(self, user_id: int, after_id: int, limit: int) -> list[int]:
        """Followee ids above `after_id`, ascending, at most `limit`."""
        ...

    async def list_blocked(self, user_id: int, after_id: int, limit: int) -> list[int]:
        """Ids above `after_id` whom the user blocks, ascending, at most `limit`."""
        ...

    async def list_muted(self, user_id: int, after_id: int, limit: int) -> list[int]:
        """Ids above `after_id` whom the user mutes, ascending, at most `limit`."""
        ...

    async def viewer_context(self, viewer_id: int) -> ViewerContext | None:
        """All of it read at one moment; None: no such user."""
        ...

    async def close(self) -> None:
        """Finish and close."""
        ...
