"""Does a process answer? Each probe takes about a second at most, and never raises."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh import channels

Probe = Callable[[], Awaitable[bool]]
_TIMEOUT_SECONDS = 1.0
_OVERALL = health_pb2.HealthCheckRequest()


def grpc_service(target: str) -> Probe:
    """SERVING by the gRPC health check."""

    async def serves() -> bool:
        async with channels.connect(target) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(_OVERALL, timeout=_TIMEOUT_SECONDS, wait_for_ready=True)
            except grpc.aio.AioRpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    return serves


def http(address: str) -> Probe:
    """200 from /readyz."""
    host, _, port = address.rpartition(":")

    async def answered() -> bool:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(f"GET /readyz HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
            return (await reader.readline()).split()[1:2] == [b"200"]
        finally:
            writer.close()

    return _within_a_second(answered)


def valkey(host: str, port: int) -> Probe:
    """PONG: the append-only file is loaded."""

    async def pong() -> bool:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(b"PING\r\n")
            return (await reader.readline()).startswith(b"+PONG")
        finally:
            writer.close()

    return _within_a_second(pong)


def _within_a_second(ask: Probe) -> Probe:
    async def serves() -> bool:
        try:
            return await asyncio.wait_for(ask(), _TIMEOUT_SECONDS)
        except (OSError, TimeoutError):
            return False

    return serves
