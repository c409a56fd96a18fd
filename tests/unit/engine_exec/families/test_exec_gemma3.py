"""Gemma 3 (text) on every back end is transformers'; windows are shorter than the prompts, and ropes differ by layer."""

from __future__ import annotations

import importlib.util

import pytest

from diptych.common.compiled import ALL_LANES
from diptych.common.errors import ConfigError
from diptych.engine.exec.models.registry import describe

ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
GEMMA3 = {
    "sliding_window": 11, "query_pre_attn_scalar": 48, "num_hidden_layers": 4, "rope_parameters": ROPES,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
VARIANTS = {
    "gemma3": {},
    "one-kv-head": {"num_key_value_heads": 1, "head_dim": 64, "final_logit_softcapping": 20.0},
    "untied": {"tie_word_embeddings": False, "attention_bias": True},
}
RAW = {
    "architectures": ["Gemma3ForCausalLM"], "vocab_size": 320, "hidden_size": 96, "intermediate_size": 160,
    "num_hidden_layers": 7, "num_attention_heads": 6, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", *ALL_LANES])
@pytest.mark.parametrize("name", VARIANTS)
def test_ids_and_logits_are_transformers(check_family_of, name, backend):
    check_family_of("Gemma3ForCausalLM", backend, {**GEMMA3, **VARIANTS[name]}, count=64)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
def test_ids_and_logits_of_triton_are_transformers(check_family_of):
    from triton import knobs

    if not knobs.runtime.interpret:
        pytest.skip("set TRITON_INTERPRET=1")
    small = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "sliding_window": 7, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    check_family_of("Gemma3ForCausalLM", "triton", {**GEMMA3, **small}, count=10, lengths=(1, 19))


def ropes_of(model):
    return [(block.attention.rope.theta, block.attention.rope.factor) for block in model.blocks]


def test_defaults_are_transformers():
    model = describe(RAW)
    attention = model.blocks[0].attention
    assert (model.head_dim, attention.scale, attention.softcap, model.head.softcap) == (256, 1 / 16, None, None)
    assert model.windows == (4096,) * 5 + (None, 4096)
    assert ropes_of(model) == [(10_000.0, 1.0)] * 5 + [(1e6, 1.0), (10_000.0, 1.0)]
    assert {norm.offset for norm in (model.head.norm, attention.q_norm, model.blocks[0].mlp_output_norm)} == {1.0}


def test_ropes_in_the_spelling_before_transformers_5():
    old = {"rope_theta": 5e5, "rope_local_base_freq": 3e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    model = describe({**RAW, **old, "sliding_window_pattern": 2, "num_hidden_layers": 2})
    assert ropes_of(model) == [(3e3, 1.0), (5e5, 8.0)]


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("use_bidirectional_attention", {"use_bidirectional_attention": True}),
        ("attn_logit_softcapping", {"attn_logit_softcapping": 50.0}),
        ("rope_parameters.full_attention.rope_type", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}),
        ("rope_parameters", {"rope_parameters": [1]}),
        ("rope_parameters.sliding_attention", {"rope_parameters": {"sliding_attention": 3}}),
        ("layer_types", {"layer_types": ["full_attention"]}),
    ],
)
def test_what_is_not_built_is_refused_by_name(field, changes):
    with pytest.raises(ConfigError) as error:
        describe({**RAW, **changes})
    assert error.value.field == field
