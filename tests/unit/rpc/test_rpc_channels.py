"""Channels between the cluster's processes."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from diptych.rpc.channels import open_channel, server_options


async def test_23_a_peer_that_is_slow_to_answer_is_connected() -> None:
    """A call failed at once where connecting took more than 200 ms: on a busy machine, or after a lost packet."""
    server = grpc.aio.server(options=server_options())
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            target.write(data)
        target.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)  # sleep: the delay under test
        back, forth = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, forth), carry(back, writer))

    slow = await asyncio.start_server(connected, "127.0.0.1", 0)
    channel = open_channel(f"127.0.0.1:{slow.sockets[0].getsockname()[1]}")
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await channel.close()
        slow.close()
        await server.stop(None)
