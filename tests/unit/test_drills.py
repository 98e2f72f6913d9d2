"""The graphs that drills generate."""

from pathlib import Path

import pytest

from cli.importing import EdgeFile
from drills.power_law import Graph, Shape

SHAPE = Shape(accounts=1_000, follows=6_000, biggest_followers=600)


def test_a_graph_has_the_shape_that_was_asked_for(tmp_path: Path) -> None:
    graph = Graph(SHAPE, 4)
    graph.write(tmp_path / "edges")
    edges = list(EdgeFile(tmp_path / "edges"))
    assert len(edges) == len(set(edges)) == graph.follows == 6_000
    assert all(follower != followee for follower, followee in edges)
    assert {label for edge in edges for label in edge} == set(range(1, 1_001))
    assert sum(followee == 1 for _, followee in edges) == 600
    for follower, followee in edges:
        assert follower in graph.followers[followee]
        assert followee in graph.followees[follower]


def test_few_have_many_followers_and_many_have_few() -> None:
    counts = [len(followers) for followers in Graph(SHAPE, 4).followers.values()]
    assert counts[0] > 2 * counts[1] > 4 * counts[10] > 16 * counts[500] > 0


def test_a_seed_is_a_graph(tmp_path: Path) -> None:
    texts = []
    for seed in (4, 4, 5):
        Graph(SHAPE, seed).write(tmp_path / "edges")
        texts.append((tmp_path / "edges").read_text())
    assert texts[0] == texts[1] != texts[2]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="no such graph"):
        Shape(accounts=10, follows=100, biggest_followers=10)
    with pytest.raises(AssertionError, match="hardly anybody"):
        Graph(Shape(accounts=10, follows=89, biggest_followers=9), 1)
