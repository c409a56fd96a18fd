"""Draw one token a row in Triton: greedy, or Gumbel-max from a counter-based hash; two kernels, no sync, bad rows marked, and
rows that leave nothing to draw.

The vocabulary is cut into chunks, so that a single row fills the GPU too. Each program reads its logits once, makes its own
noise (the same bits as the sampler on the CPU: 32-bit integer arithmetic only), and keeps its best token.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
FEED_BLOCK = 256
BAD, NONE_LEFT = -1, -2
"""In place of a token."""


@triton.jit
def _mix(x, SHIFT: tl.constexpr, FACTOR: tl.constexpr):
    x = x ^ (x >> SHIFT)
    return x * FACTOR


@triton.jit
def _best_of_chunk_kernel(
    logits_ptr,
    draws_ptr,
    thresholds_ptr,
    scores_ptr,
    ids_ptr,
    bad_ptr,
    vocab_size,
    stride_logits,
    num_chunks,
    CHUNK: tl.constexpr,
    DRAW: tl.constexpr,
    CONSTRAINED: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    x = tl.load(logits_ptr + row.to(tl.int64) * stride_logits + token, mask=inside, other=0.0).to(tl.float32)
    at = row * num_chunks + chunk
    if not CONSTRAINED:  # else it is known which are bad, and -inf stands for what may not be drawn
        finite = tl.abs(x) < float("inf")  # false for NaN too
        tl.store(bad_ptr + at, tl.max(tl.where(finite, 0, 1), 0))
        x = tl.where(finite, x, 0.0)
    scores = x
    if DRAW:
        # Four words a row: temperature as fp32 bits (0: greedy), and the 64 bits that name the draw.
        draw = draws_ptr + row * 4
        temperature = tl.load(draw).to(tl.float32, bitcast=True)
        if temperature > 0.0:
            low = tl.load(draw + 1).to(tl.uint32, bitcast=True)
            high = tl.load(draw + 2).to(tl.uint32, bitcast=True)
            h = token.to(tl.uint32) * 0x9E3779B1 + low
            h = _mix(h, 16, 0x21F0AAAD)
            h = _mix(h ^ high, 15, 0x735A2D97)
            h = _mix(h ^ low, 16, 0x21F0AAAD)
            h = _mix(h, 15, 0x735A2D97)
            bits = ((h ^ (h >> 15)) >> 9) & 0x7FFFFF
            uniform = (bits.to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
            scores = x / temperature - tl.log(-tl.log(uniform))
            scores = tl.where(x >= tl.load(thresholds_ptr + row), scores, float("-inf"))
    scores = tl.where(inside, scores, float("-inf"))
    tl.store(scores_ptr + at, tl.max(scores, 0))
    tl.store(ids_ptr + at, chunk * CHUNK + tl.argmax(scores, 0))


@triton.jit
def _best_of_row_kernel(scores_ptr, ids_ptr, bad_ptr, out_ptr, num_chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    at = row * num_chunks + chunk
    mask = chunk < num_chunks
    scores = tl.load(scores_ptr + at, mask=mask, other=float("-inf"))
    bad = tl.max(tl.load(bad_ptr + at, mask=mask, other=0), 0)
    best = tl.load(ids_ptr + row * num_chunks + tl.argmax(scores, 0))
    best = tl.where(tl.max(scores, 0) == float("-inf"), -2, best)
    tl.store(out_ptr + row, tl.where(bad > 0, -1, best))


@triton.jit(do_not_specialize=["count"])  # it changes from step to step
def _feed_kernel(ids_ptr, sources_ptr, drawn_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    source = tl.load(sources_ptr + i, mask=mask, other=-1)
    fed = mask & (source >= 0)
    drawn = tl.load(drawn_ptr + source, mask=fed, other=0)
    tl.store(ids_ptr + i, tl.maximum(drawn, 0), mask=fed)


def feed_ids(ids: Tensor, sources: Tensor, drawn: Tensor) -> None:
    """The last step's draws become this step's tokens, in place: ids[i] = max(drawn[sources[i]], 0) where sources[i] >= 0. (A
    draw of -1 came from a bad row: its sequence ends, and what is computed for it until then does not count.)

    Args:
        ids, sources: [count] int32. drawn: int32, longer than every source.
    Raises: ValueError on a shape or dtype mismatch.
    """
    if ids.shape != sources.shape or ids.dim() != 1 or {ids.dtype, sources.dtype, drawn.dtype} != {torch.int32}:
        raise ValueError(
            f"ids {tuple(ids.shape)} and sources {tuple(sources.shape)} must be int32 and alike, drawn int32 too"
        )
    count = ids.shape[0]
    _feed_kernel[(triton.cdiv(count, FEED_BLOCK),)](ids, sources, drawn, count, BLOCK=FEED_BLOCK, num_warps=1)


def chunks_of(vocab_size: int) -> tuple[int, int]:
    """Tokens of one program, and how many programs a row has."""
    chunk = min(CHUNK, triton.next_power_of_2(vocab_size))
    return chunk, triton.cdiv(vocab_size, chunk)


def sample_rows(
    logits: Tensor,
    draws: Tensor | None = None,
    thresholds: Tensor | None = None,
    out: Tensor | None = None,
    bad: Tensor | None = None,
) -> Tensor:
    """One token id a row.

    Args:
        logits: [rows, vocab_size], any float dtype, contiguous in the last dim.
        draws: [rows, 4] int32: temperature as fp32 bits (0: greedy), low and high half of the draw's key, unused. None: all
            rows are greedy.
        thresholds: [rows] fp32: the least logit that a draw may take (-inf: all). Comes with draws.
        out: [rows] int32 to write to; None: a new tensor.
        bad: of rows that triton_constrain.constrained_rows made, what it returned with them.
    Returns: [rows] int32; BAD where the row holds NaN or Inf, NONE_LEFT where no token may be drawn.
    Raises: ValueError on a shape or dtype mismatch.
    """
    rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("logits must be contiguous in the last dim")
    if (draws is None) != (thresholds is None):
        raise ValueError("draws and thresholds come together")
    if draws is not None and (draws.shape != (rows, 4) or draws.dtype != torch.int32):
        raise ValueError(f"draws {tuple(draws.shape)} {draws.dtype} do not fit {rows} rows")
    if thresholds is not None and (thresholds.shape != (rows,) or thresholds.dtype != torch.float32):
        raise ValueError(f"thresholds {tuple(thresholds.shape)} {thresholds.dtype} do not fit {rows} rows")
    if out is not None and (out.shape != (rows,) or out.dtype != torch.int32 or not out.is_contiguous()):
        raise ValueError(f"out {tuple(out.shape)} {out.dtype} does not fit {rows} rows")
    chunk, num_chunks = chunks_of(vocab_size)
    if bad is not None and (bad.shape != (rows, num_chunks) or bad.dtype != torch.int32 or not bad.is_contiguous()):
        raise ValueError(f"bad {tuple(bad.shape)} {bad.dtype} does not fit {rows} rows of {num_chunks} chunks")
    scores = torch.empty((rows, num_chunks), dtype=torch.float32, device=logits.device)
    ids, fresh = (torch.empty((rows, num_chunks), dtype=torch.int32, device=logits.device) for _ in range(2))
    flags = fresh if bad is None else bad
    out = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out
    _best_of_chunk_kernel[(rows, num_chunks)](
        logits,
        ids if draws is None else draws,
        scores if thresholds is None else thresholds,
        scores,
        ids,
        flags,
        vocab_size,
        logits.stride(0),
        num_chunks,
        CHUNK=chunk,
        DRAW=draws is not None,
        CONSTRAINED=bad is not None,
        num_warps=8,
    )
    _best_of_row_kernel[(rows,)](
        scores, ids, flags, out, num_chunks, CHUNKS=max(2, triton.next_power_of_2(num_chunks)), num_warps=1
    )
    return out
