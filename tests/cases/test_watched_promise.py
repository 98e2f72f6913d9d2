"""The promise, watched: a fault in a list is found and told, and what is as it should be isn't."""

import grpc
import pytest

from mesh import metrics, principals
from mesh.timelines import port as lists
from starling.timeline.v1 import timeline_pb2
from tests.harness import Mesh
from timeline_svc.sampler import Sampler


async def with_a_list(mesh: Mesh) -> tuple[int, int, list[int]]:
    """An author, a reader with a list, and the author's three tweets, a minute old."""
    author, reader = await mesh.create_user("author"), await mesh.create_user("reader")
    await mesh.follow(reader, author)
    await mesh.home(reader)
    await mesh.settle()
    tweets = [(await mesh.post(author, f"tweet {number}")).tweet_id for number in range(3)]
    await mesh.settle()
    mesh.clock.advance(61_000)
    await mesh.renew_leases()
    await mesh.watch_modes()
    return author, reader, tweets


async def take_out(mesh: Mesh, reader: int, tweet_id: int) -> None:
    await mesh.timelines.remove(lists.home(reader), [tweet_id])


async def verified(mesh: Mesh, reader: int) -> timeline_pb2.VerifyHomeTimelineResponse:
    mesh.timeline_service.sampler._again_seconds = 0.0
    request = timeline_pb2.VerifyHomeTimelineRequest(viewer_id=reader)
    return await mesh.timeline.VerifyHomeTimeline(request, **mesh.as_(principals.OPERATOR))


async def explained(mesh: Mesh, caller: int, tweet_id: int, viewer_id: int = 0) -> tuple[str, str]:
    request = timeline_pb2.ExplainHomeTimelineItemRequest(viewer_id=viewer_id, tweet_id=tweet_id)
    found = await mesh.timeline.ExplainHomeTimelineItem(request, **mesh.as_(caller))
    return (
        timeline_pb2.ItemSource.Name(found.source).removeprefix("ITEM_SOURCE_"),
        timeline_pb2.ItemFilter.Name(found.filter).removeprefix("ITEM_FILTER_"),
    )


async def test_a_home_that_lacks_a_tweet_is_found(mesh: Mesh) -> None:
    _, reader, tweets = await with_a_list(mesh)
    whole = await verified(mesh, reader)
    assert (whole.compared, list(whole.missing_item_ids), list(whole.extra_item_ids)) == (3, [], [])
    await take_out(mesh, reader, tweets[1])
    assert list((await verified(mesh, reader)).missing_item_ids) == [tweets[1]]
    assert await explained(mesh, reader, tweets[1]) == ("LACKING", "NONE")


async def test_the_sampler_counts_a_fault_and_nothing_else(mesh: Mesh) -> None:
    _, reader, tweets = await with_a_list(mesh)
    await mesh.home(reader)
    sampler = Sampler(mesh.timeline_service._reader, mesh.clock, again_seconds=0.0)

    def counted() -> tuple[float, float]:
        return metrics.samples._value.get(), metrics.mismatches._value.get()

    samples, mismatches = counted()
    await sampler._sample(reader)
    assert counted() == (samples + 1, mismatches)
    await take_out(mesh, reader, tweets[0])
    await sampler._sample(reader)
    assert counted() == (samples + 2, mismatches + 1)


async def test_what_may_be_in_flight_is_no_fault(mesh: Mesh) -> None:
    author, reader, _ = await with_a_list(mesh)
    late = (await mesh.post(author)).tweet_id
    assert late not in await mesh.walk(reader)
    found = await verified(mesh, reader)
    assert (found.compared, list(found.missing_item_ids)) == (3, [])


async def test_why_a_tweet_is_shown_or_is_not(mesh: Mesh) -> None:
    author, reader, tweets = await with_a_list(mesh)
    other = await mesh.create_user("other")
    theirs = (await mesh.post(other)).tweet_id
    assert await explained(mesh, reader, tweets[0]) == ("PUSHED", "NONE")
    assert await explained(mesh, reader, theirs) == ("NONE", "NOT_FOLLOWED")
    await mesh.follow(reader, other)
    assert await explained(mesh, reader, theirs) == ("UNCOVERED", "NONE")
    reply = (
        await mesh.post(other, in_reply_to_tweet_id=(await mesh.post(await mesh.create_user("x"))).tweet_id)
    ).tweet_id
    assert (await explained(mesh, reader, reply))[1] == "REPLY"
    again = (await mesh.retweet(other, tweets[0])).tweet_id
    assert (await explained(mesh, reader, again))[1] == "ORIGINAL_SHOWN"
    await mesh.mute(reader, author)
    assert (await explained(mesh, reader, tweets[0]))[1] == "HIDDEN_AUTHOR"
    await mesh.delete(author, tweets[0])
    assert await explained(mesh, reader, tweets[0]) == ("NONE", "GONE")
    await mesh.timelines.drop(lists.home(reader))
    assert await explained(mesh, reader, tweets[1]) == ("REBUILT", "HIDDEN_AUTHOR")


async def test_nobody_asks_about_anothers_home(mesh: Mesh) -> None:
    author, reader, tweets = await with_a_list(mesh)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await explained(mesh, author, tweets[0], viewer_id=reader)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
