"""18.7: whole clusters on two GPUs: identity over ipc and ucx-gpu, streams, kill -9 of each role, cancelled long prompts,
memory back.

A model of random weights in fp32, where the batch does not change the result. GPU_TESTS_DEVICE=cpu is a rehearsal without
a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from diptych.bench.gpu.http_client import Answer, ask
from diptych.bench.gpu.random_model import SMALL, TINY, write_model
from diptych.cli.up.processes import ProcessIdentity
from diptych.client import AsyncClient
from diptych.worker.visible_gpus import find_gpus
from diptych_tests.gpu_cards import DEVICE, needs_gpus

SHAPE = SMALL if DEVICE == "cuda" else TINY
LENGTHS = (5, 70, 100, 333, 700, 1500)
TOKENS = 48
LONG_PROMPT = 6000 if DEVICE == "cuda" else 1200
"""Tokens: more than one step may compute."""
CANCELLED = 200
ANSWER_S, AGAIN_S = 120.0, 240.0
SPARE_BYTES = 256 << 20
"""Of a GPU's memory, that may differ after the same work: kernels that the driver loads when they first run."""


pytestmark = needs_gpus(2)


def used_memory() -> list[int]:
    """Bytes in use on each GPU."""
    return [gpu.total_bytes - gpu.free_bytes for gpu in find_gpus(os.environ)] if DEVICE == "cuda" else []


def returned(now: list[int], then: list[int]) -> bool:
    return all(a <= b + SPARE_BYTES for a, b in zip(now, then, strict=True))


@dataclass(frozen=True)
class Truth:
    """Prompts, and the tokens of `diptych serve`, one prompt at a time."""

    prompts: list[list[int]]
    tokens: list[list[int]]


def fresh_prompt(length: int) -> list[int]:
    rng = random.SystemRandom()
    return [rng.randrange(3, SHAPE.vocab) for _ in range(length)]


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return "--device", DEVICE, "--model", str(write_model(tmp_path_factory.mktemp("model") / "small", SHAPE, DEVICE))


@pytest.fixture(scope="module")
def truth(cluster_module: Any, flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Truth:
    prompts = [fresh_prompt(length) for length in LENGTHS for _ in range(2)]

    async def one_by_one(port: int) -> list[list[int]]:
        return [(await ask(port, prompt, TOKENS)).token_ids for prompt in prompts]

    with cluster_module.running_serve(tmp_path_factory.mktemp("serve"), *flags) as serving:
        tokens = asyncio.run(one_by_one(port_of(serving.http_url)))
    assert [len(ids) for ids in tokens] == [TOKENS] * len(prompts)
    return Truth(prompts, tokens)


@pytest.fixture(scope="module")
def before_all(flags: tuple[str, ...]) -> list[int]:
    """Memory in use without a cluster."""
    return used_memory()


@pytest.fixture(scope="module")
def gpu_gates(cluster_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cluster_module.StepGates(tmp_path_factory.mktemp("gates"))


@pytest.fixture(scope="module")
def pair(
    cluster_module: Any,
    flags: tuple[str, ...],
    truth: Truth,
    before_all: list[int],
    gpu_gates: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """Two workers on two GPUs, whose steps can be held. The transport is what the default chooses: ipc."""
    with cluster_module.running_cluster(tmp_path_factory.mktemp("pair"), *flags, *gpu_gates.flags) as running:
        yield running


async def equal_to(truth: Truth, url: str) -> list[Answer]:
    """All prompts at once over P/D: the tokens are those of `serve`, and the KV crossed the transport."""
    fields = {"local_prefill_max_tokens": 0}
    answers = await asyncio.gather(*(ask(port_of(url), prompt, TOKENS, **fields) for prompt in truth.prompts))
    assert [answer.error for answer in answers] == [""] * len(answers)
    assert [answer.token_ids for answer in answers] == truth.tokens
    assert all(answer.kv_bytes > 0 for answer in answers)
    return answers


def whole(cluster: Any) -> bool:
    children = cluster.state.children
    if {child.name for child in children} < {"redis", "router", "prefill-0", "decode-0"}:
        return False
    if not all(ProcessIdentity(child.pid, child.start_time).alive() for child in children):
        return False
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{cluster.http_url}/ready", timeout=ANSWER_S).status_code == 200
    return False


async def serves_pd_again(cluster: Any) -> None:
    """Until a prompt is computed by prefill and read by decode."""
    async with asyncio.timeout(AGAIN_S):
        while True:
            if await asyncio.to_thread(whole, cluster):
                with contextlib.suppress(OSError):
                    answer = await ask(port_of(cluster.http_url), fresh_prompt(100), 4, local_prefill_max_tokens=0)
                    if not answer.error and answer.kv_bytes > 0:
                        return
            await asyncio.sleep(0.3)  # sleep: asks again, not all the time


def test_memory_comes_back_when_a_cluster_ends(
    cluster_module: Any, flags: tuple[str, ...], truth: Truth, before_all: list[int], tmp_path: Any
) -> None:
    """Over ucx-gpu: tokens as `serve`, and afterwards the GPUs are as empty as before."""
    transport = "ucx-gpu" if DEVICE == "cuda" else "ucx"
    with cluster_module.running_cluster(tmp_path, *flags, "--transport", transport) as running:
        assert running.info("decode-0").transport_path.startswith(f"{transport}:")
        asyncio.run(equal_to(truth, running.http_url))
        running.wait_idle()
    if DEVICE == "cuda":
        cluster_module.wait_until(
            lambda: returned(used_memory(), before_all),
            what=f"the GPUs' memory is back: {before_all} before, {used_memory()} after",
        )


def test_tokens_equal_serve_over_the_default_transport(pair: Any, truth: Truth) -> None:
    if DEVICE == "cuda":
        assert pair.info("decode-0").transport_path == "ipc:cuda"
    asyncio.run(equal_to(truth, pair.http_url))
    pair.wait_idle()


def test_a_stream_brings_its_tokens_while_it_runs(pair: Any) -> None:
    """One user, whose steps take a millisecond: nothing is kept until the end. Tokens may be merged on a loaded machine;
    a stream that stops brings the rest in one message."""

    async def go() -> list[Answer]:
        return [await ask(port_of(pair.http_url), fresh_prompt(100), 128) for _ in range(5)]

    for answer in asyncio.run(go()):
        assert answer.error == ""
        assert answer.num_tokens == 128
        assert max(answer.counts) <= 64, answer.counts


def test_cancelled_long_prompts_leave_nothing_behind(pair: Any, truth: Truth) -> None:
    asyncio.run(equal_to(truth, pair.http_url))
    before = used_memory()
    rng = random.Random(7)

    async def leave(client: AsyncClient, after_s: float) -> None:
        prompt = fresh_prompt(LONG_PROMPT)
        task = asyncio.create_task(client.generate(token_ids=prompt, max_tokens=64, local_prefill_max_tokens=0))
        await asyncio.sleep(after_s)  # sleep: in any phase, whichever it is
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def go() -> None:
        async with AsyncClient(pair.grpc_address, timeout_s=ANSWER_S) as client:
            for _ in range(CANCELLED // 20):
                await asyncio.gather(*(leave(client, 0.4 * rng.random() ** 2) for _ in range(20)))

    asyncio.run(go())
    pair.wait_idle()
    asyncio.run(equal_to(truth, pair.http_url))
    assert returned(used_memory(), before), (before, used_memory())


def test_a_killed_prefill_costs_time_and_nothing_else(
    pair: Any, truth: Truth, gpu_gates: Any, cluster_module: Any
) -> None:
    """kill -9 in the middle of a prompt: decode computes it itself; then the same tokens again over P/D, and the GPU's
    memory as before."""
    cluster_module.wait_until(lambda: whole(pair), deadline_s=AGAIN_S, what="the cluster is whole")
    before = used_memory()
    prompt, tokens = fresh_prompt(LENGTHS[-1]), 8

    async def go() -> None:
        gpu_gates.hold(pair, "prefill-0", after_steps=-1_000_000)  # the next one, whatever ran ahead
        task = asyncio.create_task(ask(port_of(pair.http_url), prompt, tokens, local_prefill_max_tokens=0))
        await gpu_gates.wait_held("prefill-0", task)
        pair.kill("prefill-0", signal.SIGKILL)
        gpu_gates.open("prefill-0")
        answer = await task
        assert (answer.error, answer.num_tokens) == ("", tokens)
        await serves_pd_again(pair)
        await equal_to(truth, pair.http_url)
        again = await ask(port_of(pair.http_url), prompt, tokens, local_prefill_max_tokens=0)
        assert again.token_ids == answer.token_ids

    try:
        asyncio.run(go())
    finally:
        gpu_gates.open("prefill-0")
    pair.wait_idle()
    assert returned(used_memory(), before), (before, used_memory())


@pytest.mark.parametrize("name", ["decode-0", "router"])
def test_a_killed_process_cuts_its_streams_and_nothing_else(
    pair: Any, truth: Truth, cluster_module: Any, name: str
) -> None:
    """kill -9 in the middle of a stream, over HTTP: an error event or a broken connection, never an end as if it were
    whole; then the same tokens again, and the GPU's memory as before."""
    cluster_module.wait_until(lambda: whole(pair), deadline_s=AGAIN_S, what="the cluster is whole")
    before = used_memory()
    many = SHAPE.context - 200
    body = {"prompt": fresh_prompt(100), "max_tokens": many, "temperature": 0, "ignore_eos": True, "stream": True}
    lines: list[str] = []

    async def go() -> None:
        async with httpx.AsyncClient(base_url=pair.http_url, timeout=ANSWER_S) as http:
            with contextlib.suppress(httpx.TransportError):
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    assert response.status_code == 200
                    async for line in response.aiter_lines():
                        if line.startswith("data: "):
                            if not lines:
                                pair.kill(name, signal.SIGKILL)
                            lines.append(line.removeprefix("data: "))
        assert lines
        assert "[DONE]" not in lines
        if name == "decode-0":
            assert json.loads(lines[-1])["error"]["code"]
        await serves_pd_again(pair)
        await equal_to(truth, pair.http_url)

    asyncio.run(go())
    pair.wait_idle()
    assert returned(used_memory(), before), (before, used_memory())
