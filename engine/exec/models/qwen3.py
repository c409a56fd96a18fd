"""Qwen3, dense: each query and key head is normed before it is rotated."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from diptych.engine.exec.layers.norm import Norm
from diptych.engine.exec.models import fields, parts
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.models.family import Family, Gguf


def describe(raw: Mapping[str, Any]) -> ModelDescription:
    hidden_size, heads = fields.integer(raw, "hidden_size"), fields.heads(raw, default_head_dim=128)
    max_position = fields.integer(raw, "max_position_embeddings", 32768)
    norm = partial(Norm, eps=fields.number(raw, "rms_norm_eps", 1e-6))
    rope, bias = fields.rope(raw, max_position), fields.flag(raw, "attention_bias")
    mlp_size, activation = fields.integer(raw, "intermediate_size"), fields.activation(raw)
    embedding, head = parts.ends(
        vocab_size=fields.integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        norm=norm,
        tied=fields.flag(raw, "tie_word_embeddings"),
    )
    blocks = tuple(
        parts.pre_norm_block(
            f"model.layers.{i}",
            norm,
            parts.attention(
                f"model.layers.{i}.self_attn",
                hidden_size=hidden_size,
                heads=heads,
                rope=rope,
                qkv_bias=bias,
                o_bias=bias,
                qk_norm=norm,
                window=window,
            ),
            parts.gated_mlp(f"model.layers.{i}.mlp", hidden_size=hidden_size, size=mlp_size, activation=activation),
        )
        for i, window in enumerate(fields.upper_windows(raw, fields.num_layers(raw)))
    )
    return ModelDescription("Qwen3ForCausalLM", embedding, blocks, head, max_position)


FAMILY = Family(("Qwen3ForCausalLM",), describe, Gguf("qwen3", "qwen3", lambda field: {"hidden_act": "silu"}))
