"""Workers of two ranks on two GPUs: tokens of one rank, hand-offs between workers with other degrees, and a killed rank.

A model of random weights in fp32, where the batch does not change the result.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import Any

import psutil
import pytest

from diptych.bench.gpu.http_client import ask
from diptych.bench.gpu.random_model import SMALL, write_model
from diptych.common.errors import ConfigError
from diptych.worker.visible_gpus import find_gpus
from diptych_tests.kill_run import ranks_of

LENGTHS = (5, 70, 333, 1500)
TOKENS = 32
GONE_S = 5.0
"""Until a worker has ended, one of whose ranks was killed."""
SPARE_BYTES = 256 << 20


def num_gpus() -> int:
    try:
        return len(find_gpus(os.environ))
    except ConfigError:
        return 0


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiproc,
    pytest.mark.skipif(num_gpus() < 2, reason="needs two GPUs"),
]


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def tokens_of(url: str, prompts: list[list[int]], **fields: Any) -> list[list[int]]:
    answers = await asyncio.gather(*(ask(port_of(url), prompt, TOKENS, **fields) for prompt in prompts))
    assert [answer.error for answer in answers] == [""] * len(answers)
    return [answer.token_ids for answer in answers]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return "--device", "cuda", "--model", str(write_model(tmp_path_factory.mktemp("model") / "small", SMALL, "cuda"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, SMALL.vocab) for _ in range(length)] for length in LENGTHS for _ in range(2)]


@pytest.fixture(scope="module")
def truth(
    cluster_module: Any, flags: tuple[str, ...], prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """Of one rank."""
    with cluster_module.running_serve(tmp_path_factory.mktemp("one"), *flags) as serving:
        return asyncio.run(tokens_of(serving.http_url, prompts))


def test_serve_with_two_ranks(
    cluster_module: Any, flags: tuple[str, ...], prompts: list[list[int]], truth: list[list[int]], tmp_path: Any
) -> None:
    with cluster_module.running_serve(tmp_path, *flags, "--tensor-parallel-size", "2") as serving:
        for _ in range(2):  # cold, and from the cache
            assert asyncio.run(tokens_of(serving.http_url, prompts)) == truth


def test_serve_with_two_stages(
    cluster_module: Any, flags: tuple[str, ...], prompts: list[list[int]], truth: list[list[int]], tmp_path: Any
) -> None:
    with cluster_module.running_serve(tmp_path, *flags, "--pipeline-parallel-size", "2") as serving:
        assert asyncio.run(tokens_of(serving.http_url, prompts)) == truth


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (2, 1), (1, 2)])
def test_hand_offs_between_degrees(
    cluster_module: Any,
    flags: tuple[str, ...],
    prompts: list[list[int]],
    truth: list[list[int]],
    tmp_path: Any,
    prefill: int,
    decode: int,
) -> None:
    """The workers share the two GPUs."""
    degrees = "--prefill-tensor-parallel-size", str(prefill), "--decode-tensor-parallel-size", str(decode)
    with cluster_module.running_cluster(tmp_path, *flags, *degrees) as running:
        assert asyncio.run(tokens_of(running.http_url, prompts, local_prefill_max_tokens=0)) == truth
        running.wait_idle()


def test_a_killed_rank_ends_its_worker_and_frees_both_gpus(
    cluster_module: Any, flags: tuple[str, ...], prompts: list[list[int]], tmp_path: Any
) -> None:
    def used() -> list[int]:
        return [gpu.total_bytes - gpu.free_bytes for gpu in find_gpus(os.environ)]

    before = used()
    with cluster_module.running_serve(tmp_path, *flags, "--tensor-parallel-size", "2") as serving:
        asyncio.run(tokens_of(serving.http_url, prompts[:2]))
        processes = ranks_of(serving.process)
        assert len(processes) == 2
        processes[1].send_signal(signal.SIGKILL)
        began = time.monotonic()
        cluster_module.wait_until(
            lambda: serving.process.poll() is not None and not any(map(psutil.Process.is_running, processes)),
            what="the worker and its ranks have ended",
        )
        assert time.monotonic() - began < GONE_S
    cluster_module.wait_until(
        lambda: all(now <= then + SPARE_BYTES for now, then in zip(used(), before, strict=True)),
        what=f"the GPUs' memory is back: {before} before, {used()} after",
    )
