"""Graphs that drills generate. Only `Random.random` decides, whose numbers for a seed are the same in every release of
Python; so a seed is a graph."""

import random
from collections.abc import Iterator, Mapping
from pathlib import Path

FOLLOWEES_MAX = 5_000
"""graph_svc refuses more."""


class Graph:
    """Who follows whom, by labels from 1: `followers[label]`, and `followees[label]` of everybody."""

    def __init__(self, followers: Mapping[int, list[int]]) -> None:
        self.followers = followers
        labels = {*followers, *(label for some in followers.values() for label in some)}
        self.followees: dict[int, list[int]] = {label: [] for label in sorted(labels)}
        for followee, some in followers.items():
            for follower in some:
                self.followees[follower].append(followee)
        self.follows = sum(map(len, followers.values()))
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


def evenly(counts: Mapping[int, int], readers: range, seed: int) -> Graph:
    """Each label of `counts` has so many followers: any of the readers, as likely as another, but not itself."""
    chance = random.Random(seed)  # noqa: S311 - the same numbers for the same seed is what is wanted
    followers: dict[int, list[int]] = {}
    for label, count in counts.items():
        if count > len(readers) // 2:  # Most of them: whom to leave out is fewer to choose.
            left_out = _chosen(chance, readers, label, len(readers) - (label in readers) - count)
            followers[label] = [reader for reader in readers if reader != label and reader not in left_out]
        else:
            followers[label] = list(_chosen(chance, readers, label, count))
    return Graph(followers)


def _chosen(chance: random.Random, readers: range, label: int, count: int) -> dict[int, None]:
    """Different readers, but not the label. A dict keeps the order of their choice, which a set wouldn't."""
    assert 0 <= count <= len(readers) // 2, "each try finds a new one, as likely as not"
    chosen: dict[int, None] = {}
    while len(chosen) < count:
        reader = readers[int(len(readers) * chance.random())]
        if reader != label:
            chosen[reader] = None
    return chosen
