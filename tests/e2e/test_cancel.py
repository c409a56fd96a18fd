"""A client that leaves stops both workers at once, and nothing stays behind."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from diptych.client import AsyncClient, RequestDeadlineError

pytestmark = pytest.mark.multiproc


async def idle_within(cluster, deadline_s: float) -> float:
    return await asyncio.to_thread(cluster.wait_idle, deadline_s=deadline_s)


async def test_client_leaves_while_decoding(client: AsyncClient, cluster, fresh_prompt):
    stream = client.stream(token_ids=fresh_prompt(80), max_tokens=1500, temperature=0.0, ignore_eos=True)
    async with stream:
        async for delta in stream:
            if delta.offset >= 5:
                break
    assert await idle_within(cluster, 3.0) < 1.5


async def test_client_leaves_while_prefilling(client: AsyncClient, cluster, fresh_prompt):
    task = asyncio.create_task(client.generate(token_ids=fresh_prompt(1500), max_tokens=8, ignore_eos=True))
    await asyncio.sleep(1.0)
    assert not cluster.idle("prefill-0")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await idle_within(cluster, 3.0) < 1.5


async def test_next_request_starts_soon_after_a_cancelled_long_prompt(client: AsyncClient, cluster, fresh_prompt):
    task = asyncio.create_task(client.generate(token_ids=fresh_prompt(1800), max_tokens=8, ignore_eos=True))
    await asyncio.sleep(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    began = time.monotonic()
    answer = await client.generate(token_ids=fresh_prompt(8), max_tokens=1, local_prefill_max_tokens=0)
    assert len(answer.token_ids) == 1
    assert time.monotonic() - began < 2.5
    await idle_within(cluster, 3.0)


async def test_http_client_leaves_a_stream(cluster, fresh_prompt):
    body = {"prompt": fresh_prompt(80), "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(base_url=cluster.http_url, timeout=60.0) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        seen = 0
        async for line in response.aiter_lines():
            seen += line.startswith("data: ")
            if seen > 4:
                break
    assert await idle_within(cluster, 3.0) < 1.5


async def test_deadline_ends_a_request(client: AsyncClient, cluster, fresh_prompt):
    with pytest.raises(RequestDeadlineError):
        await client.generate(token_ids=fresh_prompt(40), max_tokens=1500, ignore_eos=True, timeout_s=2.0)
    await idle_within(cluster, 3.0)


async def test_many_clients_leave_at_random_moments(client: AsyncClient, cluster, fresh_prompt):
    async def leave_after(delay_s: float) -> None:
        task = asyncio.create_task(client.generate(token_ids=fresh_prompt(200), max_tokens=200, ignore_eos=True))
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(leave_after(0.02 * i * i) for i in range(12)))
    await idle_within(cluster, 4.0)
