"""The caches that services share: bodies by version, and viewers' versions by lease."""

from collections.abc import AsyncIterator

import pytest

from mesh import caches
from mesh.caches.bodies import Bodies
from mesh.caches.viewer_versions import ViewerVersions
from mesh.valkey import Valkey
from starling.tweet.v1.tweet_pb2 import Tweet


@pytest.fixture
async def valkey(valkey_url: str, key_prefix: str) -> AsyncIterator[Valkey]:
    client = Valkey(valkey_url, key_prefix=key_prefix, libraries=[caches.LIBRARY])
    yield client
    await client.close()


async def version(versions: ViewerVersions, valkey: Valkey) -> int | None:
    return versions.parse(await valkey.call(*versions.get_command(5)))


async def test_the_highest_version_of_a_body_stays(valkey: Valkey) -> None:
    bodies = Bodies(valkey)
    old, new = Tweet(tweet_id=1, version=9, text="old"), Tweet(tweet_id=1, version=10, text="new")
    await bodies.put([new])
    await bodies.put([old])
    assert await bodies.get([1, 2]) == {1: new}


async def test_a_slow_reader_cannot_bring_a_deleted_body_back(valkey: Valkey) -> None:
    bodies = Bodies(valkey)
    read_before = Tweet(tweet_id=1, version=1, text="secret")
    await bodies.put_deleted(1, 2)
    await bodies.put([read_before])
    assert await bodies.get([1]) == {1: None}
    assert await valkey.call("TTL", f"{valkey.key_prefix}tweet:1") > 0


async def test_a_version_is_filled_by_who_has_the_lease(valkey: Valkey) -> None:
    versions = ViewerVersions(valkey)
    assert await version(versions, valkey) is None
    lease = await versions.lease(5)
    assert lease
    assert await versions.lease(5) is None
    assert await version(versions, valkey) is None
    await versions.fill(lease, 7)
    assert await version(versions, valkey) == 7
    assert await versions.lease(5) is None


async def test_a_change_ends_copies_and_leases(valkey: Valkey) -> None:
    versions = ViewerVersions(valkey)
    await version(versions, valkey)
    lease = await versions.lease(5)
    assert lease
    await versions.invalidate([5])
    await versions.fill(lease, 7)  # Read before the change, written after: too late.
    assert await version(versions, valkey) is None
    again = await versions.lease(5)
    assert again
    await versions.fill(again, 8)
    await versions.invalidate([5])
    assert await version(versions, valkey) is None


async def test_a_copy_of_another_server_process_is_no_copy(valkey: Valkey) -> None:
    versions = ViewerVersions(valkey)
    await version(versions, valkey)
    lease = await versions.lease(5)
    assert lease
    await versions.fill(lease, 7)
    valkey.run_id = "restarted"
    assert await version(versions, valkey) is None
    assert await versions.lease(5) is not None
