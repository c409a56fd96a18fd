"""Mistral: Llama's layers without biases, every one of them with a window."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from diptych.engine.exec.layers.norm import Norm
from diptych.engine.exec.models import fields, parts
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.models.family import Family


def describe(raw: Mapping[str, Any]) -> ModelDescription:
    hidden_size, heads = fields.integer(raw, "hidden_size"), fields.heads(raw)
    max_position = fields.integer(raw, "max_position_embeddings", 32768)
    norm = partial(Norm, eps=fields.number(raw, "rms_norm_eps", 1e-6))
    rope, window = fields.rope(raw, max_position), fields.window(raw)
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
                f"model.layers.{i}.self_attn", hidden_size=hidden_size, heads=heads, rope=rope, window=window
            ),
            parts.gated_mlp(f"model.layers.{i}.mlp", hidden_size=hidden_size, size=mlp_size, activation=activation),
        )
        for i in range(fields.num_layers(raw))
    )
    return ModelDescription("MistralForCausalLM", embedding, blocks, head, max_position)


FAMILY = Family(("MistralForCausalLM",), describe)
