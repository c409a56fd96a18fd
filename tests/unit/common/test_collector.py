"""The garbage collector of a process that serves."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from diptych.common.collector import ROUND_S, keep_collecting
from diptych.rpc.channels import bind, new_server

CALLS = 40


def test_it_rests_while_a_worker_loads_and_works_from_then_on() -> None:
    code = (
        "import gc, diptych.common.collector as collector\n"
        "collector.hold_collector()\n"
        "for _ in range(3000): cycle = []; cycle.append(cycle)\n"
        "held = gc.isenabled(), gc.get_count()[0] > 2500\n"
        "collector.set_collector()\n"
        "print(*held, gc.isenabled(), gc.get_count()[0] < 100, gc.get_freeze_count() > 0, gc.get_threshold()[0])"
    )
    child = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True, timeout=300)
    assert child.stdout.split() == ["False", "True", "True", "True", "True", "50000"]


class Rounds:
    """A pause that ends so many times, and is then cancelled."""

    def __init__(self, number: int) -> None:
        self.left = number

    async def __call__(self, seconds: float) -> None:
        assert seconds == ROUND_S
        if not self.left:
            raise asyncio.CancelledError
        self.left -= 1


async def test_19_each_round_has_its_generation() -> None:
    """Old ones are searched rarely, and within an hour."""
    seen: list[int] = []
    with suppress(asyncio.CancelledError):
        await keep_collecting(Rounds(720), seen.append)
    assert [number for number, generation in enumerate(seen, 1) if generation == 2] == [360, 720]
    assert [number for number, generation in enumerate(seen, 1) if generation == 1] == [
        number for number in range(30, 720, 30) if number != 360
    ]
    assert seen.count(0) == 720 - 2 - 22


def left_of_calls() -> int:
    return sum(type(one).__qualname__ == "_HandlerCallDetails" for one in gc.get_objects())


@pytest.fixture
def held():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_19_what_calls_leave_is_gone_after_a_round(held) -> None:
    """With the thresholds of a worker nothing was searched for an hour of health probes."""
    server = new_server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            before = left_of_calls()
            for _ in range(CALLS):
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=60.0)
            if left_of_calls() - before < CALLS // 2:
                pytest.skip("this gRPC leaves no cycles")
            with suppress(asyncio.CancelledError):
                await keep_collecting(Rounds(1))
            assert left_of_calls() - before <= 2
    finally:
        await server.stop(None)
