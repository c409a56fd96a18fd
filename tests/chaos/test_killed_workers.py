"""kill -9 on either side: an answer or a typed error, never a hang, never a 200 that is cut; and the cluster serves again."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from diptych.client import AsyncClient, DiptychError

pytestmark = pytest.mark.multiproc

LONG_PROMPT = 900


@pytest.fixture(scope="module")
def own_cluster(cluster_module, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A cluster whose parts may be killed."""
    with cluster_module.running_cluster(tmp_path_factory.mktemp("chaos")) as running:
        yield running


def fresh_prompt(length: int) -> list[int]:
    rng = random.SystemRandom()
    return [rng.randrange(1000, 40_000) for _ in range(length)]


async def serves_again(cluster, name: str, old_pid: int) -> None:
    """The supervisor started a fresh process, and a request uses it."""
    until = time.monotonic() + 60.0
    async with AsyncClient(cluster.grpc_address, timeout_s=30.0) as client:
        while True:
            try:
                answer = await client.generate(
                    token_ids=fresh_prompt(100), max_tokens=4, ignore_eos=True, explain=True, local_prefill_max_tokens=0
                )
                pids = (answer.explanation.prefill_pid, answer.explanation.decode_pid)
                if old_pid not in pids and cluster.child(name).pid in pids and not answer.explanation.local_prefill:
                    return
            except (DiptychError, StopIteration):
                pass
            assert time.monotonic() < until, f"{name} does not serve again:\n{cluster.log()[-3000:]}"
            await asyncio.sleep(0.3)


async def test_prefill_killed_in_mid_request(own_cluster):
    prompt = fresh_prompt(LONG_PROMPT)
    options = {"token_ids": prompt, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "explain": True}
    async with AsyncClient(own_cluster.grpc_address, timeout_s=120.0) as client:
        task = asyncio.create_task(client.generate(**options, local_prefill_max_tokens=0))
        await asyncio.sleep(2.0)
        assert not task.done(), "the prompt is too short to be killed in the middle"
        killed = own_cluster.kill("prefill-0")
        answer = await asyncio.wait_for(task, timeout=90.0)
        assert answer.explanation.notes, "the fallback is not labelled"
        await serves_again(own_cluster, "prefill-0", killed.pid)
        again = await client.generate(**options, local_prefill_max_tokens=0)
        assert again.token_ids == answer.token_ids
    own_cluster.wait_idle(deadline_s=15.0)


@pytest.mark.slow
async def test_prefill_killed_and_policy_fail(own_cluster):
    async with AsyncClient(own_cluster.grpc_address, timeout_s=120.0) as client:
        task = asyncio.create_task(
            client.generate(
                token_ids=fresh_prompt(LONG_PROMPT), max_tokens=8, failure_policy="fail", local_prefill_max_tokens=0
            )
        )
        await asyncio.sleep(2.0)
        killed = own_cluster.kill("prefill-0")
        with pytest.raises(DiptychError):
            await asyncio.wait_for(task, timeout=30.0)
    await serves_again(own_cluster, "prefill-0", killed.pid)
    own_cluster.wait_idle(deadline_s=15.0)


async def test_decode_killed_in_mid_stream(own_cluster):
    """Over HTTP: one error event, no [DONE], and the connection ends."""
    body = {"prompt": fresh_prompt(80), "max_tokens": 800, "temperature": 0, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    killed = None
    async with (
        httpx.AsyncClient(base_url=own_cluster.http_url, timeout=60.0) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                lines.append(line.removeprefix("data: "))
            if len(lines) == 5 and killed is None:
                killed = own_cluster.kill("decode-0")
    assert killed is not None
    assert "[DONE]" not in lines
    error = json.loads(lines[-1])["error"]
    assert error["message"]
    assert error["code"]
    await serves_again(own_cluster, "decode-0", killed.pid)


async def test_decode_killed_before_the_first_token_over_grpc(own_cluster):
    async with AsyncClient(own_cluster.grpc_address, timeout_s=60.0) as client:
        task = asyncio.create_task(client.generate(token_ids=fresh_prompt(LONG_PROMPT), max_tokens=8, ignore_eos=True))
        await asyncio.sleep(1.5)
        killed = own_cluster.kill("decode-0")
        with pytest.raises(DiptychError) as failure:
            await asyncio.wait_for(task, timeout=50.0)
        assert failure.value.reason in ("WORKER_LOST", "NO_WORKER")
    await serves_again(own_cluster, "decode-0", killed.pid)
    own_cluster.wait_idle(deadline_s=15.0)


async def test_redis_killed_serving_goes_on(own_cluster):
    own_cluster.kill("redis")
    async with AsyncClient(own_cluster.grpc_address, timeout_s=60.0) as client:
        answer = await client.generate(token_ids=fresh_prompt(80), max_tokens=4, ignore_eos=True)
        assert len(answer.token_ids) == 4


def test_killed_supervisor_takes_everything_with_it(cluster_module, tmp_path: Path):
    """kill -9 on `diptych up` itself: the kernel ends its children, `diptych down` clears the rest."""
    with cluster_module.running_cluster(tmp_path) as running:
        state = running.state
        running.process.kill()
        running.process.wait(timeout=10)
        running.ended = True
        identities = [cluster_module.ProcessIdentity(child.pid, child.start_time) for child in state.children]
        cluster_module.wait_until(
            lambda: not any(identity.alive() for identity in identities), deadline_s=5.0, what="the children are gone"
        )
        assert running.folder.owner() is None
        assert running.folder.remove_dead_cluster()
        assert [path.name for path in running.folder.root.iterdir()] == ["logs"]
