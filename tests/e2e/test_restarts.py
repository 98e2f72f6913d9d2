"""Planned restarts are not noticed (G1): a process that is told to stop finishes what it has begun."""

import asyncio
import itertools
import signal
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import local

import grpc
import pytest
import requests

from cli.client import Client
from mesh.channels import streaming
from mesh.principals import OPERATOR
from starling.graph.v1 import graph_pb2
from tests.e2e.conftest import RunningMesh
from tests.e2e.rest import Rest, new_user
from tests.waiting import eventually

CALLS_PER_SECOND = 50
CALL_SECONDS = 30.0


async def test_g1_a_call_in_flight_is_finished_before_the_process_ends(running_mesh: RunningMesh) -> None:
    async with running_mesh.client() as client:
        one, other = [(await client.create_user(f"g1_{n}")).user_id for n in range(2)]
        edge = graph_pb2.ImportFollowsRequest(edges=[graph_pb2.Edge(follower_id=one, followee_id=other)])
        stub = client.graph
        async with streaming(stub.ImportFollows(metadata=client.as_(OPERATOR), timeout=CALL_SECONDS)) as call:
            await call.write(edge)
            first = await call.read()
            old_pid = running_mesh.kill("graph_svc", signal.SIGTERM)
            await eventually(lambda: f"graph_svc drains (pid {old_pid})" in running_mesh.log(), 5)
            await call.write(edge)
            second = await call.read()
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
        assert isinstance(first, graph_pb2.ImportFollowsResponse)
        assert isinstance(second, graph_pb2.ImportFollowsResponse)
        assert (first.created, second.existing) == (1, 1)
        await running_mesh.comes_back("graph_svc", old_pid)
        assert f"graph_svc has stopped (pid {old_pid})" in running_mesh.log()


class Load:
    """Calls at a steady rate, by a client that tries UNAVAILABLE again until its deadline, and counts."""

    def __init__(self, client: Client, users: list[int]) -> None:
        self.client = client
        self.users = users
        self.calls = self.retries = self.errors = 0

    async def call(self, number: int) -> None:
        user = self.users[number % len(self.users)]
        request_id = str(uuid.uuid4())
        post = partial(self.client.post, user, f"post {number}", request_id=request_id)
        act: Callable[[], Awaitable[object]] = partial(self.client.home_page, user) if number % 5 else post
        self.calls += 1
        attempts = itertools.count()

        async def done() -> bool:
            self.retries += next(attempts) > 0
            try:
                await act()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    self.errors += 1
                    raise
                return False
            return True

        await eventually(done, CALL_SECONDS)

    async def more_calls(self) -> None:
        enough = self.calls + CALLS_PER_SECOND
        await eventually(lambda: self.calls > enough, 20)

    async def run(self, ending: asyncio.Event) -> None:
        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                due = begun + number / CALLS_PER_SECOND
                try:
                    await asyncio.wait_for(ending.wait(), max(0.0, due - time.monotonic()))
                except TimeoutError:
                    group.create_task(self.call(number))
                else:
                    return


@pytest.mark.timeout(180)
async def test_g1_restarts_of_every_service_in_turn_reach_no_client(running_mesh: RunningMesh) -> None:
    async with running_mesh.client() as client:
        users = [(await client.create_user(f"load_{n}")).user_id for n in range(4)]
        for follower, followee in itertools.permutations(users, 2):
            await client.follow(follower, followee)
        load, ending = Load(client, users), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run(ending))
            for name in ("timeline_svc", "tweet_svc", "graph_svc", "fanout_svc"):
                await load.more_calls()
                old_pid = running_mesh.kill(name, signal.SIGTERM)
                await running_mesh.comes_back(name, old_pid)
            ending.set()
        print(f"\n{load.calls} calls, {load.retries} retries by the client, {load.errors} errors")
        assert load.errors == 0


class Apps:
    """Requests at a steady rate, by plain HTTP clients that keep their connections and try nothing again."""

    def __init__(self, people: list[Rest]) -> None:
        self.people = people
        self.answers: list[int | str] = []
        self._threads = ThreadPoolExecutor(4 * CALLS_PER_SECOND)
        self._sessions = local()

    def request(self, number: int) -> None:
        if not hasattr(self._sessions, "mine"):
            self._sessions.mine = requests.Session()
        person = replace(self.people[number % len(self.people)], session=self._sessions.mine)
        try:
            if number % 5:
                answer = person.call("GET", "/timeline/home")
            else:
                answer = person.call("POST", "/tweets", {"text": f"post {number}"})
            self.answers.append(answer.status_code)
        except requests.RequestException as error:
            self.answers.append(repr(error))

    async def run(self, ending: asyncio.Event) -> None:
        begun = time.monotonic()
        with self._threads:
            for number in itertools.count():
                due = begun + number / CALLS_PER_SECOND
                try:
                    await asyncio.wait_for(ending.wait(), max(0.0, due - time.monotonic()))
                except TimeoutError:
                    self._threads.submit(self.request, number)
                else:
                    return


@pytest.mark.timeout(180)
async def test_g1_restarts_of_everything_reach_no_app(running_mesh: RunningMesh) -> None:
    people = [new_user(running_mesh.folder, f"app_{n}")[0] for n in range(4)]
    apps, ending = Apps(people), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(apps.run(ending))
        for name in ("edge", "timeline_svc", "tweet_svc", "graph_svc", "fanout_svc", "edge"):
            enough = len(apps.answers) + CALLS_PER_SECOND
            await eventually(lambda enough=enough: len(apps.answers) > enough, 20)  # type: ignore[misc]
            old_pid = running_mesh.kill(name, signal.SIGTERM)
            await running_mesh.comes_back(name, old_pid)
        ending.set()
    print(f"\n{len(apps.answers)} requests: {Counter(apps.answers)}")
    assert set(apps.answers) == {200, 201}
