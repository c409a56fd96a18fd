"""Linear layers for few rows in Triton: bound by reading the weight once.

One program owns BLOCK_N output columns and streams their weight rows through a deep pipeline. With SILU it owns the same columns
of gate and of up, and writes silu(gate) * up: the activation costs no launch and no traffic. Where the columns are too few to
fill the GPU, the inputs are cut into splits; a split writes its sums in fp32, and whoever reads them adds them up in a fixed
order (`rms_norm`, `rope_write`): no second kernel, no atomics, and the result does not depend on timing.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.pdl import begin, use_pdl

MAX_ROWS = 64


@triton.jit(do_not_specialize=["num_rows"])
def _small_matmul_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_columns,
    size,
    stride_x,
    stride_weight,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHARE: tl.constexpr,
    EVEN: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    split = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    low = split * SHARE
    high = tl.minimum(low + SHARE, size)
    k = tl.arange(0, BLOCK_K)
    real_row = (row < num_rows)[:, None]
    real_column = (column < num_columns)[:, None]
    x_at = x_ptr + row[:, None] * stride_x + k[None, :]
    w_at = weight_ptr + column[:, None].to(tl.int64) * stride_weight + k[None, :]
    up_at = w_at + num_columns.to(tl.int64) * stride_weight
    begin(PDL)
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    acc_up = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in tl.range(low, high, BLOCK_K):
        if EVEN:
            x = tl.load(x_at + start, mask=real_row, other=0.0)
            w = tl.load(w_at + start)
        else:
            inside = (start + k < high)[None, :]
            x = tl.load(x_at + start, mask=real_row & inside, other=0.0)
            w = tl.load(w_at + start, mask=real_column & inside, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if SILU:
            if EVEN:
                up = tl.load(up_at + start)
            else:
                up = tl.load(up_at + start, mask=real_column & inside, other=0.0)
            acc_up = tl.dot(x, tl.trans(up), acc_up, input_precision="ieee")
    if SILU:
        # Rounded as the unfused projection would be.
        gate = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
        acc = gate / (1.0 + tl.exp(-gate)) * acc_up.to(out_ptr.dtype.element_ty).to(tl.float32)
    out_at = out_ptr + split.to(tl.int64) * num_rows * num_columns + row[:, None] * num_columns + column[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=real_row & (column < num_columns)[None, :])


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """How one launch is cut; chosen by measurement: see docs/measurements/gpu-kernels.md.

    Args:
        splits: of the inputs.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1


_PLAIN = MatmulShape(32, 128, 4, 6)
FEW_ROWS = 16
_SPLIT_COLUMNS, _SPLIT_BLOCK = 32, 256


def choose_shape(num_rows: int, num_columns: int, size: int, *, silu: bool) -> MatmulShape | None:
    """The shape that was the fastest inside a decode step (see docs/measurements/gpu-kernels.md): enough programs for
    every multiprocessor, and some 100 KB in flight on each. None: cuBLAS is as fast."""
    if silu:
        return MatmulShape(64, 128, 4, 3) if num_rows <= FEW_ROWS else MatmulShape(64, 64, 8, 4)
    splits = 4 if size >= 8192 else 2
    if num_rows > FEW_ROWS or num_columns % _SPLIT_COLUMNS or size % (splits * _SPLIT_BLOCK):
        return None
    return MatmulShape(_SPLIT_COLUMNS, _SPLIT_BLOCK, 4, 3, splits)


def small_matmul(x: Tensor, weight: Tensor, *, silu: bool = False, shape: MatmulShape | None = None) -> Tensor:
    """x @ weight.T for at most MAX_ROWS rows; with silu, weight holds gate and up one after the other.

    Args:
        x: [rows, size]; weight: [columns, size], or [2 * columns, size] with silu; same dtype, contiguous in the last dim.
        shape: None: one without splits.
    Returns: [rows, columns], x's dtype; accumulated in fp32. With silu: silu(gate) * up. With a shape of several splits:
        [splits, rows, columns] fp32, whose sum is the result.
    Raises: ValueError on a shape or dtype mismatch, and for splits with silu.
    """
    num_rows, size = x.shape
    columns = weight.shape[0] // 2 if silu else weight.shape[0]
    if not 1 <= num_rows <= MAX_ROWS:
        raise ValueError(f"{num_rows} rows: between 1 and {MAX_ROWS} are supported")
    if weight.shape[1] != size or weight.dtype != x.dtype or x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit weight {tuple(weight.shape)} {weight.dtype}")
    if silu and weight.shape[0] % 2:
        raise ValueError(f"{weight.shape[0]} rows of weight are not gate and up")
    cut = shape or (choose_shape(num_rows, columns, size, silu=True) if silu else None) or _PLAIN
    pdl = use_pdl(x.device, num_rows)
    if silu and cut.splits > 1:
        raise ValueError("an activation needs the whole sum: no splits with silu")
    share = triton.cdiv(triton.cdiv(size, cut.splits), cut.block_k) * cut.block_k
    if cut.splits > 1:
        out = torch.empty((cut.splits, num_rows, columns), dtype=torch.float32, device=x.device)
    else:
        out = torch.empty((num_rows, columns), dtype=x.dtype, device=x.device)
    even = size % (cut.splits * cut.block_k) == 0 and columns % cut.block_n == 0
    grid = (triton.cdiv(columns, cut.block_n), cut.splits)
    _small_matmul_kernel[grid](
        x,
        weight,
        out,
        num_rows,
        columns,
        size,
        x.stride(0),
        weight.stride(0),
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        SHARE=share,
        EVEN=even,
        SILU=silu,
        PDL=pdl,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        launch_pdl=pdl,
    )
    return out
