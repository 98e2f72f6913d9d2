"""Traces: the W3C traceparent that travels with calls and events, and OpenTelemetry's spans where they are wanted.

The context is a string in a ContextVar: taken from a call's metadata by `mesh.server`, sent along by
`principals.Credentials`, and carried through the log by events. That costs next to nothing. OpenTelemetry itself is
imported only where STARLING_OTLP_ENDPOINT is set, and a span is made only for a trace that is sampled: whose caller
says so, or whose random id lies low enough, which all processes judge alike.
"""

import random
import re
from contextvars import ContextVar
from typing import Any

METADATA_KEY = "traceparent"
current: ContextVar[str] = ContextVar("traceparent", default="")
"""The traceparent that calls made from here carry; empty: none."""
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_SAMPLED = 1
_QUEUE_SPANS = 2_048

_tracer: Any = None
_sampled_below = 0


def incoming(given: object) -> str:
    """A caller's traceparent, or a new one where there is none that can be read."""
    if isinstance(given, str) and _TRACEPARENT.fullmatch(given):
        return given
    return f"00-{random.getrandbits(128) or 1:032x}-{random.getrandbits(64) or 1:016x}-00"


def trace_id(traceparent: str) -> str:
    """Its 32 hexadecimal digits."""
    return traceparent[3:35]


def is_sampled(traceparent: str) -> bool:
    """Whether spans of this trace are recorded."""
    if _tracer is None or not traceparent:
        return False
    return bool(int(traceparent[-2:], 16) & _SAMPLED) or int(traceparent[19:35], 16) < _sampled_below


class Span:
    """A piece of work of a trace; as a block, `current` is what the work's own calls are to carry."""

    def __init__(self, name: str, traceparent: str, *, served: bool = False) -> None:
        self._name, self._served = name, served
        self.traceparent = traceparent
        self._span: Any = None
        self._reset: Any = None

    def __enter__(self) -> "Span":
        if is_sampled(self.traceparent):
            self._begin()
        self._reset = current.set(self.traceparent)
        return self

    def _begin(self) -> None:
        from opentelemetry import trace  # noqa: PLC0415 - there only where it is wanted

        parent = trace.SpanContext(
            int(trace_id(self.traceparent), 16),
            int(self.traceparent[36:52], 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
        kind = trace.SpanKind.SERVER if self._served else trace.SpanKind.CONSUMER
        context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        self._span = _tracer.start_span(self._name, context=context, kind=kind)
        self.traceparent = f"00-{trace_id(self.traceparent)}-{self._span.get_span_context().span_id:016x}-01"

    def note(self, name: str, value: str | int | float) -> None:
        """An attribute, if the span is recorded; never text of people, never a token."""
        if self._span is not None:
            self._span.set_attribute(name, value)

    @property
    def exemplar(self) -> dict[str, str] | None:
        """What a histogram may keep as an example."""
        return {"trace_id": trace_id(self.traceparent)} if self._span is not None else None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._reset is not None:
            current.reset(self._reset)
        if self._span is not None:
            if error is not None:
                from opentelemetry.trace import StatusCode  # noqa: PLC0415

                self._span.set_status(StatusCode.ERROR, type(error).__name__)
            self._span.end()


def start(service: str, endpoint: str, ratio: float) -> None:
    """From now on record spans of this share of traces, and send them to an OTLP endpoint over gRPC
    (`http://host:4317`). Raises ImportError where the extra `traces` isn't installed."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    direct: Any = (("grpc.enable_http_proxy", 0),)
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), channel_options=direct)
    record(service, BatchSpanProcessor(exporter, max_queue_size=_QUEUE_SPANS, schedule_delay_millis=1_000), ratio)


def record(service: str, processor: Any, ratio: float) -> None:
    """From now on give the spans of this share of traces to one of OpenTelemetry's processors."""
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider, sampling  # noqa: PLC0415

    global _tracer, _sampled_below  # noqa: PLW0603 - a process has one, as it has one log
    provider = TracerProvider(
        sampler=sampling.ALWAYS_ON,
        resource=Resource({"service.name": service}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(processor)
    _tracer = provider.get_tracer("starling")
    _tracer_provider.append(provider)
    _sampled_below = int(ratio * (1 << 64))


_tracer_provider: list[Any] = []


def stop() -> None:
    """Send what is left, and record no more."""
    global _tracer  # noqa: PLW0603
    _tracer = None
    while _tracer_provider:
        _tracer_provider.pop().shutdown()
