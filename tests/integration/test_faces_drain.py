"""The end of a router: running answers end whole, or with a typed error; ports that are taken are named."""

from __future__ import annotations

import asyncio
import socket

import grpc.aio
import httpx
import pytest

from diptych.client import AsyncClient, NoWorkerError, UnreachableError, WorkerLostError
from diptych.common.errors import ConfigError
from diptych.router.fake_door import FakeDoor, hello_script
from diptych.router.messages import TokenEvent
from diptych.router.server import Faces, drain

BODY = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
WAIT_S = 5.0

grpc.aio.init_grpc_aio()  # its poller thread lives as long as the process; it must not look like a leak of the first test


async def started(faces: Faces, door: FakeDoor, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while door.running < count:  # noqa: ASYNC110 - the fake has no event for it
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("ends", [True, False])
async def test_draining(ends: bool) -> None:
    gate = asyncio.Event()
    after = hello_script()[1:] if ends else [WorkerLostError("the router stops")]
    door = FakeDoor([TokenEvent(0, (10,), "Hello"), gate, *after])
    faces = Faces("127.0.0.1", 0, 0)
    addresses = await faces.start(door, door.metrics)
    async with (
        httpx.AsyncClient(base_url=f"http://{addresses.http}", timeout=WAIT_S) as http,
        AsyncClient(addresses.grpc, timeout_s=WAIT_S) as client,
    ):
        posted = asyncio.create_task(http.post("/v1/chat/completions", json=BODY))
        called = asyncio.ensure_future(client.generate(prompt="Hi"))
        await started(faces, door, 2)

        async def close() -> None:
            gate.set()

        if ends:
            asyncio.get_running_loop().call_later(0.2, gate.set)
        await drain(faces, close, asyncio.Event(), drain_s=3.0 if ends else 0.3)
        answer = await posted
        if ends:
            assert answer.text.endswith("data: [DONE]\n\n")
            assert (await called).text == "Hello there"
        else:
            assert "the router stops" in answer.text
            assert "[DONE]" not in answer.text
            with pytest.raises(WorkerLostError):
                await called
        with pytest.raises((UnreachableError, NoWorkerError)):
            await client.generate(prompt="Hi", timeout_s=0.5)


async def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}.*cannot be listened on"):
            Faces("127.0.0.1", port, 0)
        with pytest.raises(ConfigError, match=f"{port}.*cannot be listened on"):
            Faces("127.0.0.1", 0, port)


async def test_stopping_what_never_started() -> None:
    await Faces("127.0.0.1", 0, 0).stop(0.1)
