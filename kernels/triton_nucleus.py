"""The border of top_k, top_p and min_p in Triton, without a sort: by bisection over the ordered bits of the logits.

A token stays while fewer than top_k tokens, and less than top_p of the (top_k) probability, lie strictly above it; so ties at
the border stay, and the border is the least value for which that holds. Both conditions are monotone in the value: 17 halvings
find it among all bf16 numbers, 33 among all fp32 ones. One program takes one row, which stays in the L2 between the passes.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
LOWEST_KEY = tl.constexpr(-2139095041)
"""Of -inf: its bits 0xFF800000, ordered."""


@triton.jit
def _ordered(x, SHIFT: tl.constexpr):
    """An int32 that rises with x. SHIFT: low bits that are zero in every value of the dtype."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _above(row_ptr, key, lowest, best, inverse, vocab_size, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Number and weight (relative to the best token's) of the tokens whose key is greater and whose logit is >= lowest."""
    count = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        above = (_ordered(x, SHIFT).to(tl.int64) > key) & (x >= lowest) & (at < vocab_size)
        count += above.to(tl.int32)
        weight += tl.where(above, tl.exp2((x - best) * inverse), 0.0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _thresholds_kernel(
    logits_ptr,
    top_k_ptr,
    shares_ptr,
    out_ptr,
    vocab_size,
    stride_logits,
    SHIFT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(shares_ptr + row * 4)
    min_p = tl.load(shares_ptr + row * 4 + 1)
    temperature = tl.load(shares_ptr + row * 4 + 2)
    limited = (top_k > 0) & (top_k < vocab_size)
    if (temperature <= 0.0) | ((top_p >= 1.0) & (min_p <= 0.0) & (limited == 0)):
        tl.store(out_ptr + row, float("-inf"))
        return
    row_ptr = logits_ptr + row.to(tl.int64) * stride_logits
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, vocab_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        peaks = tl.maximum(peaks, tl.load(row_ptr + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32))
    best = tl.max(peaks, 0)
    if best == float("-inf"):  # no token is allowed: the row is refused
        tl.store(out_ptr + row, float("-inf"))
        return
    inverse = 1.4426950408889634 / temperature
    lowest = best
    if min_p > 0.0:
        lowest = best + tl.log(min_p) * temperature
    else:
        lowest = best * 0.0 + float("-inf")
    top = _ordered(best, SHIFT).to(tl.int64)
    least = top * 0 + (LOWEST_KEY >> SHIFT)

    total = best * 0.0
    if limited:
        k_high = top
        for _k_step in tl.range(STEPS):
            k_middle = (least + k_high) >> 1
            k_count, _k_weight = _above(row_ptr, k_middle, lowest, best, inverse, vocab_size, SHIFT, BLOCK)
            k_high = tl.where(k_count < top_k, k_middle, k_high)
            least = tl.where(k_count < top_k, least, k_middle + 1)
        # Of the tokens that tie at the border only as many weigh as top_k has room for.
        over, over_weight = _above(row_ptr, least, lowest, best, inverse, vocab_size, SHIFT, BLOCK)
        upto, upto_weight = _above(row_ptr, least - 1, lowest, best, inverse, vocab_size, SHIFT, BLOCK)
        ties = tl.maximum(upto - over, 1).to(tl.float32)
        total = over_weight + (upto_weight - over_weight) * tl.minimum((top_k - over).to(tl.float32) / ties, 1.0)
    else:
        _all_count, total = _above(row_ptr, least - 1, lowest, best, inverse, vocab_size, SHIFT, BLOCK)
    if top_p < 1.0:
        p_high = top
        goal = top_p * total
        for _p_step in tl.range(STEPS):
            p_middle = (least + p_high) >> 1
            _p_count, p_weight = _above(row_ptr, p_middle, lowest, best, inverse, vocab_size, SHIFT, BLOCK)
            p_high = tl.where(p_weight < goal, p_middle, p_high)
            least = tl.where(p_weight < goal, least, p_middle + 1)
    # Back to a number: the least one with this key, so that x >= it exactly where key(x) >= least.
    key = (least << SHIFT).to(tl.int32)
    border = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(out_ptr + row, tl.maximum(border, lowest))


def row_thresholds(logits: Tensor, top_k: Tensor, shares: Tensor) -> Tensor:
    """Least logit that each row's top_k, top_p and min_p keep.

    Args:
        logits: [rows, vocab_size], any float dtype, contiguous in the last dim. A row with NaN gets any threshold.
        top_k: [rows] int32; 0: no limit. shares: [rows, 4] fp32: top_p, min_p, temperature (0: greedy, no threshold), unused.
    Returns: [rows] fp32; -inf where nothing is dropped.
    Raises: ValueError on a shape or dtype mismatch.
    """
    rows, vocab_size = logits.shape
    if logits.stride(1) != 1 or top_k.shape != (rows,) or shares.shape != (rows, 4) or shares.dtype != torch.float32:
        raise ValueError(
            f"logits {tuple(logits.shape)}, top_k {tuple(top_k.shape)}, shares {tuple(shares.shape)} differ"
        )
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    bf16 = logits.dtype == torch.bfloat16
    _thresholds_kernel[(rows,)](
        logits,
        top_k,
        shares,
        out,
        vocab_size,
        logits.stride(0),
        SHIFT=16 if bf16 else 0,
        STEPS=17 if bf16 else 33,
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab_size)),
        num_warps=16,
    )
    return out
