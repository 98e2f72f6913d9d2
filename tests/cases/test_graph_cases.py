"""Blocks and mutes as graph_svc answers them: who is told that copies are void, and whose lists are whose."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from mesh.caches.viewer_versions import ViewerVersions
from mesh.principals import service
from starling.graph.v1 import graph_pb2
from tests.cases.test_timeline_cases import people
from tests.harness import Mesh

SERVICE = service("test")


def change(mesh: Mesh, rpc: str) -> Callable[[int, int], Any]:
    request = getattr(graph_pb2, f"{rpc}Request")
    return lambda user, other: getattr(mesh.graph, rpc)(request(user_id=other), **mesh.as_(user))


async def copies_left(mesh: Mesh, *viewer_ids: int) -> list[int]:
    """Which of the viewers have a copy of their version; all of them had one before."""
    versions = ViewerVersions(mesh.valkey)
    return [v for v in viewer_ids if versions.parse(v, await mesh.valkey.call(*versions.get_command(v))) is not None]


async def make_copies(mesh: Mesh, *viewer_ids: int) -> None:
    versions = ViewerVersions(mesh.valkey)
    for viewer_id in viewer_ids:
        if lease := await versions.lease(viewer_id):
            await versions.fill(lease, 1)
    assert await copies_left(mesh, *viewer_ids) == list(viewer_ids)


@pytest.mark.parametrize(("rpc", "of_both"), [("Block", True), ("Unblock", True), ("Mute", False), ("Unmute", False)])
async def test_a_change_voids_the_copies_of_whom_it_concerns_also_when_it_was_made_before(
    mesh: Mesh, rpc: str, of_both: bool
) -> None:
    alice, bob, carol = await people(mesh, 3)
    if rpc.startswith("Un"):
        await change(mesh, rpc.removeprefix("Un").capitalize())(alice, bob)
    for changed in (True, False):
        await make_copies(mesh, alice, bob, carol)
        assert (await change(mesh, rpc)(alice, bob)).changed is changed
        assert await copies_left(mesh, alice, bob, carol) == ([carol] if of_both else [bob, carol])


@pytest.mark.parametrize("rpc", ["Block", "Mute"])
async def test_a_change_that_readers_cannot_be_told_of_is_completed_by_its_retry(mesh: Mesh, rpc: str) -> None:
    alice, bob = await people(mesh, 2)
    await make_copies(mesh, alice, bob)
    mesh.valkey.down = True
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await change(mesh, rpc)(alice, bob)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    mesh.valkey.down = False
    assert await copies_left(mesh, alice) == [alice]
    assert not (await change(mesh, rpc)(alice, bob)).changed
    assert await copies_left(mesh, alice) == []


async def test_whom_one_blocks_and_mutes_is_ones_own_to_read_in_pages(mesh: Mesh) -> None:
    alice, *others = await people(mesh, 6)
    for other in others:
        await change(mesh, "Block")(alice, other)
        await change(mesh, "Mute")(alice, other)
    for rpc in ("ListBlocked", "ListMuted"):
        request = getattr(graph_pb2, f"{rpc}Request")

        async def page(caller: int, token: str, rpc: str = rpc, request: Any = request) -> Any:
            return await getattr(mesh.graph, rpc)(request(page_size=2, page_token=token), **mesh.as_(caller))

        found, token = list[int](), ""
        for _ in range(3):
            reply = await page(alice, token)
            found, token = [*found, *reply.user_ids], reply.next_page_token
        assert (found, token) == (sorted(others), "")
        assert list((await page(others[0], "")).user_ids) == []
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await page(others[0], (await page(alice, "")).next_page_token)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_services_learn_of_blocks_and_mutes(mesh: Mesh) -> None:
    alice, bob, carol, dave = await people(mesh, 4)
    await change(mesh, "Block")(alice, bob)
    await change(mesh, "Block")(carol, alice)
    await change(mesh, "Mute")(alice, dave)
    context = await mesh.graph.GetViewerContext(graph_pb2.GetViewerContextRequest(viewer_id=alice), **mesh.as_(SERVICE))
    assert (list(context.blocked_ids), list(context.muted_ids), context.version) == ([bob], [dave], 3)
    request = graph_pb2.CheckBlocksRequest(user_id=alice, other_ids=[dave, carol, bob, carol])
    reply = await mesh.graph.CheckBlocks(request, **mesh.as_(SERVICE))
    assert (list(reply.blocked_by_ids), list(reply.blocked_ids)) == ([carol], [bob])


async def test_an_authors_mode_comes_with_the_followers_of_who_has_few(mesh: Mesh) -> None:
    author, *others = await people(mesh, 5)

    async def followers(below: int) -> list[int] | None:
        request = graph_pb2.GetAuthorModeRequest(author_id=author, followers_below=below)
        reply = await mesh.graph.GetAuthorMode(request, **mesh.as_(SERVICE))
        return sorted(reply.followers.follower_ids) if reply.HasField("followers") else None

    assert (await followers(0), await followers(100)) == (None, [])
    in_one_bucket = others[: mesh.sizes.bucket_size]
    for number, follower in enumerate(in_one_bucket, 1):
        await mesh.follow(follower, author)
        assert (await followers(number), await followers(number + 1)) == (None, sorted(others[:number]))
    await mesh.follow(others[-1], author)
    assert await followers(100) is None, "one bucket's followers aren't all"
