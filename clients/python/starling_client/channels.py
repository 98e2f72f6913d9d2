"""Channels that know who is calling, and end every call in time."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

CALL_SECONDS = 10.0
KEEPALIVE_MS = 20_000
_MESSAGE_BYTES_MAX = 4 << 20

Token = str | Callable[[], str]
"""A token, or what gives one that is valid now; asked at each call."""

# All others may be repeated: reads, and changes that say "again: changes nothing". A tweet is posted again only with a
# request id (`Starling.post`); after a lost answer a second CreateUser would say that the handle is taken.
_ONCE = [
    {"service": "starling.tweet.v1.TweetService", "method": "CreateTweet"},
    {"service": "starling.graph.v1.GraphService", "method": "CreateUser"},
]
SERVICE_CONFIG = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        "methodConfig": [
            {"name": _ONCE},
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    # CANCELLED: what gRPC says of calls that a stopping server hadn't looked at (grpc/grpc#41785).
                    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
                },
            },
        ],
    }
)
_OPTIONS = [
    ("grpc.service_config", SERVICE_CONFIG),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
]


def connect(
    target: str,
    token: Token,
    *,
    timeout: float = CALL_SECONDS,
    credentials: grpc.ChannelCredentials | None = None,
) -> grpc.Channel:
    """A channel to a service (`host:port`, `dns:///name:port`). Connects when first used, and again for ever.

    Calls that name no `timeout` have this one, in seconds. `credentials`: for TLS; None: in the clear.
    """
    channel = (
        grpc.secure_channel(target, credentials, options=_OPTIONS)
        if credentials
        else grpc.insecure_channel(target, options=_OPTIONS)
    )
    return grpc.intercept_channel(channel, _Calling(token, timeout))


def connect_aio(
    target: str,
    token: Token,
    *,
    timeout: float = CALL_SECONDS,
    credentials: grpc.ChannelCredentials | None = None,
) -> grpc.aio.Channel:
    """The same for asyncio. An aio stream that isn't read to its end must be cancelled: `call.cancel()`."""
    interceptors: list[grpc.aio.ClientInterceptor] = [kind(token, timeout) for kind in _ASYNC_KINDS]
    if credentials:
        return grpc.aio.secure_channel(target, credentials, options=_OPTIONS, interceptors=interceptors)
    return grpc.aio.insecure_channel(target, options=_OPTIONS, interceptors=interceptors)


class _Details(NamedTuple):
    """What gRPC wants to know of a call."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _Completing:
    """Gives a call what it doesn't say itself: a deadline, and who is calling."""

    def __init__(self, token: Token, timeout: float) -> None:
        self._token = token
        self._timeout = timeout

    def details(self, given: Any) -> Any:
        token = self._token if isinstance(self._token, str) else self._token()
        metadata = [*(given.metadata or ()), ("authorization", f"Bearer {token}")]
        timeout = self._timeout if given.timeout is None else given.timeout
        return _Details(
            given.method,
            timeout,
            grpc.aio.Metadata(*metadata) if isinstance(given, grpc.aio.ClientCallDetails) else metadata,
            given.credentials,
            given.wait_for_ready,
            getattr(given, "compression", None),
        )


class _Calling(
    _Completing,
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def _intercept(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self.details(client_call_details), request)

    intercept_unary_unary = intercept_unary_stream = _intercept
    intercept_stream_unary = intercept_stream_stream = _intercept  # type: ignore[assignment]


class _AsyncCalling(_Completing):
    async def _intercept(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self.details(client_call_details), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_unary = intercept_stream_stream = _intercept


# grpc.aio takes an interceptor for the first kind that it is of: one for each.
class _AsyncUnaryUnary(_AsyncCalling, grpc.aio.UnaryUnaryClientInterceptor): ...


class _AsyncUnaryStream(_AsyncCalling, grpc.aio.UnaryStreamClientInterceptor): ...


class _AsyncStreamUnary(_AsyncCalling, grpc.aio.StreamUnaryClientInterceptor): ...


class _AsyncStreamStream(_AsyncCalling, grpc.aio.StreamStreamClientInterceptor): ...


_ASYNC_KINDS = (_AsyncUnaryUnary, _AsyncUnaryStream, _AsyncStreamUnary, _AsyncStreamStream)
