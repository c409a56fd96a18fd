"""kill -9 of the router: clients see a broken connection and no end, workers let go, and a new router knows the cluster again."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from diptych_tests import waiting
from diptych_tests.fake_model_cluster import FakeModelCluster, ask, body_of, check, expected, fake_model_cluster

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
STREAMS = 20
ANSWER_S = 300.0
DETACH_S, FREE_S = 1.0, 25.0
"""Until workers have let go of a router's answers: this long another router may ask for them; and on a busy machine."""


async def lines_of(cluster: FakeModelCluster, number: int) -> AsyncIterator[str]:
    body = body_of(ask(number, max_tokens=60), stream=True)
    async with (
        httpx.AsyncClient(base_url=cluster.http_url, timeout=ANSWER_S) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


async def test_a_killed_router_ends_no_stream_well_and_the_next_one_serves(tmp_path: Path) -> None:
    async with fake_model_cluster(tmp_path, decode=2, detach_s=DETACH_S) as cluster:
        for name in ("decode-0", "decode-1"):
            await cluster.hold(name, after_steps=12)
        seen: dict[int, list[str]] = {number: [] for number in range(STREAMS)}

        async def read(number: int) -> None:
            async for line in lines_of(cluster, number):
                seen[number].append(line)

        streams = [asyncio.create_task(read(number)) for number in range(STREAMS)]
        await waiting.until(lambda: all(cluster.gates.held(name) for name in ("decode-0", "decode-1")))
        await waiting.until(lambda: all(seen.values()) or any(stream.done() for stream in streams))
        cluster.kill_hard("router")
        ends = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(end, httpx.TransportError) for end in ends), ends
        for number, lines in seen.items():
            chunks = [json.loads(line) for line in lines]  # a [DONE] would be no JSON
            assert not any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])
            tokens = [
                token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or ()
            ]
            assert tokens == expected(ask(number, max_tokens=60))[: len(tokens)]
        # Their steps are still held: only the lost router can end these requests.
        assert await cluster.idle_again(deadline_s=ANSWER_S) < FREE_S
        for name in ("decode-0", "decode-1"):
            cluster.gates.open(name)

        cluster.start("router")
        await cluster.until_usable()
        warm = ask(1000)
        async with cluster.client() as client:
            check(await client.generate(**warm), warm)

            async def known() -> bool:
                answer = await client.generate(**warm)
                check(answer, warm)
                return answer.explanation.predicted_cached_tokens == answer.usage.cached_tokens == 144

            await waiting.until(known, "the index knows what workers have cached")
            cluster.kill_hard("router")
            cluster.start("router")
            await cluster.until_usable()
            await waiting.until(known, "the next router's index knows it, too")
        await cluster.idle_again()


@pytest.mark.slow
async def test_a_router_finds_all_workers_after_each_of_twenty_restarts(tmp_path: Path) -> None:
    """Also where the store lost everything meanwhile."""
    async with fake_model_cluster(tmp_path, prefill=2, decode=2) as cluster:
        for number in range(20):
            cluster.kill_hard("router")
            if number % 5 == 4:
                cluster.kill_hard("redis")
                cluster.start("redis")
            cluster.start("router")
            await cluster.until_usable()
            async with cluster.client() as client:
                check(await client.generate(**ask(number)), ask(number))
        await cluster.idle_again()
