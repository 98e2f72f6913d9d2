"""What fan-out asks of graph_svc: the followers of an author."""

from collections.abc import AsyncIterator, Sequence

import grpc

from mesh.channels import streaming, translated
from mesh.principals import Credentials
from starling.graph.v1 import graph_pb2, graph_pb2_grpc

_STREAM_SECONDS = 300.0


class Followers:
    """graph_svc's StreamFollowers. What is read ahead is bounded by gRPC's flow control."""

    def __init__(self, channel: grpc.aio.Channel, credentials: Credentials) -> None:
        self._stub = graph_pb2_grpc.GraphServiceStub(channel)
        self._credentials = credentials

    async def of(self, author_id: int) -> AsyncIterator[Sequence[int]]:
        """All followers, chunk by chunk. Raises NotFoundError for an unknown author, and UnavailableError."""
        with translated("graph_svc"):
            call = self._stub.StreamFollowers(
                graph_pb2.StreamFollowersRequest(author_id=author_id),
                timeout=_STREAM_SECONDS,
                metadata=self._credentials.metadata(),
            )
            async with streaming(call):
                async for reply in call:
                    yield reply.follower_ids
