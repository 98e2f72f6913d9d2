"""What lag makes of the fan-out policy: pure. Looks at the log come in, with their times; what is in force comes out.

Fan-out that is behind sheds work in stages, the mildest first, and takes it up again the other way round:

0. All is normal.
1. Lag has been over the bar for some seconds: bucket tasks of big authors go to the slow topic, where nobody else's
   tweets wait behind them. From now on that topic's lag counts, too: followers wait for what is in it.
2. It still is, some seconds later: the pull threshold in force is halved, and again, down to the policy's minimum.
   Shedding costs reads (followers × reads instead of followers × tweets), so it is for authors who post only.

When lag has been low for a minute the threshold doubles, one step a minute, and at last stage 1 ends. Between the two
bars nothing moves. So a burst of load, which may pause for less than a minute, moves an author once there and once
back. A load that stays brings lag again as soon as an author is pushed again: whenever the threshold falls after it
rose, calm must last twice as long before it rises again, until everything has been normal.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from graph_svc.store import FanoutPolicy
from mesh.eventlog.port import Lag
from mesh.eventlog.topics import FANOUT_TASKS_SLOW

LAG_HIGH_SECONDS = 5.0
LAG_LOW_SECONDS = 2.0
SLOW_AFTER_SECONDS = 5.0
FALL_AFTER_SECONDS = 15.0
"""From stage 1 on: a worker's crash, whose records others take after 15 to 20 s, is over before the threshold falls."""
FALL_EVERY_SECONDS = 10.0
RISE_EVERY_SECONDS = 60.0
RISE_EVERY_SECONDS_MAX = 960.0
THRESHOLD_MIN_DEFAULT = 10_000
TRAFFIC_SECONDS = 60.0
TRAFFIC_AUTHORS_MAX = 10_000
assert LAG_LOW_SECONDS < LAG_HIGH_SECONDS
assert SLOW_AFTER_SECONDS + FALL_AFTER_SECONDS >= 20
assert FALL_EVERY_SECONDS < RISE_EVERY_SECONDS < RISE_EVERY_SECONDS_MAX


@dataclass(frozen=True, slots=True)
class Pressure:
    """What is in force: stage 1 (`slow`), and so many `halvings` of the policy's threshold, changed `changes` times.

    `high_since`, `low_since`: since when lag has been over the upper bar, or under the lower one. `moved_at`: the last
    step of any kind. `rise_every_seconds`: how long calm must last now; `rose`: the last step of the threshold was
    upwards. Times are of a monotonic clock, seconds.
    """

    slow: bool = False
    halvings: int = 0
    changes: int = 0
    lag_seconds: float = 0.0
    high_since: float | None = None
    low_since: float | None = None
    moved_at: float = -math.inf
    rise_every_seconds: float = RISE_EVERY_SECONDS
    rose: bool = False

    def threshold(self, policy: FanoutPolicy) -> int:
        """The pull threshold in force."""
        return max(_minimum(policy), -(-policy.pull_threshold >> self.halvings))

    def push_threshold(self, policy: FanoutPolicy, now: float) -> int:
        """The threshold below which (hysteresis aside) pulled authors are pushed again. Until all has been calm for a
        while, and so after a start that finds a burst, or another process that knows of one, the lowest there can be:
        a way back is work, too."""
        calm = self.low_since is not None and now - self.low_since >= RISE_EVERY_SECONDS
        return self.threshold(policy) if calm else _minimum(policy)


def _minimum(policy: FanoutPolicy) -> int:
    return policy.pull_threshold_min or min(policy.pull_threshold, THRESHOLD_MIN_DEFAULT)


def _halvings_max(policy: FanoutPolicy) -> int:
    """So many bring the threshold down to its minimum."""
    return ((policy.pull_threshold - 1) // _minimum(policy)).bit_length()


def lag_that_counts(pressure: Pressure, lags: Iterable[Lag], draining: bool) -> float:
    """The lag that `observe` is to be told, seconds, of that of all topics. In stage 0 what is on the slow topic may
    wait, whatever it is. From stage 1 on it holds big authors' tasks. While an author is `draining` it holds drains as
    well, which a threshold that rises brings: it mustn't fall again for them; nor may it rise further."""
    slow_most = (LAG_HIGH_SECONDS if draining else math.inf) if pressure.slow else 0.0
    return max(
        (min(lag.seconds, slow_most if lag.topic == FANOUT_TASKS_SLOW.name else math.inf) for lag in lags), default=0.0
    )


def observe(pressure: Pressure, now: float, lag_seconds: float | None, policy: FanoutPolicy) -> Pressure:
    """What is in force after another look at the log: one step further at most. `lag_seconds`: the age of the oldest
    record that isn't acknowledged; None: the log is away, nothing moves, and every wait begins anew."""
    if lag_seconds is None:
        return replace(pressure, high_since=None, low_since=None)
    seen = replace(
        pressure,
        lag_seconds=lag_seconds,
        high_since=_since(pressure.high_since, now, lag_seconds > LAG_HIGH_SECONDS),
        low_since=_since(pressure.low_since, now, lag_seconds < LAG_LOW_SECONDS),
        halvings=min(pressure.halvings, _halvings_max(policy)),  # The policy may be another one.
    )
    if seen.high_since is not None and now - max(seen.high_since, seen.moved_at) >= _shed_after(seen):
        return _shed(seen, now, policy)
    if seen.low_since is not None and now - max(seen.low_since, seen.moved_at) >= seen.rise_every_seconds:
        return _take_up(seen, now)
    return seen


def _since(before: float | None, now: float, holds: bool) -> float | None:
    if not holds:
        return None
    return now if before is None else before


def _shed_after(pressure: Pressure) -> float:
    if not pressure.slow:
        return SLOW_AFTER_SECONDS
    return FALL_EVERY_SECONDS if pressure.halvings else FALL_AFTER_SECONDS


def _shed(pressure: Pressure, now: float, policy: FanoutPolicy) -> Pressure:
    if not pressure.slow:
        return replace(pressure, slow=True, moved_at=now)
    if pressure.halvings == _halvings_max(policy):
        return pressure
    rise_every = pressure.rise_every_seconds * (2 if pressure.rose else 1)
    return replace(
        pressure,
        halvings=pressure.halvings + 1,
        changes=pressure.changes + 1,
        moved_at=now,
        rise_every_seconds=min(rise_every, RISE_EVERY_SECONDS_MAX),
        rose=False,
    )


def _take_up(pressure: Pressure, now: float) -> Pressure:
    if pressure.halvings:
        return replace(pressure, halvings=pressure.halvings - 1, changes=pressure.changes + 1, moved_at=now, rose=True)
    if pressure.slow:
        return replace(pressure, slow=False, moved_at=now, rise_every_seconds=RISE_EVERY_SECONDS, rose=False)
    return pressure


class Traffic:
    """Authors who post: when fan-out last asked for the mode of each. Bounded: those asked for longest ago go first."""

    def __init__(self) -> None:
        self._asked: OrderedDict[int, float] = OrderedDict()

    def asked(self, author_id: int, now: float) -> None:
        """Fan-out asks."""
        self._asked[author_id] = now
        self._asked.move_to_end(author_id)
        if len(self._asked) > TRAFFIC_AUTHORS_MAX:
            self._asked.popitem(last=False)

    def authors(self, now: float) -> list[int]:
        """Those asked for within the last minute; the others are forgotten."""
        while self._asked and next(iter(self._asked.values())) < now - TRAFFIC_SECONDS:
            self._asked.popitem(last=False)
        return list(self._asked)
