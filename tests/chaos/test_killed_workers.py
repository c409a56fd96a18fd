"""kill -9 on either side: an answer or a typed error, never a hang, never a 200 that is cut; and the cluster serves
again.

A step gate holds a request at the point at which a worker is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random

import httpx
import pytest

from diptych.cli.up.processes import ProcessIdentity
from diptych.client import AsyncClient, DiptychError
from diptych_tests.clusters import GATED_STEP_TOKENS

pytestmark = pytest.mark.multiproc

LONG_PROMPT = GATED_STEP_TOKENS + 70
"""Tokens: more than one step may compute, on a machine of any speed."""
ANSWER_S, AGAIN_S = 300.0, 240.0
"""Deadlines of what takes seconds on an idle machine."""


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest, cluster_module):
    """Every test begins with a cluster that serves and holds nothing, whatever became of the one before."""
    if "gated_cluster" not in request.fixturenames:
        yield
        return
    cluster, gates = request.getfixturevalue("gated_cluster"), request.getfixturevalue("gates")
    cluster_module.wait_until(lambda: serves(cluster), deadline_s=AGAIN_S, what=f"it serves\n{cluster.log()[-3000:]}")
    yield
    for name in cluster.workers():
        gates.open(name)


def serves(cluster) -> bool:
    children = cluster.state.children
    if {child.name for child in children} < {"redis", "router", "prefill-0", "decode-0"}:
        return False
    if not all(ProcessIdentity(child.pid, child.start_time).alive() for child in children):
        return False
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{cluster.http_url}/ready", timeout=300.0).status_code == 200
    return False


def fresh_prompt(length: int) -> list[int]:
    rng = random.SystemRandom()
    return [rng.randrange(1000, 40_000) for _ in range(length)]


async def test_prefill_killed_in_mid_request(gated_cluster, gates):
    prompt = fresh_prompt(LONG_PROMPT)
    options = {"token_ids": prompt, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "explain": True}
    async with AsyncClient(gated_cluster.grpc_address, timeout_s=ANSWER_S) as client:
        gates.hold(gated_cluster, "prefill-0", after_steps=1)
        task = asyncio.create_task(client.generate(**options, local_prefill_max_tokens=0))
        await gates.wait_held("prefill-0", task)
        killed = gated_cluster.kill("prefill-0")
        gates.open("prefill-0")
        answer = await task
        assert answer.explanation.notes, "the fallback is not labelled"
        await gated_cluster.serves_again("prefill-0", killed.pid)
        again = await client.generate(**options, local_prefill_max_tokens=0)
        assert again.token_ids == answer.token_ids
    gated_cluster.wait_idle()


@pytest.mark.slow
async def test_prefill_killed_and_policy_fail(gated_cluster, gates):
    async with AsyncClient(gated_cluster.grpc_address, timeout_s=ANSWER_S) as client:
        gates.hold(gated_cluster, "prefill-0", after_steps=1)
        options = {"max_tokens": 8, "failure_policy": "fail", "local_prefill_max_tokens": 0}
        task = asyncio.create_task(client.generate(token_ids=fresh_prompt(LONG_PROMPT), **options))
        await gates.wait_held("prefill-0", task)
        killed = gated_cluster.kill("prefill-0")
        gates.open("prefill-0")
        with pytest.raises(DiptychError):
            await task
    await gated_cluster.serves_again("prefill-0", killed.pid)
    gated_cluster.wait_idle()


async def test_decode_killed_in_mid_stream(gated_cluster, gates):
    """Over HTTP: one error event, no [DONE], and the connection ends."""
    body = {"prompt": fresh_prompt(80), "max_tokens": 800, "temperature": 0, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    killed = None
    gates.hold(gated_cluster, "decode-0", after_steps=20)
    async with (
        httpx.AsyncClient(base_url=gated_cluster.http_url, timeout=ANSWER_S) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                lines.append(line.removeprefix("data: "))
            if lines and killed is None:
                await gates.wait_held("decode-0")
                killed = gated_cluster.kill("decode-0")
                gates.open("decode-0")
    assert killed is not None
    assert "[DONE]" not in lines
    error = json.loads(lines[-1])["error"]
    assert error["message"]
    assert error["code"]
    await gated_cluster.serves_again("decode-0", killed.pid)


async def test_decode_killed_before_the_first_token_over_grpc(gated_cluster, gates):
    async with AsyncClient(gated_cluster.grpc_address, timeout_s=ANSWER_S) as client:
        gates.hold(gated_cluster, "prefill-0", after_steps=1)
        options = {"max_tokens": 8, "ignore_eos": True, "local_prefill_max_tokens": 0}
        task = asyncio.create_task(client.generate(token_ids=fresh_prompt(LONG_PROMPT), **options))
        await gates.wait_held("prefill-0", task)
        killed = gated_cluster.kill("decode-0")
        with pytest.raises(DiptychError) as failure:
            await task
        assert failure.value.reason in ("WORKER_LOST", "NO_WORKER")
        # The prompt is no longer needed: the step is abandoned, though the gate is still shut.
        await asyncio.to_thread(gated_cluster.wait_idle_of, "prefill-0")
        gates.open("prefill-0")
    await gated_cluster.serves_again("decode-0", killed.pid)
    gated_cluster.wait_idle()


async def test_redis_killed_serving_goes_on(gated_cluster):
    """While Redis is dead, and after it restarted empty."""
    killed = gated_cluster.kill("redis")
    async with AsyncClient(gated_cluster.grpc_address, timeout_s=ANSWER_S) as client:
        options = {"max_tokens": 4, "ignore_eos": True}
        assert len((await client.generate(token_ids=fresh_prompt(80), **options)).token_ids) == 4
        async with asyncio.timeout(AGAIN_S):
            while not {child.pid for child in gated_cluster.state.children if child.name == "redis"} - {killed.pid}:
                await client.generate(token_ids=fresh_prompt(80), **options)
        assert len((await client.generate(token_ids=fresh_prompt(80), **options)).token_ids) == 4
