"""What every process tells of itself: metrics, log lines, and the trace of a post to its delivery."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from cli.client import Client
from mesh import metrics
from mesh.metrics import DECLARED
from mesh.principals import Credentials, user
from starling.graph.v1 import graph_pb2
from starling.timeline.v1 import timeline_pb2
from starling.tweet.v1 import tweet_pb2
from tests.e2e.conftest import RunningMesh
from tests.scraping import Samples, exemplars, scrape_all, total
from tests.waiting import eventually

MOVED: dict[str, list[tuple[str, dict[str, str]]]] = {
    "graph_svc": [
        ("starling_rpc_seconds_count", {"method": "starling.graph.v1.GraphService/Follow", "code": "OK"}),
        ("starling_event_loop_delay_seconds_count", {}),
        ("starling_pull_threshold", {}),
    ],
    "tweet_svc": [
        ("starling_rpc_seconds_count", {"method": "starling.tweet.v1.TweetService/CreateTweet", "code": "OK"}),
        ("starling_events_published_total", {}),
    ],
    "fanout_svc": [
        ("starling_fanout_events_total", {}),
        ("starling_deliveries_total", {}),
        ("starling_deliveries_to_lists_total", {}),
        ("starling_delivery_delay_seconds_count", {}),
        ("starling_push_lists_count", {}),
        ("starling_calls_in_flight", {}),
    ],
    "timeline_svc": [
        (
            "starling_rpc_seconds_count",
            {"method": "starling.timeline.v1.TimelineService/ListHomeTimeline", "code": "INVALID_ARGUMENT"},
        ),
        ("starling_home_reads_total", {"source": "missing"}),
        ("starling_home_reads_total", {"source": "list"}),
        ("starling_lists_made_total", {"how": "rebuild"}),
        ("starling_pull_width_count", {}),
    ],
}


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes in spans as a collector would."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            names = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            self.spans += [(names[0], span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture(scope="module")
def receiver() -> Iterator[tuple[Receiver, int]]:
    server = grpc.server(ThreadPoolExecutor(2))
    made = Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield made, port
    server.stop(None).wait(5)


@pytest.fixture(scope="module")
def observed(receiver: tuple[Receiver, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    mesh = RunningMesh(tmp_path_factory.mktemp("observed") / "data")
    mesh.start(
        STARLING_LOG_FORMAT="json",
        STARLING_LOG_REQUESTS="true",
        STARLING_OTLP_ENDPOINT=f"http://127.0.0.1:{receiver[1]}",
        STARLING_TRACE_RATIO="0",
    )
    try:
        yield mesh
        assert mesh.stop() == 0, mesh.log()
    finally:
        mesh.destroy()


class People:
    """An author, and a follower who has read once, so that there is a list."""

    def __init__(self, client: Client, secret: str, author_id: int, reader_id: int) -> None:
        self.client = client
        self._secret = secret
        self.author_id, self.reader_id = author_id, reader_id

    def as_(self, user_id: int, *traceparent: str) -> dict[str, Any]:
        metadata = Credentials(self._secret, user(user_id)).metadata()
        return {"timeout": 10.0, "metadata": (*metadata, *(("traceparent", value) for value in traceparent))}

    async def home(self, *traceparent: str, token: str = "") -> list[int]:
        request = timeline_pb2.ListHomeTimelineRequest(page_token=token)
        page = await self.client.timeline.ListHomeTimeline(request, **self.as_(self.reader_id, *traceparent))
        return [item.item_id for item in page.items]

    async def post(self, *traceparent: str) -> int:
        request = tweet_pb2.CreateTweetRequest(text="hello")
        reply = await self.client.tweet.CreateTweet(request, **self.as_(self.author_id, *traceparent))
        return int(reply.tweet.tweet_id)


@pytest.fixture
async def people(observed: RunningMesh, request: pytest.FixtureRequest) -> AsyncIterator[People]:
    name = str(abs(hash(request.node.name)))[:8]
    async with observed.client() as client:
        ids = [(await client.create_user(f"{who}{name}")).user_id for who in ("a", "r")]
        made = People(client, observed.folder.read_secrets().auth_secret, *ids)
        await client.graph.Follow(graph_pb2.FollowRequest(followee_id=ids[0]), **made.as_(ids[1]))
        await made.home()
        yield made


async def test_each_declared_metric_is_served_by_its_processes_and_moves(observed: RunningMesh, people: People) -> None:
    async def read_from_the_list() -> bool:
        posted = await people.post()
        found = await people.home()
        counted = total((await _scraped(observed))["timeline_svc"], "starling_home_reads_total", source="list")
        return posted in found and counted > 0

    await eventually(read_from_the_list, 30.0)
    with pytest.raises(grpc.aio.AioRpcError):
        await people.home(token="made up")
    await eventually(lambda: _all_moved(observed), 30.0)
    for process, samples in (await _scraped(observed)).items():
        service = process.partition("-")[0]
        names = {name for name, _ in samples}
        wanted = {
            series
            for declared in DECLARED
            if service in declared.services
            for series in declared.series
            if not declared.labels or process == "timeline_svc"
        }
        assert not wanted - names, process
        assert not {n for n in names if n.startswith("starling_") and not n.endswith("_created")} - {
            *(series for declared in DECLARED if service in declared.services for series in declared.series),
            *(name for name in names if name.startswith("starling_edge_")),
        }


async def _scraped(mesh: RunningMesh) -> dict[str, Samples]:
    return await asyncio.to_thread(scrape_all, mesh)


async def _all_moved(mesh: RunningMesh) -> bool:
    scraped = await _scraped(mesh)
    return all(
        total(scraped[process], name, **labels) > 0 for process, wanted in MOVED.items() for name, labels in wanted
    )


async def test_a_line_of_json_for_each_call_and_no_token_in_any(observed: RunningMesh, people: People) -> None:
    trace = "5" * 32
    await people.home(f"00-{trace}-{'1' * 16}-00")

    def calls() -> list[dict[str, Any]]:
        lines = [line.partition("│ ")[2] for line in observed.log().splitlines()]
        read = [json.loads(line) for line in lines if line.startswith("{")]
        return [
            line
            for line in read
            if line.get("trace_id") == trace and line.get("method", "").endswith("/ListHomeTimeline")
        ]

    async def logged() -> bool:
        return bool(calls())

    await eventually(logged, 10.0)
    (line,) = calls()
    assert (line["caller"], line["code"]) == (f"user:{people.reader_id}", "OK")
    assert line["ms"] > 0
    secrets = observed.folder.read_secrets()
    for told in (secrets.auth_secret, secrets.page_token_key, "Bearer ", "eyJ"):
        assert told not in observed.log()


async def test_one_trace_shows_post_delivery_and_read(
    observed: RunningMesh, people: People, receiver: tuple[Receiver, int], tmp_path: Path
) -> None:
    trace = "a1" * 16
    sampled = f"00-{trace}-{'2' * 16}-01"

    def seen() -> dict[tuple[str, str], Any]:
        return {(where, span.name): span for where, span in receiver[0].spans if span.trace_id.hex() == trace}

    wanted = {
        ("tweet_svc", "starling.tweet.v1.TweetService/CreateTweet"),
        ("fanout_svc", "fanout created"),
        ("graph_svc", "starling.graph.v1.GraphService/GetAuthorMode"),
        ("timeline_svc", "starling.timeline.v1.TimelineService/ListHomeTimeline"),
    }

    async def shown() -> bool:
        return wanted <= seen().keys()

    await people.post(sampled)
    await people.home(sampled)
    await eventually(shown, 20.0)
    spans = seen()
    post = spans["tweet_svc", "starling.tweet.v1.TweetService/CreateTweet"]
    delivery = spans["fanout_svc", "fanout created"]
    assert delivery.parent_span_id == post.span_id
    assert spans["graph_svc", "starling.graph.v1.GraphService/GetAuthorMode"].parent_span_id == delivery.span_id
    assert trace in await asyncio.to_thread(exemplars, observed.mesh.metrics["tweet_svc"])
    # Nobody asked for the others, and the share of those recorded all the same is 0 here.
    assert {span.trace_id.hex() for _, span in receiver[0].spans} == {trace}


def test_metrics_are_declared_with_units_and_few_labels() -> None:
    names = [declared.name for declared in DECLARED]
    assert len(names) == len(set(names))
    assert {label for declared in DECLARED for label in declared.labels} <= {
        *("method", "code", "topic", "partition", "source", "how")
    }
    assert all(declared.services <= metrics.ALL for declared in DECLARED)
