"""Copies of viewers' versions: `viewer_version:<viewer>`, for 60 s, right from the very next read after a change.

A reader that misses takes a lease, reads graph_svc, and fills only while it still has the lease. A change commits,
then deletes copy or lease, then replies: whoever reads after that reply reads graph_svc afresh.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from mesh.valkey import Command, Valkey

TTL_SECONDS = 60
LEASE_MS = 5_000


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to fill one copy, taken from the server process `run_id`."""

    viewer_id: int
    token: str
    run_id: str


class ViewerVersions:
    """All methods that ask Valkey raise UnavailableError."""

    def __init__(self, valkey: Valkey) -> None:
        self._valkey = valkey

    def _key(self, viewer_id: int) -> str:
        return f"{self._valkey.key_prefix}viewer_version:{viewer_id}"

    def _run_id(self, viewer_id: int) -> str:
        return self._valkey.run_id_of(self._key(viewer_id))

    def get_command(self, viewer_id: int) -> Command:
        """To be sent along with other commands; `parse` reads the reply."""
        return ("GET", self._key(viewer_id))

    def parse(self, viewer_id: int, reply: bytes | None) -> int | None:
        """The version, or None for a miss: no copy, a lease, or a copy that another server process made."""
        kind, _, copy = (reply or b"").partition(b":")
        run_id, _, version = copy.partition(b":")
        return int(version) if kind == b"v" and run_id.decode() == self._run_id(viewer_id) else None

    async def lease(self, viewer_id: int) -> Lease | None:
        """The right to fill; None when another reader has it."""
        lease = Lease(viewer_id, secrets.token_hex(8), self._run_id(viewer_id))
        taken = await self._valkey.fcall(
            "cache_lease_version_v1", [self._key(viewer_id)], lease.token, lease.run_id, LEASE_MS
        )
        return lease if taken else None

    async def fill(self, lease: Lease, version: int) -> None:
        """Write the copy, if the lease still stands."""
        await self._valkey.fcall(
            "cache_fill_version_v1", [self._key(lease.viewer_id)], lease.token, lease.run_id, version, TTL_SECONDS
        )

    async def invalidate(self, viewer_ids: Sequence[int]) -> None:
        """Delete copies and leases."""
        if viewer_ids:
            await self._valkey.call("DEL", *(self._key(viewer_id) for viewer_id in viewer_ids))
