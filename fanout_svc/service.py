"""FanoutService: how far behind fan-out is, and what it delivers to whom."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from fanout_svc.deliveries import Deliveries
from fanout_svc.worker import Figures
from mesh.eventlog.port import Consumer, LagReader
from mesh.principals import Kind
from mesh.server import SERVICES, Allowed
from starling.fanout.v1 import fanout_pb2, fanout_pb2_grpc

ALLOWED: Allowed = {
    "/starling.fanout.v1.FanoutService/GetFanoutStatus": frozenset({Kind.OPERATOR, Kind.SERVICE}),
    "/starling.fanout.v1.FanoutService/StreamDeliveries": SERVICES,
}
_POLL_SECONDS = 0.5
_STREAM_SECONDS = 8.0
"""A stream of deliveries ends after so long, within the grace that an old connection has; the caller has opened another
by then."""


class FanoutService(fanout_pb2_grpc.FanoutServiceServicer):
    """See the proto."""

    def __init__(self, consumer: Consumer, lag: LagReader, figures: Figures, deliveries: Deliveries) -> None:
        self._consumer = consumer
        self._lag = lag
        self._figures = figures
        self._deliveries = deliveries
        self.stopping = asyncio.Event()
        """Set when the process stops: streams end then, so that nothing waits for them."""

    async def GetFanoutStatus(
        self, request: fanout_pb2.GetFanoutStatusRequest, context: Any
    ) -> fanout_pb2.GetFanoutStatusResponse:
        """See the proto."""
        p50, p95, p99 = self._figures.percentiles(0.50, 0.95, 0.99)
        return fanout_pb2.GetFanoutStatusResponse(
            partitions=[
                fanout_pb2.PartitionLag(
                    topic=lag.topic, partition=lag.partition, lag_messages=lag.messages, lag_seconds=lag.seconds
                )
                for lag in await self._lag.lag()
            ],
            dead_letters=await self._consumer.dead_letters(),
            worker=fanout_pb2.WorkerStatus(
                name=self._consumer.name,
                events=self._figures.events,
                deliveries=self._figures.deliveries,
                deliveries_to_lists=self._figures.deliveries_to_lists,
                retries=self._figures.retries,
                drained_buckets=self._figures.drained_buckets,
                delay=fanout_pb2.DelayPercentiles(
                    p50_seconds=p50,
                    p95_seconds=p95,
                    p99_seconds=p99,
                    max_seconds=self._figures.delay_max_seconds,
                ),
            ),
        )

    async def StreamDeliveries(
        self, requests: AsyncIterator[fanout_pb2.StreamDeliveriesRequest], context: Any
    ) -> AsyncIterator[fanout_pb2.StreamDeliveriesResponse]:
        """See the proto."""
        with self._deliveries.listening() as listener:
            following = asyncio.create_task(listener.follow(requests))
            end = time.monotonic() + _STREAM_SECONDS
            try:
                while (left := end - time.monotonic()) > 0 and not self.stopping.is_set():
                    if following.done():
                        following.result()  # Raises what was wrong with a request.
                    with suppress(TimeoutError):
                        yield await asyncio.wait_for(listener.take(), min(left, _POLL_SECONDS))
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
