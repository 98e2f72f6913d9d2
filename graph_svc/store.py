"""The GraphStore port: users, and follows in both directions.

Every method may raise `UnavailableError`; nothing is then known of its effect, and all may be repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mesh.ids import WorkerLeases

FOLLOWEES_MAX = 5_000


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
    """One viewer at one moment: `followee_ids` ascending, `since` beside them (versions)."""

    version: int
    followee_ids: Sequence[int]
    since: Sequence[int]


@dataclass(frozen=True, slots=True)
class ImportCounts:
    """What became of a batch of edges."""

    created: int
    existing: int
    refused: int


class GraphStore(WorkerLeases, Protocol):
    """What graph_svc owns.

    A viewer's version counts up by one with each of its follows and unfollows. `follow` gives the row
    `since` = the new version. Always following ⊆ followers, also after a crash at any point, for whoever reads:
    a follow writes the followers' side first, an unfollow removes it last.
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
        """True when this call made the follow, False when it stood.

        Raises NotFoundError (USER_NOT_FOUND) and FailedPreconditionError (FOLLOW_LIMIT_REACHED).
        """
        ...

    async def unfollow(self, follower_id: int, followee_id: int) -> bool:
        """True when this call ended the follow, False when there was none. Raises NotFoundError."""
        ...

    async def import_follows(self, edges: Sequence[tuple[int, int]]) -> ImportCounts:
        """(follower, followee) pairs at once; what `follow` would refuse, and oneself, is only counted."""
        ...

    async def followers(self, author_id: int, bucket: int, after_id: int, limit: int) -> list[int]:
        """Follower ids of one bucket above `after_id`, ascending, at most `limit`."""
        ...

    async def bucket_count(self, author_id: int) -> int | None:
        """How many buckets an author has (at least 1); None: no such user. Never falls."""
        ...

    async def list_followers(self, user_id: int, after_id: int, limit: int) -> list[int]:
        """Follower ids above `after_id` over all buckets, ascending, at most `limit`."""
        ...

    async def list_following(self, user_id: int, after_id: int, limit: int) -> list[int]:
        """Followee ids above `after_id`, ascending, at most `limit`."""
        ...

    async def viewer_context(self, viewer_id: int) -> ViewerContext | None:
        """Version and followees read at one moment; None: no such user."""
        ...

    async def close(self) -> None:
        """Finish and close."""
        ...
