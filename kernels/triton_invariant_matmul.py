"""Linear layers whose results do not depend on the number of rows: for `--batch-invariant`.

Every output is a sum in one fixed order, whatever the launch: products go into an fp32 accumulator in ascending order of k, as
one chain of matrix instructions of the same kind. Tiles of any size therefore give the same bits. Weights with few columns
have two such chains, one for each half of k; which weights do, follows from their shape alone:

    k        0 ................ share ................ size
    chain 0  [ a0 b0 + a1 b1 + ..)
    chain 1                     [ .. )                          out = chain 0 + chain 1, in fp32

Each chain has programs of its own, so that few columns fill the GPU when rows are few, too; `rms_norm` and `rope_write` add
them up. See docs/decisions/batch-invariant.md.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from diptych.kernels.pdl import begin, use_pdl

CHAINS_FROM = 2048
"""Inputs of a weight whose sums are two chains, at least."""
CHAINS_COLUMNS = 4096
"""And its outputs, at most: with more, tiles of one chain each nearly fill the GPU."""
_CHAINS = 2
_SHARE_GRAIN = 256
"""A chain begins at a multiple of it: a multiple of every BLOCK_K, so that no tile lies in two chains."""
_GROUP = 8
"""Tiles of rows that run beside each other, so that they find their weights in the L2."""


@triton.jit
def _chain(
    x_ptr,
    weight_ptr,
    num_rows,
    num_columns,
    first_row,
    first_column,
    low,
    high,
    stride_x,
    stride_weight,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SILU: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
):
    """Sums over [low, high) of a tile; with SILU of gate and of up, else the same twice."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = acc
    if TMA:
        for start in tl.range(low, high, BLOCK_K):
            x = x_ptr.load([first_row, start])
            w = weight_ptr.load([first_column, start])
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
            if SILU:
                up = weight_ptr.load([num_columns + first_column, start])
                acc_up = tl.dot(x, up.T, acc_up, input_precision="ieee")
    else:
        row = first_row + tl.arange(0, BLOCK_M)
        column = first_column + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        real_row = (row < num_rows)[:, None]
        real_column = (column < num_columns)[:, None]
        x_at = x_ptr + row[:, None].to(tl.int64) * stride_x + k[None, :]
        w_at = weight_ptr + column[:, None].to(tl.int64) * stride_weight + k[None, :]
        up_at = w_at + num_columns.to(tl.int64) * stride_weight
        for start in tl.range(low, high, BLOCK_K):
            if EVEN:
                x = tl.load(x_at + start, mask=real_row, other=0.0)
                w = tl.load(w_at + start)
            else:
                inside = (start + k < high)[None, :]
                x = tl.load(x_at + start, mask=real_row & inside, other=0.0)
                w = tl.load(w_at + start, mask=real_column & inside, other=0.0)
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
            if SILU:
                if EVEN:
                    up = tl.load(up_at + start)
                else:
                    up = tl.load(up_at + start, mask=real_column & inside, other=0.0)
                acc_up = tl.dot(x, up.T, acc_up, input_precision="ieee")
    return acc, acc_up


@triton.jit(do_not_specialize=["num_rows"])
def _invariant_matmul_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    size,
    share,
    stride_x,
    stride_weight,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, chain = tl.program_id(0), tl.program_id(1)
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    in_group = GROUP * column_tiles
    group_first = tile // in_group * GROUP
    group_rows = tl.minimum(row_tiles - group_first, GROUP)
    first_row = (group_first + tile % in_group % group_rows) * BLOCK_M
    first_column = tile % in_group // group_rows * BLOCK_N
    begin(PDL)
    low = chain * share
    high = tl.minimum(low + share, size)
    acc, up = _chain(
        x_ptr, weight_ptr, num_rows, num_columns, first_row, first_column, low, high, stride_x, stride_weight,
        BLOCK_M, BLOCK_N, BLOCK_K, SILU, EVEN, TMA,
    )  # fmt: skip
    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    out_at = (
        out_ptr
        + chain.to(tl.int64) * num_rows * num_columns
        + row[:, None].to(tl.int64) * num_columns
        + column[None, :]
    )
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    if BIAS:
        acc = acc + tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
    if SILU:
        # Rounded as the unfused projection would be.
        gate = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
        acc = gate / (1.0 + tl.exp(-gate)) * up.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class InvariantShape:
    """How one launch is cut: none of it changes a bit.

    Args:
        tma: tiles are loaded by the tensor memory accelerator, where strides allow.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool = False


_MULTIPROCESSORS = 132
"""Of the card for which the shapes were chosen."""


def chains_of(num_columns: int, size: int) -> int:
    """Chains of a weight's sums. It may depend on nothing else: workers of a pair must agree."""
    return _CHAINS if size >= CHAINS_FROM and num_columns <= CHAINS_COLUMNS else 1


def invariant_shape(num_rows: int, num_columns: int, *, silu: bool, chains: int, half: bool = True) -> InvariantShape:
    """A fast shape of a launch.

    Args:
        num_columns: with silu, of gate alone. half: 2 bytes an element.
    """
    if not half:  # no matrix instruction: each thread holds its sums' operands in registers
        return InvariantShape(32, 32, 32, 4, 2)
    wide = num_columns >= 128 * _MULTIPROCESSORS
    if num_rows <= 64:
        if silu:
            return InvariantShape(64, 64, 64, 4, 4)
        if wide:
            return InvariantShape(64, 128, 64, 4, 4)
        alone = triton.cdiv(num_columns, 64) * chains <= _MULTIPROCESSORS
        return InvariantShape(64, 64, 128, 4, 6 if alone else 3)
    if num_rows <= 256:
        if wide and not silu:
            return InvariantShape(128, 128, 64, 8, 3, tma=True)
        return InvariantShape(128, 64, 64, 8 if silu else 4, 3 if silu else 4, tma=True)
    columns = 128 if silu else 256
    if triton.cdiv(num_rows, 128) * triton.cdiv(num_columns, columns) < _MULTIPROCESSORS:
        return InvariantShape(128, columns // 2, 64, 8, 4, tma=True)
    return InvariantShape(128, columns, 64, 8, 4, tma=True)


def distinct_launches(num_columns: int, *, silu: bool, chains: int, half: bool, most_rows: int) -> Iterator[int]:
    """Numbers of rows whose launches are every kernel that up to `most_rows` rows may need: to compile them before readiness."""
    seen = set()
    for rows in (1, *range(65, most_rows + 1, 64)):
        key = (invariant_shape(rows, num_columns, silu=silu, chains=chains, half=half), rows <= 128)
        if key not in seen:
            seen.add(key)
            yield rows


def _fits_tma(x: Tensor) -> bool:
    return x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def invariant_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = False,
    chains: int = 1,
    shape: InvariantShape | None = None,
) -> Tensor:
    """x @ weight.T (+ bias); a row's bits depend on x's row, weight, bias and `chains` alone.

    Args:
        x: [rows, size]; weight: [columns, size], or [2 * columns, size] with silu: gate and up one after the other; same dtype,
            contiguous in the last dim. bias: [columns], contiguous.
        chains: see chains_of.
        shape: None: a fast one.
    Returns: [rows, columns], x's dtype; with silu: silu(gate) * up. With several chains: [chains, rows, columns] fp32, whose
        sum, in order, is the result.
    Raises: ValueError on a shape or dtype mismatch, and for chains with silu or bias.
    """
    num_rows, size = x.shape
    columns = weight.shape[0] // 2 if silu else weight.shape[0]
    if weight.shape[1] != size or weight.dtype != x.dtype or x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit weight {tuple(weight.shape)} {weight.dtype}")
    if silu and weight.shape[0] % 2:
        raise ValueError(f"{weight.shape[0]} rows of weight are not gate and up")
    if chains > 1 and (silu or bias is not None):
        raise ValueError("an activation or a bias needs the whole sum: no chains with silu or bias")
    if bias is not None and (silu or bias.shape != (columns,) or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise ValueError(f"bias {tuple(bias.shape)} {bias.dtype} does not fit {columns} columns of {x.dtype}")
    half = x.element_size() == 2
    cut = shape or invariant_shape(num_rows, columns, silu=silu, chains=chains, half=half)
    tma = cut.tma and _fits_tma(x) and _fits_tma(weight)
    pdl = use_pdl(x.device, num_rows)
    share = triton.cdiv(triton.cdiv(size, chains), _SHARE_GRAIN) * _SHARE_GRAIN
    if chains > 1:
        out = torch.empty((chains, num_rows, columns), dtype=torch.float32, device=x.device)
    else:
        out = torch.empty((num_rows, columns), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(num_rows, cut.block_m) * triton.cdiv(columns, cut.block_n)
    _invariant_matmul_kernel[(tiles, chains)](
        TensorDescriptor.from_tensor(x, [cut.block_m, cut.block_k]) if tma else x,
        TensorDescriptor.from_tensor(weight, [cut.block_n, cut.block_k]) if tma else weight,
        weight if bias is None else bias,
        out,
        num_rows,
        columns,
        size,
        share,
        x.stride(0),
        weight.stride(0),
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        GROUP=_GROUP,
        SILU=silu,
        BIAS=bias is not None,
        EVEN=size % cut.block_k == 0 and columns % cut.block_n == 0,
        TMA=tma,
        PDL=pdl,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return out
