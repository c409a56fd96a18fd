"""Requests that cannot be read are counted, apart from those that can."""

from __future__ import annotations

import grpc
import httpx
import pytest

from diptych.router.api.fake import MODEL, FakeRouterApi, hello_script
from diptych.router.api.grpc.service import SERVICE
from diptych.router.observe.metrics import RouterMetrics
from diptych.router.server import ApiServers
from diptych.rpc.channels import open_channel
from diptych.rpc.v1 import router_pb2

WAIT_S = 60.0
CHAT = "/v1/chat/completions"
GOOD = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}

grpc.aio.init_grpc_aio()  # its poller thread runs as long as the process; it must not count as a leak of the first test


async def test_5_6_a_body_that_cannot_be_read_is_counted_by_reason() -> None:
    router_api, metrics = FakeRouterApi(hello_script()), RouterMetrics()
    servers = ApiServers("127.0.0.1", 0, 0)

    def counted() -> dict[str, float]:
        return metrics.totals()["unparsed_requests"]

    try:
        addresses = await servers.start(router_api, metrics)
        async with httpx.AsyncClient(base_url=f"http://{addresses.http}", timeout=WAIT_S) as client:
            assert (await client.post(CHAT, json=GOOD)).status_code == 200
            assert counted() == {}
            for body, status in ((b"{", 400), (b"[]", 400), (b'{"messages": 1}', 400), (b"x" * (9 << 20), 413)):
                assert (await client.post(CHAT, content=body)).status_code == status
            zipped = {"content-encoding": "gzip"}
            assert (await client.post("/v1/completions", content=b"x", headers=zipped)).status_code == 415
            assert (await client.post("/v1/responses", json={"input": 1})).status_code == 400
        async with open_channel(addresses.grpc) as channel:
            generate = channel.unary_stream(
                f"/{SERVICE}/Generate", response_deserializer=router_pb2.GenerateResponse.FromString
            )
            with pytest.raises(grpc.aio.AioRpcError):
                await anext(aiter(generate(b"\xff", timeout=WAIT_S)))
    finally:
        await servers.stop(1.0)
    found = counted()
    assert sum(found.values()) == 7
    assert found["INVALID_ARGUMENT"] == 5
