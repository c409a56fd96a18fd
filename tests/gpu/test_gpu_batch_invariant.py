"""A cluster on one GPU with --batch-invariant, in bf16: the ids of all prompts at once, over P/D, are those of `serve`, which
computes one at a time; over quantized KV, too. GPU_TESTS_DEVICE=cpu is a rehearsal without a GPU."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.bench.gpu.http_client import ask
from diptych.bench.gpu.random_model import SMALL, TINY, write_model
from diptych_tests.gpu_cards import DEVICE, needs_gpus

SHAPE = replace(SMALL, dtype="bfloat16") if DEVICE == "cuda" else TINY
TOKENS = 48
PROMPTS = [
    [(7919 * i + 31 * k) % (SHAPE.vocab - 3) + 3 for k in range(n)] for i, n in enumerate((5, 70, 333, 700, 1500) * 4)
]


pytestmark = needs_gpus(1)


def fields(i: int) -> dict[str, Any]:
    return {"temperature": 0.9, "top_p": 0.95, "seed": i} if i % 2 else {}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_the_same_ids_in_any_company(cluster_module: Any, tmp_path: Path, kv_cache_dtype: str) -> None:
    model = write_model(tmp_path / "model", SHAPE, DEVICE)
    flags = ("--device", DEVICE, "--model", str(model), "--batch-invariant", "--kv-cache-dtype", kv_cache_dtype)

    async def one_by_one(url: str) -> list[list[int]]:
        port = int(url.rpartition(":")[2])
        return [(await ask(port, prompt, TOKENS, **fields(i))).token_ids for i, prompt in enumerate(PROMPTS)]

    async def at_once(url: str) -> list[list[int]]:
        port = int(url.rpartition(":")[2])
        more = {"local_prefill_max_tokens": 0}
        answers = await asyncio.gather(
            *(ask(port, prompt, TOKENS, **fields(i), **more) for i, prompt in enumerate(PROMPTS))
        )
        assert all(answer.kv_bytes > 0 for answer in answers)
        return [answer.token_ids for answer in answers]

    for name in ("serve", "up"):
        (tmp_path / name).mkdir()
    with cluster_module.running_serve(tmp_path / "serve", *flags) as serving:
        alone = asyncio.run(one_by_one(serving.http_url))
    assert [len(ids) for ids in alone] == [TOKENS] * len(PROMPTS)
    gpus = ("--prefill-gpus", "0", "--decode-gpus", "0") if DEVICE == "cuda" else ()
    small_steps = ("--max-num-batched-tokens", "512")
    with cluster_module.running_cluster(tmp_path / "up", *flags, *gpus, *small_steps) as running:
        assert asyncio.run(at_once(running.http_url)) == alone
        assert asyncio.run(one_by_one(running.http_url)) == alone  # from the caches of both workers
