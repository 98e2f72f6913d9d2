"""Client side: channels between services, streams that are always cancelled, and statuses as our errors."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol, TypeVar

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from mesh.errors import NotFoundError, UnavailableError

KEEPALIVE_MS = 20_000
_TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
}
# What is tried again: UNAVAILABLE, since the server didn't take the call, or it may be repeated safely; and CANCELLED,
# which gRPC's core says for it of calls that a stopping server hadn't looked at yet (grpc/grpc#41785). Four attempts
# within about a second bridge a restart behind a balancer; longer outages are the caller's to decide about.
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        # Has no request id: after a lost answer a repeat would say that the handle is taken.
        {"name": [{"service": "starling.graph.v1.GraphService", "method": "CreateUser"}]},
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            },
        },
    ],
}


def connect(target: str, *, max_message_bytes: int = 4 << 20, retries: bool = True) -> grpc.aio.Channel:
    """A channel to a service (`dns:///name:port` or `host:port`). Connects when first used, and again for ever."""
    return grpc.aio.insecure_channel(
        target,
        options=[
            ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
            ("grpc.enable_retries", int(retries)),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.initial_reconnect_backoff_ms", 100),
            # Despite its name, how long one attempt to connect may take.
            ("grpc.min_reconnect_backoff_ms", 5_000),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.enable_http_proxy", 0),
            # One process may hold several channels to one server (tests do): each has its own connection.
            ("grpc.use_local_subchannel_pool", 1),
        ],
    )


class _Cancellable(Protocol):
    def cancel(self) -> bool: ...


C = TypeVar("C", bound=_Cancellable)


@asynccontextmanager
async def streaming(call: C) -> AsyncIterator[C]:
    """A stream that ends with the block: a dropped response stream of grpc.aio is never cancelled by itself."""
    try:
        yield call
    finally:
        call.cancel()


@contextmanager
def translated(service: str) -> Iterator[None]:
    """What a callee says as our errors: UnavailableError for what may pass, NotFoundError; others stay."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        text = f"{service}: {error.details()}"
        if error.code() in _TRANSIENT:
            raise UnavailableError(text, reason=f"{service.upper()}_UNAVAILABLE") from error
        if error.code() is grpc.StatusCode.NOT_FOUND:
            raise NotFoundError(text, reason=reason_of(error)) from error
        raise


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The stable reason in an error's ErrorInfo, or the status's name."""
    info = error_details_pb2.ErrorInfo()
    for detail in details_of(error):
        if detail.Unpack(info):
            return str(info.reason)
    return str(error.code().name)


def details_of(error: grpc.aio.AioRpcError) -> list[any_pb2.Any]:
    """The details of the google.rpc.Status that came with an error."""
    for name, value in error.trailing_metadata() or ():
        if name == "grpc-status-details-bin" and isinstance(value, bytes):
            return list(status_pb2.Status.FromString(value).details)
    return []
