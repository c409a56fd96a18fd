"""Rows of logits with what may not be drawn taken out, in Triton: one pass, no sync.

Bad rows are told by the model's own logits, before anything is taken out: a row that holds NaN or Inf is bad wherever it does.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.triton_sample import chunks_of


@triton.jit
def _constrain_kernel(
    logits_ptr,
    rows_ptr,
    words_ptr,
    out_ptr,
    bad_ptr,
    vocab_size,
    stride_logits,
    num_words,
    num_chunks,
    CHUNK: tl.constexpr,
    MASK: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    source = tl.load(rows_ptr + row).to(tl.int64)
    x = tl.load(logits_ptr + source * stride_logits + token, mask=inside, other=0.0).to(tl.float32)
    finite = tl.abs(x) < float("inf")  # false for NaN too
    tl.store(bad_ptr + row * num_chunks + chunk, tl.max(tl.where(finite, 0, 1), 0))
    if MASK:
        word = tl.load(words_ptr + row.to(tl.int64) * num_words + token // 32, mask=inside, other=0)
        x = tl.where(((word >> (token % 32)) & 1) == 1, x, float("-inf"))
    tl.store(out_ptr + row.to(tl.int64) * vocab_size + token, x, mask=inside)


def constrained_rows(logits: Tensor, rows: Tensor, words: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Some rows in fp32, with -inf where a bit of `words` is 0.

    Args:
        logits: [num_rows, vocab_size], any float dtype, contiguous in the last dim.
        rows: [count] int32, which of them. words: [count, at least vocab_size / 32] int32, token t's bit is bit t % 32 of word
            t // 32; None: everything may be drawn.
    Returns: [count, vocab_size] fp32; and for sample_rows which of its chunks hold NaN or Inf, [count, chunks] int32.
    Raises: ValueError on a shape or dtype mismatch.
    """
    count, vocab_size = rows.shape[0], logits.shape[1]
    if logits.stride(1) != 1 or rows.shape != (count,) or rows.dtype != torch.int32:
        raise ValueError(f"logits {tuple(logits.shape)} and rows {tuple(rows.shape)} {rows.dtype} do not fit")
    if words is not None and (
        words.dim() != 2 or words.shape[0] != count or words.shape[1] * 32 < vocab_size or words.dtype != torch.int32
        or not words.is_contiguous()
    ):  # fmt: skip
        raise ValueError(f"words {tuple(words.shape)} {words.dtype} do not fit {count} rows of {vocab_size} tokens")
    chunk, num_chunks = chunks_of(vocab_size)
    out = torch.empty((count, vocab_size), dtype=torch.float32, device=logits.device)
    bad = torch.empty((count, num_chunks), dtype=torch.int32, device=logits.device)
    _constrain_kernel[(count, num_chunks)](
        logits,
        rows,
        rows if words is None else words,
        out,
        bad,
        vocab_size,
        logits.stride(0),
        0 if words is None else words.shape[1],
        num_chunks,
        CHUNK=chunk,
        MASK=words is not None,
        num_warps=8,
    )
    return out, bad
