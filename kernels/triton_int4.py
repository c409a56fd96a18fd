"""Linear layers with weights of four bits in Triton: read once, widened in registers, multiplied by activations as they are.

A weight is (code - zero) * scale; a group of inputs shares a scale and a zero. The codes less their zero are whole numbers that
16 bits hold exactly, so they go into the matrix instructions, and a group's sum is scaled once, in fp32:

    out[m, n] = sum over groups g of scale[g, n] * (sum over k in g of x[m, k] * (code[n, k] - zero[g, n]))

Layout (`pack_int4`): [groups, outputs, group_size / 2] bytes; byte j of a group has input j in its low half and input
j + group_size / 2 in its high half. So both halves of the bytes multiply contiguous inputs, and a tile of outputs is one
contiguous range. Codes become floating-point numbers by their bits: 128 + code in bf16 (1024 + code in fp16) is the code
in the low bits of a constant, and the zero that is subtracted has that constant added.

Few rows stream the weight with splits of the groups, whose sums the reader adds up in a fixed order (see triton_matmul). For
many rows `dequantize_int4` writes the weight in the model's dtype, and cuBLAS multiplies.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.pdl import begin, prefetch, use_pdl
from diptych.kernels.triton_tile import store_tile, tile_start

GROUP_SIZES = (128, 64, 32)
"""Of packed weights; other groups are cut into the largest of these that divides them."""
OFFSETS = {torch.bfloat16: 128, torch.float16: 1024, torch.float32: 0}
"""What stands in front of a code in its floating-point number; by the model's dtype."""
_GROUP = 8
_AHEAD = 2
"""Groups of a program's weight that are on their way before it waits for its predecessor."""
_UNPACK = {
    torch.bfloat16: ("0x43434343", "bf16x2"),
    torch.float16: ("0x64646464", "f16x2"),
}
# Four bytes: their low and their high halves, each as four numbers in two registers, less the zero.
_ASM = """
{{
.reg .b32 high, a, b, c, d;
shr.u32 high, $4, 4;
prmt.b32 a, $4, {magic}, 0x4140;
prmt.b32 b, $4, {magic}, 0x4342;
prmt.b32 c, high, {magic}, 0x4140;
prmt.b32 d, high, {magic}, 0x4342;
and.b32 a, a, 0xff0fff0f;
and.b32 b, b, 0xff0fff0f;
and.b32 c, c, 0xff0fff0f;
and.b32 d, d, 0xff0fff0f;
sub.{kind} $0, a, $5;
sub.{kind} $1, b, $6;
sub.{kind} $2, c, $5;
sub.{kind} $3, d, $6;
}}
"""
_BF16_ASM: tl.constexpr = tl.constexpr(_ASM.format(magic=_UNPACK[torch.bfloat16][0], kind="bf16x2"))
_FP16_ASM: tl.constexpr = tl.constexpr(_ASM.format(magic=_UNPACK[torch.float16][0], kind="f16x2"))


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """
    Args:
        codes: [groups, outputs, group_size / 2] uint8.
        scales: [groups, outputs]. Of a model in 16 bits int32: the scale's bits in the low half, those of offset + zero in the
            high one; in float32 the scale itself.
        zeros: [groups, outputs] float32; None: they stand in `scales`.
        dtype: the model's.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    dtype: torch.dtype

    @property
    def outputs(self) -> int:
        return self.codes.shape[1]

    @property
    def inputs(self) -> int:
        return self.codes.shape[0] * self.group_size

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)


def pack_int4(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> PackedInt4:
    """The kernels' layout.

    Args:
        codes: [outputs, inputs / 2] uint8, input 2k in the low half of a byte, 2k + 1 in the high one.
        scales, zeros: [outputs, inputs / group_size], in the model's dtype and uint8.
        group_size: a multiple of 32.
    Raises: ValueError on a shape or dtype that does not fit.
    """
    outputs, inputs = codes.shape[0], 2 * codes.shape[1]
    size = next((size for size in GROUP_SIZES if group_size % size == 0), 0)
    if not size or inputs % group_size:
        raise ValueError(f"groups of {group_size} of {inputs} inputs: must divide them, and be a multiple of 32")
    shape = (outputs, inputs // group_size)
    if scales.shape != shape or zeros.shape != shape or codes.dtype != torch.uint8 or scales.dtype not in OFFSETS:
        given = f"scales {tuple(scales.shape)} {scales.dtype}, zeros {tuple(zeros.shape)}, codes {codes.dtype}"
        raise ValueError(f"{given} do not fit {shape[0]} outputs of {shape[1]} groups")
    groups, half = inputs // size, size // 2
    wide = torch.stack((codes & 15, codes >> 4), dim=-1).view(outputs, groups, 2, half)
    packed = (wide[:, :, 0] | (wide[:, :, 1] << 4)).transpose(0, 1).contiguous()
    scales, zeros = (x.repeat_interleave(group_size // size, dim=1).t().contiguous() for x in (scales, zeros))
    numbers = (zeros.int() + OFFSETS[scales.dtype]).to(scales.dtype)
    if scales.dtype == torch.float32:
        return PackedInt4(packed, scales, numbers, size, torch.float32)
    words = torch.stack((scales, numbers), dim=-1).view(torch.int32).squeeze(-1)
    return PackedInt4(packed, words, None, size, scales.dtype)


@triton.jit
def _widened(packed, zero, OFFSET: tl.constexpr, ASM: tl.constexpr):
    """Low and high halves of bytes, less the zero, as zero's dtype. packed: [n, k] uint8; zero: [n, 1], OFFSET added."""
    if ASM:
        zero = tl.broadcast_to(zero, packed.shape)
        if OFFSET == 128:
            low, high = tl.inline_asm_elementwise(
                _BF16_ASM, "=r,=r,=r,=r,r,r,r", [packed, zero], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            low, high = tl.inline_asm_elementwise(
                _FP16_ASM, "=r,=r,=r,=r,r,r,r", [packed, zero], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
    else:
        low = ((packed & 15).to(tl.int32) + OFFSET).to(zero.dtype) - zero
        high = ((packed >> 4).to(tl.int32) + OFFSET).to(zero.dtype) - zero
    return low, high


@triton.jit
def _factors(scales_ptr, zeros_ptr, at, mask, dtype: tl.constexpr):
    """Scale in fp32, and zero with its offset in dtype, of some outputs of one group."""
    if dtype == tl.float32:
        scale, zero = tl.load(scales_ptr + at, mask=mask, other=0.0), tl.load(zeros_ptr + at, mask=mask, other=0.0)
    else:
        word = tl.load(scales_ptr + at, mask=mask, other=0)
        scale = (word & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        zero = (word >> 16).to(tl.int16).to(dtype, bitcast=True)
    return scale, zero


@triton.jit
def _group_sum(
    x_low, x_high, codes_ptr, scales_ptr, zeros_ptr, group, outputs, column, real, acc,
    HALF: tl.constexpr, OFFSET: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc plus one group's product with some outputs. column: [n]; real: which of them there are."""
    k = tl.arange(0, HALF)
    at = (outputs.to(tl.int64) * group + column)[:, None] * HALF + k[None, :]
    if EVEN:
        packed = tl.load(codes_ptr + at)
    else:
        packed = tl.load(codes_ptr + at, mask=real[:, None], other=0)
    scale, zero = _factors(scales_ptr, zeros_ptr, group * outputs + column, real, x_low.dtype)
    low, high = _widened(packed, zero[:, None], OFFSET, ASM)
    if SWAP:
        total = tl.dot(low, x_low.T, input_precision="ieee")
        total = tl.dot(high, x_high.T, total, input_precision="ieee")
        acc = acc + total * scale[:, None]
    else:
        total = tl.dot(x_low, low.T, input_precision="ieee")
        total = tl.dot(x_high, high.T, total, input_precision="ieee")
        acc = acc + total * scale[None, :]
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _int4_matmul_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    outputs,
    num_groups,
    share,
    stride_x,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
    OFFSET: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    GROUP: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    ASM: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    first_row, first_column = tile_start(num_rows, num_columns, BLOCK_M, BLOCK_N, GROUP)
    low = tl.program_id(1) * share
    high = tl.minimum(low + share, num_groups)
    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    real_row, real = (row < num_rows)[:, None], column < num_columns
    k = tl.arange(0, HALF)
    x_at = x_ptr + row[:, None].to(tl.int64) * stride_x + k[None, :]
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    if AHEAD > 0:
        line = tl.arange(0, BLOCK_N * HALF // 128) * 128
        ahead = tl.minimum(low + tl.arange(0, AHEAD), num_groups - 1)
        at = codes_ptr + (outputs.to(tl.int64) * ahead + first_column)[:, None] * HALF + line[None, :]
        prefetch(at)
        if SILU:
            prefetch(at + num_columns.to(tl.int64) * HALF)
    begin(PDL)
    for group in tl.range(low, high, num_stages=STAGES, loop_unroll_factor=UNROLL):
        x_low = tl.load(x_at + group * (2 * HALF), mask=real_row, other=0.0)
        x_high = tl.load(x_at + group * (2 * HALF) + HALF, mask=real_row, other=0.0)
        acc = _group_sum(
            x_low, x_high, codes_ptr, scales_ptr, zeros_ptr, group, outputs, column, real, acc,
            HALF, OFFSET, SWAP, EVEN, ASM,
        )  # fmt: skip
        if SILU:
            up = _group_sum(
                x_low, x_high, codes_ptr, scales_ptr, zeros_ptr, group, outputs, num_columns + column, real, up,
                HALF, OFFSET, SWAP, EVEN, ASM,
            )  # fmt: skip
    store_tile(
        out_ptr, bias_ptr, acc, up, first_row, first_column, num_rows, num_columns, BLOCK_M, BLOCK_N, SILU, BIAS, SWAP
    )


@dataclass(frozen=True, slots=True)
class Int4Shape:
    """How one launch is cut.

    Args:
        swap: weights are the matrix instructions' left operand, out of registers.
        splits: of the groups.
        unroll: groups between two waits for loads.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    swap: bool = False
    splits: int = 1
    unroll: int = 1


_PLAIN = Int4Shape(16, 64, 4, 5)


FEW_ROWS = 64
"""More are faster multiplied by a weight in the model's dtype."""
_MULTIPROCESSORS = 132
"""Of the card for which the shapes were chosen."""


def choose_int4(rows: int, columns: int, groups: int, *, silu: bool, splits: int | None) -> Int4Shape:
    """A fast shape of a launch (docs/measurements/gpu-quantized.md).

    Args:
        columns: with silu, of gate alone.
        splits: None: as many as are fast; else so many, and the shape changes no bit of a row.
    """
    if splits is not None:
        if rows > FEW_ROWS:
            return Int4Shape(128, 128, 8, 3, swap=True, splits=splits)
        return Int4Shape(max(16, triton.next_power_of_2(rows)), 64, 4, 5, swap=True, splits=splits)
    parts = 1 if silu else min(groups, 4)
    if rows <= 16:
        if silu:
            return Int4Shape(16, 64, 4, 4)
        if rows > 8 and columns > 8192:
            return Int4Shape(16, 128, 4, 4, splits=parts)
        return Int4Shape(8 if rows <= 8 else 16, 64, 2, 4, swap=True, splits=parts, unroll=2)
    if rows <= FEW_ROWS:
        return Int4Shape(32 if rows <= 32 else 64, 64, 4, 4, swap=True, splits=parts)
    return Int4Shape(128, 128, 8, 3, swap=True, splits=parts)


def int4_matmul(
    x: Tensor,
    weight: PackedInt4,
    bias: Tensor | None = None,
    *,
    silu: bool = False,
    shape: Int4Shape | None = None,
) -> Tensor:
    """x @ dequantized(weight).T (+ bias), accumulated in fp32.

    Args:
        x: [rows, inputs], the model's dtype, contiguous in the last dim. bias: [outputs], contiguous.
        silu: the weight holds gate and up one after the other, and silu(gate) * up is the result.
        shape: None: one that fits any number of rows.
    Returns: [rows, outputs], x's dtype; with silu half as many columns. With a shape of several splits: [splits, rows, outputs]
        fp32, whose sum, in order, is the result.
    Raises: ValueError on a shape or dtype mismatch, and for splits with silu or bias.
    """
    rows, size = x.shape
    cut, outputs = shape or _PLAIN, weight.outputs
    if size != weight.inputs or x.dtype != weight.dtype or x.stride(1) != 1:
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} does not fit a weight [{outputs}, {weight.inputs}] {weight.dtype}"
        )
    if silu and outputs % 2:
        raise ValueError(f"{outputs} outputs are not gate and up")
    if cut.splits > 1 and (silu or bias is not None):
        raise ValueError("an activation or a bias needs the whole sum: no splits with silu or bias")
    if bias is not None and (bias.shape != (outputs,) or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise ValueError(f"bias {tuple(bias.shape)} {bias.dtype} does not fit {outputs} outputs of {x.dtype}")
    columns = outputs // 2 if silu else outputs
    groups = weight.codes.shape[0]
    if cut.splits > 1:
        out = torch.empty((cut.splits, rows, columns), dtype=torch.float32, device=x.device)
    else:
        out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    pdl, even = use_pdl(x.device, rows), columns % cut.block_n == 0
    tiles = triton.cdiv(rows, cut.block_m) * triton.cdiv(columns, cut.block_n)
    _int4_matmul_kernel[(tiles, cut.splits)](
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        x if bias is None else bias,
        out,
        rows,
        columns,
        outputs,
        groups,
        triton.cdiv(groups, cut.splits),
        x.stride(0),
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        HALF=weight.group_size // 2,
        OFFSET=OFFSETS[weight.dtype],
        STAGES=cut.num_stages,
        UNROLL=cut.unroll,
        GROUP=_GROUP,
        SILU=silu,
        BIAS=bias is not None,
        SWAP=cut.swap,
        EVEN=even,
        ASM=x.is_cuda and x.dtype != torch.float32,
        AHEAD=_AHEAD if pdl and even else 0,
        PDL=pdl,
        num_warps=cut.num_warps,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _dequantize_kernel(
    codes_ptr, scales_ptr, zeros_ptr, out_ptr, outputs, stride_out,
    BLOCK_N: tl.constexpr, HALF: tl.constexpr, OFFSET: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = column < outputs
    k = tl.arange(0, HALF)
    packed = tl.load(codes_ptr + (group * outputs + column)[:, None] * HALF + k[None, :], mask=real[:, None], other=0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    scale, zero = _factors(scales_ptr, zeros_ptr, group * outputs + column, real, dtype)
    low, high = _widened(packed, zero[:, None], OFFSET, ASM)
    at = out_ptr + column[:, None].to(tl.int64) * stride_out + group * (2 * HALF) + k[None, :]
    tl.store(at, (low.to(tl.float32) * scale[:, None]).to(dtype), mask=real[:, None])
    tl.store(at + HALF, (high.to(tl.float32) * scale[:, None]).to(dtype), mask=real[:, None])


def dequantize_int4(weight: PackedInt4) -> Tensor:
    """[outputs, inputs] in the model's dtype: each weight rounded once."""
    out = torch.empty((weight.outputs, weight.inputs), dtype=weight.dtype, device=weight.codes.device)
    block = 64
    _dequantize_kernel[(triton.cdiv(weight.outputs, block), weight.codes.shape[0])](
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        out,
        weight.outputs,
        out.stride(0),
        BLOCK_N=block,
        HALF=weight.group_size // 2,
        OFFSET=OFFSETS[weight.dtype],
        ASM=out.is_cuda and weight.dtype != torch.float32,
        num_warps=4,
    )
    return out
