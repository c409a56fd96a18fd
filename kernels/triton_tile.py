"""What Triton matrix products share: which tile a program computes, and how it leaves it."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_start(num_rows, num_columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of this program's tile. GROUP tiles of rows run beside each other, so that they find their weights in
    the L2."""
    tile = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    in_group = GROUP * column_tiles
    group_first = tile // in_group * GROUP
    group_rows = tl.minimum(row_tiles - group_first, GROUP)
    first_row = (group_first + tile % in_group % group_rows) * BLOCK_M
    first_column = tile % in_group // group_rows * BLOCK_N
    return first_row, first_column


@triton.jit
def store_tile(
    out_ptr,
    bias_ptr,
    acc,
    up,
    first_row,
    first_column,
    num_rows,
    num_columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    SWAP: tl.constexpr,
):
    """Adds a bias, applies the activation, stores into the split's part of `out`. acc, up: [BLOCK_M, BLOCK_N] fp32, with SWAP
    [BLOCK_N, BLOCK_M]; bias: with SILU of gate, then of up."""
    split = tl.program_id(1)
    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    real_column = column < num_columns
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=real_column, other=0.0).to(tl.float32)
        if SWAP:
            acc = acc + bias[:, None]
        else:
            acc = acc + bias[None, :]
    if SILU:
        if BIAS:
            bias = tl.load(bias_ptr + num_columns + column, mask=real_column, other=0.0).to(tl.float32)
            if SWAP:
                up = up + bias[:, None]
            else:
                up = up + bias[None, :]
        # Rounded as the unfused projection would be.
        gate = acc.to(dtype).to(tl.float32)
        acc = gate / (1.0 + tl.exp(-gate)) * up.to(dtype).to(tl.float32)
    out_ptr += split.to(tl.int64) * num_rows * num_columns
    if SWAP:
        at = out_ptr + row[None, :].to(tl.int64) * num_columns + column[:, None]
        mask = (row < num_rows)[None, :] & real_column[:, None]
    else:
        at = out_ptr + row[:, None].to(tl.int64) * num_columns + column[None, :]
        mask = (row < num_rows)[:, None] & real_column[None, :]
    tl.store(at, acc.to(dtype), mask=mask)
