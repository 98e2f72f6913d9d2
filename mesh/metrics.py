"""All metrics of the Python processes, declared in one place; dashboards and alerts are checked against it.

Names carry units; labels are few, and never an id: a method, a status, a topic and its partition. What the code counts
anyway is read when somebody asks (`Reading`), the rest is counted where it happens. Each process serves those of its
service, and what Python and the operating system tell of it.
"""

import asyncio
import bisect
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import HTTPServer
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from mesh.errors import ConfigurationError

ALL = frozenset({"graph_svc", "tweet_svc", "fanout_svc", "timeline_svc"})
RPC_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
DELAY_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0, 1_800.0)
_LOOP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_WIDTHS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 5_000.0)
_LISTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0)
_LOOP_EVERY_SECONDS = 0.25


class Buckets:
    """Counts of a histogram whose observations come with a weight, which prometheus_client's doesn't know."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, weight: int) -> None:
        """So many observations of one value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += weight
        self._sum += value * weight

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """As it is served."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)


Samples = Iterable[tuple[Sequence[str], float]]


class Reading(Collector):
    """A number that the code has anyway, read when it's asked for: `read` gives values with their labels' values."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self.name, self._text, self._labels = name, text, labels
        self.read: Callable[[], Samples] = tuple
        self.buckets: Buckets | None = None

    def of(self, value: Callable[[], float]) -> None:
        """Read one number without labels."""
        self.read = lambda: [((), value())]

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        if self.buckets:
            yield self.buckets.family(self.name, self._text)
            return
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        family = kind(self.name, self._text, labels=self._labels)
        for labels, value in self.read():
            family.add_metric(labels, value)
        yield family


@dataclass(frozen=True, slots=True)
class Declared:
    """A metric, and which services serve it. `series`: the names that queries may use, and `labels` theirs."""

    name: str
    series: tuple[str, ...]
    labels: tuple[str, ...]
    services: frozenset[str]
    collector: Collector


DECLARED: list[Declared] = []
M = TypeVar("M", bound=Collector)


def _declare(name: str, collector: M, services: frozenset[str], labels: Sequence[str] = (), *, sums: bool = False) -> M:
    series = tuple(f"{name}{end}" for end in ("_bucket", "_count", "_sum")) if sums else (name,)
    DECLARED.append(Declared(name, series, tuple(labels), services, collector))
    return collector


def _counter(name: str, text: str, services: frozenset[str], labels: Sequence[str] = ()) -> Counter:
    return _declare(name, Counter(name, text, labels, registry=None), services, labels)


def _gauge(name: str, text: str, services: frozenset[str], labels: Sequence[str] = ()) -> Gauge:
    return _declare(name, Gauge(name, text, labels, registry=None), services, labels)


def _histogram(
    name: str, text: str, services: frozenset[str], buckets: Sequence[float], labels: Sequence[str] = ()
) -> Histogram:
    made = Histogram(name, text, labels, buckets=buckets, registry=None)
    return _declare(name, made, services, labels, sums=True)


def _reading(name: str, text: str, services: frozenset[str], *, sums: bool = False) -> Reading:
    return _declare(name, Reading(name, text), services, sums=sums)


_TWEETS, _GRAPH = frozenset({"tweet_svc"}), frozenset({"graph_svc"})
_FANOUT, _TIMELINES = frozenset({"fanout_svc"}), frozenset({"timeline_svc"})

# Every process.
rpc_seconds = _histogram(
    "starling_rpc_seconds",
    "Calls served, by method and status; streams count when they end.",
    ALL,
    RPC_SECONDS,
    ("method", "code"),
)
calls_in_flight = _reading("starling_calls_in_flight", "Calls being handled.", ALL)
event_loop_delay_seconds = _histogram(
    "starling_event_loop_delay_seconds", "How much later than asked for the event loop woke a task.", ALL, _LOOP_SECONDS
)
cache_errors = _counter("starling_cache_errors_total", "Times that Valkey didn't answer, or refused.", ALL)

# tweet_svc.
outbox_depth = _gauge("starling_outbox_depth", "Events that aren't in the log yet.", _TWEETS)
events_published = _counter("starling_events_published_total", "Events brought from the outbox to the log.", _TWEETS)
relay_retries = _counter("starling_relay_retries_total", "Times that the relay had to wait for log or store.", _TWEETS)
hot_tweets = _reading("starling_hot_tweets", "Tweets whose retweets may wait, as known here.", _TWEETS)

# graph_svc.
lag_messages = _gauge(
    "starling_fanout_lag_messages", "Records that fan-out hasn't acknowledged.", _GRAPH, ("topic", "partition")
)
lag_seconds = _gauge(
    "starling_fanout_lag_seconds", "Age of the oldest record not acknowledged.", _GRAPH, ("topic", "partition")
)
pull_threshold = _gauge("starling_pull_threshold", "Followers from which an author is pulled, now.", _GRAPH)
pressure_stage = _gauge("starling_pressure_stage", "0: normal; 1: big authors' tasks are slow; +1 a halving.", _GRAPH)
mode_moves = _counter("starling_mode_moves_total", "Authors moved between modes, and drain tasks published.", _GRAPH)

# fanout_svc.
fanout_events = _reading("starling_fanout_events_total", "Records acknowledged.", _FANOUT)
deliveries = _reading(
    "starling_deliveries_total", "Ids brought to followers, whether they have a list or not.", _FANOUT
)
deliveries_to_lists = _reading("starling_deliveries_to_lists_total", "Ids put into lists that were there.", _FANOUT)
delivery_delay_seconds = _reading(
    "starling_delivery_delay_seconds", "From a post to its delivery, each follower counted.", _FANOUT, sums=True
)
push_lists = _histogram("starling_push_lists", "Followers that one push is for.", _FANOUT, _LISTS)
drained_buckets = _reading("starling_drained_buckets_total", "Buckets of followers mended after a pull.", _FANOUT)
fanout_retries = _reading("starling_fanout_retries_total", "Pieces of work that had to be tried again.", _FANOUT)
dead_letters = _counter("starling_dead_letters_total", "Records that can never succeed.", _FANOUT)

# timeline_svc.
home_reads = _counter(
    "starling_home_reads_total",
    "Pages by what they were read from: the list; the list and the store, for followees not covered yet (covering); "
    "the store, since there was no list (missing), one being made (building), one that can't be mended (replaced), or "
    "authors' modes weren't known (modes_unknown).",
    _TIMELINES,
    ("source",),
)
fall_throughs = _counter("starling_fall_throughs_total", "Pages that went on in the store below a list.", _TIMELINES)
lists_made = _counter("starling_lists_made_total", "Lists rebuilt or covered behind a read.", _TIMELINES, ("how",))
pull_width = _histogram("starling_pull_width", "Pulled authors that one page was read from.", _TIMELINES, _WIDTHS)
bodies_missed = _counter("starling_bodies_missed_total", "Bodies of tweets that weren't cached.", _TIMELINES)
pulled_authors = _reading("starling_pulled_authors", "Authors known as pulled; -1: unknown.", _TIMELINES)
samples = _counter("starling_timeline_samples_total", "Homes that the sampler held against the stores.", _TIMELINES)
mismatches = _counter("starling_timeline_mismatches_total", "Homes that weren't what the stores say.", _TIMELINES)

for _source in ("list", "covering", "missing", "building", "replaced", "modes_unknown"):
    home_reads.labels(_source)
for _how in ("rebuild", "cover"):
    lists_made.labels(_how)
home_reads_by: Mapping[str, Counter] = {
    source: home_reads.labels(source)
    for source in ("list", "covering", "missing", "building", "replaced", "modes_unknown")
}


def registry_of(service: str) -> CollectorRegistry:
    """What a process of this service serves."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    for declared in DECLARED:
        if service in declared.services:
            registry.register(declared.collector)
    return registry


def serve(service: str, listen: str) -> Callable[[], None]:
    """Serve /metrics on `host:port` from a thread; returns what ends it. Raises ConfigurationError."""
    host, _, port = listen.rpartition(":")
    try:
        server: tuple[HTTPServer, threading.Thread] = start_http_server(
            int(port), host.strip("[]"), registry_of(service)
        )
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigurationError(f"STARLING_METRICS_LISTEN: can't listen on {listen}") from error

    def end() -> None:
        server[0].shutdown()
        server[0].server_close()
        server[1].join(5.0)

    return end


async def watch_loop(stopping: asyncio.Event) -> None:
    """Sample how late the event loop is, until `stopping`."""
    while not stopping.is_set():
        asked = time.monotonic() + _LOOP_EVERY_SECONDS
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), _LOOP_EVERY_SECONDS)
            return
        event_loop_delay_seconds.observe(max(0.0, time.monotonic() - asked))
