"""What drills are made of: the graphs that they generate, and how they say what they found."""

import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cli.importing import EdgeFile
from drills import lag, storm
from drills.findings import Checks, delay_lines, quantile
from drills.graphs import evenly
from drills.lag import Look
from drills.own_mesh import DrillError
from drills.picture import Curve, Panel, svg
from drills.power_law import Shape, power_law
from mesh.eventlog.topics import FANOUT_TASKS, FANOUT_TASKS_SLOW

SHAPE = Shape(accounts=1_000, follows=6_000, biggest_followers=600)


def test_a_graph_has_the_shape_that_was_asked_for(tmp_path: Path) -> None:
    graph = power_law(SHAPE, 4)
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
    counts = [len(followers) for followers in power_law(SHAPE, 4).followers.values()]
    assert counts[0] > 2 * counts[1] > 4 * counts[10] > 16 * counts[500] > 0


def test_a_seed_is_a_graph(tmp_path: Path) -> None:
    texts = []
    for seed in (4, 4, 5):
        power_law(SHAPE, seed).write(tmp_path / "edges")
        texts.append((tmp_path / "edges").read_text())
    assert texts[0] == texts[1] != texts[2]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="no such graph"):
        Shape(accounts=10, follows=100, biggest_followers=10)
    with pytest.raises(AssertionError, match="hardly anybody"):
        power_law(Shape(accounts=10, follows=89, biggest_followers=9), 1)


def test_followers_are_spread_evenly_and_nobody_follows_themselves() -> None:
    graph = evenly({1: 5, 2: 70, 3: 99, 500: 100, 501: 0}, range(1, 101), 4)
    assert {label: len(set(followers)) for label, followers in graph.followers.items()} == {
        1: 5,
        2: 70,
        3: 99,
        500: 100,
        501: 0,
    }
    assert all(label not in followers for label, followers in graph.followers.items())
    assert graph.followees[7] == [label for label, followers in graph.followers.items() if 7 in followers]
    assert sorted(graph.followees) == [*range(1, 101), 500, 501]
    edges = list(graph.edges())
    assert len(edges) == len(set(edges)) == graph.follows == 274
    assert edges == list(evenly({1: 5, 2: 70, 3: 99, 500: 100, 501: 0}, range(1, 101), 4).edges())
    assert edges != list(evenly({1: 5, 2: 70, 3: 99, 500: 100, 501: 0}, range(1, 101), 5).edges())


def test_a_table_says_what_was_asked_beside_what_was_reached() -> None:
    checks = Checks()
    checks.equal("walks", 300, 300)
    checks.at_least("deliveries", 1_000, 1_000)
    checks.at_most("lag, s", 60, 43.21)
    assert checks.hold
    assert [line.split() for line in checks.lines()] == [
        ["asked", "reached"],
        ["walks", "300", "300"],
        ["deliveries", "≥", "1,000", "1,000"],
        ["lag,", "s", "≤", "60", "43.2"],
    ]


@pytest.mark.parametrize(
    ("check", "reached"), [(Checks.equal, 11), (Checks.equal, 9), (Checks.at_least, 9), (Checks.at_most, 11)]
)
def test_a_figure_that_is_not_reached_is_named_and_fails_the_drill(
    check: Callable[[Checks, str, int, int], None], reached: int
) -> None:
    checks = Checks()
    check(checks, "this", 10, reached)
    checks.equal("that", 10, 10)
    assert not checks.hold
    assert [line.endswith("NOT REACHED") for line in checks.lines()] == [False, True, False]


def test_quantiles_are_values_that_were_measured() -> None:
    assert [quantile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.95, 1.0)] == [1.0, 3.0, 4.0, 4.0]
    lines = delay_lines({"before": [0.010] * 9, "after": [0.025] * 9}, before="before", during="after")
    assert lines[-1].split() == ["after", "/", "before", "2.5", "2.5", "2.5"]


def test_a_picture_has_each_curve_and_mark_and_stays_within_its_edges() -> None:
    curves = [Curve("a & b", [(0, 0), (60, 812.5), (118, 3)]), Curve("c", [(0, 1), (118, 2)])]
    panels = [Panel("lag <s>", curves), Panel("nothing", [Curve("", [])]), Panel("zero", [Curve("", [(5, 0)])])]
    picture = ET.fromstring(svg("a title", panels, {"burst ends": 90.0}))
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    tags = [each.tag.rpartition("}")[2] for each in picture]
    assert tags.count("polyline") == 4
    texts = [each.text for each in picture if each.tag.endswith("text")]
    assert {"a title", "lag <s>", "nothing", "a & b", "c", "burst ends", "0 s", "1,000", "500"} <= set(texts)
    for line in picture.iter("{http://www.w3.org/2000/svg}polyline"):
        for x, y in (point.split(",") for point in line.attrib["points"].split()):
            assert 0 <= float(x) <= width
            assert 0 <= float(y) <= height


def look(seconds: float, *, slow: bool = False, threshold: int = lag.THRESHOLD, deliveries: int = 0) -> Look:
    return Look(seconds, {FANOUT_TASKS.name: 1.0, FANOUT_TASKS_SLOW.name: 2.5}, deliveries, slow, threshold, 0)


def test_the_story_of_a_burst_is_told_by_its_steps() -> None:
    looks = [
        look(0.0),
        look(1.0, slow=True, deliveries=500),
        look(2.0, slow=True, deliveries=1_000),
        look(3.0, slow=True, threshold=5_000),
        look(9.0),
    ]
    assert [line.split(":")[0].strip() for line in lag.story(looks)] == ["1 s", "3 s", "9 s"]
    assert lag.first(looks, lambda one: one.threshold < lag.THRESHOLD) == 3.0
    assert lag.rate(looks, 0.0, 2.0) == 500.0
    assert looks[0].lag == 2.5
    with pytest.raises(DrillError, match="fan-out followed"):
        lag.first(looks, lambda one: one.lag > 60)


def test_a_storm_that_takes_longer_than_a_minute_is_not_the_one_that_was_asked_for() -> None:
    calm = storm.Findings(True, before={1: 0.010}, during={2: 0.010}, exact=storm.WALKS)
    minute = list(range(0, 60_000, 3))
    assert storm.checks_of(replace(calm, retweeted_at=minute)).hold
    assert not storm.checks_of(replace(calm, retweeted_at=[*minute[:-1], 60_001])).hold


@pytest.mark.parametrize(
    ("detector", "during", "exact", "holds"),
    [
        (True, 0.020, storm.WALKS, True),
        (True, 0.021, storm.WALKS, False),
        (False, 0.500, storm.WALKS, True),
        (False, 0.010, storm.WALKS - 1, False),
    ],
)
def test_ordinary_tweets_may_take_twice_as_long_in_a_storm_and_the_walks_are_exact(
    detector: bool, during: float, exact: int, holds: bool
) -> None:
    findings = storm.Findings(
        detector,
        before={1: 0.010, 2: 0.010},
        during={3: during, 4: during},
        retweeted_at=[1_000] * storm.RETWEETERS,
        exact=exact,
    )
    assert storm.checks_of(findings).hold == holds
