"""Live home timelines through the edge: server-sent events and WebSockets, over a mesh of real processes."""

import asyncio
import itertools
import json
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import requests
import websockets

from mesh import principals
from mesh.principals import OPERATOR
from tests.e2e.conftest import RunningMesh
from tests.e2e.rest import API, Rest, as_, new_user, problem
from tests.waiting import eventually

STREAM = "/timeline/home/stream"
SECONDS = 20.0
OF_ONE_USER = 5


class Events:
    """A stream of server-sent events as a browser reads it."""

    def __init__(self, of: Rest, **options: Any) -> None:
        self.answer = of.call("GET", STREAM, stream=True, **options)
        self.answer.encoding = "utf-8"
        self._lines = self.answer.iter_lines(decode_unicode=True)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Events, with their data parsed, until the stream ends."""
        one: dict[str, Any] = {}
        for line in self._lines:
            name, _, value = line.partition(": ")
            if line:
                one[name] = json.loads(value) if name == "data" else value
            else:
                if "event" in one:
                    yield one
                one = {}

    def next(self, kind: str) -> dict[str, Any]:
        """The next event of a kind; only heartbeats and gaps have a place before it."""
        for one in itertools.islice(self, 20):
            if one["event"] == kind:
                return one
            assert one["event"] in {"heartbeat", "gap"}, one
        raise AssertionError(f"no {kind} came")

    def close(self) -> None:
        self.answer.close()


@pytest.fixture
def pair(running_mesh: RunningMesh) -> tuple[Rest, Rest]:
    """An author, and a reader who follows them."""
    author, author_id = new_user(running_mesh.folder, f"a{uuid.uuid4().hex[:12]}")
    reader, _ = new_user(running_mesh.folder, f"r{uuid.uuid4().hex[:12]}")
    reader.ok("POST", "/follows", {"targetId": author_id})
    return author, reader


def test_what_is_posted_comes_and_a_new_connection_goes_on_where_the_last_one_ended(pair: tuple[Rest, Rest]) -> None:
    author, reader = pair
    events = Events(reader)
    assert events.answer.headers["Content-Type"] == "text/event-stream"
    first = events.next("heartbeat")
    posted = [author.ok("POST", "/tweets", {"text": f"one {n}"})["tweetId"] for n in range(2)]
    items = [events.next("item") for _ in posted]
    assert [item["data"]["itemId"] for item in items] == posted
    assert items[0]["data"]["tweet"]["text"] == "one 0"
    assert [item["id"] for item in items] == posted
    events.close()
    while_away = author.ok("POST", "/tweets", {"text": "while away"})["tweetId"]
    again = Events(reader, headers={"Last-Event-ID": posted[-1]})
    assert again.next("item")["data"]["itemId"] in {posted[0], while_away}, "a minute before is shown again"
    again.close()
    # A heartbeat's id does, too: who saw nothing resumes from there.
    since = Events(reader, params={"newerThanId": first["id"]})
    assert [since.next("item")["data"]["itemId"] for _ in range(3)] == [*posted, while_away]
    since.close()


def test_a_stream_outlives_those_of_the_service(pair: tuple[Rest, Rest]) -> None:
    """timeline_svc ends its own after 8 s."""
    author, reader = pair
    events = Events(reader)
    begun = time.monotonic()
    beats = 0
    for one in events:
        assert one["event"] in {"heartbeat", "gap"}, one
        beats += 1
        if time.monotonic() - begun > 9:
            break
    assert beats >= 3
    posted = author.ok("POST", "/tweets", {"text": "late"})["tweetId"]
    assert events.next("item")["data"]["itemId"] == posted
    events.close()


async def test_the_same_comes_over_a_websocket(pair: tuple[Rest, Rest]) -> None:
    author, reader = pair
    url = reader.base.replace("http", "ws") + API + STREAM
    protocols = [websockets.Subprotocol("starling.v1"), websockets.Subprotocol(f"bearer.{reader.token}")]
    async with websockets.connect(url, subprotocols=protocols, origin=websockets.Origin(reader.base)) as client:
        assert client.subprotocol == "starling.v1"
        assert json.loads(await asyncio.wait_for(client.recv(), SECONDS))["type"] == "heartbeat"
        posted = author.ok("POST", "/tweets", {"text": "over a socket"})["tweetId"]
        while (frame := json.loads(await asyncio.wait_for(client.recv(), SECONDS)))["type"] in {"heartbeat", "gap"}:
            pass
        assert (frame["type"], frame["id"], frame["data"]["itemId"]) == ("item", posted, posted)
    for options, status in (
        ({"subprotocols": [websockets.Subprotocol("starling.v1")]}, 401),
        ({"subprotocols": protocols, "origin": websockets.Origin("https://evil.example")}, 403),
    ):
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(url, **options)
        assert refused.value.response.status_code == status


async def test_a_server_that_dies_half_way_is_told_of_and_is_no_end(
    running_mesh: RunningMesh, pair: tuple[Rest, Rest]
) -> None:
    author, reader = pair
    events = Events(reader)
    events.next("heartbeat")
    last_id = events.next("heartbeat")["id"]  # The first was the edge's own.
    old = running_mesh.kill("timeline_svc")
    told = await asyncio.to_thread(events.next, "error")
    assert (told["data"]["status"], told["data"]["reason"]) == (503, "UNAVAILABLE")
    assert list(events) == []
    posted = author.ok("POST", "/tweets", {"text": "meanwhile"})["tweetId"]
    await running_mesh.comes_back("timeline_svc", old)
    again = Events(reader, headers={"Last-Event-ID": last_id})
    assert again.next("item")["data"]["itemId"] == posted
    again.close()


async def test_an_edge_that_stops_says_so(running_mesh: RunningMesh, pair: tuple[Rest, Rest]) -> None:
    _, reader = pair
    events = Events(reader)
    url = reader.base.replace("http", "ws") + API + STREAM
    headers = {"Authorization": f"Bearer {reader.token}"}
    async with websockets.connect(url, additional_headers=headers) as client:
        events.next("heartbeat")
        old = running_mesh.kill("edge", signal.SIGTERM)
        told = await asyncio.to_thread(events.next, "error")
        assert told["data"]["reason"] == "RESTARTING"
        frames = await until_closed(client)
        assert frames[-1]["data"]["reason"] == "RESTARTING"
        assert client.close_code == 1013
    await running_mesh.comes_back("edge", old)
    Events(reader).next("heartbeat")


async def until_closed(client: websockets.ClientConnection) -> list[Any]:
    frames = []
    with suppress(websockets.ConnectionClosed):
        while True:
            frames.append(json.loads(await asyncio.wait_for(client.recv(), SECONDS)))
    return frames


def test_a_stream_ends_with_its_token(running_mesh: RunningMesh, pair: tuple[Rest, Rest]) -> None:
    user_id = pair[1].ok("GET", "/me")["userId"]
    short = as_(running_mesh.folder, principals.user(int(user_id)), lifetime_seconds=2)
    told = Events(short).next("error")
    assert (told["data"]["status"], told["data"]["reason"]) == (401, "TOKEN_EXPIRED")


async def test_clients_that_vanish_leave_their_places(pair: tuple[Rest, Rest]) -> None:
    _, reader = pair
    for _ in range(3):
        sockets = [vanishing(reader) for _ in range(OF_ONE_USER)]
        problem(reader.call("GET", STREAM), 429, "WATCHES_FULL")
        for one in sockets:
            one.close()

        def has_room() -> bool:
            events = Events(reader)
            events.close()
            return events.answer.status_code == 200

        await eventually(has_room)


async def test_clients_that_take_nothing_are_cut_off(pair: tuple[Rest, Rest]) -> None:
    author, reader = pair
    sockets = [vanishing(reader) for _ in range(OF_ONE_USER)]
    for n in range(200):
        author.ok("POST", "/tweets", {"text": f"{n:3d}" + "故" * 138})

    def has_room() -> bool:
        events = Events(reader)
        events.close()
        return events.answer.status_code == 200

    await eventually(has_room, 30)  # They have 10 s.
    for one in sockets:
        one.close()


def vanishing(reader: Rest) -> socket.socket:
    """A stream whose client reads no more than that it was begun, and will be gone without a word."""
    host, _, port = reader.base.removeprefix("http://").partition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1_024)
    client.connect((host, int(port)))
    head = f"GET {API}{STREAM} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {reader.token}\r\n\r\n"
    client.sendall(head.encode())
    assert client.recv(12) == b"HTTP/1.1 200"
    return client


def test_streams_are_users_and_begin_at_an_item(running_mesh: RunningMesh, pair: tuple[Rest, Rest]) -> None:
    _, reader = pair
    problem(as_(running_mesh.folder, OPERATOR).call("GET", STREAM), 403, "USERS_ONLY")
    problem(Rest(reader.base).call("GET", STREAM), 401)
    problem(as_(running_mesh.folder, principals.user(5)).call("GET", STREAM), 404, "USER_NOT_FOUND")
    problem(reader.call("GET", STREAM, params={"newerThanId": "x"}), 400, names="newerThanId")
    problem(reader.call("GET", STREAM, params={"nope": "1"}), 400, names="nope")
    problem(reader.call("POST", STREAM), 405)
    assert requests.options(reader.base + API + STREAM, timeout=SECONDS).status_code == 204
