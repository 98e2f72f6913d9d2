"""The protocol: each process a generator, whose yields are the points where anything else may run, or it may die.

This is the specification. A line that is right only because of a rule says so by asking for it: `rules.…`.
"""

from collections.abc import Generator, Iterable, Sequence

from fanout_svc.core import PULL_AGE_SECONDS
from mesh.timelines.port import ListState, author, home
from tests.sim.world import BUILD_LEASE_MS, STALENESS_MS, Context, Failure, Mode, OutboxRow, Reader, Row, Steps, World
from timeline_svc.core import MODES_AGE_MS, Verdict, ViewerContext, assess

PULL_AGE_MS = int(PULL_AGE_SECONDS * 1_000)
ALL = 1_000


# Post: the outbox row carries the whole write, so that whatever dies after it is completed by the sweep.


def post(w: World, user: int) -> Steps:
    tweet = w.next_number()
    if w.rules.outbox_row_first:
        w.outbox[tweet] = OutboxRow(user)
        yield "outbox row"
        w.tweets.put(tweet, user)
        yield "tweet"
    else:
        w.tweets.put(tweet, user)
        yield "tweet"
        w.outbox[tweet] = OutboxRow(user)
        yield "outbox row"
    w.outbox[tweet].done = True
    yield "write done"
    if not w.away():  # The worker repeats it.
        w.lists.push([home(user), author(user)], [tweet])
    yield "inline push"
    w.replied_tweet[user] = tweet


def sweep(w: World, tweet: int) -> Steps:
    """What a crash, or a slow post, left unwritten."""
    row = w.outbox[tweet]
    if w.rules.sweep_completes_first:
        w.tweets.put(tweet, row.author)
        row.done = True
        yield "completed"
        yield from relay(w, tweet)
    else:
        yield from relay(w, tweet)
        w.tweets.put(tweet, row.author)
        row.done = True


def relay(w: World, tweet: int) -> Steps:
    row = w.outbox[tweet]
    life = w.handled_run_id
    yield "log's life read"
    w.events.publish(row.author, tweet)
    yield "published"
    row.published = life == w.handled_run_id or not w.rules.mark_in_same_life


# Fan-out: every effect may be repeated, and an event is acknowledged last.


def deliver(w: World, position: int, generation: int) -> Steps:
    """An event: into the author's own lists, then into the followers', at once or in a task for each bucket.
    `generation`: of the log when the event was taken."""
    user, tweet = w.events.records[position]
    if not w.rules.ack_after_effects:
        w.events.ack(position, generation)
    yield "taken"
    if (yield from fan_out(w, user, tweet)):
        w.events.ack(position, generation)
        yield "acknowledged"
        if not w.rules.own_pushes_before_ack:
            w.lists.push([home(user), author(user)], [tweet])
    elif not w.rules.dead_letters_never_succeed:
        w.events.ack(position, generation)


def fan_out(w: World, user: int, tweet: int) -> Generator[str, None, bool]:
    """False: Valkey was away, and it must be tried again."""
    skips = skips_followers(w, user)
    buckets = range(w.graph.bucket_count[user])
    followers = w.graph.followers(user, 0) if len(buckets) == 1 else None  # In the same call.
    yield "mode read"
    repeats_own = w.rules.own_pushes_repeated and (w.rules.own_pushes_in_every_mode or not skips)
    if w.away():
        return False
    if repeats_own and w.rules.own_pushes_before_ack:
        w.lists.push([home(user), author(user)], [tweet])
        yield "own lists pushed"
    if skips:
        return True
    if len(buckets) == 1:
        return (yield from push_bucket(w, user, 0, tweet, followers))
    for bucket in buckets:
        w.tasks.publish(user, 0, bucket, tweet)
        yield "bucket's task published"
    return True


def skips_followers(w: World, user: int) -> bool:
    """Only when every reader pulls the author by now, and only on what graph_svc says now: later it may be drained."""
    modes = w.graph.modes if w.rules.skip_on_fresh_pull else w.worker_modes
    mode = modes[user]
    age_ms = w.now - mode.since_ms
    return mode.mode is Mode.PULL and (age_ms >= PULL_AGE_MS or not w.rules.skip_after_20_s)


def push_bucket(
    w: World, user: int, bucket: int, tweet: int, known: list[int] | None = None
) -> Generator[str, None, bool]:
    followers = w.graph.followers(user, bucket) if known is None else known
    yield "followers read"
    if w.away():
        return False
    w.lists.push([home(follower) for follower in followers], [tweet])
    yield "bucket pushed"
    return True


def bucket_task(w: World, position: int, generation: int) -> Steps:
    """A part of a delivery; the mode is read again, since the task may be old."""
    user, _, bucket, tweet = w.tasks.records[position]
    skips = skips_followers(w, user)
    yield "mode read"
    if skips or (yield from push_bucket(w, user, bucket, tweet)):
        w.tasks.ack(position, generation)


# Author modes: PUSH → PULL → DRAIN → PUSH, or back from DRAIN to PULL. Each change is one write of graph_svc.


def publish_drain(w: World, user: int, epoch: int, bucket: int) -> Steps:
    life = w.handled_run_id
    yield "log's life read"
    w.tasks.publish(user, epoch, bucket)
    yield "published"
    w.graph.drains[user, epoch, bucket].published = life == w.handled_run_id or not w.rules.mark_in_same_life


def drain_task(w: World, position: int, generation: int) -> Steps:
    """Take what followers were not pushed into their lists; also when the epoch is over, after a failover."""
    user, epoch, bucket = w.tasks.records[position]
    yield "taken"
    ids, down_to = yield from newest(w, [user], 0, from_lists=not w.rules.drain_from_store)
    for follower in w.graph.followers(user, bucket):
        hides = (follower, user) in w.graph.mutes and not w.rules.making_ignores_filters
        if not hides:
            w.lists.merge([home(follower)], ids, down_to)
            yield "merged"
    w.graph.complete_drain(user, epoch, bucket)
    yield "drain completed"
    w.tasks.ack(position, generation)


# Failover: what was pushed and lost is delivered again.


def replay(w: World) -> Steps:
    """A log apart from Valkey: back to where everything was acknowledged before the replica's last change."""
    run_id = w.valkey.run_id
    since_ms = w.failed_at_ms - STALENESS_MS if w.rules.replay_covers_staleness else w.failed_at_ms + 1
    w.tasks.rewind(since_ms, all_kinds=w.rules.drain_tasks_again)
    yield "tasks rewound"
    if w.rules.rewind_is_committed:
        w.events.rewind(since_ms)
        yield "events rewound"
        w.handled_run_id = run_id
    else:
        again = w.events.acked_since(since_ms)
        w.handled_run_id = run_id
        yield "rewound in memory"
        for position in again:
            while not (yield from fan_out(w, *w.events.records[position])):
                yield "again"


def republish(w: World) -> Steps:
    """A log that lost its end together with the lists: outbox and drains of the last hour go out again. In one write
    with the name of the log's new life, in each store."""
    run_id = w.valkey.run_id
    yield "log's life read"
    if w.rules.republish_last_hour:
        for row in w.outbox.values():
            row.published = False
    if w.rules.drain_tasks_again:
        for drain in w.graph.drains.values():
            drain.published = False
    w.handled_run_id = run_id


# Follow and unfollow: two legs, always following ⊆ followers, and no event. `since` above a list's version means that
# readers take the followee from the store until the list covers it.


def follow(w: World, viewer: int, user: int) -> Steps:
    """Also its own retry, and another's: it completes what it finds."""
    graph, rules = w.graph, w.rules
    row = graph.following.get((viewer, user))
    yield from change_begins(w, viewer)
    if row is None or row.state != "active":
        mending = row is not None and row.state == "pending"
        if row is None or not mending:
            row = graph.following[viewer, user] = Row("pending", graph.next_version(viewer))
            yield "row pending"
        leg, activation = follow_leg(w, viewer, user, row), activate(w, viewer, user, row, mending=mending)
        leg_first = rules.followers_leg_first and (rules.no_batch_across_legs or w.choose(2) == 0)
        for part in (leg, activation) if leg_first else (activation, leg):
            yield from part
    yield from change_ends(w, viewer)


def follow_leg(w: World, viewer: int, user: int, row: Row) -> Steps:
    bucket = w.graph.bucket_for(user, viewer)
    if bucket >= w.graph.bucket_count[user] and w.rules.bucket_count_first:
        w.graph.bucket_count[user] = bucket + 1
        yield "bucket count raised"
    w.graph.write_leg(user, viewer, row.stamp, alive=True)
    yield "followers leg"


def activate(w: World, viewer: int, user: int, pending: Row, *, mending: bool) -> Steps:
    """`since`: lists of this version and above were made when the row was active, and so with the followee's ids."""
    fresh = w.rules.since_is_fresh and (w.rules.mended_since_is_fresh or not mending)
    if w.graph.following[viewer, user] == pending:  # Else another attempt was faster, or it was unfollowed.
        since = w.graph.next_version(viewer) if fresh else pending.stamp
        w.graph.following[viewer, user] = Row("active", pending.stamp, since)
        yield "row active"
    if not w.rules.bucket_count_first:
        bucket = w.graph.bucket_for(user, viewer)
        w.graph.bucket_count[user] = max(w.graph.bucket_count[user], bucket + 1)
        yield "bucket count raised"


def unfollow(w: World, viewer: int, user: int) -> Steps:
    graph = w.graph
    yield from change_begins(w, viewer)
    row = graph.following.get((viewer, user))
    if row is None:
        return
    if row.state != "ended":
        row = Row("ended", graph.next_version(viewer))
        if not w.rules.unfollow_leg_last:
            graph.write_leg(user, viewer, row.stamp, alive=False)
            yield "followers leg removed"
        graph.following[viewer, user] = row
        yield "row ended"
    graph.write_leg(user, viewer, row.stamp, alive=False)
    yield "followers leg removed"
    yield from change_ends(w, viewer)


def mute(w: World, viewer: int, user: int, off: int) -> Steps:
    """Or (`off`) unmute: a filter, of which lists know nothing."""
    yield from change_begins(w, viewer)
    if not w.rules.version_after_mute:
        w.graph.next_version(viewer)
        yield "version"
    w.graph.mutes = w.graph.mutes - {(viewer, user)} if off else w.graph.mutes | {(viewer, user)}
    yield "mute row"
    if w.rules.version_after_mute:
        w.graph.next_version(viewer)
        yield "version"
    yield from change_ends(w, viewer)


# The viewer's context, and the copy of its version: right from the very next read after a change was replied to.


def change_begins(w: World, viewer: int) -> Steps:
    if not w.rules.copy_deleted_after_commit:
        w.valkey.forget(viewer)
        yield "copy deleted"


def change_ends(w: World, viewer: int) -> Steps:
    version = w.graph.version[viewer]
    if not w.rules.reply_after_copy_deleted:
        w.replied_version[viewer] = max(w.replied_version[viewer], version)
        yield "reply"
    if w.rules.copy_deleted_after_commit:
        w.valkey.forget(viewer)
        yield "copy deleted"
    w.replied_version[viewer] = max(w.replied_version[viewer], version)


def context_now(w: World, viewer: int) -> Generator[str, None, Context]:
    """From graph_svc. Rows newer than the version are harmless; a version newer than its rows vouches for too much."""
    version = w.graph.version[viewer]
    if w.rules.version_before_rows:
        yield "version read"
    followees = w.graph.followees(viewer)
    muted = frozenset(user for user in w.users if (viewer, user) in w.graph.mutes)
    if not w.rules.version_before_rows:
        yield "rows read"
        version = w.graph.version[viewer]
    yield "context read"
    return Context(ViewerContext(viewer, version, [f for f, _ in followees], [since for _, since in followees]), muted)


def context_at_hand(w: World, reader: Reader, viewer: int, version: int | None) -> Generator[str, None, Context]:
    """The one in the process while the copy of the version vouches for it, else afresh."""
    known = reader.contexts.get(viewer)
    if known and known.viewer.version == version:
        return known
    lease = w.valkey.lease(viewer) if version is None else None
    yield "lease"
    context = yield from context_now(w, viewer)
    if known is None or known.viewer.version <= context.viewer.version:
        reader.contexts[viewer] = context
    if lease:
        w.valkey.fill(viewer, lease, context.viewer.version)
        yield "copy filled"
    return context


# Making lists, behind the reads that missed them.


def warm(w: World, viewer: int) -> Steps:
    """Cover or rebuild a home list, as it needs."""
    view = w.lists.read(home(viewer), 0)
    yield "list looked at"
    context = yield from context_now(w, viewer)
    found = assess(view.record if view else None, context.viewer, w.now)
    if found.verdict is Verdict.REPLACE:
        w.lists.drop(home(viewer))
        yield "list dropped"
    if found.verdict in {Verdict.REPLACE, Verdict.BUILD}:
        yield from rebuild(w, viewer)
    elif view and found.verdict is Verdict.SERVE and found.uncovered:
        authors = made_from(w, context, found.uncovered)
        record, from_lists = view.record, not w.rules.cover_from_store
        ids, down_to = yield from newest(w, authors, record.floor, from_lists=from_lists)
        version = context.viewer.version
        w.lists.cover(home(viewer), record.token, record.version, version, ids, down_to)


def rebuild(w: World, viewer: int) -> Steps:
    """What is committed after the store was read finds a list to be pushed to."""
    token = str(w.next_number())
    if w.rules.create_before_store and not w.lists.create(home(viewer), token, BUILD_LEASE_MS):
        return
    yield "list created"
    context = yield from context_now(w, viewer)
    authors = made_from(w, context, context.viewer.authors())
    if not w.rules.rebuild_takes_own:
        authors.remove(viewer)
    ids, down_to = yield from newest(w, authors, 0, from_lists=not w.rules.rebuild_from_store)
    if not w.rules.create_before_store and not w.lists.create(home(viewer), token, BUILD_LEASE_MS):
        return
    w.lists.finish(home(viewer), token, context.viewer.version, ids, down_to)


def warm_author(w: World, user: int) -> Steps:
    token = str(w.next_number())
    if w.lists.create(author(user), token, BUILD_LEASE_MS):
        yield "list created"
        ids, down_to = yield from newest(w, [user], 0)
        w.lists.finish(author(user), token, 0, ids, down_to)


def made_from(w: World, context: Context, authors: Iterable[int]) -> list[int]:
    """All of them, whatever the viewer's filters and the authors' modes: those change without a new version."""
    hidden = frozenset() if w.rules.making_ignores_filters else context.muted
    pulled = {
        user for user, mode in w.graph.modes.items() if mode.mode is Mode.PULL and user != context.viewer.viewer_id
    }
    left_out = hidden if w.rules.making_ignores_modes else hidden | pulled
    return [user for user in authors if user not in left_out]


def newest(
    w: World, authors: Sequence[int], floor: int, *, from_lists: bool = False
) -> Generator[str, None, tuple[list[int], int]]:
    """A list's worth, not below `floor`, and how far down that is all. Each author is read at its own moment."""
    ids: list[int] = []
    for user in authors:
        view = w.lists.read(author(user), ALL) if from_lists else None
        if view and view.record.state is ListState.READY:
            ids += view.ids
            floor = max(floor, view.record.floor)
        else:
            ids += w.tweets.of(user)[: w.lists.cap]
        yield "author's newest read"
    ids = sorted((tweet for tweet in ids if tweet >= floor), reverse=True)[: w.lists.cap]
    down_to = ids[-1] if len(ids) == w.lists.cap else floor
    return ids, down_to if w.rules.floor_is_as_far_as_asked else 0


# Reading: a list is one source, exact down to its floor; uncovered followees, pulled authors and the store the others.


def home_ids(w: World, reader: Reader, viewer: int) -> Generator[str, None, tuple[Context, set[int]]]:
    """All that the sources hold for a viewer, before filters."""
    pulled = reader.pulled(w)
    yield "modes taken"
    view, version = w.lists.read(home(viewer), ALL), w.valkey.version_copy(viewer)
    yield "list and version read"
    context = yield from context_at_hand(w, reader, viewer, version)
    if not w.rules.modes_before_list:
        pulled = reader.pulled(w)
    found = assess(view.record if view else None, context.viewer, w.now)
    if view is None or found.verdict is not Verdict.SERVE or pulled is None:
        return context, (yield from stored(w, context.viewer.authors()))
    ids = set(view.ids)
    for followee in context.viewer.followee_ids:
        if followee in found.uncovered:
            ids |= yield from stored(w, [followee])
        elif followee in pulled:
            ids |= yield from author_ids(w, followee)
    floor = view.record.floor
    below = (yield from stored(w, context.viewer.authors())) if floor else set()
    return context, {tweet for tweet in ids if tweet >= floor} | {tweet for tweet in below if tweet < floor}


def author_ids(w: World, user: int) -> Generator[str, None, set[int]]:
    """A pulled author's list, and below its floor the store."""
    view = w.lists.read(author(user), ALL)
    yield "author list read"
    below = yield from stored(w, [user])
    if view is None or view.record.state is not ListState.READY:
        return below
    floor = view.record.floor
    return {tweet for tweet in view.ids if tweet >= floor} | {tweet for tweet in below if tweet < floor}


def stored(w: World, authors: Iterable[int]) -> Generator[str, None, set[int]]:
    ids: set[int] = set()
    for user in authors:
        ids |= set(w.tweets.of(user))
        yield "store read"
    return ids


def visible(w: World, context: Context, ids: Iterable[int]) -> list[int]:
    """The filters, on bodies; an id without one is left out."""
    return sorted((tweet for tweet in ids if context.sees(w.tweets.author_of.get(tweet))), reverse=True)


def read(w: World, reader: int, viewer: int, size: int) -> Steps:
    """A first page, with the read-your-write token; in flight it may lag, but not behind what was settled before."""
    token, replied, settled = w.replied_tweet.get(viewer), w.replied_version[viewer], w.settled()
    run_id = w.valkey.run_id
    context, ids = yield from home_ids(w, w.readers[reader], viewer)
    items = visible(w, context, ids)
    if token and token not in items[:size]:
        if len(items) > size:
            belongs_here = token > items[size - 1]
        else:  # The page would carry no token.
            belongs_here = w.rules.own_tweet_on_last_page or (bool(items) and token > items[-1])
        if belongs_here:
            items = visible(w, context, ids | (yield from stored(w, [viewer])))
    page = items[:size]
    end = page[-1] if len(items) > size else 0
    if context.viewer.version < replied:
        raise Failure(f"reader sees {viewer} at version {context.viewer.version}, {replied} was replied")
    if token and token > end and token not in page:
        raise Failure(f"{viewer} doesn't see their own {token} in {page}")
    if run_id == w.valkey.run_id and (
        lacking := [t for t in visible(w, context, settled) if t > end and t not in page]
    ):
        raise Failure(f"{viewer}'s page {page} lacks {lacking}, settled before")


assert MODES_AGE_MS < PULL_AGE_MS
