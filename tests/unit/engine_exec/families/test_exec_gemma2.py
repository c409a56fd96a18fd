"""Gemma 2 on every back end is transformers'; windows are shorter than the prompts."""

from __future__ import annotations

import importlib.util

import pytest

from diptych.common.compiled import ALL_LANES
from diptych.common.errors import ConfigError
from diptych.engine.exec.models.registry import describe

GEMMA2 = {"sliding_window": 11, "query_pre_attn_scalar": 48, "attn_logit_softcapping": 5.0, "num_hidden_layers": 4}
VARIANTS = {
    "gemma2": {},
    "no-caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    "all-full": {"layer_types": ["full_attention"] * 4, "attention_bias": True},
}
RAW = {
    "architectures": ["Gemma2ForCausalLM"], "vocab_size": 320, "hidden_size": 96, "intermediate_size": 160,
    "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", *ALL_LANES])
@pytest.mark.parametrize("name", VARIANTS)
def test_ids_and_logits_are_transformers(check_family_of, name, backend):
    check_family_of("Gemma2ForCausalLM", backend, {**GEMMA2, **VARIANTS[name]}, count=64)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
def test_ids_and_logits_of_triton_are_transformers(check_family_of):
    from triton import knobs

    if not knobs.runtime.interpret:
        pytest.skip("set TRITON_INTERPRET=1")
    small = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "sliding_window": 7, "num_hidden_layers": 2,
    }  # fmt: skip
    check_family_of("Gemma2ForCausalLM", "triton", {**GEMMA2, **small}, count=10, lengths=(1, 19))


def test_defaults_are_transformers():
    model = describe(RAW)
    attention = model.blocks[0].attention
    assert (model.head_dim, attention.scale, attention.softcap, model.head.softcap) == (256, 1 / 16, 50.0, 30.0)
    assert model.windows == (4096, None, 4096)
    assert (model.head.tied, model.embedding.scale, model.blocks[0].mlp.activation) == (True, 96**0.5, "gelu_tanh")
    assert {norm.offset for norm in (model.head.norm, model.blocks[0].attention_output_norm)} == {1.0}
    assert describe({**RAW, "sliding_window": None}).windows == (None,) * 3


def test_attention_in_both_directions_is_refused():
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        describe({**RAW, "use_bidirectional_attention": True})
