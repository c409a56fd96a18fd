"""Llama 2 and 3, and what shares their architecture, such as SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from diptych.engine.exec.layers.norm import Norm
from diptych.engine.exec.models import fields, parts
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.models.family import Family, Field, Gguf


def describe(raw: Mapping[str, Any]) -> ModelDescription:
    hidden_size, heads = fields.integer(raw, "hidden_size"), fields.heads(raw)
    max_position = fields.integer(raw, "max_position_embeddings", 2048)
    norm = partial(Norm, eps=fields.number(raw, "rms_norm_eps", 1e-6))
    rope, bias = fields.rope(raw, max_position), fields.flag(raw, "attention_bias")
    mlp_size, mlp_bias = fields.integer(raw, "intermediate_size"), fields.flag(raw, "mlp_bias")
    activation = fields.activation(raw)
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
            ),
            parts.gated_mlp(
                f"model.layers.{i}.mlp", hidden_size=hidden_size, size=mlp_size, activation=activation, bias=mlp_bias
            ),
        )
        for i in range(fields.num_layers(raw))
    )
    return ModelDescription("LlamaForCausalLM", embedding, blocks, head, max_position)


def _gguf_config(field: Field) -> dict[str, Any]:
    return {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False}


def _gguf_restore(name: str, weight: Any, config: Mapping[str, Any]) -> Any:
    """GGUF keeps the rotary halves of q and k interleaved; Hugging Face keeps them one after the other."""
    heads = {"q_proj.weight": "num_attention_heads", "k_proj.weight": "num_key_value_heads"}.get(name.split(".", 4)[-1])
    if heads is None:
        return weight
    rows, columns = weight.shape
    pairs = weight.reshape(config[heads], rows // config[heads] // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


FAMILY = Family(("LlamaForCausalLM",), describe, Gguf("llama", "llama", _gguf_config, _gguf_restore))
