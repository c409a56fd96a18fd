"""Quantized weights and KV under the scheduler: a sequence that gives way, or goes on elsewhere, ends with the same ids."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.kv_format import QUANTIZED_KV
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.executor import LocalExecutor
from diptych.engine.messages import EngineRequest
from diptych.engine.offline import OfflineEngine, OfflineResult
from diptych_tests import quantized

BLOCK, COUNT = 8, 20
PROMPTS = [[(5 * i + 31 * seq) % 320 for i in range(length)] for seq, length in enumerate((21, 14, 9, 17))]
SAMPLING = [SamplingParams(max_tokens=COUNT, temperature=0.7 * (seq % 2), seed=seq, logprobs=2) for seq in range(4)]
WEIGHTS: dict[str, tuple[dict[str, Any], Any]] = {
    "int8": (quantized.COMPRESSED_INT8, quantized.int8_rows),
    "fp8": (quantized.COMPRESSED_FP8, quantized.fp8_rows),
    "int4": (quantized.COMPRESSED_INT4, partial(quantized.compressed_int4, size=32, symmetric=True)),
    "gguf": ({}, quantized.gguf_rows),
}
CASES = [
    *(
        (method, "auto", backend)
        for method in WEIGHTS
        for backend in ("torch", "native")
        if (method, backend) != ("fp8", "native")
    ),
    *(("plain", kv, backend) for kv in QUANTIZED_KV for backend in ("torch", "native")),
    ("int4", "int8", "native"),
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def folder(method: str) -> Path:
        if method not in made:
            made[method] = quantized.write_llama(tmp_path_factory.mktemp(method), hidden=128, mlp=256)
            if method != "plain":
                config, quantize = WEIGHTS[method]
                quantized.quantize_folder(made[method], config or quantized.gguf_config(made[method]), quantize)
        return made[method]

    return folder


def engine_of(folder: Path, backend: str, kv: str, *, blocks: int = 64, mode: str = "recompute") -> OfflineEngine:
    host = 32 if mode == "swap" else 0
    runner = TorchModelRunner.load(
        folder,
        num_blocks=blocks,
        block_size=BLOCK,
        num_threads=1,
        backend=backend,
        num_host_blocks=host,
        kv_cache_dtype=kv,
    )
    assert runner.backend == backend
    config = EngineConfig(
        num_blocks=blocks, block_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=16, max_step_time_s=None,
        mixed_step_time_s=None, num_host_blocks=host, preemption_mode=mode, check_invariants=True,
    )  # fmt: skip
    return OfflineEngine(
        LocalExecutor(runner), config, IdentityHeader(b"k" * 32, "m", "t", kv, BLOCK), clock=FakeClock()
    )


def requests(*, said: list[list[int]] | None = None) -> list[EngineRequest]:
    """said: tokens that each has written already, at another worker."""
    before = said or [[]] * len(PROMPTS)
    return [
        EngineRequest(f"r{i}", Prompt(tuple(prompt)), SAMPLING[i], tuple(before[i])) for i, prompt in enumerate(PROMPTS)
    ]


def told(results: list[OfflineResult]) -> list[tuple[list[int], list[float]]]:
    return [(result.token_ids, [one.logprob for one in result.logprobs]) for result in results]


@pytest.mark.parametrize(("method", "kv", "backend"), CASES)
def test_preempted_and_continued_sequences_end_with_the_same_ids(request, folder_of, method, kv, backend) -> None:
    if backend == "native":
        request.getfixturevalue("compiler")
    folder = folder_of(method)
    whole = engine_of(folder, backend, kv).generate(requests())
    assert all(result.error is None and len(result.token_ids) == COUNT for result in whole)
    assert all(a.token_ids != b.token_ids for a, b in pairwise(whole)), "or nothing would be compared"
    exact = backend == "native"  # torch's sums depend on the rows of a step, by rounding
    for mode in ("recompute", "swap"):
        tight = engine_of(folder, backend, kv, blocks=12, mode=mode)
        results = tight.generate(requests())
        assert tight.stats().preemptions_total > 0
        assert (tight.stats().swaps_total > 0) == (mode == "swap")
        assert [result.token_ids for result in results] == [result.token_ids for result in whole]
        assert not exact or told(results) == told(whole)
        assert tight.core.scheduler.check() == []
    said = [result.token_ids[: 3 + 4 * i] for i, result in enumerate(whole)]
    results = engine_of(folder, backend, kv).generate(requests(said=said))
    assert [before + result.token_ids for before, result in zip(said, results, strict=True)] == [
        result.token_ids for result in whole
    ]
