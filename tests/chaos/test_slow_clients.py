"""HTTP clients that read nothing, close one half, or vanish before the first token: buffers are bounded, both pools let
go, and others go on."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
from pathlib import Path

import psutil
import pytest

from diptych_tests import waiting
from diptych_tests.fake_model_cluster import VOCAB, FakeModelCluster, ask, body_of, check, fake_model_cluster
from diptych_tests.router_fleet import make_model_folder

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
SLOW, TOKENS = 20, 600
MOST_GROWTH = 50 << 20


def connect(cluster: FakeModelCluster, *, receive_bytes: int = 0) -> socket.socket:
    sock = socket.socket()
    if receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    host, port = cluster.http_url.removeprefix("http://").split(":")
    sock.connect((host, int(port)))
    return sock


def send(sock: socket.socket, body: dict[str, object]) -> None:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    sock.sendall(head.encode() + content)


@pytest.mark.parametrize("way", [pytest.param("vanishes", marks=pytest.mark.slow), "closes its half"])
async def test_a_client_that_leaves_before_the_first_token(tmp_path: Path, way: str) -> None:
    """Over TCP the two are one until somebody writes: both pools let go, though the steps that would show it are still held."""
    async with fake_model_cluster(tmp_path) as cluster:
        await cluster.hold("prefill-0", after_steps=1)
        with connect(cluster) as sock:
            send(sock, body_of(ask(), stream=True))
            await cluster.gates.wait_held("prefill-0")
            if way == "vanishes":
                sock.close()
            else:
                sock.shutdown(socket.SHUT_WR)
            await cluster.idle_again()
        cluster.gates.open("prefill-0")
        async with cluster.client() as client:
            check(await client.generate(**ask(1)), ask(1))


@pytest.mark.slow
async def test_twenty_clients_that_read_nothing(tmp_path: Path) -> None:
    """Long streams with log probabilities: the router's memory stays, and another client gets its answers."""
    settings = {"num_blocks": 8192, "fake": {"max_model_len": 8192}}
    folder = make_model_folder(tmp_path / "long", VOCAB, 8192)
    async with fake_model_cluster(tmp_path, model_folder=folder, **settings) as cluster, cluster.client() as client:
        check(await client.generate(**ask()), ask())
        router = psutil.Process(cluster.processes["router"].pid)
        before = router.memory_info().rss
        socks = [connect(cluster, receive_bytes=4096) for _ in range(SLOW)]
        try:
            for number, sock in enumerate(socks):
                send(sock, body_of(ask(100 + number, max_tokens=TOKENS), stream=True, logprobs=5))

            async def computed() -> bool:
                stats = await asyncio.to_thread(cluster.stats, "decode-0")
                return stats["num_running"] == 0

            async def generated() -> bool:
                return await cluster.metric("diptych_generation_tokens_total") >= 20 * 100

            await waiting.until(generated, "the streams have begun")
            for number in range(1, 6):
                check(await client.generate(**ask(number)), ask(number))
            await waiting.until(computed, "no stream is computed any more: each ended, or was given up as too slow")
            assert router.memory_info().rss - before < MOST_GROWTH
        finally:
            for sock in socks:
                sock.close()
        await cluster.idle_again()
        check(await client.generate(**ask(50)), ask(50))
