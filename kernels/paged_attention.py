"""Paged attention in plain torch, for the CPU and any other device without a kernel of its own.

The pool [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] is seen as rows: one row is the K or the V of one
block in one layer, contiguous. Row of block b in layer l: (b * num_layers + l) * 2, V right after K. So a layer's view is
the pool shifted by 2 * l rows, and one set of indices (`block_rows`) serves all layers:

    rows:  [b0 l0 K][b0 l0 V][b0 l1 K][b0 l1 V] ... [b1 l0 K][b1 l0 V] ...
           ^ layer 0         ^ layer 1: same indices, view starts here

The same holds for single tokens: a slot is one token's K in one layer, its V lies block_size slots further.

Of a quantized pool rows and slots are bytes: what is gathered is decoded at once, and attention is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from diptych.kernels.kv_codes import SlotCodec


class Scratch:
    """A buffer that grows to the largest gather and is then used again: fresh memory costs a page fault a page."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, num_rows: int, like: Tensor) -> Tensor:
        """Returns: [num_rows, like.shape[1]] of like's dtype and device; valid until the next take."""
        size = num_rows * like.shape[1]
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = torch.empty(size + size // 4, dtype=like.dtype, device=like.device)
        return self._buffer[:size].view(num_rows, like.shape[1])


def layer_rows(pool: Tensor, layer: int) -> Tensor:
    """[rows from this layer's first on, block_size * num_kv_heads * head_dim], a view."""
    return pool.view(-1, pool.shape[3] * pool.shape[4] * pool.shape[5])[2 * layer :]


def layer_slots(pool: Tensor, layer: int) -> Tensor:
    """[slots from this layer's first on, num_kv_heads * head_dim], a view."""
    return pool.view(-1, pool.shape[4] * pool.shape[5])[2 * layer * pool.shape[3] :]


def block_rows(block_ids: Tensor, num_layers: int) -> Tensor:
    """Row indices of the K rows, then of the V rows, of `block_ids` (any shape, int64). Returns: [2 * numel]."""
    k_rows = block_ids.reshape(-1) * (2 * num_layers)
    return torch.cat((k_rows, k_rows + 1))


def token_slots(block_ids: Tensor, offsets: Tensor, num_layers: int, block_size: int) -> Tensor:
    """Slot indices of the K of tokens at `offsets` within `block_ids`, both [num_tokens] int64."""
    return block_ids * (2 * num_layers * block_size) + offsets


def write_kv(slots_view: Tensor, slots: Tensor, v_slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store one layer's new keys and values.

    Args:
        slots_view: layer_slots(pool, layer).
        slots, v_slots: token_slots(...), and the same + block_size.
        k, v: [num_tokens, num_kv_heads * head_dim], or [num_tokens, slot_bytes] as SlotCodec.encode makes them; rows may be
            strided.
    """
    slots_view.index_copy_(0, slots, k)
    slots_view.index_copy_(0, v_slots, v)


def decode_mask(lens: Tensor, num_slots: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive mask for one query a sequence. lens: [num_seqs], tokens including the new one.
    Returns: [num_seqs, 1, 1, num_slots], 0 where visible, -inf elsewhere."""
    at = torch.arange(num_slots, device=lens.device)
    hidden = at >= lens[:, None]
    if window is not None:
        hidden |= at < lens[:, None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=lens.device).masked_fill_(hidden, float("-inf"))
    return mask[:, None, None, :]


def chunk_mask(start: int, num_tokens: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive causal mask for queries at start .. start + num_tokens. Returns: [num_tokens, start + num_tokens]."""
    at = torch.arange(start + num_tokens, device=device)
    queries = at[start:, None]
    hidden = at > queries
    if window is not None:
        hidden |= at <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """All [batch, heads, tokens, head_dim]; mask: additive, None: plain causal over as many keys as queries."""
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    scores = torch.matmul(q, k.transpose(-2, -1)).mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is None:
        mask = chunk_mask(0, q.shape[-2], None, q.dtype, q.device)
    weights = torch.softmax(scores.add_(mask), -1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v)


def paged_decode(
    q: Tensor,
    rows_view: Tensor,
    rows: Tensor,
    mask: Tensor,
    num_kv_heads: int,
    scale: float,
    scratch: Scratch,
    softcap: float | None = None,
    codec: SlotCodec | None = None,
) -> Tensor:
    """Attend one new token per sequence over its paged KV blocks; all sequences in one call.

    Args:
        q: [num_seqs, num_q_heads, head_dim], contiguous in the last dim.
        rows_view: layer_rows(pool, layer).
        rows: block_rows of the [num_seqs, max_blocks] block table. Entries past a sequence's end must name a block of the
            same sequence: they are read and masked, and a masked NaN would still spoil the result.
        mask: decode_mask(...), with max_blocks * block_size slots.
        softcap: scores become softcap * tanh(score / softcap) before the mask; None: they stay.
        codec: of a quantized pool.
    Returns: [num_seqs, num_q_heads, head_dim].
    """
    num_seqs, num_q_heads, head_dim = q.shape
    kv = _gathered(rows_view, rows, scratch, codec, q.dtype)
    k, v = kv.view(2, num_seqs, -1, num_kv_heads, head_dim).transpose(2, 3)
    # The query heads that share a KV head become query positions: no copy of K or V for the group.
    folded = q.view(num_seqs, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    return _attend(folded, k, v, mask, scale, softcap).reshape(num_seqs, num_q_heads, head_dim)


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None = None
) -> Tensor:
    """Attend a chunk of one sequence.

    Args:
        q: [num_tokens, num_q_heads, head_dim].
        k, v: [num_kv_tokens, num_kv_heads, head_dim]; the chunk's own tokens are the last ones.
        mask: chunk_mask(...); None: plain causal, num_kv_tokens == num_tokens.
        softcap: as in paged_decode.
    Returns: [num_tokens, num_q_heads, head_dim].
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_q_heads // num_kv_heads
    folded = q.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    # KV heads as batch, the group as heads with stride 0: K and V are not repeated in memory.
    shape = (num_kv_heads, group, k.shape[0], head_dim)
    keys, values = k.transpose(0, 1)[:, None].expand(shape), v.transpose(0, 1)[:, None].expand(shape)
    out = _attend(folded, keys, values, mask, scale, softcap)
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_q_heads, head_dim)


def gather_kv(
    rows_view: Tensor,
    rows: Tensor,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    scratch: Scratch,
    codec: SlotCodec | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """K and V of one sequence's first `num_tokens` tokens, each [num_tokens, num_kv_heads, head_dim], valid until the next
    gather.

    Args:
        rows: block_rows of the blocks that hold them.
        codec: of a quantized pool. dtype: into which it is decoded.
    """
    k, v = _gathered(rows_view, rows, scratch, codec, dtype).view(2, -1, num_kv_heads, head_dim)
    return k[:num_tokens], v[:num_tokens]


def _gathered(rows_view: Tensor, rows: Tensor, scratch: Scratch, codec: SlotCodec | None, dtype: torch.dtype) -> Tensor:
    """[number of rows, block_size * num_kv_heads * head_dim]."""
    kv = torch.index_select(rows_view, 0, rows, out=scratch.take(rows.shape[0], rows_view))
    if codec is None:
        return kv
    return codec.decode(kv.view(rows.shape[0], -1, codec.slot_bytes), dtype).flatten(1)
