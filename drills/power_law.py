"""A graph as social networks have it: one account that most follow, few with many followers, many with few.

Of the accounts after the biggest, number r has followers in proportion to r^-0.8 (Zipf's law; degrees then follow a
power law with exponent 2.25). Who follows is skewed, too: few follow many.
"""

import random
from dataclasses import dataclass

from drills.graphs import Graph

ZIPF = 0.8
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


def power_law(shape: Shape, seed: int) -> Graph:
    """A graph of that shape."""
    chance = random.Random(seed)  # noqa: S311 - the same numbers for the same seed is what is wanted
    labels = range(1, shape.accounts + 1)
    # Whoever comes early here follows many; independent of how many follow them.
    eager = sorted(labels, key=lambda _: chance.random())
    followers: dict[int, list[int]] = {1: [label for label in eager if label != 1][: shape.biggest_followers]}
    for label, count in zip(labels[1:], _counts(shape), strict=True):
        followers[label] = _followers(chance, eager, label, count)
    graph = Graph(followers)
    assert graph.follows == shape.follows
    return graph


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
