"""What tweet_svc asks of graph_svc: whether an account is registered, and who blocks whom.

Accounts never vanish, so a yes is kept. Blocks are asked for each time: they count from the very next call.
"""

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
        if user_id in self._known:
            return True
        with translated("graph_svc"):
            reply = await self._stub.BatchGetUsers(
                graph_pb2.BatchGetUsersRequest(user_ids=[user_id]),
                timeout=remaining(_CALL_SECONDS),
                metadata=self._credentials.metadata(),
            )
        if not reply.users:
            return False
        self._known[user_id] = None
        if len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)
        return True

    async def any_block(self, user_id: int, other_ids: Sequence[int]) -> bool:
        """Whether the user and any of the others (at least one) block each other, either way. Raises UnavailableError,
        and NotFoundError for a user who isn't registered."""
        with translated("graph_svc"):
            reply = await self._stub.CheckBlocks(
                graph_pb2.CheckBlocksRequest(user_id=user_id, other_ids=other_ids),
                timeout=remaining(_CALL_SECONDS),
                metadata=self._credentials.metadata(),
            )
        return bool(reply.blocked_by_ids or reply.blocked_ids)
