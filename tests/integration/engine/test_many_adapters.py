"""Adapters as peft writes them; and 32 adapters of every rank from 4 to 32 in one batch, on both back ends of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.common.adapters.peft import read_adapter
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.messages import EngineRequest
from diptych.engine.offline import OfflineEngine, OfflineResult
from diptych_tests import quantized
from diptych_tests.lora import adapter_engine, keep_adapter, linear_shapes, merge_adapter, write_adapter

TOLERANCE = 1e-4
"""Of logprobs in float32."""


TRAINED = Path(__file__).resolve().parents[2] / "adapters"
RANK_AND_MODULES = {
    "count": (10, 10), "french": (16, 9), "pirate": (8, 16), "polite": (6, 12), "record": (4, 21), "rhyme": (4, 16),
    "robot": (16, 16), "shout": (8, 8),
}  # fmt: skip


def test_what_peft_wrote_is_read_with_the_ranks_and_scales_of_its_patterns() -> None:
    facts = {folder.parent.name: read_adapter(folder.parent) for folder in TRAINED.glob("*/adapter_config.json")}
    assert {name: (one.rank, len(one.modules)) for name, one in facts.items()} == RANK_AND_MODULES
    assert len({one.id for one in facts.values()}) == len(facts)
    assert {one.base_model for one in facts.values()} == {"HuggingFaceTB/SmolLM2-135M-Instruct"}
    robot = {
        module.name.removeprefix("model.layers."): (module.rank, module.scale) for module in facts["robot"].modules
    }
    assert robot["24.self_attn.q_proj"] == (12, 1.0)
    assert robot["24.self_attn.k_proj"] == (2, 4.0)
    assert robot["27.self_attn.o_proj"] == (4, 2.0)
    assert robot["29.self_attn.o_proj"] == (16, 0.5)
    assert robot["29.mlp.gate_proj"] == (4, 4.0)
    assert {module.scale for module in facts["french"].modules} == {2.0}


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_32_adapters_of_ranks_4_to_32_in_one_batch(backend: str, compiler: str, tmp_path: Path) -> None:
    """Each row as with weights that its adapter was added to, and one row of the base model among them."""
    model = quantized.write_llama(tmp_path / "model", hidden=128, mlp=256)
    shapes = linear_shapes(model)
    targets = [tuple(list(shapes)[first::3]) for first in range(3)]
    folders = [
        write_adapter(
            tmp_path / f"adapter{i}",
            {name: shapes[name] for name in targets[i % 3]},
            rank=4 + 28 * i // 31,
            seed=i,
            size=0.1,
        )
        for i in range(32)
    ]
    prompts = [tuple((37 * i + 11 * k) % 320 for k in range(3 + i)) for i in range(33)]
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=4)

    def answer(engine: OfflineEngine, asked: dict[int, str]) -> dict[int, OfflineResult]:
        requests = [EngineRequest(str(i), Prompt(prompts[i], adapter=adapter), params) for i, adapter in asked.items()]
        return dict(zip(asked, engine.generate(requests), strict=True))

    engine, runner = adapter_engine(model, backend, max_loras=32, max_lora_rank=32)
    ids = {i: keep_adapter(engine, runner, folder) for i, folder in enumerate(folders)}
    assert {read_adapter(folder).rank for folder in folders} == set(range(4, 33))
    mixed = answer(engine, ids | {32: ""})
    alone = answer(adapter_engine(model, backend)[0], {32: ""})
    for i, folder in enumerate(folders):
        merged, _ = adapter_engine(merge_adapter(model, folder, tmp_path / f"merged{i}"), backend)
        alone |= answer(merged, {i: ""})
    for i, expected in alone.items():
        assert mixed[i].error is None
        assert mixed[i].token_ids == expected.token_ids
        for ours, theirs in zip(mixed[i].logprobs, expected.logprobs, strict=True):
            assert dict(ours.top) == pytest.approx(dict(theirs.top), abs=TOLERANCE)
    assert len({tuple(one.token_ids) for one in mixed.values()}) > 16, "adapters change the answers"
