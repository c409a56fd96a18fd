from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.errors import ConfigError
from diptych.engine.exec.models.fields import eos_token_ids
from diptych.engine.exec.models.registry import ARCHITECTURES, describe

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}


def config(**changes):
    return describe({**LLAMA, **changes})


def test_llama():
    model = config()
    attention, mlp = model.blocks[3].attention, model.blocks[3].mlp
    assert (model.num_layers, model.head_dim, model.num_kv_heads, attention.q_size, attention.kv_size) == (
        4,
        8,
        2,
        64,
        16,
    )
    assert [part.name for part in attention.qkv.parts] == [f"model.layers.3.self_attn.{x}_proj" for x in "qkv"]
    assert {linear.bias for linear in (attention.qkv, attention.o, mlp.gate_up, mlp.down)} == {False}
    assert (attention.q_norm, attention.softcap, model.head.tied) == (None, None, False)
    assert model.windows == (None,) * 4


def test_a_q_norm_over_the_whole_width_is_refused_by_name():
    model = config(architectures=["Qwen3ForCausalLM"], head_dim=8)
    block = model.blocks[0]
    attention = replace(block.attention, q_norm=replace(block.attention.q_norm, size=64))
    with pytest.raises(ConfigError, match=r"q_norm.*head_dim=8"):
        replace(model, blocks=(replace(block, attention=attention), *model.blocks[1:]))


def test_theta_in_both_spellings():
    assert config(rope_theta=5e5).blocks[0].attention.rope.theta == 5e5
    assert config(rope_parameters={"rope_type": "default", "rope_theta": 7e4}).blocks[0].attention.rope.theta == 7e4
    old = config(rope_theta=9e4, rope_scaling={"type": "linear", "factor": 4.0}).blocks[0].attention.rope
    assert (old.kind, old.theta, old.factor) == ("linear", 9e4, 4.0)
    new = (
        config(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
            }
        )
        .blocks[0]
        .attention.rope
    )
    assert (new.kind, new.factor, new.original_max_position) == ("llama3", 8.0, 512)


def test_families():
    qwen2 = config(architectures=["Qwen2ForCausalLM"], attention_bias=False)
    assert qwen2.blocks[0].attention.qkv.bias
    assert not qwen2.blocks[0].attention.o.bias
    qwen3 = config(architectures=["Qwen3ForCausalLM"])
    assert qwen3.blocks[0].attention.q_norm
    assert qwen3.head_dim == 128
    assert config(architectures=["MistralForCausalLM"]).windows == (4096,) * 4
    assert config(architectures=["MistralForCausalLM"], sliding_window=None).windows == (None,) * 4
    windowed = config(
        architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=16, max_window_layers=3
    )
    assert windowed.windows == (None, None, None, 16)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("architectures", {"architectures": ["GPT2LMHeadModel"]}),
        ("architectures", {"architectures": None}),
        ("hidden_act", {"hidden_act": "relu2"}),
        ("quantization_config.quant_method", {"quantization_config": {"quant_method": "awq"}}),
        ("rope_scaling.rope_type", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
        ("factor", {"rope_scaling": {"rope_type": "linear"}}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("num_key_value_heads", {"num_key_value_heads": 3}),
        ("hidden_size", {"hidden_size": None}),
        ("vocab_size", {"vocab_size": "many"}),
        ("tie_word_embeddings", {"tie_word_embeddings": "yes"}),
        ("head_dim", {"head_dim": 7}),
        ("layer_types", {
            "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["chunked_attention"] * 4,
        }),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(field, changes):
    with pytest.raises(ConfigError) as error:
        config(**changes)
    assert error.value.field == field


def test_eos():
    assert eos_token_ids({**LLAMA, "eos_token_id": 2}, None) == (2,)
    assert eos_token_ids({**LLAMA, "eos_token_id": 2}, {"eos_token_id": [3, 4]}) == (3, 4)
    assert eos_token_ids(LLAMA, {}) == ()
    with pytest.raises(ConfigError, match="eos_token_id"):
        eos_token_ids({**LLAMA, "eos_token_id": 100}, None)


FIELDS = (
    *LLAMA, "head_dim", "hidden_act", "hidden_activation", "rope_parameters", "rope_scaling", "partial_rotary_factor",
    "attention_bias", "mlp_bias", "tie_word_embeddings", "sliding_window", "use_sliding_window", "max_window_layers",
    "layer_types", "sliding_window_pattern", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping", "rope_local_base_freq", "use_bidirectional_attention", "quantization_config",
)  # fmt: skip
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.sampled_from(["", "x", "linear", "llama3"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "full_attention", "type"]), inner)
    ),
    max_leaves=5,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(ARCHITECTURES), st.dictionaries(st.sampled_from(FIELDS), anything, max_size=4))
def test_whatever_a_config_holds_is_described_or_refused_by_name(architecture, changes):
    """No other error; and numbers that are described make sense."""
    raw = {**LLAMA, "num_hidden_layers": 3, "architectures": [architecture], **changes}
    try:
        model = describe(raw)
    except ConfigError:
        return
    for block in model.blocks:
        attention = block.attention
        assert attention.num_heads % attention.num_kv_heads == 0
        assert 0 < attention.scale < float("inf")
        assert attention.window is None or attention.window > 0
        for value in (attention.rope.theta, attention.rope.factor, block.mlp_norm.eps, attention.softcap or 1.0):
            assert 0 < value < float("inf")
