"""A graph as social networks have it: one account that most follow, few with many followers, many with few.

Of the accounts after the biggest, number r has followers in proportion to r^-0.8 (Zipf's law; degrees then follow a
power law with exponent 2.25). Who follows is skewed, too: few follow many. Only `Random.random` decides, whose
numbers for a seed are the same in every release of Python; so a seed is a graph.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ZIPF = 0.8
FOLLOWEES_MAX = 5_000
"""graph_svc refuses more."""
_TRIES_MAX = 200


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a graph is. Account 1 is the biggest."""

    accounts: int
    follows: int
    biggest_followers: int

    def __post_init__(self) -> None:
        if not 1 < self.biggest_followers < self.accounts <= self.follows:
            raise ValueError(f"no such graph can be: {self}")


class Graph:
    """Who follows whom, by labels from 1: `followers[label]`, and `followees[label]`."""

    def __init__(self, shape: Shape, seed: int) -> None:
        chance = random.Random(seed)  # noqa: S311 - the same numbers for the same seed is what is wanted
        labels = range(1, shape.accounts + 1)
        # Whoever comes early here follows many; independent of how many follow them.
        eager = sorted(labels, key=lambda _: chance.random())
        self.followers: dict[int, list[int]] = {1: [label for label in eager if label != 1][: shape.biggest_followers]}
        for label, count in zip(labels[1:], _counts(shape), strict=True):
            self.followers[label] = _followers(chance, eager, label, count)
        self.followees: dict[int, list[int]] = {label: [] for label in labels}
        for followee, followers in self.followers.items():
            for follower in followers:
                self.followees[follower].append(followee)
        self.follows = sum(map(len, self.followers.values()))
        assert self.follows == shape.follows
        assert max(map(len, self.followees.values())) <= FOLLOWEES_MAX

    def edges(self) -> Iterator[tuple[int, int]]:
        """Follower and followee, by followee, then follower: neighbours in the file are neighbours in the store, too,
        which takes them in with a third less work than in another order."""
        for followee, followers in self.followers.items():
            for follower in sorted(followers):
                yield follower, followee

    def write(self, path: Path) -> None:
        """As an edge file, "u v": u follows v."""
        with path.open("w", encoding="ascii") as file:
            file.writelines(f"{follower} {followee}\n" for follower, followee in self.edges())


def _counts(shape: Shape) -> list[int]:
    """Followers of each account but the biggest. Sums are rounded, not parts, so that the total is exact."""
    weights = [rank**-ZIPF for rank in range(2, shape.accounts + 1)]
    share = (shape.follows - shape.biggest_followers) / sum(weights)
    counts, exact, given = list[int](), 0.0, 0
    for weight in weights:
        exact += weight * share
        counts.append(round(exact) - given)
        given += counts[-1]
    return counts


def _followers(chance: random.Random, eager: list[int], label: int, count: int) -> list[int]:
    """Different accounts, the eager ones more often; not the account itself."""
    chosen: dict[int, None] = {}  # In the order of their choice, which a set wouldn't keep.
    for _ in range(count * _TRIES_MAX):
        if len(chosen) == count:
            break
        follower = eager[int(len(eager) * chance.random() ** 2)]
        if follower != label:
            chosen[follower] = None
    assert len(chosen) == count, "hardly anybody is left to follow"
    return list(chosen)
