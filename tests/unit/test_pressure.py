"""What lag makes of the fan-out policy: the stages, as tables and properties. A look at the log comes every second."""

from collections.abc import Callable, Iterable
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_svc import pressure as p
from graph_svc.core import push_below
from graph_svc.pressure import Pressure, Traffic, lag_that_counts, observe
from graph_svc.store import FanoutPolicy
from mesh.eventlog.port import Lag
from mesh.eventlog.topics import FANOUT_TASKS, FANOUT_TASKS_SLOW, TWEET_FANOUT

USUAL = FanoutPolicy(100_000)
HIGH, BETWEEN, LOW = p.LAG_HIGH_SECONDS + 1, p.LAG_HIGH_SECONDS, 0.0
assert BETWEEN > p.LAG_LOW_SECONDS

lags = st.sampled_from([HIGH, BETWEEN, LOW, None]) | st.floats(0, 1_000)
# Long stretches of one lag: what lasts less than a minute often moves nothing.
traces = st.lists(st.tuples(lags, st.integers(1, 200)), max_size=12).map(
    lambda parts: [lag for lag, seconds in parts for _ in range(seconds)]
)
policies = st.integers(2, 10**9).flatmap(
    lambda threshold: st.builds(FanoutPolicy, st.just(threshold), st.just(0) | st.integers(2, threshold))
)


def followed(trace: Iterable[float | None], policy: FanoutPolicy = USUAL) -> list[Pressure]:
    """What was in force after each second."""
    pressure, found = Pressure(), list[Pressure]()
    for second, lag in enumerate(trace):
        pressure = observe(pressure, float(second), lag, policy)
        found.append(pressure)
    return found


def stages(trace: Iterable[float | None], policy: FanoutPolicy = USUAL) -> list[tuple[int, bool, int]]:
    """(second, big tasks are slow, threshold in force) at the beginning, and at each step."""
    steps = list[tuple[int, bool, int]]()
    for second, each in enumerate(followed(trace, policy)):
        in_force = each.slow, each.threshold(policy)
        if not steps or steps[-1][1:] != in_force:
            steps.append((second, *in_force))
    return steps


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        ([LOW] * 300, []),
        ([BETWEEN] * 300, []),
        ([None] * 300, []),
        ([HIGH] * 5 + [BETWEEN] + [HIGH] * 5, []),
        ([HIGH] * 6, [(5, True, 100_000)]),
        ([HIGH] * 20, [(5, True, 100_000)]),
        ([HIGH] * 41, [(5, True, 100_000), (20, True, 50_000), (30, True, 25_000), (40, True, 12_500)]),
        # Low for a minute, and no second less, since the last high lag.
        ([HIGH] * 6 + [LOW] * 60 + [BETWEEN] + [LOW] * 60, [(5, True, 100_000)]),
        ([HIGH] * 6 + [LOW] * 61, [(5, True, 100_000), (66, False, 100_000)]),
        # The log is away: a wait begins anew.
        ([HIGH] * 6 + [LOW] * 60 + [None] + [LOW] * 60, [(5, True, 100_000)]),
        ([HIGH] * 6 + [None] * 300, [(5, True, 100_000)]),
    ],
)
def test_lag_is_answered_in_stages(trace: list[float | None], expected: list[tuple[int, bool, int]]) -> None:
    assert stages(trace) == [(0, False, 100_000), *expected]


def test_a_burst_from_beginning_to_end() -> None:
    assert stages([HIGH] * 300 + [LOW] * 400) == [
        (0, False, 100_000),
        (5, True, 100_000),
        (20, True, 50_000),
        (30, True, 25_000),
        (40, True, 12_500),
        (50, True, 10_000),
        (360, True, 12_500),
        (420, True, 25_000),
        (480, True, 50_000),
        (540, True, 100_000),
        (600, False, 100_000),
    ]


@pytest.mark.parametrize(
    ("policy", "lowest"),
    [
        (FanoutPolicy(100_000), 10_000),
        (FanoutPolicy(100_000, 30_000), 30_000),
        (FanoutPolicy(100_000, 100_000), 100_000),
        (FanoutPolicy(100_000, 2), 2),
        (FanoutPolicy(9_000), 9_000),
        (FanoutPolicy(9, 4), 4),
    ],
)
def test_the_threshold_falls_to_the_policys_minimum(policy: FanoutPolicy, lowest: int) -> None:
    *_, last = followed([HIGH] * 400, policy)
    assert (last.slow, last.threshold(policy)) == (True, lowest)


@given(traces, st.lists(policies, min_size=1, max_size=3))
def test_what_is_in_force_is_within_the_policy_whatever_it_becomes(
    trace: list[float | None], operators: list[FanoutPolicy]
) -> None:
    pressure = Pressure()
    for second, lag in enumerate(trace):
        policy = operators[second * len(operators) // len(trace)]
        pressure = observe(pressure, float(second), lag, policy)
        lowest = policy.pull_threshold_min or min(policy.pull_threshold, p.THRESHOLD_MIN_DEFAULT)
        assert lowest <= pressure.threshold(policy) <= policy.pull_threshold
        assert pressure.slow or pressure.threshold(policy) == policy.pull_threshold


@given(traces, policies)
def test_steps_are_single_and_far_apart(trace: list[float | None], policy: FanoutPolicy) -> None:
    found = followed(trace, policy)
    moves = [
        (second, after)
        for second, (before, after) in enumerate(pairwise([Pressure(), *found]))
        if (before.slow, before.halvings) != (after.slow, after.halvings)
    ]
    for (at, before), (then, after) in pairwise(moves):
        fell = after.halvings > before.halvings or after.slow > before.slow
        assert abs(after.halvings - before.halvings) + (before.slow != after.slow) == 1
        assert then - at >= (p.SLOW_AFTER_SECONDS if not before.slow else p.FALL_EVERY_SECONDS)
        assert fell or then - at >= p.RISE_EVERY_SECONDS
        assert not fell or trace[then] is not None
    assert found == [] or found[-1].changes <= len(trace) / p.FALL_EVERY_SECONDS


@given(traces, policies, st.lists(st.sampled_from([BETWEEN, None]), min_size=1, max_size=300))
def test_between_the_bars_and_without_a_log_nothing_moves(
    trace: list[float | None], policy: FanoutPolicy, quiet: list[float | None]
) -> None:
    found = [Pressure(), *followed([*trace, *quiet], policy)][len(trace) :]
    assert len({(each.slow, each.halvings, each.changes) for each in found}) == 1


@st.composite
def bursts(draw: st.DrawFn) -> list[float | None]:
    """Load that pauses for less than a minute at a time, and then is over."""
    parts = draw(st.lists(st.tuples(st.sampled_from([HIGH, BETWEEN, LOW, None]), st.integers(1, 58)), max_size=15))
    burst = list[float | None]()
    for _, together in groupby(parts, key=lambda part: part[0] == LOW):
        stretch = [lag for lag, seconds in together for _ in range(seconds)]
        burst += stretch[:58] if stretch[0] == LOW else stretch
    return [*burst, *[LOW] * 2_000]


@given(bursts(), policies, st.integers(1, 10**9))
def test_a_burst_moves_the_threshold_down_once_and_up_once_and_no_author_more_than_twice(
    burst: list[float | None], policy: FanoutPolicy, followers: int
) -> None:
    found = followed(burst, policy)
    in_force = [each.threshold(policy) for each in found]
    lowest = in_force.index(min(in_force))
    assert in_force[: lowest + 1] == sorted(in_force[: lowest + 1], reverse=True)
    assert in_force[lowest:] == sorted(in_force[lowest:])
    assert (in_force[-1], found[-1].slow) == (policy.pull_threshold, False)
    assert found[-1].changes == 2 * max(each.halvings for each in found)
    pulled, changes = followers >= policy.pull_threshold, 0
    for threshold in in_force:
        changed = followers < push_below(threshold) if pulled else followers >= threshold
        pulled, changes = pulled != changed, changes + changed
    assert changes <= 2


def lags_when_pushed(followers: int) -> Callable[[int], float]:
    """A load that one author makes, as long as followers are pushed to."""
    return lambda threshold: LOW if threshold <= followers else HIGH


def test_a_load_that_stays_moves_its_author_ever_more_rarely() -> None:
    load = lags_when_pushed(60_000)
    pressure, rises = Pressure(), list[int]()
    for second in range(3 * 3_600):
        before = pressure.threshold(USUAL)
        pressure = observe(pressure, float(second), load(before), USUAL)
        if pressure.threshold(USUAL) > before:
            rises.append(second)
    between = [b - a for a, b in pairwise(rises)]
    assert between[:4] == sorted(between[:4])
    assert all(seconds >= p.RISE_EVERY_SECONDS_MAX for seconds in between[4:])
    assert len(rises) <= 16


@pytest.mark.parametrize(
    ("slow", "draining", "expected"), [(False, False, 3.0), (False, True, 3.0), (True, True, 5.0), (True, False, 7.0)]
)
def test_the_slow_topics_lag_counts_while_big_authors_tasks_are_in_it_and_no_drains(
    slow: bool, draining: bool, expected: float
) -> None:
    lags = [
        Lag(TWEET_FANOUT.name, 0, 1, 1.0),
        Lag(FANOUT_TASKS.name, 5, 1, 3.0),
        Lag(FANOUT_TASKS_SLOW.name, 2, 1, 7.0),
    ]
    assert lag_that_counts(Pressure(slow=slow), lags, draining) == expected
    assert lag_that_counts(Pressure(slow=slow), reversed(lags), draining) == expected
    assert lag_that_counts(Pressure(slow=slow), [], draining) == 0.0


def test_authors_who_posted_within_a_minute_are_known() -> None:
    traffic = Traffic()
    for author, now in ((1, 0.0), (2, 10.0), (3, 20.0), (1, 50.0)):
        traffic.asked(author, now)
    assert traffic.authors(60.0) == [2, 3, 1]
    assert traffic.authors(75.0) == [3, 1]
    assert traffic.authors(75.0) == [3, 1]
    assert traffic.authors(200.0) == []


def test_of_very_many_authors_the_last_are_known() -> None:
    traffic = Traffic()
    for author in range(p.TRAFFIC_AUTHORS_MAX + 5):
        traffic.asked(author, author / 1_000)
    assert traffic.authors(11.0) == list(range(5, p.TRAFFIC_AUTHORS_MAX + 5))
