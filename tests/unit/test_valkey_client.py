"""What the client for one server promises: one connection for all, which outlives its callers but not its server."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from mesh.errors import UnavailableError
from mesh.valkey import Valkey
from tests.conftest import running_valkey
from tests.waiting import eventually


@pytest.fixture
async def valkey(valkey_url: str, key_prefix: str) -> AsyncIterator[Valkey]:
    client = Valkey(valkey_url, key_prefix=key_prefix)
    yield client
    await client.close()


async def connections(valkey: Valkey) -> int:
    """Of the same kind as this one's."""
    name = valkey.key_prefix.rstrip(":")
    listed = (await valkey.call("CLIENT", "LIST")).decode()
    return int(sum(f"name={name} " in line for line in listed.splitlines()))


async def test_all_calls_share_a_connection_and_each_gets_its_own_reply(valkey: Valkey) -> None:
    await valkey.call("CLIENT", "SETNAME", valkey.key_prefix.rstrip(":"))
    key = f"{valkey.key_prefix}n"
    calls = [valkey.pipeline([("SET", f"{key}{n}", n), ("GET", f"{key}{n}")], atomic=n % 2 == 0) for n in range(200)]
    assert [reply[1] for reply in await asyncio.gather(*calls)] == [str(n).encode() for n in range(200)]
    assert await connections(valkey) == 1


async def test_who_goes_leaves_the_others_their_replies(valkey: Valkey) -> None:
    key = f"{valkey.key_prefix}n"
    gone = asyncio.create_task(valkey.call("INCR", key))
    stays = [asyncio.create_task(valkey.call("INCR", key)) for _ in range(3)]
    await asyncio.wait([gone], timeout=0)
    gone.cancel()
    assert max(await asyncio.gather(*stays)) >= 3
    assert valkey.is_connected


async def test_who_waits_in_the_server_holds_up_nobody(valkey: Valkey) -> None:
    waiting = asyncio.create_task(valkey.call_blocking("BLPOP", f"{valkey.key_prefix}list", 0.9))
    await valkey.call("RPUSH", f"{valkey.key_prefix}list", "here")
    assert (await waiting)[1] == b"here"


async def test_a_server_that_is_started_again_is_another_life_also_to_who_asks_nothing_else(tmp_path: Path) -> None:
    with running_valkey(tmp_path) as url:
        client = Valkey(url)
        before = await client.life()
        assert await client.life() == before
    await eventually(lambda: not client.is_connected)
    with pytest.raises(UnavailableError):
        await client.life()
    with running_valkey(tmp_path):

        async def is_another() -> bool:
            try:
                return await client.life() != before
            except UnavailableError:
                return False

        await eventually(is_another)
        await client.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[str]:
    with running_valkey(tmp_path) as url:
        yield url


async def test_a_server_that_hangs_costs_one_time_out_and_then_none_for_a_while(own_server: str) -> None:
    client = Valkey(own_server, timeout_seconds=0.3)
    pid = int((await client.call("INFO", "server")).decode().partition("process_id:")[2].partition("\r")[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        outcomes = await asyncio.gather(*(client.ping() for _ in range(5)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [UnavailableError] * 5
        with pytest.raises(UnavailableError, match=r"Valkey doesn't answer\.$"):
            await client.ping()
    finally:
        os.kill(pid, signal.SIGCONT)

    async def answers() -> bool:
        try:
            await client.ping()
        except UnavailableError:
            return False
        return True

    await eventually(answers)
    await client.close()
