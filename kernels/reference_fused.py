"""Plain versions of the fused kernels, in fp32 or float64, for tests; and attention over paged KV fast enough for real shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def paged_attention_dense_ref(
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    start: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of one sequence, gathered and dense, in fp32.

    Args:
        q: [num_tokens, num_q_heads, head_dim], at positions start, start + 1, ...
        kv: [num_blocks, 2, block_size, num_kv_heads, head_dim]. block_table: [blocks], any integer dtype.
    Returns: [num_tokens, num_q_heads, head_dim], fp32.
    """
    num_tokens, end = q.shape[0], start + q.shape[0]
    gathered = kv[block_table.long()].float().transpose(0, 1).flatten(1, 2)[:, :end]
    group = q.shape[1] // kv.shape[3]
    k, v = (x.repeat_interleave(group, dim=1) for x in gathered)
    scores = torch.einsum("thd,shd->hts", q.float(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key, query = torch.arange(end, device=q.device), torch.arange(start, end, device=q.device)[:, None]
    hidden = key > query
    if window is not None:
        hidden = hidden | (key <= query - window)
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    return torch.einsum("hts,shd->thd", weights, v).reshape(num_tokens, q.shape[1], q.shape[2])


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """fp32, any leading dims."""
    x = x.float()
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight.float() + offset)


def rope_ref(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate halves. x: [num_tokens, heads, head_dim]; cos, sin: [num_positions, head_dim / 2]. Returns: fp32."""
    left, right = x.float().chunk(2, -1)
    c, s = cos.float()[positions.long()][:, None], sin.float()[positions.long()][:, None]
    return torch.cat((left * c - right * s, right * c + left * s), -1)


def feed_ids_ref(ids: Tensor, sources: Tensor, drawn: Tensor) -> Tensor:
    """See triton_sample.feed_ids; a new tensor."""
    fed = drawn[sources.clamp(min=0).long()].clamp(min=0)
    return torch.where(sources >= 0, fed, ids)


def gate_mul_ref(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """See triton_norm.gate_mul; fp32, by the activations' definitions."""
    gate, up = gate_up.float().chunk(2, -1)
    if activation == "silu":
        return gate * torch.sigmoid(gate) * up
    if activation == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate * 0.5**0.5)) * up
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return gate * 0.5 * (1 + torch.tanh(inner)) * up


def lora_ref(x: Tensor, a: Tensor, b: Tensor, adapters: Tensor, part_outputs: Sequence[int]) -> Tensor:
    """What adapters add to a layer's rows, fp32; zeros for rows without one.

    Args: x: [rows, inputs]. a: [slots, parts, max_rank, inputs]. b: [slots, outputs, max_rank]. adapters: [rows], -1: none.
    """
    out = torch.zeros(x.shape[0], b.shape[1], device=x.device)
    for row, slot in enumerate(adapters.tolist()):
        if slot >= 0:
            t = x[row].float() @ a[slot].float().transpose(1, 2)  # [parts, max_rank]
            parts = torch.split(b[slot].float(), list(part_outputs))
            out[row] = torch.cat([rows @ t[i] for i, rows in enumerate(parts)])
    return out
