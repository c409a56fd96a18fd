"""Layers under the names that most decoders of Hugging Face have for them: what families are put together from."""

from __future__ import annotations

from collections.abc import Callable

from diptych.engine.exec.layers.attention import Attention
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.layers.embedding import Embedding, LmHead
from diptych.engine.exec.layers.linear import Linear, Part, ShardBy
from diptych.engine.exec.layers.mlp import Mlp
from diptych.engine.exec.layers.norm import Norm
from diptych.engine.exec.layers.rope import Rope

MakeNorm = Callable[[str, int], Norm]
"""(name in the checkpoint, size) -> norm."""


def pre_norm_block(prefix: str, norm: MakeNorm, attention: Attention, mlp: Mlp) -> DecoderBlock:
    """A norm before attention and one before the feed-forward layer, as Llama has them."""
    hidden_size = attention.o.outputs
    return DecoderBlock(
        attention_norm=norm(f"{prefix}.input_layernorm", hidden_size),
        attention=attention,
        mlp_norm=norm(f"{prefix}.post_attention_layernorm", hidden_size),
        mlp=mlp,
    )


def four_norm_block(prefix: str, norm: MakeNorm, attention: Attention, mlp: Mlp) -> DecoderBlock:
    """A norm before and one behind attention, and so the feed-forward layer."""
    hidden_size = attention.o.outputs
    return DecoderBlock(
        attention_norm=norm(f"{prefix}.input_layernorm", hidden_size),
        attention=attention,
        attention_output_norm=norm(f"{prefix}.post_attention_layernorm", hidden_size),
        mlp_norm=norm(f"{prefix}.pre_feedforward_layernorm", hidden_size),
        mlp=mlp,
        mlp_output_norm=norm(f"{prefix}.post_feedforward_layernorm", hidden_size),
    )


def attention(
    prefix: str,
    *,
    hidden_size: int,
    heads: tuple[int, int, int],
    rope: Rope,
    scale: float | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: MakeNorm | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Attention:
    """q_proj, k_proj, v_proj and o_proj under `prefix`.

    Args:
        heads: query heads, KV heads, head_dim.
        scale: None: head_dim ** -0.5.
        qk_norm: makes the norms of each query and key head, q_norm and k_norm under `prefix`; None: there are none.
    """
    num_heads, num_kv_heads, head_dim = heads
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    query = Part(f"{prefix}.q_proj", q_size, num_heads)
    keys, values = (Part(f"{prefix}.{name}_proj", kv_size, num_kv_heads, kv=True) for name in "kv")
    q_norm, k_norm = (
        None if qk_norm is None else qk_norm(f"{prefix}.{name}", head_dim) for name in ("q_norm", "k_norm")
    )
    return Attention(
        qkv=Linear((query, keys, values), hidden_size, qkv_bias, ShardBy.OUTPUTS),
        o=Linear((Part(f"{prefix}.o_proj", hidden_size),), q_size, o_bias, ShardBy.INPUTS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        scale=head_dim**-0.5 if scale is None else scale,
        q_norm=q_norm,
        k_norm=k_norm,
        softcap=softcap,
        window=window,
    )


def gated_mlp(prefix: str, *, hidden_size: int, size: int, activation: str, bias: bool = False) -> Mlp:
    """gate_proj, up_proj and down_proj under `prefix`."""
    gate_up = (Part(f"{prefix}.gate_proj", size), Part(f"{prefix}.up_proj", size))
    return Mlp(
        gate_up=Linear(gate_up, hidden_size, bias, ShardBy.OUTPUTS),
        down=Linear((Part(f"{prefix}.down_proj", hidden_size),), size, bias, ShardBy.INPUTS),
        activation=activation,
    )


def ends(
    *, vocab_size: int, hidden_size: int, norm: MakeNorm, tied: bool, scale: float = 1.0, softcap: float | None = None
) -> tuple[Embedding, LmHead]:
    """model.embed_tokens, and lm_head behind model.norm."""
    embedding = Embedding("model.embed_tokens", vocab_size, hidden_size, scale)
    linear = Linear((Part("lm_head", vocab_size),), hidden_size, shard=ShardBy.OUTPUTS)
    return embedding, LmHead(norm("model.norm", hidden_size), linear, tied, softcap)
