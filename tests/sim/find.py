"""Finds, for a rule switched off, an interleaving that fails; shrinks it; and keeps it in `kept.json`.

python -m tests.sim.find [RULE…]: the rules named, or those that have none yet. Progress is shown.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.sim.rules import RULES, Rules, without
from tests.sim.schedule import fails
from tests.sim.world import Choices

KEPT = Path(__file__).with_name("kept.json")
SEEDS_MAX = 100_000
SHRINKS_MAX = 600

# What a search confines itself to, what it prefers of the world, and where processes are slow, where failures are rare.
FOCUS: dict[str, tuple[str, ...]] = {
    "insert_never_lowers_floor": ("work", "post", "time", "evict", "warm"),
    "push_in_any_state": ("work", "post", "evict", "warm", "read"),
    "finish_needs_token": ("work", "post", "warm", "evict", "two users"),
    "cover_compares_version": ("work", "warm", "follow", "failover"),
    "create_before_store": ("work", "post", "warm", "evict"),
    "rebuild_from_store": ("work", "post", "mode", "warm", "evict", "two users", "pulled", "mode read", "write done"),
    "cover_from_store": ("work", "post", "mode", "warm", "follow", "two users", "pulled", "mode read", "write done"),
    "drain_from_store": ("work", "post", "mode", "two users", "pulled"),
    "followers_leg_first": ("work", "post", "warm", "follow", "crash"),
    "no_batch_across_legs": ("work", "post", "warm", "follow", "crash"),
    "mended_since_is_fresh": ("work", "post", "warm", "follow", "crash"),
    "legs_have_timestamps": ("work", "post", "follow", "unfollow", "warm"),
    "bucket_count_first": ("work", "post", "follow", "warm", "crash"),
    "reply_after_copy_deleted": ("follow", "unfollow", "read"),
    "copy_names_run_id": ("follow", "unfollow", "read", "failover"),
    "modes_before_list": ("work", "read", "mode", "hear"),
    "pull_while_draining": ("work", "read", "mode", "post", "time", "hear"),
    # A long search found none: what is kept was composed by hand.
    "complete_drain_checks_epoch": ("work", "post", "mode", "time", "hear", "read", "two users", "pulled"),
    "complete_when_all_drained": ("work", "read", "mode", "hear"),
    "relay_waits_for_writes": ("work", "post", "warm", "evict", "mode", "time"),
    "sweep_completes_first": ("work", "post", "warm", "evict", "mode", "time"),
    "own_pushes_before_ack": ("work", "post", "crash"),
    "replay_covers_staleness": ("work", "post", "failover"),
    "rewind_is_committed": ("work", "post", "failover", "crash"),
    "work_in_hand_again": ("work", "post", "failover"),
    "mark_in_same_life": ("work", "post", "failover"),
    "own_tweet_on_last_page": ("post", "read"),
}


def outcome(rules: Rules, choices: Choices) -> str:
    """What goes wrong in a run, broken assertions of the lists included; "": nothing."""
    try:
        return fails(rules, choices)
    except AssertionError as error:
        return f"asserted: {error}"


def replay(rules: Rules, schedule: Sequence[int]) -> str:
    """What goes wrong in the run of a schedule."""
    return outcome(rules, Choices(replayed=schedule))


def find(name: str, seeds: int = SEEDS_MAX) -> tuple[int, list[int]] | None:
    """A seed, and a failing schedule; None when none of the seeds fails."""
    rules = without(name)
    for seed in range(seeds):
        choices = Choices(seed, focus=FOCUS.get(name, ()))
        if outcome(rules, choices) and replay(rules, choices.taken) and not replay(Rules(), choices.taken):
            return seed, shrink(rules, choices.taken)
    return None


def shrink(rules: Rules, schedule: list[int]) -> list[int]:
    """A shorter one that fails without the rule, and passes with it: left out, made plain, while it helps."""
    best = list(schedule)
    left = SHRINKS_MAX
    size = max(1, len(best) // 2)
    while size and left:
        at = 0
        while at < len(best) and left:
            candidates = [best[:at] + best[at + size :]]
            if any(best[at : at + size]):
                candidates.append(best[:at] + [0] * len(best[at : at + size]) + best[at + size :])
            for candidate in candidates:
                left = max(0, left - 1)
                if replay(rules, candidate) and not replay(Rules(), candidate):
                    best = candidate
                    break
            else:
                at += size
        size //= 2
    return best


def kept() -> dict[str, list[int]]:
    """The kept schedules, by rule."""
    found: dict[str, list[int]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return found


def main(names: Sequence[str]) -> None:
    """Find and keep."""
    schedules = kept()
    for name in names or [rule for rule in RULES if rule not in schedules]:
        found = find(name)
        if found is None:
            print(f"{name}: none of {SEEDS_MAX:,} seeds fails", flush=True)
            continue
        seed, schedule = found
        schedules[name] = schedule
        print(f"{name}: seed {seed}, {len(schedule)} choices: {replay(without(name), schedule)}", flush=True)
        lines = [f'  "{rule}": {json.dumps(schedules[rule])}' for rule in RULES if rule in schedules]
        KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
