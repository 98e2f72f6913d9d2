"""What goes wrong between gRPC clients and servers (G1, G2, G4, X4), between real ones."""

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from fanout_svc.deliveries import Deliveries
from fanout_svc.service import FanoutService
from fanout_svc.worker import Figures
from mesh import channels, deadlines, principals
from mesh.channels import streaming
from mesh.principals import service
from mesh.server import ANYONE, Gate, server_options
from starling.fanout.v1 import fanout_pb2, fanout_pb2_grpc
from starling.graph.v1 import graph_pb2
from tests.harness import SECRET, Mesh
from tests.waiting import eventually, keep_busy, turns
from tweet_svc.store import StoredTweet

CALL_SECONDS = 8.0


class Slow(FanoutService):
    """Takes its time."""

    def __init__(self, seconds: float) -> None:
        nobody: Any = None
        super().__init__(nobody, nobody, Figures(), Deliveries())
        self._seconds = seconds

    async def GetFanoutStatus(self, request: Any, context: Any) -> Any:
        await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=self._seconds)
        return fanout_pb2.GetFanoutStatusResponse()


async def serve(address: str, seconds: float) -> tuple[grpc.aio.Server, int]:
    """A server whose answers take so long, and its port."""
    gate = Gate(principals.Verifier(SECRET), {"/starling.fanout.v1.FanoutService/GetFanoutStatus": ANYONE})
    server = grpc.aio.server(interceptors=[gate], options=server_options(60.0, 1.0, 1 << 20))
    fanout_pb2_grpc.add_FanoutServiceServicer_to_server(Slow(seconds), server)
    port = server.add_insecure_port(address)
    await server.start()
    return server, port


@pytest.fixture
async def slow_target() -> AsyncIterator[str]:
    server, port = await serve("127.0.0.1:0", CALL_SECONDS)
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_g1_calls_that_a_busy_server_has_not_looked_at_when_it_stops_are_done_by_the_next() -> None:
    metadata = principals.Credentials(SECRET, principals.OPERATOR).metadata()
    async with AsyncExitStack() as stack:
        server, port = await serve("127.0.0.1:0", 0.01)
        channel = await stack.enter_async_context(channels.connect(f"127.0.0.1:{port}"))
        stub = fanout_pb2_grpc.FanoutServiceStub(channel)

        async def call() -> None:
            await stub.GetFanoutStatus(fanout_pb2.GetFanoutStatusRequest(), metadata=metadata, timeout=20)

        await call()
        calls = [asyncio.create_task(call()) for _ in range(20)]
        await turns(3)  # They are on their way,
        keep_busy(0.3)  # and come to a server that is busy with something else.
        await server.stop(5)
        server, _ = await serve(f"127.0.0.1:{port}", 0.01)
        stack.push_async_callback(server.stop, None)
        await asyncio.gather(*calls)


async def test_g2_a_client_that_pings_each_second_is_not_sent_away(slow_target: str) -> None:
    options = [
        ("grpc.keepalive_time_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with grpc.aio.insecure_channel(slow_target, options=options) as channel:
        metadata = principals.Credentials(SECRET, principals.OPERATOR).metadata()
        request = fanout_pb2.GetFanoutStatusRequest()
        await fanout_pb2_grpc.FanoutServiceStub(channel).GetFanoutStatus(request, metadata=metadata, timeout=20)
        assert channel.get_state() is grpc.ChannelConnectivity.READY, "no GOAWAY"


async def test_g4_abandoned_streams_leave_nothing(mesh: Mesh) -> None:
    author = await mesh.create_user("author")
    for number in range(12):
        await mesh.follow(await mesh.create_user(f"f{number}"), author)
    caller = mesh.as_(service("test"))
    request = graph_pb2.StreamFollowersRequest(author_id=author)

    async def abandon(times: int) -> None:
        for _ in range(times):
            async with streaming(mesh.graph.StreamFollowers(request, **caller)) as call:
                async for _ in call:
                    break

    await abandon(200)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await abandon(1_000)
    await eventually(lambda: sum(gate.calls_in_flight for gate in mesh.gates) == 0, 5)
    grown_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kilobytes < 20_000, "1,000 streams that stayed would take more"


class Hops:
    """Watches the last hop of a read, and how long its caller has for it."""

    def __init__(self, mesh: Mesh, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> None:
        self.left: list[float] = []
        self.cancelled = False
        tweets = mesh.tweet_store.tweets

        async def watched(tweet_ids: Sequence[int]) -> list[StoredTweet]:
            self.left.append(deadlines.remaining(1_000.0))
            try:
                if seconds:
                    await asyncio.wait_for(asyncio.Event().wait(), seconds)
            except asyncio.CancelledError:
                self.cancelled = True
                raise
            return await tweets(tweet_ids)

        monkeypatch.setattr(mesh.tweet_store, "tweets", watched)


async def a_read_of_two_hops(mesh: Mesh) -> int:
    """A viewer with one tweet, whose body isn't cached."""
    author = await mesh.create_user("author")
    tweet = await mesh.post(author)
    await mesh.valkey.call("DEL", f"{mesh.valkey.key_prefix}tweet:{tweet.tweet_id}")
    return author


@pytest.mark.parametrize("timeout", [None, 2.0])
async def test_x4_the_last_hop_has_no_more_time_than_the_caller(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    viewer = await a_read_of_two_hops(mesh)
    hops = Hops(mesh, monkeypatch)
    page = await mesh.home(viewer, timeout=timeout)
    assert len(page.items) == 1
    rounded_up = 0.02  # as gRPC writes time-outs on the wire
    assert 0 < hops.left[-1] <= (timeout or 30.0) + rounded_up


async def test_x4_a_callers_deadline_ends_the_work_behind_it(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    viewer = await a_read_of_two_hops(mesh)
    hops = Hops(mesh, monkeypatch, seconds=2.0)
    begun = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await mesh.home(viewer, timeout=0.3)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - begun < 2.0
    await eventually(lambda: hops.cancelled, 1.5)
    await eventually(lambda: sum(gate.calls_in_flight for gate in mesh.gates) == 0, 5)
