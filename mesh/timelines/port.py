"""The Timelines port: capped lists of tweet ids, newest first, that know how far down they are exact.

One contract for a viewer's home list and for an author's list; `docs/architecture.md` tells the story.

**Invariant.** Strictly above and at its `floor` a list misses no tweet of the authors that it covers; below,
the store continues; floor 0: nothing is missing at all. Within a life (from `create` until the list is gone)
the floor only rises. Who trims sets it to the smallest id kept. An insert never lowers it.

Every method may raise `UnavailableError` (nothing is known of the effect; all are idempotent and may be
repeated). Ids are unsigned 64-bit, compared as numbers of that width, never as doubles.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class ListState(Enum):
    """`BUILDING`: between create and finish; `READY`: serves reads."""

    BUILDING = "building"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class TailRecord:
    """What a list knows of itself.

    `version`: the viewer's version that it covers (followees with `since <= version`; 0 for author lists).
    `token`: names its life. `lease_until_ms`: while BUILDING, until when the builder has it.
    """

    state: ListState
    floor: int
    version: int
    token: str
    lease_until_ms: int


@dataclass(frozen=True, slots=True)
class ListView:
    """One view of a list: its first `len(ids)` entries, descending, and its record.

    `complete`: no further entries follow in the list.
    """

    ids: Sequence[int]
    record: TailRecord
    complete: bool


@dataclass(frozen=True, slots=True)
class ListKey:
    """Which list: a viewer's home list or an author's own list."""

    kind: "ListKind"
    owner: int


class ListKind(Enum):
    """`HOME`: `timeline:{b}:<viewer>`; `AUTHOR`: `user_tweets:<author>`."""

    HOME = "timeline"
    AUTHOR = "user_tweets"


def home(viewer_id: int) -> ListKey:
    """The key of a viewer's home list."""
    return ListKey(ListKind.HOME, viewer_id)


def author(author_id: int) -> ListKey:
    """The key of an author's own list."""
    return ListKey(ListKind.AUTHOR, author_id)


class Timelines(Protocol):
    """All lists. Entries are capped at `cap`; a list is trimmed when it passes `cap + slack`."""

    cap: int

    async def read(self, key: ListKey, count: int) -> ListView | None:
        """The newest `count` (>= 0) entries and the record, in one view; None: no list, or not one we know.

        Extends the list's life (30 days from the last read), at most hourly.
        """
        ...

    async def read_many(self, keys: Sequence[ListKey], count: int) -> list[ListView | None]:
        """As `read`, of many lists, each in a view of its own, in the order asked for."""
        ...

    async def bounds(self, keys: Sequence[ListKey]) -> list[int | None]:
        """For each list an id that none of its owner's is above: the newest entry (without any: the floor); None where
        there is none that is READY. In the order asked for; extends no list's life."""
        ...

    async def push(self, keys: Sequence[ListKey], ids: Sequence[int]) -> int:
        """Insert each id into each existing list, in any state, once, at its place; below the floor nothing.

        A missing list stays missing. Changes neither version, token nor expiry. Returns how many of `keys`
        exist. `keys` and `ids` may be of any length and order; memory and calls are bounded inside.
        """
        ...

    async def create(self, key: ListKey, token: str, lease_ms: int) -> bool:
        """Start a life: BUILDING, floor 0, no entries, leased for `lease_ms`.

        Only where the list is missing, or BUILDING with its lease over (that life ends). False otherwise.
        """
        ...

    async def finish(self, key: ListKey, token: str, version: int, ids: Sequence[int], down_to: int) -> bool:
        """End a build: READY at `version`, the union of its entries and `ids` (any order).

        The floor becomes max(floor, down_to), entries below it go, and the cap is applied. `down_to`: how far
        the store was asked and answered (0: exhausted). False, and no change, unless BUILDING with `token`.
        """
        ...

    async def cover(
        self,
        key: ListKey,
        token: str,
        from_version: int,
        to_version: int,
        ids: Sequence[int],
        down_to: int,
    ) -> bool:
        """Take in new followees: as `finish`, on a READY list with exactly `token` and `from_version`."""
        ...

    async def merge(self, keys: Sequence[ListKey], ids: Sequence[int], down_to: int) -> int:
        """Repair lists that workers left out: take ids of one author in, in any state, down to each list's floor.

        As `finish`, but state, version and token stay. A missing list stays missing. Returns how many exist.
        """
        ...

    def walk(self) -> AsyncIterator[Sequence[tuple[ListKey, Sequence[int]]]]:
        """All lists and their entries, some at a time. One that is there throughout comes at least once; extends no
        list's life."""
        ...

    async def remove(self, key: ListKey, ids: Sequence[int]) -> int:
        """Take ids out that no reader may see any more, and that never come back (deleted tweets'). Returns how many
        were there."""
        ...

    async def drop(self, key: ListKey) -> None:
        """Remove the list (eviction): always right, the store has everything."""
        ...
