"""Gemma 3 (text): five layers with a window and a rope of their own to each that sees all; q and k are normed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from diptych.common.errors import ConfigError
from diptych.engine.exec.layers.norm import Norm
from diptych.engine.exec.layers.rope import Rope
from diptych.engine.exec.models import fields, parts
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.models.family import Family, Field, Gguf

_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def _ropes(raw: Mapping[str, Any], max_position: int) -> tuple[Rope, Rope]:
    """Of layers that see all tokens, and of those with a window. transformers 5 writes one object for each kind of layer;
    before, rope_theta and rope_scaling were the first ones' and rope_local_base_freq the others'."""
    theta = fields.number(raw, "rope_theta", _THETA)
    local_theta = fields.number(raw, "rope_local_base_freq", _LOCAL_THETA)
    given = raw.get("rope_parameters")
    if given is None:
        return fields.rope(raw, max_position, theta), Rope(local_theta)
    if not isinstance(given, Mapping):
        raise ConfigError("rope_parameters", given, "must be an object")
    full, sliding = (
        fields.rope_of(given.get(kind) or {}, f"rope_parameters.{kind}", default, max_position)
        for kind, default in (("full_attention", theta), ("sliding_attention", local_theta))
    )
    return full, sliding


def _sliding(raw: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """For each layer whether it has a window; the last one of the pattern sees all."""
    pattern = fields.integer(raw, "sliding_window_pattern", 6)
    return fields.sliding_layers(raw, tuple((i + 1) % pattern != 0 for i in range(num_layers)))


def describe(raw: Mapping[str, Any]) -> ModelDescription:
    fields.only(raw, "use_bidirectional_attention", False)
    hidden_size, heads = fields.integer(raw, "hidden_size"), fields.heads(raw, default_head_dim=256)
    max_position = fields.integer(raw, "max_position_embeddings", 131_072)
    norm = partial(Norm, eps=fields.number(raw, "rms_norm_eps", 1e-6), offset=1.0)
    full_rope, sliding_rope = _ropes(raw, max_position)
    bias = fields.flag(raw, "attention_bias")
    scale = fields.number(raw, "query_pre_attn_scalar", 256) ** -0.5
    window = fields.integer(raw, "sliding_window", 4096)
    mlp_size = fields.integer(raw, "intermediate_size")
    activation = fields.activation(raw, "hidden_activation", "gelu_pytorch_tanh")
    embedding, head = parts.ends(
        vocab_size=fields.integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        norm=norm,
        tied=fields.flag(raw, "tie_word_embeddings", True),
        scale=hidden_size**0.5,
        softcap=fields.optional_number(raw, "final_logit_softcapping", None),
    )
    blocks = tuple(
        parts.four_norm_block(
            f"model.layers.{i}",
            norm,
            parts.attention(
                f"model.layers.{i}.self_attn",
                hidden_size=hidden_size,
                heads=heads,
                rope=sliding_rope if slides else full_rope,
                scale=scale,
                qkv_bias=bias,
                o_bias=bias,
                qk_norm=norm,
                window=window if slides else None,
            ),
            parts.gated_mlp(f"model.layers.{i}.mlp", hidden_size=hidden_size, size=mlp_size, activation=activation),
        )
        for i, slides in enumerate(_sliding(raw, fields.num_layers(raw)))
    )
    return ModelDescription("Gemma3ForCausalLM", embedding, blocks, head, max_position)


def _gguf_config(field: Field) -> dict[str, Any]:
    heads, layers = field("attention.head_count"), field("block_count")
    # The file does not hold it: the 27B model divides by its hidden size per head, the others by head_dim.
    scalar = field("embedding_length") // heads if layers == 62 else field("attention.key_length")
    full = {"rope_type": "default", "rope_theta": float(field("rope.freq_base", _THETA))}
    if field("rope.scaling.type", "none") != "none":
        full |= {"rope_type": field("rope.scaling.type"), "factor": float(field("rope.scaling.factor"))}
    local = {"rope_type": "default", "rope_theta": float(field("rope.freq_base_swa", _LOCAL_THETA))}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(scalar),
        "sliding_window": int(field("attention.sliding_window")),
        "sliding_window_pattern": int(field("attention.sliding_window_pattern", 6)),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _gguf_restore(name: str, weight: Any, config: Mapping[str, Any]) -> Any:
    """GGUF holds 1 + w of a norm."""
    return weight - 1 if name.endswith("norm.weight") else weight


FAMILY = Family(
    ("Gemma3ForCausalLM",),
    describe,
    Gguf("gemma3", "gemma3_text", _gguf_config, _gguf_restore),
    without_effect=("hidden_act", "_sliding_window_pattern"),  # hidden_activation, and layer_types beside it, count
)
