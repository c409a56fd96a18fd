"""Adapters in the layers of every family: beside biases, norms of heads, norms behind attention and MLP, softcaps and windows.
Llama: test_exec_lora.py."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from diptych.common.adapters.peft import read_adapter
from diptych_tests.lora import linear_shapes, merge_adapter, write_adapter

WINDOWS = ["sliding_attention", "full_attention"]
GEMMA: dict[str, Any] = {
    "num_hidden_layers": 2, "sliding_window": 5, "query_pre_attn_scalar": 48, "layer_types": WINDOWS,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": {**GEMMA, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0},
    "Gemma3ForCausalLM": GEMMA,
    "MistralForCausalLM": {"num_hidden_layers": 2, "sliding_window": 5},
    "Qwen2ForCausalLM": {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"num_hidden_layers": 2},
}
PROMPTS = [[5, 9, 17, 250, 31, 8, 77, 120, 3], [44, 12, 90], [200, 201, 202, 203, 9, 9]]
SLOTS = [1, -1, 0]


@pytest.fixture
def adapters_of(tmp_path):
    """adapters_of(model) -> folders: of some layers and of all, with several ranks."""

    def make(model):
        some = linear_shapes(model, ("q_proj", "v_proj", "up_proj", "down_proj"))
        return [
            write_adapter(tmp_path / "some", some, rank=3, seed=1),
            write_adapter(tmp_path / "all", linear_shapes(model), rank=2, seed=2, ranks=lambda n: 5 if "o_proj" in n else 2),
        ]  # fmt: skip

    return make


def installed(driver, folders):
    for slot, folder in enumerate(folders):
        driver.runner.install_adapter(slot, driver.runner.read_adapter(folder, read_adapter(folder)))
    return driver


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_have_the_results_of_merged_weights(model_dir_of, driver_of, adapters_of, tmp_path, family, backend):
    model = model_dir_of(family, **FAMILIES[family])
    folders = adapters_of(model)
    driver = installed(driver_of(model, backend=backend, max_loras=2, max_lora_rank=5), folders)
    assert driver.runner.backend == backend
    ids, logprobs = driver.in_one_batch(PROMPTS, SLOTS)
    for i, slot in enumerate(SLOTS):
        weights = model if slot < 0 else merge_adapter(model, folders[slot], tmp_path / f"merged{slot}")
        expected, known = driver_of(weights, backend=backend).in_one_batch(PROMPTS[i : i + 1], [-1])
        assert ids[i] == expected[0]
        np.testing.assert_allclose(logprobs[i], known[0], atol=5e-4)
    assert ids[0] != driver.in_one_batch(PROMPTS[:1], [-1])[0][0], "the adapter changes the answer"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_triton_adds_before_the_norms_behind_attention_and_mlp(model_dir_of, driver_of, adapters_of, monkeypatch):
    """As on a GPU, where plain layers compute the first product themselves and the norms add the second."""
    from triton import knobs

    from diptych.engine.exec.backends import triton
    from diptych.engine.exec.linear import DenseLinear

    if not knobs.runtime.interpret:
        pytest.skip("set TRITON_INTERPRET=1")
    small = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    }  # fmt: skip
    model = model_dir_of("Gemma3ForCausalLM", **{**GEMMA, **small})
    folders = adapters_of(model)
    torch_driver = installed(driver_of(model, backend="torch", max_loras=2, max_lora_rank=5), folders)
    monkeypatch.setattr(triton, "keep_linear", lambda method, weights: DenseLinear(weights.weight, weights.bias))
    driver = installed(driver_of(model, backend="triton", max_loras=2, max_lora_rank=5), folders)
    expected, found = (one.in_one_batch(PROMPTS, SLOTS, count=2) for one in (torch_driver, driver))
    assert found[0] == expected[0]
    np.testing.assert_allclose(found[1], expected[1], atol=1e-4)
    assert np.abs(found[1] - driver.in_one_batch(PROMPTS, [-1] * 3, count=2)[1])[0].max() > 1e-2
