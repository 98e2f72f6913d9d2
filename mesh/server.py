"""Server side: the gate that every call passes, and a process's life.

The gate, in order: overload is refused, the token verified, the kind of principal allowed, the deadline set, the
request decoded; then the handler; and what it raises becomes a status. It alone knows both our errors and gRPC.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import Histogram

from mesh import deadlines, errors, logs, metrics, principals, tracing
from mesh.channels import KEEPALIVE_MS
from mesh.config import ENV_PREFIX, Config
from mesh.principals import Kind, Principal

log = logging.getLogger(__name__)

USERS = frozenset({Kind.USER})
SERVICES = frozenset({Kind.SERVICE})
OPERATORS = frozenset({Kind.OPERATOR})
ANYONE = frozenset(Kind)

Allowed = Mapping[str, frozenset[Kind]]
"""Who may call: full method name ("/package.Service/Method") to kinds of principals. Not listed: nobody."""

DEFAULT_TIMEOUT_SECONDS = 30.0
"""For callers that set none: no work is unbounded."""
_BACKOFF_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)

_CODES: dict[type[errors.StarlingError], grpc.StatusCode] = {
    errors.InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExistsError: grpc.StatusCode.ALREADY_EXISTS,
    errors.FailedPreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.AbortedError: grpc.StatusCode.ABORTED,
    errors.ResourceExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
}
_PASSED_ON = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def _details(error: errors.StarlingError) -> list[Message]:
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=errors.DOMAIN, metadata=error.metadata)
    found: list[Message] = [info]
    if isinstance(error, errors.InvalidArgumentError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message, reason=error.reason
        )
        found.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.ResourceExhaustedError):
        delay = Duration()
        delay.FromMilliseconds(int(error.retry_after_seconds * 1_000))
        found.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return found


async def _abort(context: "grpc.aio.ServicerContext[Any, Any]", error: errors.StarlingError) -> NoReturn:
    code = _CODES[type(error)]
    message = f"{error.field}: {error.message}" if isinstance(error, errors.InvalidArgumentError) else error.message
    status = status_pb2.Status(code=code_pb2.Code.Value(code.name), message=message)
    for detail in _details(error):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    metadata = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(code, message, metadata)
    raise AssertionError("abort raises")


class _Undecodable:
    """Stands for a request whose bytes are no message (invalid UTF-8, say)."""


def _safe(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def attempt(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception:  # whatever the parser finds wrong with foreign bytes
            return _Undecodable()

    return attempt


def _decoded(request: Any) -> Any:
    if isinstance(request, _Undecodable):
        raise errors.InvalidArgumentError(
            "request", "Not a valid message: wrong wire format, or text that isn't UTF-8.", reason="UNDECODABLE"
        )
    return request


async def _all_decoded(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _decoded(request)


class Gate(grpc.aio.ServerInterceptor):
    """The interceptor of every server."""

    def __init__(
        self,
        verifier: principals.Verifier,
        allowed: Allowed,
        *,
        concurrent_calls_max: int = 1_000,
        log_requests: bool = False,
        measured: bool = True,
    ) -> None:
        self._measured = measured
        self._seconds: dict[tuple[str, str], Histogram] = {}
        self._verifier = verifier
        self._allowed = allowed
        self._concurrent_calls_max = concurrent_calls_max
        self._log_requests = log_requests
        self.calls_in_flight = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method's handler; health and reflection pass as they are."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method.startswith("/grpc."):
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        header = metadata.get(principals.METADATA_KEY)
        token = header if isinstance(header, str) else None
        traceparent = tracing.incoming(metadata.get(tracing.METADATA_KEY))
        if handler.response_streaming:
            behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
            wrapped: Any = self._streaming(method, token, traceparent, behaviour)
        else:
            behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary
            wrapped = self._unary(method, token, traceparent, behaviour)
        make = _HANDLERS[handler.request_streaming, handler.response_streaming]
        return make(wrapped, _safe(handler.request_deserializer), handler.response_serializer)

    def _unary(self, method: str, token: str | None, traceparent: str, behaviour: Any) -> Any:
        async def handle(request: Any, context: Any) -> Any:
            async with _Call(self, method, token, traceparent, context) as call:
                return await behaviour(call.decoded(request), context)

        return handle

    def _streaming(self, method: str, token: str | None, traceparent: str, behaviour: Any) -> Any:
        async def handle(request: Any, context: Any) -> None:
            # Writes inside of the call, not yields out of it: a client that reads too slowly meets the deadline, too.
            async with (
                _Call(self, method, token, traceparent, context) as call,
                aclosing(behaviour(call.decoded(request), context)) as responses,
            ):
                async for response in responses:
                    await context.write(response)

        return handle

    def admit(self, method: str, token: str | None) -> Principal:
        """The caller, if it may call this now. Raises what it is to be told."""
        if self.calls_in_flight >= self._concurrent_calls_max:
            raise errors.ResourceExhaustedError("Too many calls at once.", retry_after_seconds=1.0, reason="OVERLOADED")
        principal = self._verifier.verify(token)
        if principal.kind not in self._allowed.get(method, frozenset()):
            raise errors.PermissionDeniedError(
                f"A {principal.kind.value} may not call this.", reason="KIND_NOT_ALLOWED"
            )
        return principal

    def note(self, method: str, caller: str, code: str, seconds: float, span: tracing.Span) -> None:
        """One call is over: it counts, and where that is asked for it is a line in the log."""
        if self._measured:
            measured = self._seconds.get((method, code))
            if measured is None:
                measured = self._seconds[method, code] = metrics.rpc_seconds.labels(method[1:], code)
            measured.observe(seconds, span.exemplar)
        if self._log_requests:
            logs.request(caller, method, code, seconds * 1_000, tracing.trace_id(span.traceparent))


class _Call:
    """One call through the gate; as a block, it turns what is raised inside into a status."""

    def __init__(self, gate: Gate, method: str, token: str | None, traceparent: str, context: Any) -> None:
        self._gate, self._method, self._token, self._context = gate, method, token, context
        self._span = tracing.Span(method[1:], traceparent, served=True)
        self._caller = "?"
        self._started = time.monotonic()
        self._admitted = False
        self._timeout: asyncio.Timeout | None = None

    async def __aenter__(self) -> "_Call":
        try:
            principal = self._gate.admit(self._method, self._token)
        except errors.StarlingError as error:
            self._gate.note(self._method, self._caller, _CODES[type(error)].name, 0.0, self._span)
            await _abort(self._context, error)
        self._gate.calls_in_flight += 1
        self._admitted = True
        self._caller = str(principal)
        principals.current.set(principal)
        self._span.__enter__()
        seconds = self._context.time_remaining()
        if seconds is None:
            seconds = DEFAULT_TIMEOUT_SECONDS
        deadlines.deadline.set(time.monotonic() + seconds)
        self._timeout = asyncio.timeout(seconds)
        await self._timeout.__aenter__()
        return self

    def decoded(self, request: Any) -> Any:
        """The request, or for a stream its requests; raises InvalidArgumentError for foreign bytes."""
        return _decoded(request) if isinstance(request, Message | _Undecodable) else _all_decoded(request)

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._gate.calls_in_flight -= 1
        try:
            await cast("asyncio.Timeout", self._timeout).__aexit__(kind, error, trace)
        except TimeoutError as late:
            error = late
        code = _code_of(error)
        self._span.note("rpc.grpc.status_code", code)
        self._span.__exit__(kind, error, trace)
        self._gate.note(self._method, self._caller, code, time.monotonic() - self._started, self._span)
        if error is None:
            return
        await self._answer(error)

    async def _answer(self, error: BaseException) -> None:
        if isinstance(error, errors.StarlingError):
            await _abort(self._context, error)
        if isinstance(error, grpc.aio.AioRpcError) and error.code() in _PASSED_ON:
            await self._context.abort(error.code(), error.details())
        if isinstance(error, TimeoutError):
            await self._context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "The deadline has passed.")
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                return  # the client is gone, or the server stops: nobody waits for a status
            # A handler that raises CancelledError of its own hangs its client.
            await _abort(self._context, errors.UnavailableError("A piece of the work was cancelled."))
        if isinstance(error, grpc.aio.AbortError):
            return
        log.error("unexpected error in %s", self._method, exc_info=error)
        await self._context.abort(grpc.StatusCode.INTERNAL, "Something went wrong here; it is in the logs.")


def _code_of(error: BaseException | None) -> str:
    """The status that a call ends with, as `_answer` gives it."""
    if error is None:
        return grpc.StatusCode.OK.name
    if isinstance(error, errors.StarlingError):
        return _CODES[type(error)].name
    if isinstance(error, grpc.aio.AioRpcError) and error.code() in _PASSED_ON:
        return str(error.code().name)
    if isinstance(error, TimeoutError):
        return grpc.StatusCode.DEADLINE_EXCEEDED.name
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        ended = task is not None and task.cancelling()
        return grpc.StatusCode.CANCELLED.name if ended else grpc.StatusCode.UNAVAILABLE.name
    return grpc.StatusCode.INTERNAL.name


_HANDLERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def make_server(config: Config, allowed: Allowed) -> grpc.aio.Server:
    """A server with the gate and our options; the caller registers servicers and binds it."""
    gate = Gate(
        principals.Verifier(config.auth_secret.get_secret_value()),
        allowed,
        concurrent_calls_max=config.concurrent_calls_max,
        log_requests=config.log_requests,
        measured=bool(config.metrics_listen),
    )
    metrics.calls_in_flight.of(lambda: gate.calls_in_flight)
    options = server_options(config.max_connection_age_seconds, config.grace_seconds, config.max_message_bytes)
    return grpc.aio.server(interceptors=[gate], options=options)


def server_options(connection_age_seconds: float, grace_seconds: float, message_bytes: int) -> list[tuple[str, int]]:
    """What every server allows and bounds."""
    return [
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_connection_age_ms", int(connection_age_seconds * 1_000)),
        ("grpc.max_connection_age_grace_ms", int(grace_seconds * 1_000)),
        # Allow the clients' keepalive, or it is answered with GOAWAY "too many pings".
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 4),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


_SWITCH_SECONDS = 0.0005
"""How long the event loop may keep threads waiting that want to run Python: gRPC's poller, and a store's writer, who
asks again after each statement. With Python's 5 ms a post waits for a busy loop several times."""


class App(Protocol):
    """A service as its `__main__` wires it."""

    name: str
    allowed: Allowed

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Add the servicers; returns the full names of their gRPC services."""
        ...

    async def start(self) -> None:
        """Open the stores. Raises UnavailableError when one doesn't answer: it is called again."""
        ...

    def loops(self, stopping: asyncio.Event) -> list[Awaitable[None]]:
        """Background work. Each ends by itself soon after `stopping` is set."""
        ...

    async def stop(self) -> None:
        """Close what start opened."""
        ...


def run(config: Config, make_app: Callable[[], App]) -> NoReturn:
    """Serve until SIGTERM or SIGINT; exits with 0 after a clean stop, 1 when background work failed, 2 when this can't
    run as it was told to.

    `make_app` is called inside the event loop, which channels and events belong to.
    """
    logs.configure(config.log_level, config.log_format)
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        sys.exit(asyncio.run(_serve(config, make_app)))
    except errors.ConfigurationError as error:
        print(f"configuration: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)


async def _serve(config: Config, make_app: Callable[[], App]) -> int:
    app = make_app()
    end_metrics = metrics.serve(app.name, config.metrics_listen) if config.metrics_listen else None
    if config.otlp_endpoint:
        _trace(app.name, config)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)

    server = make_server(config, app.allowed)
    services = app.register(server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    await _say(healthy, ["", *services], health_pb2.HealthCheckResponse.NOT_SERVING)
    if config.reflection:
        names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, server)
    try:
        port = server.add_insecure_port(config.listen)
    except RuntimeError as error:
        raise errors.ConfigurationError(f"{ENV_PREFIX}LISTEN: can't listen on {config.listen}") from error
    await server.start()
    address = f"{config.listen.rpartition(':')[0]}:{port}"

    background: list[asyncio.Task[None]] = []
    if await _started(app, stopping):
        watching = [metrics.watch_loop(stopping)] if end_metrics else []
        background = [asyncio.ensure_future(work) for work in (*app.loops(stopping), *watching)]
        for task in background:
            task.add_done_callback(lambda _: stopping.set())
        # What was imported and opened stays: the collector needn't look at it again, which took tens of ms each time.
        gc.collect()
        gc.freeze()
        await _say(healthy, ["", *services], health_pb2.HealthCheckResponse.SERVING)
        log.info("%s serves on %s", app.name, address)
        if config.address_file:
            Path(config.address_file).write_text(address)  # noqa: ASYNC240 - once, a few bytes
        await stopping.wait()

    log.info("%s drains (pid %d)", app.name, os.getpid())
    await _say(healthy, ["", *services], health_pb2.HealthCheckResponse.NOT_SERVING)
    await asyncio.sleep(config.drain_seconds)
    await server.stop(config.grace_seconds)
    failed = await _finished(background, config.grace_seconds)
    with suppress(errors.UnavailableError):
        await app.stop()
    await asyncio.to_thread(tracing.stop)
    if end_metrics:
        await asyncio.to_thread(end_metrics)
    log.info("%s has stopped (pid %d)", app.name, os.getpid())
    return 1 if failed else 0


def _trace(name: str, config: Config) -> None:
    try:
        tracing.start(name, config.otlp_endpoint, config.trace_ratio)
    except ImportError as error:
        raise errors.ConfigurationError(
            f"{ENV_PREFIX}OTLP_ENDPOINT: traces need the extra: pip install 'starling[traces]'"
        ) from error


async def _say(healthy: health.aio.HealthServicer, names: list[str], status: Any) -> None:
    for name in names:
        await healthy.set(name, status)


async def _started(app: App, stopping: asyncio.Event) -> bool:
    """Try until the stores answer (True) or the process is to stop (False)."""
    attempt = 0
    while not stopping.is_set():
        try:
            await app.start()
        except errors.UnavailableError as error:
            delay = _BACKOFF_SECONDS[min(attempt, len(_BACKOFF_SECONDS) - 1)]
            log.warning("%s waits for its stores: %s", app.name, error)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), delay)
            attempt += 1
        else:
            return True
    return False


async def _finished(tasks: list[asyncio.Task[None]], grace_seconds: float) -> bool:
    """Wait for the background work, then cancel it. True when any of it failed."""
    if not tasks:
        return False
    _, late = await asyncio.wait(tasks, timeout=grace_seconds)
    for task in late:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    broken = [o for o in outcomes if isinstance(o, BaseException) and not isinstance(o, asyncio.CancelledError)]
    for error in broken:
        log.error("background work failed", exc_info=error)
    return bool(broken)
