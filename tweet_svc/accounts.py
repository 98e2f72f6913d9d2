"""What tweet_svc asks of graph_svc: whether an account is registered, and who blocks whom.

Accounts never vanish, so a yes is kept. Blocks are asked for each time: they count from the very next call.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

import grpc

from mesh.channels import translated
from mesh.deadlines import remaining
from mesh.principals import Credentials
from starling.graph.v1 import graph_pb2, graph_pb2_grpc

_KNOWN_MAX = 100_000
_CALL_SECONDS = 0.5


class Accounts:
    """Remembers a bounded number of accounts that exist."""

    def __init__(self, channel: grpc.aio.Channel, credentials: Credentials) -> None:
        self._stub = graph_pb2_grpc.GraphServiceStub(channel)
        self._credentials = credentials
        self._known: OrderedDict[int, None] = OrderedDict()

    async def exists(self, user_id: int) -> bool:
        """Whether a user is registered. Raises UnavailableError."""
        return not await self._unknown([user_id])

    async def _unknown(self, user_ids: Sequence[int]) -> set[int]:
        """Which of these (at most 100) aren't registered."""
        asked = {*user_ids} - self._known.keys()
        if asked:
            with translated("graph_svc"):
                reply = await self._stub.BatchGetUsers(
                    graph_pb2.BatchGetUsersRequest(user_ids=sorted(asked)),
                    timeout=remaining(_CALL_SECONDS),
                    metadata=self._credentials.metadata(),
                )
            self._known.update(dict.fromkeys(user.user_id for user in reply.users))
            while len(self._known) > _KNOWN_MAX:
                self._known.popitem(last=False)
            asked -= {user.user_id for user in reply.users}
        return asked

    async def refused(self, author_id: int, user_ids: Sequence[int]) -> tuple[set[int], set[int]]:
        """Of users (at most 100) who want to do something with an author's tweet: who isn't registered, and who blocks
        the author or is blocked. Raises UnavailableError."""
        others = sorted({*user_ids} - {author_id})
        unknown, blocks = await asyncio.gather(self._unknown(user_ids), self._blocks(author_id, others))
        return unknown, {*blocks.blocked_by_ids, *blocks.blocked_ids}

    async def any_block(self, user_id: int, other_ids: Sequence[int]) -> bool:
        """Whether the user and any of the others (at least one) block each other, either way. Raises UnavailableError,
        and NotFoundError for a user who isn't registered."""
        reply = await self._blocks(user_id, other_ids)
        return bool(reply.blocked_by_ids or reply.blocked_ids)

    async def _blocks(self, user_id: int, other_ids: Sequence[int]) -> graph_pb2.CheckBlocksResponse:
        if not other_ids:
            return graph_pb2.CheckBlocksResponse()
        with translated("graph_svc"):
            return await self._stub.CheckBlocks(
                graph_pb2.CheckBlocksRequest(user_id=user_id, other_ids=other_ids),
                timeout=remaining(_CALL_SECONDS),
                metadata=self._credentials.metadata(),
            )
