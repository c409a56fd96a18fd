"""A client that leaves stops both workers at once, and nothing stays behind.

"At once": the step that runs is given up. It is held by a gate meanwhile, so the workers are idle only if it was."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from diptych.client import AsyncClient, RequestDeadlineError
from diptych_tests.clusters import GATED_STEP_TOKENS

pytestmark = pytest.mark.multiproc

LONG_PROMPT = 2 * GATED_STEP_TOKENS + 70
"""Tokens: three steps at least, on a machine of any speed."""
MANY = 1500
ANSWER_S = 300.0


@pytest.fixture
async def client(gated_cluster):
    async with AsyncClient(gated_cluster.grpc_address, timeout_s=ANSWER_S) as connected:
        yield connected


@pytest.fixture
def held(gated_cluster, gates):
    """held(worker, n): the worker takes n steps more. Opened after the test."""
    names = []

    def hold(name: str, after_steps: int) -> None:
        names.append(name)
        gates.hold(gated_cluster, name, after_steps=after_steps)

    yield hold
    for name in names:
        gates.open(name)


async def all_idle(cluster) -> None:
    for name in cluster.workers():
        await asyncio.to_thread(cluster.wait_idle_of, name)


async def test_client_leaves_while_decoding(client: AsyncClient, gated_cluster, gates, held, fresh_prompt):
    held("decode-0", 20)
    stream = client.stream(token_ids=fresh_prompt(80), max_tokens=MANY, temperature=0.0, ignore_eos=True)
    async with stream:
        async for _ in stream:
            await gates.wait_held("decode-0")
            break
    await all_idle(gated_cluster)


async def test_client_leaves_while_prefilling_and_the_next_request_is_served(
    client: AsyncClient, gated_cluster, gates, held, fresh_prompt
):
    options = {"max_tokens": 1, "ignore_eos": True, "local_prefill_max_tokens": 0}
    before = gated_cluster.steps()["prefill-0"]
    held("prefill-0", 1)
    task = asyncio.create_task(client.generate(token_ids=fresh_prompt(LONG_PROMPT), **options))
    await gates.wait_held("prefill-0", task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await all_idle(gated_cluster)
    assert gated_cluster.steps()["prefill-0"] == before + 2, "one step was computed, and one given up"
    gates.open("prefill-0")
    assert len((await client.generate(token_ids=fresh_prompt(8), **options)).token_ids) == 1


async def test_http_client_leaves_a_stream(gated_cluster, gates, held, fresh_prompt):
    body = {"prompt": fresh_prompt(80), "max_tokens": MANY, "temperature": 0, "ignore_eos": True, "stream": True}
    held("decode-0", 20)
    async with (
        httpx.AsyncClient(base_url=gated_cluster.http_url, timeout=ANSWER_S) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                await gates.wait_held("decode-0")
                break
    await all_idle(gated_cluster)


async def test_deadline_ends_a_request(client: AsyncClient, gated_cluster, held, fresh_prompt):
    held("decode-0", 20)
    with pytest.raises(RequestDeadlineError):
        await client.generate(token_ids=fresh_prompt(40), max_tokens=MANY, ignore_eos=True, timeout_s=3.0)
    await all_idle(gated_cluster)


async def test_a_request_that_was_left_gives_its_idempotency_key_back(gated_cluster, gates) -> None:
    ask: dict[str, Any] = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "idempotency_key": "left"}
    async with AsyncClient(gated_cluster.grpc_address, timeout_s=300.0) as client:
        gates.hold(gated_cluster, "decode-0", after_steps=5)
        try:
            stream = client.stream(**ask)
            async for _ in stream:
                break
            del stream
            await asyncio.to_thread(gated_cluster.wait_idle_of, "decode-0")
        finally:
            gates.open("decode-0")
        await client.generate(**ask | {"max_tokens": 4})


async def test_many_clients_leave_at_random_moments(client: AsyncClient, gated_cluster, fresh_prompt):
    async def leave_after(delay_s: float) -> None:
        task = asyncio.create_task(client.generate(token_ids=fresh_prompt(200), max_tokens=200, ignore_eos=True))
        await asyncio.sleep(delay_s)  # sleep: in any phase, whichever it is
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    rng = random.Random(7)
    await asyncio.gather(*(leave_after(0.02 * i * i * rng.random()) for i in range(12)))
    await all_idle(gated_cluster)
