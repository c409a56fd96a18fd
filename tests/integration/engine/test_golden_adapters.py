"""The trained adapters of tests/adapters, mixed in the steps of one engine: ids and logprobs are those of peft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from diptych.cli.models.store import ensure_default_model
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.exec import model_runner
from diptych.engine.messages import EngineRequest, ScheduledSeq
from diptych.engine.offline import OfflineEngine, OfflineResult
from diptych_tests import golden_adapters
from diptych_tests.golden_adapters import AdapterCase
from diptych_tests.lora import adapter_engine, keep_adapter

TOLERANCE = 1e-4
"""Of logits and logprobs in float32."""


def golden_engine(backend: str, max_loras: int) -> tuple[OfflineEngine, dict[str, str]]:
    """An engine that knows all trained adapters, and their ids by name."""
    engine, runner = adapter_engine(ensure_default_model(), backend, max_loras)
    ids = {name: keep_adapter(engine, runner, golden_adapters.FOLDER / name) for name in golden_adapters.names()}
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


@pytest.mark.parametrize(
    ("backend", "prompts"),
    [
        ("native", 1),
        pytest.param("native", 4, marks=pytest.mark.slow),
        pytest.param("torch", 4, marks=pytest.mark.slow),
    ],
)
def test_logits_of_the_first_and_the_last_token(
    backend: str, prompts: int, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every adapter in one batch: of the prompt's step, and behind the tokens that were decoded."""
    cases, new_tokens, step = (
        golden_adapters.cases(prompts),
        golden_adapters.max_new_tokens(),
        golden_adapters.logit_step(),
    )
    found: dict[str, list[Tensor]] = {}
    draw_step = model_runner.draw_step

    def seen(seqs: Sequence[ScheduledSeq], sampled: Sequence[int], rows: object, logits: Tensor, *more: Any) -> None:
        for row, seq in enumerate(sampled):
            found.setdefault(seqs[seq].attempt, []).append(logits[row, ::step].clone())
        draw_step(seqs, sampled, rows, logits, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(model_runner, "draw_step", seen)
    engine, ids = golden_engine(backend, max_loras=8)
    for i, (case, result) in enumerate(zip(cases, answer_all(engine, ids, cases, new_tokens), strict=True)):
        assert tuple(result.token_ids) == case.answer
        logits = found[f"{case.adapter}-{i}"]
        assert len(logits) == len(case.answer)
        for ours, theirs in zip((logits[0], logits[-1]), case.logits, strict=True):
            assert ours.tolist() == pytest.approx(theirs, abs=TOLERANCE), case


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
