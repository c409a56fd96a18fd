"""Adapters over HTTP on one GPU, from one process and from two pools that share it: requests of two adapters and of the base
model in the same steps have the tokens of plain torch. In fp32, where the batch does not change the result.
GPU_TESTS_DEVICE=cpu is a rehearsal without a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from diptych.bench.gpu.http_client import ask
from diptych_tests.gpu_adapters import SHAPE, TOKENS, Engine, made, prompt_ids, temperature_of
from diptych_tests.gpu_cards import DEVICE, needs_gpus

pytestmark = needs_gpus(1)

NAMES = ("", "a0", "a1")
"""Of the base model, and of adapters whose ranks and modules differ."""
MIXED = [(number, adapter) for number in range(4) for adapter in range(len(NAMES))] * 2
"""Number of the prompt, and of the adapter. Each twice: the second time blocks of the prompt may be there."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A model, and its adapters."""
    model, adapters = made(tmp_path_factory.mktemp("adapters"), SHAPE)
    return model, adapters[: len(NAMES) - 1]


@pytest.fixture(scope="module")
def flags(folders: tuple[Path, list[Path]]) -> tuple[str, ...]:
    model, adapters = folders
    modules = [flag for path in adapters for flag in ("--lora-modules", f"{path.name}={path}")]
    lora = ("--enable-lora", "--max-loras", "2", "--lora-dir", str(model.parent), *modules)
    return "--device", DEVICE, "--model", str(model), "--max-model-len", "1024", *lora


@pytest.fixture(scope="module")
def truth(folders: tuple[Path, list[Path]]) -> list[list[int]]:
    """Of MIXED, by plain torch."""
    model, adapters = folders
    engine = Engine(model, adapters, len(adapters), dtype="float32", backend="torch")
    tokens = engine.tokens(MIXED)
    by_adapter = [tokens[: len(NAMES)][i] for i in range(len(NAMES))]
    assert len({tuple(ids) for ids in by_adapter}) == len(NAMES), "adapters change answers"
    return tokens


async def all_at_once(url: str, **more: Any) -> Sequence[Any]:
    port = int(url.rpartition(":")[2])
    return await asyncio.gather(*(
        ask(
            port, list(prompt_ids(number)), TOKENS, temperature=temperature_of(number), seed=number,
            **({"model": NAMES[adapter]} if adapter else {}), **more,
        )
        for number, adapter in MIXED
    ))  # fmt: skip


def check(answers: Sequence[Any], truth: list[list[int]]) -> None:
    assert [answer.error for answer in answers] == [""] * len(answers)
    assert [answer.token_ids for answer in answers] == truth


def test_one_process(cluster_module: Any, flags: tuple[str, ...], truth: list[list[int]], tmp_path: Path) -> None:
    with cluster_module.running_serve(tmp_path, *flags) as serving:
        check(asyncio.run(all_at_once(serving.http_url)), truth)


def test_two_pools_on_one_gpu(
    cluster_module: Any, flags: tuple[str, ...], truth: list[list[int]], tmp_path: Path
) -> None:
    with cluster_module.running_cluster(tmp_path, *flags) as running:
        answers = asyncio.run(all_at_once(running.http_url, local_prefill_max_tokens=0))
        check(answers, truth)
        assert sum(answer.kv_bytes > 0 for answer in answers) >= len(set(MIXED)) // 2
        running.wait_idle()
