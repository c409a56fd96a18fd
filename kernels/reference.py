"""Obviously right versions of every op, one token and one block at a time. Tests compare the fast paths with these."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def write_kv_ref(pool: Tensor, layer: int, block_table: Sequence[int], start: int, k: Tensor, v: Tensor) -> None:
    """Store k and v, [num_tokens, num_kv_heads, head_dim], at positions start, start + 1, ... of one sequence."""
    block_size = pool.shape[3]
    for i in range(k.shape[0]):
        block, offset = divmod(start + i, block_size)
        pool[block_table[block], layer, 0, offset] = k[i]
        pool[block_table[block], layer, 1, offset] = v[i]


def paged_attention_ref(
    q: Tensor,
    pool: Tensor,
    layer: int,
    block_table: Sequence[int],
    start: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of one sequence's queries over its paged KV, in float64.

    Args:
        q: [num_tokens, num_q_heads, head_dim], at positions start, start + 1, ...
        pool: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]; KV of all tokens up to the last query is in it.
        window: a query at p sees keys in (p - window, p]; None: all up to p.
        softcap: scores become softcap * tanh(score / softcap); None: they stay.
    Returns: [num_tokens, num_q_heads, head_dim], float64.
    """
    block_size, num_kv_heads = pool.shape[3], pool.shape[4]
    group = q.shape[1] // num_kv_heads
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(q.shape[0]):
        position = start + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            scores, values = [], []
            for p in range(first, position + 1):
                slot = pool[block_table[p // block_size], layer, :, p % block_size, head // group].double()
                scores.append(torch.dot(q[i, head].double(), slot[0]) * scale)
                values.append(slot[1])
            stacked = torch.stack(scores)
            if softcap is not None:
                stacked = softcap * torch.tanh(stacked / softcap)
            out[i, head] = torch.softmax(stacked, 0) @ torch.stack(values)
    return out


def pack_ref(pool: Tensor, block_ids: Sequence[int], num_tokens: int) -> bytes:
    """Bytes of `num_tokens` tokens: each block's [num_layers, 2, tokens in it, num_kv_heads, head_dim], one after the other."""
    block_size = pool.shape[3]
    out = b""
    for i, block in enumerate(block_ids):
        used = min(block_size, num_tokens - i * block_size)
        out += pool[block, :, :, :used].contiguous().view(torch.uint8).numpy().tobytes()
    return out
