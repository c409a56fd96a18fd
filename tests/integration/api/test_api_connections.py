"""Connections with malformed or partial requests, at a real server."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import grpc
import grpc.aio
import pytest

from diptych.router.api.fake import FakeRouterApi, hello_script
from diptych.router.api.http.options import HttpOptions
from diptych_tests.http_api import WAIT_S, http, serving

CHAT = "/v1/chat/completions"
ASK = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()


async def said_to(url: str, data: bytes) -> bytes:
    """All that the server sends until it closes."""
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(data)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    return answer


@pytest.mark.parametrize("data", [b"", b"P", b"POST /v1/chat/comp"])
async def test_connections_that_send_nothing_or_half_a_head_are_closed(data: bytes) -> None:
    async with serving(FakeRouterApi([]), HttpOptions(head_timeout_s=0.1)) as url:
        answer = await said_to(url, data)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_content_length_with_transfer_encoding_is_refused_and_closed(order: tuple[int, int]) -> None:
    router_api = FakeRouterApi(hello_script())
    both = (b"Content-Length: 6\r\n", b"Transfer-Encoding: chunked\r\n")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n" + both[order[0]] + both[order[1]] + b"\r\n"
    smuggled = b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"
    async with serving(router_api) as url:
        answer = await said_to(url, head + b"0\r\n\r\n" + smuggled)
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answer.lower()
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "ambiguous_framing"
    assert router_api.prepared == 0


def unchunked(body: bytes) -> bytes:
    """Asserts that the framing is whole."""
    found = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        assert body[length : length + 2] == b"\r\n"
        if not length:
            assert body == b"\r\n"
            return found
        found, body = found + body[:length], body[length + 2 :]


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_streams_framing_is_that_of_the_clients_version(version: bytes) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
    lines = (
        b"POST %b HTTP/%b" % (CHAT.encode(), version),
        b"Host: a",
        b"Connection: close",
        b"Content-Length: %d" % len(body),
    )
    async with serving(FakeRouterApi(hello_script())) as url:
        answer = await said_to(url, b"\r\n".join((*lines, b"", body)))
    head, _, said = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert (b"transfer-encoding: chunked" in head.lower()) == (version == b"1.1")
    stream = unchunked(said) if version == b"1.1" else said
    parts = stream.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]
    assert (
        "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]) == "Hello there"
    )
    assert len(chunks) > 3


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "identity, gzip", "GZIP"])
async def test_a_compressed_body_is_415(encoding: str) -> None:
    router_api = FakeRouterApi(hello_script())
    async with http(router_api) as client:
        for path in (CHAT, "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"):
            answer = await client.post(path, content=gzip.compress(ASK), headers={"content-encoding": encoding})
            error: dict[str, Any] = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (415, "invalid_request_error", "body_encoding")
            assert encoding in error["message"]
        plain = await client.post(CHAT, content=ASK, headers={"content-encoding": "identity"})
        assert plain.status_code == 200


async def test_a_grpc_client_at_the_http_port_gets_an_error_that_says_so() -> None:
    async with serving(FakeRouterApi([])) as url, grpc.aio.insecure_channel(url.removeprefix("http://")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/diptych.rpc.v1.RouterService/ListModels")(b"", timeout=WAIT_S)
    assert "http1.x server" in str(caught.value.details())


async def test_an_offer_of_http2_is_answered_in_http1() -> None:
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"}
    async with http(FakeRouterApi(hello_script())) as client:
        assert (await client.post(CHAT, content=ASK, headers=offer)).status_code == 200
