"""Linear layers with weights of four bits in Triton, from words of four codes.

A weight is (code - zero) * scale; a group of inputs shares a scale and a zero. The codes less their zero are whole numbers that
16 bits hold exactly, so they go into the matrix instructions, and a group's sum is scaled once, in fp32:

    out[m, n] = sum over groups g of scale[g, n] * (sum over k in g of x[m, k] * (code[n, k] - zero[g, n]))

Layout (`pack_int4_words`): [groups, outputs, group_size / 4] words of 16 bits; word j of a group has inputs j, j + q, j + 2 q and
j + 3 q in its four bits each, lowest first, where q is a quarter of the group. Two words lie in a register, so a shift and a
masked "or" with a constant make two numbers of two inputs that lie side by side: 128 + code in bf16, 1024 + code in fp16. From
them the zero with the same constant is subtracted. The four quarters, one behind the other, are the group's inputs in order:
one product of a group, with the weight as left operand out of registers and the rows of x as the right one.

Outputs lie in pairs of eights, so that gate and up of an output are summed by one thread, and the activation costs nothing:

    position   0 .. 7   8 .. 15                        16 .. 23   24 .. 31
    output     0 .. 7   half .. half + 7               8 .. 15    half + 8 .. half + 15
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from diptych.kernels.pdl import begin, prefetch, use_pdl
from diptych.kernels.triton_tile import tile_start

GROUP_SIZES = (128, 64, 32)
"""Of packed weights; other groups are cut into the largest of these that divides them."""
OFFSETS = {torch.bfloat16: 128, torch.float16: 1024, torch.float32: 0}
"""What stands in front of a code in its floating-point number; by the model's dtype."""
PAIR = 8
"""Outputs of each half that lie side by side."""
_GROUP = 8
# Two words: the four codes of each, less the zero, as four registers of two numbers.
_ASM = """
{{
.reg .b32 a, b, c;
shr.u32 a, $4, 4;
shr.u32 b, $4, 8;
shr.u32 c, $4, 12;
lop3.b32 $0, $4, 0x000f000f, {magic}, 0xea;
lop3.b32 $1, a, 0x000f000f, {magic}, 0xea;
lop3.b32 $2, b, 0x000f000f, {magic}, 0xea;
lop3.b32 $3, c, 0x000f000f, {magic}, 0xea;
sub.{kind} $0, $0, $5;
sub.{kind} $1, $1, $5;
sub.{kind} $2, $2, $5;
sub.{kind} $3, $3, $5;
}}
"""
_BF16_ASM: tl.constexpr = tl.constexpr(_ASM.format(magic="0x43004300", kind="bf16x2"))
_FP16_ASM: tl.constexpr = tl.constexpr(_ASM.format(magic="0x64006400", kind="f16x2"))


@dataclass(frozen=True, slots=True)
class Int4Words:
    """
    Args:
        codes: [groups, outputs, group_size / 4] int16.
        scales: [groups, outputs] float32. Of a model in 16 bits with zeros of their own int32: the scale's bits in the low half,
            those of offset + zero in the high one.
        zeros: [groups, outputs] float32; None: they stand in `scales`, or are `zero`.
        zero: of every group; None: they differ.
        paired: outputs lie in pairs of eights; else in order.
        dtype: the model's.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    zero: int | None
    group_size: int
    paired: bool
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


def _in_pairs(x: Tensor) -> Tensor:
    """[outputs, ...] in the order of positions."""
    return torch.unflatten(x, 0, (2, -1, PAIR)).transpose(0, 1).flatten(0, 2)


def pack_int4_words(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> Int4Words:
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
    paired = outputs % (2 * PAIR) == 0
    if paired:
        codes, scales, zeros = (_in_pairs(x) for x in (codes, scales, zeros))
    wide = torch.stack((codes & 15, codes >> 4), dim=-1).view(outputs, inputs // size, 4, size // 4)
    two = wide[:, :, ::2] | wide[:, :, 1::2] << 4
    words = two.permute(1, 0, 3, 2).contiguous().view(torch.int16).squeeze(-1)
    scales, zeros = (x.repeat_interleave(group_size // size, dim=1).t().contiguous() for x in (scales, zeros))
    if bool((zeros == zeros[0, 0]).all()):
        return Int4Words(words, scales.float(), None, int(zeros[0, 0]), size, paired, scales.dtype)
    numbers = (zeros.int() + OFFSETS[scales.dtype]).to(scales.dtype)
    if scales.dtype == torch.float32:
        return Int4Words(words, scales, numbers, None, size, paired, torch.float32)
    both = torch.stack((scales, numbers), dim=-1).view(torch.int32).squeeze(-1)
    return Int4Words(words, both, None, None, size, paired, scales.dtype)


@triton.jit
def _by_asm(words, zero, ASM_TEXT: tl.constexpr):
    zero = tl.broadcast_to(zero, words.shape)
    return tl.inline_asm_elementwise(
        ASM_TEXT, "=&r,=&r,=&r,=&r,r,r", [words, zero], dtype=(zero.dtype, zero.dtype, zero.dtype, zero.dtype),
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _quarters(words, zero, OFFSET: tl.constexpr, ASM: tl.constexpr):
    """The four codes of words, less the zero, as zero's dtype. words: [n, q] int16; zero: [n, 1], OFFSET added."""
    if ASM:
        if OFFSET == 128:
            a, b, c, d = _by_asm(words, zero, _BF16_ASM)
        else:
            a, b, c, d = _by_asm(words, zero, _FP16_ASM)
    else:
        wide = words.to(tl.int32)
        a = ((wide & 15) + OFFSET).to(zero.dtype) - zero
        b = (((wide >> 4) & 15) + OFFSET).to(zero.dtype) - zero
        c = (((wide >> 8) & 15) + OFFSET).to(zero.dtype) - zero
        d = (((wide >> 12) & 15) + OFFSET).to(zero.dtype) - zero
    return a, b, c, d


@triton.jit
def _in_order(words, zero, OFFSET: tl.constexpr, ASM: tl.constexpr):
    """[n, 4 q]: a group's codes less the zero, in the order of its inputs: registers are renamed, nothing is moved."""
    a, b, c, d = _quarters(words, zero, OFFSET, ASM)
    ab = tl.permute(tl.join(a, b), (0, 2, 1))
    cd = tl.permute(tl.join(c, d), (0, 2, 1))
    every = tl.permute(tl.join(ab, cd), (0, 3, 1, 2))
    return tl.reshape(every, [words.shape[0], 4 * words.shape[1]])


@triton.jit
def _factors(scales_ptr, zeros_ptr, at, mask, dtype: tl.constexpr):
    """Scale, and zero with its offset, in dtype, of some outputs of one group."""
    if dtype == tl.float32:
        scale, zero = tl.load(scales_ptr + at, mask=mask, other=0.0), tl.load(zeros_ptr + at, mask=mask, other=0.0)
    else:
        word = tl.load(scales_ptr + at, mask=mask, other=0)
        scale = (word & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
        zero = (word >> 16).to(tl.int16).to(dtype, bitcast=True)
    return scale, zero


@triton.jit
def _column_of(position, outputs, PAIRED: tl.constexpr):
    if PAIRED:
        column = position // 16 * 8 + position % 8 + position // 8 % 2 * (outputs // 2)
    else:
        column = position
    return column


@triton.jit(do_not_specialize=["num_rows", "num_groups", "share"])
def _words_matmul_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    outputs,
    num_groups,
    share,
    stride_x,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUARTER: tl.constexpr,
    OFFSET: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    GROUP: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    PAIRED: tl.constexpr,
    ROUNDED: tl.constexpr,
    EVEN: tl.constexpr,
    ZERO: tl.constexpr,
    TMA: tl.constexpr,
    ASM: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    first_row, first = tile_start(num_rows, outputs, BLOCK_M, BLOCK_N, GROUP)
    split = tl.program_id(1)
    low = split * share
    high = tl.minimum(low + share, num_groups)
    row = first_row + tl.arange(0, BLOCK_M)
    position = first + tl.arange(0, BLOCK_N)
    real_row, real = row < num_rows, position < outputs
    k = tl.arange(0, 4 * QUARTER)
    q = tl.arange(0, QUARTER)
    x_dtype: tl.constexpr = x_ptr.dtype if TMA else x_ptr.dtype.element_ty
    if not TMA:
        x_at = x_ptr + (row[:, None] * stride_x + k[None, :])
        words_at = codes_ptr + (position[:, None] * QUARTER + q[None, :])
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if AHEAD > 0:
        line = tl.arange(0, BLOCK_N * QUARTER // 64) * 64
        ahead = tl.minimum(low + tl.arange(0, AHEAD), num_groups - 1)
        prefetch(codes_ptr + (outputs.to(tl.int64) * ahead + first)[:, None] * QUARTER + line[None, :])
    begin(PDL)
    for group in tl.range(low, high, num_stages=STAGES, loop_unroll_factor=UNROLL):
        if TMA:
            x = x_ptr.load([first_row, group * (4 * QUARTER)])
        else:
            x = tl.load(x_at + group * (4 * QUARTER), mask=real_row[:, None], other=0.0)
        if TMA:
            words = codes_ptr.load([group * outputs + first, 0])
        elif EVEN:
            words = tl.load(words_at + group * (outputs * QUARTER))
        else:
            words = tl.load(words_at + group * (outputs * QUARTER), mask=real[:, None], other=0)
        if ZERO >= 0:
            if EVEN:
                scale = tl.load(scales_ptr + group * outputs + position)
            else:
                scale = tl.load(scales_ptr + group * outputs + position, mask=real, other=0.0)
            zero = tl.full([BLOCK_N], OFFSET + ZERO, tl.float32).to(x_dtype)
        else:
            scale, zero = _factors(scales_ptr, zeros_ptr, group * outputs + position, real, x_dtype)
        weight = _in_order(words, zero[:, None], OFFSET, ASM)
        if ROUNDED:
            acc = tl.dot((weight * scale[:, None].to(x_dtype)).to(x_dtype), x.T, acc, input_precision="ieee")
        else:
            total = tl.dot(weight, x.T, input_precision="ieee")
            acc = tl.fma(total, tl.broadcast_to(scale.to(tl.float32)[:, None], total.shape), acc)
    if BIAS:
        bias = tl.load(bias_ptr + _column_of(position, outputs, PAIRED), mask=real, other=0.0).to(tl.float32)
        acc = acc + bias[:, None]
    out_type: tl.constexpr = out_ptr.dtype.element_ty
    if SILU:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_N // 16, 2, 8, BLOCK_M]), (0, 2, 3, 1)))
        # Rounded as the unfused projection would be.
        gate = gate.to(out_type).to(tl.float32)
        done = gate / (1.0 + tl.exp(-gate)) * up.to(out_type).to(tl.float32)
        done = tl.reshape(done, [BLOCK_N // 2, BLOCK_M])
        columns = outputs // 2
        column = first // 2 + tl.arange(0, BLOCK_N // 2)
        here = column < columns
    else:
        done = acc
        columns = outputs
        column = _column_of(position, outputs, PAIRED)
        here = real
    out_ptr += split.to(tl.int64) * num_rows * columns
    out_at = out_ptr + row[None, :].to(tl.int64) * columns + column[:, None]
    tl.store(out_at, done.to(out_type), mask=real_row[None, :] & here[:, None])


@dataclass(frozen=True, slots=True)
class WordsShape:
    """How one launch is cut.

    Args:
        block_m, block_n: rows; outputs, with silu of gate and up together.
        splits: of the groups.
        unroll: groups between two waits for loads.
        rounded: weights are scaled and rounded before the product, as `dequantize` does, so that sums of all groups stay where
            they are: for many rows.
        tma: x and words are loaded by the tensor memory accelerator.
        ahead: groups of a program's weight that are on their way before it waits for its predecessor.
        max_registers: of a thread; None: as many as the compiler wants.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int = 1
    unroll: int = 1
    rounded: bool = False
    tma: bool = False
    ahead: int = 2
    max_registers: int | None = None


_PLAIN = WordsShape(16, 64, 4, 4)


FEW_ROWS = 64
"""Of more the weights are rounded before they are multiplied, but where a row's bits must not depend on the number."""
_MANY_ROWS = 1024
_MULTIPROCESSORS = 132
"""Of the card for which the shapes were chosen."""


def is_widened(rows: int, outputs: int) -> bool:
    """Whether a product without an activation is faster by a weight in the model's dtype: of many rows, and of more than few
    where tiles of outputs are too few to fill the GPU."""
    return rows > FEW_ROWS and (rows > _MANY_ROWS or outputs <= 32 * _MULTIPROCESSORS)


def choose_words(
    rows: int, outputs: int, groups: int, *, silu: bool, splits: int | None, invariant: bool = False
) -> WordsShape:
    """A fast shape of a launch (docs/measurements/gpu-quantized.md).

    Args:
        outputs: with silu, of gate and up together.
        splits: None: as many as are fast.
        invariant: neither the shape nor the number of rows changes a bit of a row; with `splits` only.
    """
    if invariant:
        if rows > FEW_ROWS:
            return WordsShape(128, 128, 8, 3, splits=splits or 1)
        return WordsShape(max(16, triton.next_power_of_2(rows)), 64, 4, 4, splits=splits or 1)
    few = rows <= FEW_ROWS
    fast = _for_few(rows, outputs, groups, silu=silu) if few else _for_many(rows, silu=silu)
    return fast if splits is None else replace(fast, splits=splits)


def _for_few(rows: int, outputs: int, groups: int, *, silu: bool) -> WordsShape:
    parts = min(groups, 4)
    if rows <= 8:
        if silu:
            return WordsShape(8, 64, 2, 4)
        if outputs > 32 * _MULTIPROCESSORS:
            return WordsShape(8, 64, 2, 4, splits=min(parts, 2), unroll=2)
        return (
            WordsShape(8, 64, 2, 4, splits=parts, unroll=2) if groups > 64 else WordsShape(8, 128, 4, 4, splits=parts)
        )
    if rows <= 16:
        return WordsShape(16, 128, 4, 4, max_registers=128) if silu else WordsShape(16, 64, 4, 6, splits=parts)
    block = 32 if rows <= 32 else 64
    return WordsShape(block, 128, 4, 4) if silu else WordsShape(block, 64, 4, 4, splits=parts)


def _for_many(rows: int, *, silu: bool) -> WordsShape:
    """Of rounded weights."""
    if silu:  # the wide tile is 8% faster, unless more of it lies past the last row
        wide = 1.08 * triton.cdiv(rows, 128) > 2 * triton.cdiv(rows, 256)
        return WordsShape(256 if wide else 128, 128, 8, 3 if wide else 2, rounded=True, tma=True)
    if rows <= 128:
        return WordsShape(64, 128, 8, 4, rounded=True)
    return WordsShape(128, 128 if rows <= 256 else 256, 8, 3, rounded=True, tma=True)


def int4_words_matmul(
    x: Tensor,
    weight: Int4Words,
    bias: Tensor | None = None,
    *,
    silu: bool = False,
    shape: WordsShape | None = None,
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
    if silu and not weight.paired:
        raise ValueError(f"{outputs} outputs are not pairs of gate and up")
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
    pdl, even = use_pdl(x.device, rows), outputs % cut.block_n == 0
    quarter = weight.group_size // 4
    tma = cut.tma and even and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    codes, rows_of_x = weight.codes, x
    if tma:
        rows_of_x = TensorDescriptor.from_tensor(x, [cut.block_m, 4 * quarter])
        codes = TensorDescriptor.from_tensor(codes.view(-1, quarter), [cut.block_n, quarter])
    tiles = triton.cdiv(rows, cut.block_m) * triton.cdiv(outputs, cut.block_n)
    _words_matmul_kernel[(tiles, cut.splits)](
        rows_of_x,
        codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        x if bias is None else bias,
        out,
        rows,
        outputs,
        groups,
        triton.cdiv(groups, cut.splits),
        x.stride(0),
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        QUARTER=quarter,
        OFFSET=OFFSETS[weight.dtype],
        STAGES=cut.num_stages,
        UNROLL=cut.unroll,
        GROUP=_GROUP,
        SILU=silu,
        BIAS=bias is not None,
        PAIRED=weight.paired,
        ROUNDED=cut.rounded,
        EVEN=even,
        ZERO=-1 if weight.zero is None else weight.zero,
        TMA=tma,
        ASM=x.is_cuda and x.dtype != torch.float32,
        AHEAD=cut.ahead if pdl and even and not tma else 0,
        PDL=pdl,
        num_warps=cut.num_warps,
        maxnreg=cut.max_registers,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _dequantize_words_kernel(
    codes_ptr, scales_ptr, zeros_ptr, out_ptr, outputs, stride_out,
    BLOCK_N: tl.constexpr, QUARTER: tl.constexpr, OFFSET: tl.constexpr, PAIRED: tl.constexpr, ZERO: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    position = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = position < outputs
    at = (group * outputs + position)[:, None] * QUARTER + tl.arange(0, QUARTER)[None, :]
    words = tl.load(codes_ptr + at, mask=real[:, None], other=0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if ZERO >= 0:
        scale = tl.load(scales_ptr + group * outputs + position, mask=real, other=0.0).to(dtype)
        zero = tl.full([BLOCK_N], OFFSET + ZERO, tl.float32).to(dtype)
    else:
        scale, zero = _factors(scales_ptr, zeros_ptr, group * outputs + position, real, dtype)
    weight = _in_order(words, zero[:, None], OFFSET, ASM) * scale[:, None]
    column = _column_of(position, outputs, PAIRED)
    k = tl.arange(0, 4 * QUARTER)
    out_at = out_ptr + column[:, None].to(tl.int64) * stride_out + group * (4 * QUARTER) + k[None, :]
    tl.store(out_at, weight.to(dtype), mask=real[:, None])


def dequantize_int4_words(weight: Int4Words) -> Tensor:
    """[outputs, inputs] in the model's dtype: each weight rounded once."""
    out = torch.empty((weight.outputs, weight.inputs), dtype=weight.dtype, device=weight.codes.device)
    block = 64
    _dequantize_words_kernel[(triton.cdiv(weight.outputs, block), weight.codes.shape[0])](
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        out,
        weight.outputs,
        out.stride(0),
        BLOCK_N=block,
        QUARTER=weight.group_size // 4,
        OFFSET=OFFSETS[weight.dtype],
        PAIRED=weight.paired,
        ZERO=-1 if weight.zero is None else weight.zero,
        ASM=out.is_cuda and weight.dtype != torch.float32,
        num_warps=4,
    )
    return out
