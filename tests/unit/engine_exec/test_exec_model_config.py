from __future__ import annotations

import json
from dataclasses import replace

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.errors import ConfigError
from diptych.engine.exec.model_runner import TorchModelRunner
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
        ("quantization_config.quant_method", {"quantization_config": {"quant_method": "bitsandbytes"}}),
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


# ---- keys that nothing reads ----

CONFIGS = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "MistralForCausalLM": transformers.MistralConfig,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "Qwen3ForCausalLM": transformers.Qwen3Config,
    "Gemma2ForCausalLM": transformers.Gemma2Config,
    "Gemma3ForCausalLM": transformers.Gemma3TextConfig,
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def written(architecture, *, everything, **changes):
    """config.json as transformers writes it: everything, or only what differs from the defaults."""
    made = CONFIGS[architecture](architectures=[architecture], dtype="bfloat16", **changes)
    return json.loads(made.to_json_string(use_diff=not everything))


@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_transformers_writes_is_read_or_known_to_change_nothing(architecture, everything):
    sizes = {"num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
    raw = written(architecture, everything=everything, head_dim=16, **sizes)
    raw = {"vocab_size": 100, "intermediate_size": 128, **raw}  # defaults are left out
    model = describe(raw)
    assert (model.architecture, model.num_layers, model.num_kv_heads, model.head_dim) == (architecture, 12, 4, 16)
    assert describe({**raw, "generation_max_length": None, "pruned_heads": {}, "anything": []}) == model
    defaults = transformers.GenerationConfig._get_default_generation_params()
    assert describe({**raw, **dict.fromkeys(defaults, 7)}) == model, "defaults of requests are no part of a model"


@pytest.mark.parametrize("rope", [LLAMA3, {"rope_type": "linear", "factor": 2.0}])
def test_ropes_that_transformers_writes(rope):
    for architecture in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        for everything in (True, False):
            raw = written(architecture, everything=everything, rope_parameters={**rope, "rope_theta": 5e5})
            described = describe({**LLAMA, **raw}).blocks[0].attention.rope
            assert (described.kind, described.theta, described.factor) == (rope["rope_type"], 5e5, rope["factor"])
    gemma3 = describe(written("Gemma3ForCausalLM", everything=True, rope_scaling=dict(rope)))
    assert [gemma3.blocks[i].attention.rope.kind for i in (4, 5)] == ["default", rope["rope_type"]]


PUBLISHED = {
    "Llama 2": {
        "architectures": ["LlamaForCausalLM"], "_name_or_path": "meta-llama/Llama-2-7b-hf", "pretraining_tp": 1,
        "attention_bias": False, "rope_scaling": None, "rope_theta": 10000.0, "torch_dtype": "float16", "use_cache": True,
        "max_length": 4096, "pad_token_id": 0, "do_sample": True, "temperature": 0.9, "top_p": 0.6,
    },
    "Llama 3.1": {
        "architectures": ["LlamaForCausalLM"], "eos_token_id": [8, 9], "mlp_bias": False, "pretraining_tp": 1,
        "rope_scaling": LLAMA3, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0",
    },
    "SmolLM2": {
        "architectures": ["LlamaForCausalLM"], "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "pretraining_tp": 1,
    },
    "Mistral Nemo": {
        "architectures": ["MistralForCausalLM"], "head_dim": 16, "rope_theta": 1000000.0, "sliding_window": None,
        "attention_dropout": 0.0, "initializer_range": 0.02,
    },
    "Qwen2.5": {
        "architectures": ["Qwen2ForCausalLM"], "max_window_layers": 70, "rope_theta": 1000000.0, "sliding_window": 131072,
        "use_mrope": False, "use_sliding_window": False,
    },
    "Qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 16, "max_window_layers": 36,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False,
    },
    "Gemma 2": {
        "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0, "head_dim": 16, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "rope_theta": 10000.0,
        "sliding_window": 4096, "sliding_window_size": 4096,
    },
    "Gemma 3": {
        "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "cache_implementation": "hybrid",
        "final_logit_softcapping": None, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16, "rope_local_base_freq": 10000, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "_sliding_window_pattern": 6,
    },
}  # fmt: skip
"""Keys of config.json files on the hub that transformers 5 does not write any more."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_earlier_versions_wrote_is_known(name):
    sizes = {key: value for key, value in LLAMA.items() if key not in ("architectures", "rope_theta")}
    describe({"eos_token_id": 1, "bos_token_id": 2, "model_type": "any", **sizes, **PUBLISHED[name]})


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        # Granite's: each changes every logit, and its other keys are Llama's.
        *((name, {name: 0.5}) for name in (
            "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling",
        )),
        ("final_logit_softcapping", {"final_logit_softcapping": 30.0}),
        ("attn_logit_softcapping", {"attn_logit_softcapping": 30.0, "architectures": ["Gemma3ForCausalLM"]}),
        ("query_pre_attn_scalar", {"query_pre_attn_scalar": 144}),
        ("sliding_window", {"sliding_window": 64}),
        ("layer_types", {"layer_types": ["full_attention"] * 4}),
        ("mlp_bias", {"mlp_bias": True, "architectures": ["Qwen2ForCausalLM"]}),
        ("dual_chunk_attention_config", {
            "dual_chunk_attention_config": {"chunk_size": 262144}, "architectures": ["Qwen2ForCausalLM"],
        }),
        ("num_experts", {"num_experts": 0}),
        ("per_layer_config", {"per_layer_config": {"1": {"intermediate_size": 64}}}),
        ("rope_interleaved", {"rope_interleaved": True}),
        ("is_encoder_decoder", {"is_encoder_decoder": True}),
        ("rope_scaling.attention_factor", {"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 1.2}}),
        ("rope_parameters.factor", {"rope_parameters": {"rope_type": "default", "factor": 8.0}}),
        ("rope_scaling", {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("rope_parameters.full_attention.mscale", {
            "architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"full_attention": {"mscale": 0.7}},
        }),
        ("rope_parameters.rope_theta", {
            "architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"rope_theta": 5e5},
        }),
        ("layer_types", {
            "architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"] * 4, "sliding_window": 64,
        }),
    ],
)  # fmt: skip
def test_a_key_that_nothing_reads_is_refused_by_name(field, changes):
    with pytest.raises(ConfigError) as error:
        config(**changes)
    assert error.value.field == field


def test_a_key_of_another_model_is_refused_before_weights_are_read(tiny_dir, tmp_path):
    raw = {**json.loads((tiny_dir / "config.json").read_text()), "residual_multiplier": 0.22}
    (tmp_path / "config.json").write_text(json.dumps(raw))  # and no weights
    with pytest.raises(ConfigError, match="residual_multiplier=0.22"):
        TorchModelRunner.load(tmp_path, num_blocks=8)


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
    "residual_multiplier",
)  # fmt: skip
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.sampled_from(["", "x", "linear", "llama3"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "full_attention", "type"]), inner)
    ),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
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
