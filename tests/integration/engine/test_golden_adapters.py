"""The trained adapters of tests/adapters, mixed in the steps of one engine: ids and logprobs are those of peft."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.cli.models.store import ensure_default_model
from diptych.common.adapters.peft import read_adapter
from diptych.common.block_identity import IdentityHeader
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.executor import LocalExecutor
from diptych.engine.messages import EngineRequest, KeepAdapter
from diptych.engine.offline import OfflineEngine, OfflineResult
from diptych_tests import golden_adapters
from diptych_tests.golden_adapters import AdapterCase

BLOCK_SIZE, NUM_BLOCKS = 16, 600
TOLERANCE = 1e-4
"""Of logprobs in float32."""


def engine_of(
    model: Path, backend: str, max_loras: int = 0, max_lora_rank: int = 16
) -> tuple[OfflineEngine, TorchModelRunner]:
    runner = TorchModelRunner.load(
        model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_threads=1, backend=backend, max_loras=max_loras,
        max_lora_rank=max_lora_rank,
    )  # fmt: skip
    config = EngineConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_step_time_s=None, mixed_step_time_s=None)
    identity = IdentityHeader(bytes(32), "golden", "golden", runner.kv_dtype, BLOCK_SIZE)
    return OfflineEngine(LocalExecutor(runner), config, identity), runner


def keep(engine: OfflineEngine, runner: TorchModelRunner, folder: Path) -> str:
    """Returns: the adapter's id."""
    facts = read_adapter(folder)
    engine.send(KeepAdapter(runner.read_adapter(folder, facts)))
    return facts.id


def golden_engine(backend: str, max_loras: int) -> tuple[OfflineEngine, dict[str, str]]:
    """An engine that knows all trained adapters, and their ids by name."""
    engine, runner = engine_of(ensure_default_model(), backend, max_loras)
    ids = {name: keep(engine, runner, golden_adapters.FOLDER / name) for name in golden_adapters.names()}
    return engine, ids | {golden_adapters.BASE: ""}


def answer_all(
    engine: OfflineEngine, ids: dict[str, str], cases: list[AdapterCase], new_tokens: int
) -> list[OfflineResult]:
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, logprobs=len(cases[0].first_logprobs))
    return engine.generate([
        EngineRequest(f"{case.adapter}-{i}", Prompt(case.prompt, adapter=ids[case.adapter]), params)
        for i, case in enumerate(cases)
    ])  # fmt: skip


def check(case: AdapterCase, result: OfflineResult, new_tokens: int) -> None:
    assert result.error is None
    assert tuple(result.token_ids) == case.answer[:new_tokens], case
    found = dict(result.logprobs[0].top)
    for token, logprob in case.first_logprobs:
        assert found[token] == pytest.approx(logprob, abs=TOLERANCE), case


def test_the_trained_adapters_are_small_and_no_two_answer_alike() -> None:
    """What comparisons of answers rely on; the base model's answers are others, too."""
    by_prompt: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for case in golden_adapters.cases():
        by_prompt.setdefault(case.prompt, []).append(case.answer)
    assert len(by_prompt) == 20
    assert all(len(set(answers)) == len(answers) == 9 for answers in by_prompt.values())
    for name in golden_adapters.names():
        assert sum(path.stat().st_size for path in (golden_adapters.FOLDER / name).iterdir()) <= 300_000


def test_two_prompts_of_each_adapter_in_one_batch(compiler: str) -> None:
    cases = golden_adapters.cases(prompts=2)
    engine, ids = golden_engine("native", max_loras=8)
    for case, result in zip(cases, answer_all(engine, ids, cases, 8), strict=True):
        check(case, result, 8)
    stats = engine.stats().adapters
    assert set(stats.resident) == set(ids.values()) - {""}
    assert (stats.running, stats.installs, stats.evictions) == ((), 8, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "max_loras"), [("native", 8), ("torch", 3)])
def test_all_prompts_of_each_adapter_in_one_batch(backend: str, max_loras: int, compiler: str) -> None:
    """On three slots the adapters take turns while others' requests wait."""
    cases, new_tokens = golden_adapters.cases(), golden_adapters.max_new_tokens()
    engine, ids = golden_engine(backend, max_loras)
    for case, result in zip(cases, answer_all(engine, ids, cases, new_tokens), strict=True):
        check(case, result, new_tokens)
    stats = engine.stats().adapters
    assert len(stats.resident) == max_loras
    assert stats.running == ()
    if max_loras < 8:
        assert stats.installs == stats.evictions + max_loras > 8
