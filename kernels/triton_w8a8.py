"""Linear layers with weights and activations of eight bits (FP8 E4M3 or INT8) in Triton: few rows and many.

    out[m, n] = x_scale[m] * scale[n] * sum over k of x[m, k] * weight[n, k]

INT8 is summed in int32, exactly. FP8 is summed by the tensor cores in fp32, which on Hopper keep some 14 bits of a sum: after
every 128 inputs their sums are added up by the ordinary units. Block-scaled FP8 has a scale for each 128 inputs and 128 outputs,
so that each such sum is scaled before it is added:

    out[m, n] = sum over blocks b of x_scale[m, b] * scale[n / 128, b] * (sum over k in b of x[m, k] * weight[n, k])

Few rows stream the weight, with splits of the inputs whose sums the reader adds up in a fixed order (see triton_matmul); the
weight is then the left operand of Hopper's warpgroup instructions, which need 64 rows there, and the few rows are the right one.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from diptych.kernels.pdl import begin, prefetch, use_pdl
from diptych.kernels.triton_quantize import BLOCK, QuantizedRows
from diptych.kernels.triton_tile import store_tile, tile_start

_GROUP = 8


@triton.jit
def _add_product(x, w, acc, SWAP: tl.constexpr, EXACT: tl.constexpr):
    """acc plus a tile's product. acc: int32, or fp32 of FP8. EXACT: FP8's sums leave the tensor cores after 128 inputs."""
    if SWAP:
        left, right = w, x.T
    else:
        left, right = x, w.T
    if acc.dtype == tl.int32:
        acc = tl.dot(left, right, acc, out_dtype=tl.int32)
    elif EXACT:
        acc = tl.dot(left, right, acc, max_num_imprecise_acc=128)
    else:
        acc = tl.dot(left, right, acc)
    return acc


@triton.jit
def _block_scaled(acc, x_scale, scale, SWAP: tl.constexpr):
    """x_scale: of each row; scale: the tile's one."""
    both = x_scale * scale
    if SWAP:
        acc = acc * both[None, :]
    else:
        acc = acc * both[:, None]
    return acc


@triton.jit
def _scaled(acc, x_scale, scale, SWAP: tl.constexpr):
    if SWAP:
        both = x_scale[None, :] * scale[:, None]
    else:
        both = x_scale[:, None] * scale[None, :]
    return acc.to(tl.float32) * both


@triton.jit(do_not_specialize=["num_rows", "stride_x_scale"])  # of blocks, the latter is a number of rows, too
def _w8a8_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    size,
    stride_x,
    stride_weight,
    stride_x_scale,
    stride_scale,
    share,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    GROUP: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    first_row, first_column = tile_start(num_rows, num_columns, BLOCK_M, BLOCK_N, GROUP)
    low = tl.program_id(1) * share
    high = tl.minimum(low + share, size)
    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row, is_column = row < num_rows, column < num_columns
    real_row, real_column = is_row[:, None], is_column[:, None]
    if not TMA:
        x_at = x_ptr + row[:, None].to(tl.int64) * stride_x + k[None, :]
        w_at = weight_ptr + column[:, None].to(tl.int64) * stride_weight + k[None, :]
        up_at = w_at + num_columns.to(tl.int64) * stride_weight
    kind: tl.constexpr = tl.int32 if WHOLE else tl.float32
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], kind)
        none = tl.zeros([BLOCK_N, BLOCK_M], kind)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], kind)
        none = tl.zeros([BLOCK_M, BLOCK_N], kind)
    up = none
    if not BLOCKS:
        scale = tl.load(scales_ptr + column, mask=is_column, other=0.0)
        if SILU:
            up_scale = tl.load(scales_ptr + num_columns + column, mask=is_column, other=0.0)
    if AHEAD > 0:
        line = low + tl.arange(0, AHEAD // 128) * 128
        at = weight_ptr + column[:, None].to(tl.int64) * stride_weight + line[None, :]
        prefetch(at)
        if SILU:
            prefetch(at + num_columns.to(tl.int64) * stride_weight)
    begin(PDL)
    for start in tl.range(low, high, BLOCK_K, num_stages=STAGES):
        if TMA:
            x = x_ptr.load([first_row, start])
            w = weight_ptr.load([first_column, start])
        elif EVEN:
            x = tl.load(x_at + start, mask=real_row, other=0.0)
            w = tl.load(w_at + start)
        else:
            inside = (start + k < high)[None, :]
            x = tl.load(x_at + start, mask=real_row & inside, other=0.0)
            w = tl.load(w_at + start, mask=real_column & inside, other=0.0)
        if BLOCKS:
            block = start // BLOCK_K
            x_scale = tl.load(x_scales_ptr + row + block * stride_x_scale, mask=is_row, other=0.0)
            scale = tl.load(scales_ptr + first_column // 128 * stride_scale + block)
            acc += _block_scaled(_add_product(x, w, none, SWAP, EXACT), x_scale, scale, SWAP)
        else:
            acc = _add_product(x, w, acc, SWAP, EXACT)
        if SILU:
            if TMA:
                w = weight_ptr.load([num_columns + first_column, start])
            elif EVEN:
                w = tl.load(up_at + start)
            else:
                w = tl.load(up_at + start, mask=real_column & inside, other=0.0)
            if BLOCKS:
                up_scale = tl.load(scales_ptr + (num_columns + first_column) // 128 * stride_scale + block)
                up += _block_scaled(_add_product(x, w, none, SWAP, EXACT), x_scale, up_scale, SWAP)
            else:
                up = _add_product(x, w, up, SWAP, EXACT)
    if BLOCKS:
        done, done_up = acc, up
    else:
        x_scale = tl.load(x_scales_ptr + row, mask=is_row, other=0.0)
        done = _scaled(acc, x_scale, scale, SWAP)
        done_up = done
        if SILU:
            done_up = _scaled(up, x_scale, up_scale, SWAP)
    store_tile(
        out_ptr, bias_ptr, done, done_up, first_row, first_column, num_rows, num_columns,
        BLOCK_M, BLOCK_N, SILU, BIAS, SWAP,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class W8A8Shape:
    """How one launch is cut.

    Args:
        block_n, block_k: for block-scaled weights at most 128, and 128.
        swap: weights are the matrix instructions' left operand.
        tma: tiles are loaded by the tensor memory accelerator, where strides allow.
        splits: of the inputs.
        exact: FP8's sums leave the tensor cores after 128 inputs; else never, with some 14 bits.
        ahead: inputs of a program's weight that are on their way before it waits for its predecessor.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool = False
    tma: bool = False
    splits: int = 1
    exact: bool = True
    ahead: int = 0


_PLAIN = W8A8Shape(16, 64, 128, 4, 5)


FEW_ROWS = 64
"""Up to so many rows a product is bound by reading the weight."""
_MULTIPROCESSORS = 132
"""Of the card for which the shapes were chosen."""


def choose_w8a8(rows: int, columns: int, size: int, *, silu: bool, blocks: bool, splits: int | None) -> W8A8Shape:
    """A fast shape of a launch (docs/measurements/gpu-quantized.md).

    Args:
        columns: with silu, of gate alone. blocks: block-scaled.
        splits: None: as many as are fast; else so many, and the shape changes no bit of a row.
    """
    if rows <= FEW_ROWS:
        block_m = max(16, triton.next_power_of_2(rows))
        if splits is not None:
            return W8A8Shape(block_m, 64, 128, 4, 6, swap=True, splits=splits)
        if silu:
            if blocks:
                return W8A8Shape(block_m, 64, 128, 4, 6, swap=True)
            if rows <= 16:
                return W8A8Shape(block_m, 128, 256, 8, 3, swap=True)
            return W8A8Shape(block_m, 128, 128, 4, 4, swap=block_m < 64, tma=True)
        parts = 2 if triton.cdiv(columns, 64) <= _MULTIPROCESSORS // 2 else 1
        return W8A8Shape(block_m, 64, 128, 4, 8 if rows <= 16 else 5, swap=True, splits=parts)
    return W8A8Shape(128, 128, 128, 8, 4 if silu else 3, tma=True, splits=splits or 1)


def _fits_tma(x: Tensor) -> bool:
    return x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0


def w8a8_matmul(
    x: QuantizedRows,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = False,
    shape: W8A8Shape | None = None,
) -> Tensor:
    """The product of rows and a weight of eight bits (+ bias).

    Args:
        x: see QuantizedRows. weight: [outputs, size], x's codes' dtype, contiguous in the last dim.
        scales: float32, [outputs], contiguous; or of blocks, [ceil(outputs / 128), ceil(size / 128)], where x has them.
        bias: [outputs], x.dtype, contiguous.
        silu: the weight holds gate and up one after the other, and silu(gate) * up is the result.
        shape: None: one that fits any number of rows.
    Returns: [rows, outputs], x.dtype; with silu half as many columns. With a shape of several splits: [splits, rows, outputs]
        fp32, whose sum, in order, is the result.
    Raises: ValueError on a shape or dtype mismatch, and for splits with silu or bias.
    """
    (rows, size), (outputs, inputs) = x.shape, weight.shape
    cut, blocks = shape or _PLAIN, scales.dim() == 2
    if inputs != size or weight.dtype != x.codes.dtype or weight.stride(1) != 1 or x.codes.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} {x.codes.dtype} does not fit weight {tuple(weight.shape)} {weight.dtype}")
    wanted = (triton.cdiv(outputs, BLOCK), triton.cdiv(size, BLOCK)) if blocks else (outputs,)
    if scales.shape != wanted or x.scales.dim() != scales.dim() or scales.stride(-1) != 1:
        raise ValueError(
            f"scales {tuple(scales.shape)} and {tuple(x.scales.shape)} do not fit weight {outputs} x {size}"
        )
    if blocks and (cut.block_k != BLOCK or BLOCK % cut.block_n):
        raise ValueError(f"tiles of {cut.block_n} x {cut.block_k}: a tile of block-scaled weights has one scale")
    if blocks and silu and outputs // 2 % BLOCK:
        raise ValueError(f"{outputs} outputs: gate and up share a block of {BLOCK}")
    if silu and outputs % 2:
        raise ValueError(f"{outputs} outputs are not gate and up")
    if cut.splits > 1 and (silu or bias is not None):
        raise ValueError("an activation or a bias needs the whole sum: no splits with silu or bias")
    if bias is not None and (bias.shape != (outputs,) or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise ValueError(f"bias {tuple(bias.shape)} {bias.dtype} does not fit {outputs} outputs of {x.dtype}")
    columns = outputs // 2 if silu else outputs
    if cut.splits > 1:
        out = torch.empty((cut.splits, rows, columns), dtype=torch.float32, device=weight.device)
    else:
        out = torch.empty((rows, columns), dtype=x.dtype, device=weight.device)
    even = size % (cut.splits * cut.block_k) == 0 and columns % cut.block_n == 0
    # Beyond a tile's edge the accelerator reads the next split's, or up's, and not zeros.
    tma = cut.tma and _fits_tma(x.codes) and _fits_tma(weight) and (even or (not silu and cut.splits == 1))
    pdl = use_pdl(weight.device, rows)
    tiles = triton.cdiv(rows, cut.block_m) * triton.cdiv(columns, cut.block_n)
    _w8a8_kernel[(tiles, cut.splits)](
        TensorDescriptor.from_tensor(x.codes, [cut.block_m, cut.block_k]) if tma else x.codes,
        x.scales,
        TensorDescriptor.from_tensor(weight, [cut.block_n, cut.block_k]) if tma else weight,
        scales,
        scales if bias is None else bias,
        out,
        rows,
        columns,
        size,
        x.codes.stride(0),
        weight.stride(0),
        x.scales.stride(-1),
        scales.stride(0),
        triton.cdiv(triton.cdiv(size, cut.splits), cut.block_k) * cut.block_k,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        STAGES=cut.num_stages,
        EXACT=cut.exact,
        GROUP=_GROUP,
        SILU=silu,
        BIAS=bias is not None,
        BLOCKS=blocks,
        WHOLE=weight.dtype == torch.int8,
        SWAP=cut.swap,
        EVEN=even,
        TMA=tma,
        AHEAD=cut.ahead if pdl and even and not tma else 0,
        PDL=pdl,
        num_warps=cut.num_warps,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return out
