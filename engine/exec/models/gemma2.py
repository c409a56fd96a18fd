"""Gemma 2: norms before and behind attention and feed-forward layer, windows in every other layer, softcaps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from diptych.engine.exec.layers.norm import Norm
from diptych.engine.exec.models import fields, parts
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.models.family import Family, Field, Gguf


def _windows(raw: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """Every other layer has one, the first does; null switches them off."""
    window = fields.window(raw)
    return [window if one else None for one in fields.sliding_layers(raw, tuple(i % 2 == 0 for i in range(num_layers)))]


def describe(raw: Mapping[str, Any]) -> ModelDescription:
    fields.only(raw, "use_bidirectional_attention", False)
    hidden_size, heads = fields.integer(raw, "hidden_size"), fields.heads(raw, default_head_dim=256)
    max_position = fields.integer(raw, "max_position_embeddings", 8192)
    norm = partial(Norm, eps=fields.number(raw, "rms_norm_eps", 1e-6), offset=1.0)
    rope, bias = fields.rope(raw, max_position), fields.flag(raw, "attention_bias")
    scale = fields.number(raw, "query_pre_attn_scalar", 256) ** -0.5
    softcap = fields.optional_number(raw, "attn_logit_softcapping", 50.0)
    mlp_size = fields.integer(raw, "intermediate_size")
    activation = fields.activation(raw, "hidden_activation", "gelu_pytorch_tanh")
    embedding, head = parts.ends(
        vocab_size=fields.integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        norm=norm,
        tied=fields.flag(raw, "tie_word_embeddings", True),
        scale=hidden_size**0.5,
        softcap=fields.optional_number(raw, "final_logit_softcapping", 30.0),
    )
    blocks = tuple(
        parts.four_norm_block(
            f"model.layers.{i}",
            norm,
            parts.attention(
                f"model.layers.{i}.self_attn",
                hidden_size=hidden_size,
                heads=heads,
                rope=rope,
                scale=scale,
                qkv_bias=bias,
                o_bias=bias,
                softcap=softcap,
                window=window,
            ),
            parts.gated_mlp(f"model.layers.{i}.mlp", hidden_size=hidden_size, size=mlp_size, activation=activation),
        )
        for i, window in enumerate(_windows(raw, fields.num_layers(raw)))
    )
    return ModelDescription("Gemma2ForCausalLM", embedding, blocks, head, max_position)


def _gguf_config(field: Field) -> dict[str, Any]:
    heads, layers = field("attention.head_count"), field("block_count")
    # The file does not hold it: the 27B model divides by its hidden size per head, the others by head_dim.
    scalar = field("embedding_length") // heads if layers == 46 else field("attention.key_length")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(scalar),
        "sliding_window": int(field("attention.sliding_window")),
        "attn_logit_softcapping": float(field("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(field("final_logit_softcapping", 30.0)),
    }


def _gguf_restore(name: str, weight: Any, config: Mapping[str, Any]) -> Any:
    """GGUF holds 1 + w of a norm."""
    return weight - 1 if name.endswith("norm.weight") else weight


FAMILY = Family(
    ("Gemma2ForCausalLM",),
    describe,
    Gguf("gemma2", "gemma2", _gguf_config, _gguf_restore),
    without_effect=("hidden_act", "sliding_window_size"),  # of old configs: hidden_activation and sliding_window count
)
