"""Does the judge judge? Each of these breaks the mesh in one place, and must be found."""

import heapq
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

import fanout_svc.core
import timeline_svc.core
import timeline_svc.peers
import timeline_svc.pull_authors
import timeline_svc.reader
import timeline_svc.service
import timeline_svc.sources
from fanout_svc.worker import Batch, Worker
from mesh import caches
from mesh.caches.bodies import Bodies
from mesh.caches.viewer_versions import ViewerVersions
from mesh.eventlog import valkey_streams
from mesh.page_tokens import PageTokens
from mesh.timelines import valkey as valkey_timelines
from tests.harness import FaultyTimelines
from tests.model.machine import HomeTimelineMachine, World
from timeline_svc.author_lists import AuthorLists
from timeline_svc.core import Page, ViewerContext
from timeline_svc.reader import HomeReader
from timeline_svc.sources import HomeSources, home_ids
from tweet_svc.core import AuthorMerge

SEQUENCES_MAX = 10_000
SECONDS_QUICK, SECONDS_LONG = 300, 900
Break = Callable[[pytest.MonkeyPatch], None]

BREAKS: dict[str, Break] = {}


def breaks(function: Break) -> Break:
    BREAKS[function.__name__.replace("_", " ")] = function
    return function


def _lua(monkeypatch: pytest.MonkeyPatch, right: str, wrong: str) -> None:
    assert valkey_timelines.LIBRARY.count(right) == 1, "the line that is to be broken is there, once"
    monkeypatch.setattr(valkey_timelines, "LIBRARY", valkey_timelines.LIBRARY.replace(right, wrong))


@breaks
def a_late_id_is_pushed_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    _lua(monkeypatch, "and not (is_id(head) and less(head, args[first])) then", "and not is_id(head) then")


@breaks
def a_trim_leaves_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    _lua(monkeypatch, "  record.floor = redis.call('LINDEX', key, -1)\n", "")


@breaks
def a_finish_ignores_how_far_the_store_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    _lua(monkeypatch, "less(record.floor, down_to) and down_to or record.floor", "record.floor")


@breaks
def a_finish_takes_any_token(monkeypatch: pytest.MonkeyPatch) -> None:
    _lua(monkeypatch, "record.state ~= 'building' or record.token ~= token", "false")


@breaks
def a_cover_takes_any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    _lua(monkeypatch, "or record.version ~= from_version then", "then")


@breaks
def the_store_is_read_before_a_list_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hasty(timelines: Any, key: Any, fetch: Any, *, lease_ms: int = 30_000) -> bool:
        content = await fetch()
        if not await timelines.create(key, "hasty", lease_ms):
            return False
        return bool(await timelines.finish(key, "hasty", content.version, content.ids, content.down_to))

    monkeypatch.setattr(timeline_svc.service, "rebuild", hasty)


@breaks
def a_version_copy_is_filled_without_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    right = "if redis.call('GET', keys[1]) ~= 'lease:' .. args[1] then"
    assert caches.LIBRARY.count(right) == 1
    monkeypatch.setattr(caches, "LIBRARY", caches.LIBRARY.replace(right, "if false then"))


@breaks
def a_floor_that_rises_while_reading_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_svc.sources, "min", lambda below, floor: floor, raising=False)


@breaks
def a_page_token_repeats_the_last_id(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = PageTokens.encode
    monkeypatch.setattr(
        PageTokens, "encode", lambda self, rpc, binding, at, known=(): encode(self, rpc, binding, at + 1, known)
    )


@breaks
def catch_up_ends_at_the_newest_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_svc.core, "catch_up_bound", lambda known: known)


@breaks
def nothing_is_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_svc.core, "visible", lambda tweet, viewer: True)


@breaks
def replies_to_strangers_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def visible(tweet: Any, viewer: Any) -> bool:
        return bool(viewer.near(tweet.author_id) and not viewer.hides(tweet.author_id))

    monkeypatch.setattr(timeline_svc.core, "visible", visible)


@breaks
def the_next_page_forgets_which_retweets_were_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = PageTokens.encode
    monkeypatch.setattr(PageTokens, "encode", lambda self, rpc, binding, at, known=(): encode(self, rpc, binding, at))


@breaks
def retweets_are_shown_beside_their_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    def visible(retweet: Any, original: Any, viewer: Any) -> bool:
        hidden = viewer.hides(original.author_id) or viewer.hides(retweet.author_id)
        return bool(viewer.near(retweet.author_id) and not hidden)

    monkeypatch.setattr(timeline_svc.core, "retweet_visible", visible)


@breaks
def retweets_of_whoever_blocks_the_viewer_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(self: Any, viewer_id: int, user_ids: Sequence[int]) -> frozenset[int]:
        return frozenset()

    monkeypatch.setattr(timeline_svc.peers.Graph, "blockers", nobody)


@breaks
def a_block_is_told_to_one_side_only(monkeypatch: pytest.MonkeyPatch) -> None:
    invalidate = ViewerVersions.invalidate

    async def first(self: Any, viewer_ids: Sequence[int]) -> None:
        await invalidate(self, viewer_ids[:1])

    monkeypatch.setattr(ViewerVersions, "invalidate", first)


@breaks
def the_muted_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    hides = ViewerContext.hides
    monkeypatch.setattr(ViewerContext, "hides", lambda self, user: user not in self.muted_ids and hides(self, user))


@breaks
def an_edit_leaves_the_cached_body(monkeypatch: pytest.MonkeyPatch) -> None:
    put = Bodies.put

    async def first_versions(self: Any, tweets: Sequence[Any]) -> None:
        await put(self, [tweet for tweet in tweets if tweet.version == 1])

    monkeypatch.setattr(Bodies, "put", first_versions)


@breaks
def a_pulled_authors_list_is_opened_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = AuthorLists.bounds

    async def halved(self: Any, author_ids: Sequence[int]) -> Any:
        return {author: bound and bound // 2 for author, bound in (await bounds(self, author_ids)).items()}

    monkeypatch.setattr(AuthorLists, "bounds", halved)


@breaks
def a_page_is_not_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fill(self: Any, page: Page, ids: Any, viewer: Any) -> tuple[Page, bool]:
        batch = [tweet_id async for tweet_id, _ in _numbered(ids, page.size)]
        bodies = await self._hydrate(batch)
        for tweet_id in batch:
            page.examine(tweet_id, bodies.get(tweet_id), viewer)  # Retweets are left out: that would be found, too.
        return page, len(page.items) == page.size

    monkeypatch.setattr(HomeReader, "_fill", fill)


async def _numbered(ids: Any, count: int) -> Any:
    number = 0
    async for tweet_id in ids:
        yield tweet_id, number
        number += 1
        if number == count:
            return


def _sources(monkeypatch: pytest.MonkeyPatch, change: Callable[[HomeSources], HomeSources]) -> None:
    ids = home_ids
    monkeypatch.setattr(
        timeline_svc.reader,
        "home_ids",
        lambda timelines, authors, tweets, viewer, sources, below: ids(
            timelines, authors, tweets, viewer, change(sources), below
        ),
    )


@breaks
def a_walk_ends_at_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_floor(sources: HomeSources) -> HomeSources:
        view = sources.view
        return replace(sources, view=view and replace(view, record=replace(view.record, floor=0)))

    _sources(monkeypatch, without_floor)


@breaks
def new_followees_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    _sources(monkeypatch, lambda sources: replace(sources, beside=()))


@breaks
def pulled_authors_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    _sources(monkeypatch, lambda sources: replace(sources, pulled=()))


@breaks
def the_worker_leaves_followers_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout_svc.core, "PULL_AGE_SECONDS", 0.0)


@breaks
def readers_believe_old_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_svc.pull_authors, "MODES_AGE_MS", 10**12)


@breaks
def a_drain_mends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Any, keys: Sequence[Any], ids: Sequence[int], down_to: int) -> int:
        return len(keys)

    monkeypatch.setattr(FaultyTimelines, "merge", nothing)


@breaks
def a_split_loses_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = fanout_svc.core.bucket_tasks
    monkeypatch.setattr(fanout_svc.core, "bucket_tasks", lambda *arguments: tasks(*arguments)[:-1])


@breaks
def a_version_copy_outlives_a_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Any, viewer_ids: Sequence[int]) -> None:
        self._valkey._check()

    monkeypatch.setattr(ViewerVersions, "invalidate", nothing)


@breaks
def the_worker_leaves_the_authors_own_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    push = FaultyTimelines.push

    async def of_others(self: Any, keys: Any, ids: Any) -> int:
        return 2 if keys[-1].kind.name == "AUTHOR" and not self.inline else await push(self, keys, ids)

    process = Worker.process

    async def marked(self: Any, batch: Batch) -> None:
        self._timelines.inline = False
        try:
            await process(self, batch)
        finally:
            self._timelines.inline = True

    monkeypatch.setattr(FaultyTimelines, "inline", True, raising=False)
    monkeypatch.setattr(FaultyTimelines, "push", of_others)
    monkeypatch.setattr(Worker, "process", marked)


@breaks
def the_worker_acknowledges_before_it_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Worker.process

    async def hasty(self: Any, batch: Batch) -> None:
        await self._consumer.ack(batch.records)
        await process(self, batch)

    monkeypatch.setattr(Worker, "process", hasty)


@breaks
def a_read_ignores_the_read_your_write_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Page, "lacks", lambda self, own_tweet_id, *, more: False)


@breaks
def a_deletion_leaves_the_cached_body(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Any, tweet_id: int, version: int) -> None:
        return None

    monkeypatch.setattr(Bodies, "put_deleted", nothing)


@breaks
def the_merge_of_authors_forgets_who_ran_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AuthorMerge, "_next_head", _forgetful)


def _forgetful(self: Any, index: int) -> None:
    if self._buffers[index]:
        heapq.heappush(self._heads, (-self._buffers[index].pop(), index))


# Found within seconds; the others take up to some minutes, and are for `make test-long`.
QUICK = {
    "a late id is pushed on top",
    "a finish ignores how far the store was read",
    "a page token repeats the last id",
    "catch up ends at the newest known",
    "nothing is filtered",
    "replies to strangers are shown",
    "a page is not filled again",
    "a walk ends at the floor",
}


@pytest.mark.timeout(0)
@pytest.mark.usefixtures("small_constants")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.long) for n in BREAKS])
def test_the_judge_finds_that(name: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    BREAKS[name](monkeypatch)
    world.until = time.monotonic() + (SECONDS_QUICK if name in QUICK else SECONDS_LONG)
    world.libraries = (valkey_timelines.LIBRARY, valkey_streams.LIBRARY, caches.LIBRARY)
    machine = type("Machine", (HomeTimelineMachine,), {"world": world})
    found = settings(
        max_examples=SEQUENCES_MAX,
        stateful_step_count=60,
        deadline=None,
        database=None,
        print_blob=False,
        phases=(Phase.generate,),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, grpc.aio.AioRpcError)) as caught:  # the latter: an assertion in a service
        run_state_machine_as_test(seed(random.Random(name).randrange(1 << 32))(machine), settings=found)
    print(f"found after {world.rules_run} steps: {type(caught.value).__name__}")
