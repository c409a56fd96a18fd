"""The end of a router: running answers end whole, or with a typed error; ports that are taken are named."""

from __future__ import annotations

import asyncio
import socket

import grpc.aio
import httpx
import pytest

from diptych.client import AsyncClient, NoWorkerError, RetryPolicy, UnreachableError, WorkerLostError
from diptych.common.errors import ConfigError
from diptych.router import server
from diptych.router.api.fake import FakeRouterApi, hello_script
from diptych.router.requests.messages import TokenEvent
from diptych.router.server import ApiServers, drain
from diptych_tests import waiting

BODY = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
WAIT_S = 60.0

grpc.aio.init_grpc_aio()  # its poller thread runs as long as the process; it must not count as a leak of the first test


@pytest.mark.parametrize("ends", [True, False])
async def test_draining(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CLOSE_S", WAIT_S)
    gate = asyncio.Event()
    after = hello_script()[1:] if ends else [WorkerLostError("the router stops")]
    router_api = FakeRouterApi([TokenEvent(0, (10,), "Hello"), gate, *after])
    servers = ApiServers("127.0.0.1", 0, 0)
    addresses = await servers.start(router_api, router_api.metrics)
    async with (
        httpx.AsyncClient(base_url=f"http://{addresses.http}", timeout=WAIT_S) as http,
        AsyncClient(addresses.grpc, timeout_s=WAIT_S, retry=RetryPolicy(max_tries=1)) as client,
    ):
        posted = asyncio.create_task(http.post("/v1/chat/completions", json=BODY))
        called = asyncio.ensure_future(client.generate(prompt="Hi"))
        await waiting.until(lambda: router_api.running == 2)

        running_at_close = -1

        async def close() -> None:
            nonlocal running_at_close
            running_at_close = router_api.running
            gate.set()

        async def end_once_draining() -> None:
            await refused(addresses.http)
            gate.set()

        ending = asyncio.create_task(end_once_draining() if ends else asyncio.sleep(0))
        await drain(servers, close, asyncio.Event(), drain_s=WAIT_S if ends else 0.05)
        await ending
        answer = await posted
        assert running_at_close == (0 if ends else 2)
        if ends:
            assert answer.text.endswith("data: [DONE]\n\n")
            assert (await called).text == "Hello there"
        else:
            assert "the router stops" in answer.text
            assert "[DONE]" not in answer.text
            with pytest.raises(WorkerLostError):
                await called
        with pytest.raises((UnreachableError, NoWorkerError)):
            await client.generate(prompt="Hi")


async def refused(address: str) -> None:
    """Until the address refuses connections."""
    host, _, port = address.rpartition(":")

    async def nobody() -> bool:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return True
        writer.close()
        return False

    await waiting.until(nobody)


async def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}.*cannot be listened on"):
            ApiServers("127.0.0.1", port, 0)
        with pytest.raises(ConfigError, match=f"{port}.*cannot be listened on"):
            ApiServers("127.0.0.1", 0, port)


async def test_stopping_what_never_started() -> None:
    await ApiServers("127.0.0.1", 0, 0).stop(0.1)
