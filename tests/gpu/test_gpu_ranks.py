"""Workers of two ranks on two GPUs: tokens of one rank, and hand-offs between workers with other degrees.

A model of random weights in fp32, where the batch does not change the result. GPU_TESTS_DEVICE=cpu is a rehearsal without a GPU.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from diptych.bench.gpu.http_client import ask
from diptych.bench.gpu.random_model import SMALL, TINY, write_model
from diptych_tests.gpu_cards import DEVICE, needs_gpus

SHAPE = SMALL if DEVICE == "cuda" else TINY
LENGTHS = (5, 70, 333, 1500)
TOKENS = 32


pytestmark = needs_gpus(2)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def tokens_of(url: str, prompts: list[list[int]], **fields: Any) -> list[list[int]]:
    answers = await asyncio.gather(*(ask(port_of(url), prompt, TOKENS, **fields) for prompt in prompts))
    assert [answer.error for answer in answers] == [""] * len(answers)
    return [answer.token_ids for answer in answers]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return "--device", DEVICE, "--model", str(write_model(tmp_path_factory.mktemp("model") / "small", SHAPE, DEVICE))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, SHAPE.vocab) for _ in range(length)] for length in LENGTHS for _ in range(2)]


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
