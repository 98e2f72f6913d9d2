"""The gate that every call passes: what a handler raises becomes a status, and nothing is unbounded."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from fanout_svc.deliveries import Deliveries
from fanout_svc.service import FanoutService
from fanout_svc.worker import Figures
from mesh import channels, deadlines, errors, principals
from mesh.channels import details_of, reason_of
from mesh.server import ANYONE, Gate
from starling.fanout.v1 import fanout_pb2, fanout_pb2_grpc
from tests.waiting import eventually

SECRET = "a secret that is at least 32 bytes long"
METHOD = "/starling.fanout.v1.FanoutService/GetFanoutStatus"
Behaviour = Callable[[], Awaitable[Any]]


class Service(FanoutService):
    """Does as it is told."""

    behaviour: Behaviour

    def __init__(self) -> None:
        nobody: Any = None
        super().__init__(nobody, nobody, Figures(), Deliveries())

    async def GetFanoutStatus(self, request: Any, context: Any) -> Any:
        return await self.behaviour() or fanout_pb2.GetFanoutStatusResponse()


class Served:
    def __init__(self, stub: Any, service: Service, gate: Gate) -> None:
        self._stub, self._service, self.gate = stub, service, gate

    async def call(self, behaviour: Behaviour, timeout: float | None = 10.0) -> Any:
        self._service.behaviour = behaviour
        metadata = principals.Credentials(SECRET, principals.OPERATOR).metadata()
        request = fanout_pb2.GetFanoutStatusRequest()
        return await self._stub.GetFanoutStatus(request, timeout=timeout, metadata=metadata)

    async def refused(self, behaviour: Behaviour, timeout: float = 10.0) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.call(behaviour, timeout)
        return raised.value


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        gate = Gate(principals.Verifier(SECRET), {METHOD: ANYONE}, concurrent_calls_max=2)
        server = grpc.aio.server(interceptors=[gate])
        service = Service()
        fanout_pb2_grpc.add_FanoutServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, None)
        channel = channels.connect(f"127.0.0.1:{port}")
        stack.push_async_callback(channel.close)
        yield Served(fanout_pb2_grpc.FanoutServiceStub(channel), service, gate)


def raising(error: BaseException) -> Behaviour:
    async def behave() -> None:
        raise error

    return behave


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (errors.InvalidArgumentError("a.b", "no"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (errors.NotFoundError("no", reason="X_NOT_FOUND"), grpc.StatusCode.NOT_FOUND, "X_NOT_FOUND"),
        (errors.AlreadyExistsError("no"), grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS"),
        (errors.FailedPreconditionError("no"), grpc.StatusCode.FAILED_PRECONDITION, "FAILED_PRECONDITION"),
        (errors.PermissionDeniedError("no"), grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
        (errors.UnauthenticatedError("no"), grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
        (errors.AbortedError("no"), grpc.StatusCode.ABORTED, "ABORTED"),
    ],
)
async def test_an_error_becomes_its_status_with_details(
    served: Served, error: errors.StarlingError, code: grpc.StatusCode, reason: str
) -> None:
    refused = await served.refused(raising(error))
    assert (refused.code(), reason_of(refused)) == (code, reason)


async def test_overload_says_when_to_come_again(served: Served) -> None:
    refused = await served.refused(raising(errors.ResourceExhaustedError("full", retry_after_seconds=1.5)))
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in details_of(refused))
    assert retry.retry_delay.ToMilliseconds() == 1_500


async def test_what_nobody_expected_is_internal_and_tells_nothing(served: Served) -> None:
    refused = await served.refused(raising(RuntimeError("the secret is 42")))
    assert refused.code() is grpc.StatusCode.INTERNAL
    assert "42" not in str(refused.details())


async def test_a_handler_that_raises_cancelled_does_not_hang_its_client(served: Served) -> None:
    refused = await served.refused(raising(asyncio.CancelledError()))
    assert refused.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_unavailable_answer_is_tried_again(served: Served) -> None:
    attempts: list[int] = []

    async def fails_twice() -> None:
        attempts.append(1)
        if len(attempts) < 3:
            raise errors.UnavailableError("not now")

    await served.call(fails_twice)
    assert len(attempts) == 3


async def test_no_other_answer_is_tried_again(served: Served) -> None:
    attempts: list[int] = []

    async def fails() -> None:
        attempts.append(1)
        raise errors.AbortedError("no")

    await served.refused(fails)
    assert len(attempts) == 1


async def test_a_deadline_travels_and_ends_the_work(served: Served) -> None:
    left: list[float] = []
    ended = asyncio.Event()

    async def slow() -> None:
        left.append(deadlines.remaining(100.0))
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    refused = await served.refused(slow, timeout=0.3)
    assert refused.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(ended.wait(), 5)
    assert 0 < left[0] <= 0.3


async def test_a_call_without_a_deadline_is_given_one(served: Served) -> None:
    left: list[float] = []

    async def look() -> None:
        left.append(deadlines.remaining(1_000.0))

    await served.call(look, timeout=None)
    assert left[0] <= 30.0


async def test_calls_beyond_the_bound_are_refused_at_once_and_those_within_go_on(served: Served) -> None:
    release = asyncio.Event()

    async def wait() -> None:
        await release.wait()

    calls = [asyncio.create_task(served.call(wait)) for _ in range(2)]
    await eventually(lambda: served.gate.calls_in_flight == 2)
    refused = await served.refused(wait)
    assert (refused.code(), reason_of(refused)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    release.set()
    await asyncio.gather(*calls)
    await eventually(lambda: served.gate.calls_in_flight == 0)
