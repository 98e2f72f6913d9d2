"""The protocol, judged by simulation: see `protocol.py` and `rules.py`."""

import os

import pytest

from tests.sim.find import FOCUS, kept, replay
from tests.sim.rules import RULES, Rules, without
from tests.sim.schedule import fails
from tests.sim.world import Choices

SEEDS = int(os.environ.get("STARLING_SIM_SEEDS", "4000"))
SHARDS = 4


@pytest.mark.timeout(0)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_with_every_rule_on_no_interleaving_fails(shard: int) -> None:
    """Seeds are the same each time; every second one confines itself to what a rule is about."""
    focuses = [(), *FOCUS.values()]
    for seed in range(shard, SEEDS, SHARDS):
        focus = focuses[seed // SHARDS % len(focuses)] if seed // SHARDS % 2 else ()
        assert fails(Rules(), Choices(seed, focus=focus)) == "", f"seed {seed}, focus {focus}"


@pytest.mark.parametrize("name", sorted(kept()))
def test_without_a_rule_its_kept_interleaving_fails_and_with_it_passes(name: str) -> None:
    schedule = kept()[name]
    assert replay(without(name), schedule), RULES[name]
    assert replay(Rules(), schedule) == ""


def test_each_rule_has_a_kept_interleaving() -> None:
    assert set(kept()) == set(RULES)
