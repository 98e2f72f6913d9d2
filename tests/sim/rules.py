"""The rules of the protocol, each one a switch: what it requires, and where it stands.

With all of them on no interleaving fails; with any one off, one does, and `kept.json` keeps it. ◆: marked so in the
design. "design: …" names its section, "rule …" is the number in `docs/architecture.md`.
"""

from dataclasses import dataclass, field, fields, replace


def _rule(says: str) -> bool:
    return field(default=True, metadata={"says": says})


@dataclass(frozen=True, slots=True)
class Rules:
    """All on."""

    # Lists
    floor_only_rises: bool = _rule("◆ Within a life the floor only rises, also while building (design: list; rule 2)")
    trim_sets_floor: bool = _rule("◆ Who trims sets the floor to the smallest id kept (design: list; rule 2)")
    insert_never_lowers_floor: bool = _rule("◆ An id below the floor is ignored (design: list; rules 2, 3)")
    push_in_any_state: bool = _rule("A push goes into a list that is being built, too (design: list; rule 3)")
    finish_needs_token: bool = _rule("◆ A build ends only with its own token (design: list; rule 5)")
    cover_compares_version: bool = _rule("◆ Cover is compare-and-set on the version (design: list; rule 6)")
    merge_leaves_missing: bool = _rule("◆ A merge makes no list (design: list)")
    floor_is_as_far_as_asked: bool = _rule("`down_to`: how far the store was asked and answered (design: list; rule 5)")

    # Making lists
    create_before_store: bool = _rule("Create the list, then read the store (design: list; rule 4)")
    version_before_rows: bool = _rule("◆ Version read before, or in one with, the following (design: list; rule 4)")
    rebuild_takes_own: bool = _rule("◆ A rebuild reads the viewer's own ids, too (design: list)")
    rebuild_from_store: bool = _rule("◆ A rebuild reads the store, not author lists (design: list; rule 4)")
    cover_from_store: bool = _rule("◆ A cover reads the store, not author lists (design: follow; rule 6)")
    drain_from_store: bool = _rule("◆ A drain reads the store, not author lists (design: modes)")
    making_ignores_filters: bool = _rule("◆ Rebuild, cover, merge ignore the viewer's filters (design: list)")
    making_ignores_modes: bool = _rule("◆ Rebuild, cover, merge ignore author modes (design: list)")

    # Follows, and the copy of the viewer's version
    followers_leg_first: bool = _rule("◆ Follow writes the followers' leg first (design: follow; rule 9)")
    unfollow_leg_last: bool = _rule("Unfollow removes the followers' leg last (design: follow; rule 9)")
    no_batch_across_legs: bool = _rule("◆ No logged batch across the legs: it shows in any order (design: follow)")
    since_is_fresh: bool = _rule("`since` is a fresh version, not that of `pending` (design: follow)")
    mended_since_is_fresh: bool = _rule("A mended leg gets a fresh `since`, too (design: follow)")
    legs_have_timestamps: bool = _rule("A leg is written with the timestamp of its row (design: follow)")
    bucket_count_first: bool = _rule("The bucket count rises before a new bucket's first row (design: follow)")
    version_after_mute: bool = _rule("A version counts up with the rows it vouches for, or later (design: follow)")
    copy_deleted_after_commit: bool = _rule("A change commits, then deletes the copy (design: follow; rule 10)")
    reply_after_copy_deleted: bool = _rule("A change replies when the copy is deleted (design: follow; rule 10)")
    copy_filled_with_lease: bool = _rule("Only a lease's holder fills the version's copy (design: follow; rule 10)")
    copy_names_run_id: bool = _rule("Another primary's copy is a miss (design: follow; rule 11)")

    # Author modes
    skip_on_fresh_pull: bool = _rule("◆ Followers are skipped on a fresh read of PULL only (design: modes)")
    skip_after_20_s: bool = _rule("◆ … and only when PULL is older than 20 s (design: modes)")
    modes_unknown_after_15_s: bool = _rule("Readers forget modes that are older than 15 s (design: modes)")
    modes_before_list: bool = _rule("A reader takes the modes before it reads the list (found here)")
    pull_while_draining: bool = _rule("Readers pull authors in DRAIN, too (design: modes)")
    complete_drain_checks_epoch: bool = _rule("A drain completes its own epoch only (design: modes)")
    complete_when_all_drained: bool = _rule("PUSH when all buckets are drained (design: modes)")

    # Posts and delivery
    outbox_row_first: bool = _rule("The outbox row comes before the tweet (design: stores)")
    relay_waits_for_writes: bool = _rule("◆ The relay publishes only what is written (design: stores)")
    sweep_completes_first: bool = _rule("◆ The sweep completes a write, then publishes it (design: stores)")
    own_pushes_repeated: bool = _rule("◆ Workers repeat the author's own pushes (design: fan-out; rule 13)")
    own_pushes_in_every_mode: bool = _rule("◆ … in every mode (design: fan-out)")
    own_pushes_before_ack: bool = _rule("◆ … and before they acknowledge (design: fan-out; rule 13)")
    ack_after_effects: bool = _rule("An event is acknowledged last (design: fan-out; rule 12)")
    dead_letters_never_succeed: bool = _rule("◆ What is unavailable is tried again (design: fan-out; rule 14)")

    # Failover
    replay_covers_staleness: bool = _rule("◆ Replay from before failover − staleness (design: fan-out; rule 15)")
    rewind_is_committed: bool = _rule("◆ The rewind is committed before the replay starts (design: fan-out)")
    work_in_hand_again: bool = _rule("◆ At a rewind work in hand is taken again (design: fan-out)")
    drain_tasks_again: bool = _rule("◆ Drain tasks acknowledged in that window run again (design: fan-out)")
    republish_last_hour: bool = _rule("A log that dies with lists gets the last hour again (design: stores; rule 15)")
    mark_in_same_life: bool = _rule("Published is marked in the log's life it was published in (found here)")

    # Reading
    own_tweet_on_last_page: bool = _rule("◆ Read-your-write also if the page has no token (design: reading; rule 20)")


RULES: dict[str, str] = {switch.name: switch.metadata["says"] for switch in fields(Rules)}


def without(name: str) -> Rules:
    """All rules but one."""
    return replace(Rules(), **{name: False})
