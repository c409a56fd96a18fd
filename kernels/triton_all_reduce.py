"""Sums over the GPUs of one host in one launch, for messages so small that latency is what they cost.

Every rank writes its addend into the inbox of each other rank, and adds up what came into its own: one way over the link, no
copy, no second kernel. What is sent are words of 64 bits, which the hardware writes as one: 32 bits of data, and a flag.

    word    | data: two elements of 16 bits, or one of 32 | epoch |

A reader reads a word until it has the epoch of this launch. So no fence, no barrier and no atomic stands between a sender and a
reader, at the price of twice the bytes (NCCL calls this LL). Words are written into two halves of the inbox in turn: who has
read all words of epoch n knows that every peer has begun n, so has ended n - 1, and reads the half of n - 1 no more.

    inbox   [2: epoch % 2, ranks that send, words]      of one rank; the others have its address

The programs of a launch count epochs for themselves, in device memory, so that a CUDA graph may hold it. That is why every
launch has PROGRAMS programs, however few rows there are: all of them count.

Sums are in fp32, in the order of the ranks, rounded once: the same bits on every rank, whatever the number of rows. Every rank
must make the same launches in the same order. A wait ends after `limit` reads: then a peer is gone, `failed` is set, and what is
computed from there on means nothing.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.pdl import begin, use_pdl
from diptych.kernels.triton_quantize import BLOCK as SCALE_BLOCK
from diptych.kernels.triton_quantize import FP8_BLOCKS, QuantizedRows, room_for, store_quantized

PROGRAMS = 128
"""On an H200 with 132 multiprocessors all of them run at the same time."""
WORD_BYTES = 8
_PIECE_WORDS = 1024
"""Of a program at a time, where no norm needs a whole row."""


@dataclass(frozen=True, slots=True)
class Inboxes:
    """
    Args:
        rank: this one, of `degree`.
        addresses: where the inbox of each rank is, as this GPU reaches it; multiples of 16.
        room: words that one rank may send at a time: an inbox has 2 * degree * room. Zeros at first.
        epochs: [PROGRAMS] int32 on this GPU, zeros at first.
        limit: [1] int32 on this GPU: reads of a word before a wait ends; each takes about half a microsecond.
        failed: [1] int32 that this GPU and the host reach.
    """

    rank: int
    degree: int
    addresses: tuple[int, ...]
    room: int
    epochs: Tensor
    limit: Tensor
    failed: Tensor

    def most(self, x: Tensor) -> int:
        """Elements like those of x that can be sent at once; 0: such elements cannot be sent."""
        return {2: 2 * self.room, 4: self.room}.get(x.element_size(), 0)

    def holds(self, x: Tensor, columns: int | None = None) -> bool:
        """Whether x can be sent at once. Args: columns: of a row that begins with a word of its own; None: none does."""
        odd = (x.numel() if columns is None else columns) % 2
        return x.numel() <= self.most(x) and not (odd and x.element_size() == 2)


@triton.jit
def _words(x, epoch):
    """x: [n] of 16 or 32 bits. Returns: [n / 2] or [n] words."""
    if x.dtype.primitive_bitwidth == 16:
        low, high = tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
        data = (low.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF) | (
            (high.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF) << 16
        )
    else:
        data = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return data | (epoch.to(tl.int64) << 32)


@triton.jit
def _elements(words, dtype: tl.constexpr):
    """The other way round, in fp32."""
    if dtype.primitive_bitwidth == 16:
        low = (words & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
        high = ((words >> 16) & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
        x = tl.reshape(tl.join(low, high), [words.shape[0] * 2])
    else:
        x = words.to(tl.int32).to(dtype, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _inbox(addresses, owner: tl.constexpr, sender: tl.constexpr, epoch, room, DEGREE: tl.constexpr):
    """Where the words of one rank go in the inbox of another, in this epoch."""
    base = tl.multiple_of(addresses[owner].to(tl.pointer_type(tl.int64)), 16)
    return base + tl.multiple_of(((epoch & 1) * DEGREE + sender).to(tl.int64) * room, 2)


@triton.jit
def _send(words, at, mask, addresses, epoch, room, RANK: tl.constexpr, DEGREE: tl.constexpr):
    """To every other rank."""
    for ahead in tl.static_range(1, DEGREE):  # each begins with another one
        tl.store(_inbox(addresses, (RANK + ahead) % DEGREE, RANK, epoch, room, DEGREE) + at, words, mask=mask)


@triton.jit
def _received(at, mask, addresses, limit_ptr, failed_ptr, epoch, room, SENDER: tl.constexpr, RANK, DEGREE):
    """The words of one rank."""
    own = _inbox(addresses, RANK, SENDER, epoch, room, DEGREE) + at
    here = epoch.to(tl.int64) << 32
    words = tl.load(own, mask=mask, other=here, volatile=True)
    late = tl.max(((words >> 32).to(tl.int32) != epoch).to(tl.int32), 0)
    left = tl.load(limit_ptr)
    while late > 0 and left > 0:
        words = tl.load(own, mask=mask, other=here, volatile=True)
        late = tl.max(((words >> 32).to(tl.int32) != epoch).to(tl.int32), 0)
        left -= 1
    if late > 0:
        tl.store(failed_ptr, 1)
        tl.store(limit_ptr, 0)  # nobody waits again
    return words


@triton.jit
def _sum(x, at, mask, addresses, limit_ptr, failed_ptr, epoch, room, dtype: tl.constexpr, RANK: tl.constexpr, DEGREE):
    """x: this rank's, in its dtype. Returns: the sum over the ranks in their order, rounded, in fp32."""
    total = x.to(tl.float32)
    if RANK != 0:
        total = _elements(_received(at, mask, addresses, limit_ptr, failed_ptr, epoch, room, 0, RANK, DEGREE), dtype)
    for rank in tl.static_range(1, DEGREE):
        if rank == RANK:
            total += x.to(tl.float32)
        else:
            total += _elements(
                _received(at, mask, addresses, limit_ptr, failed_ptr, epoch, room, rank, RANK, DEGREE), dtype
            )
    return total.to(dtype)


@triton.jit
def _addend(x_ptr, at, mask, stride_split, SPLITS: tl.constexpr, dtype: tl.constexpr):
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(x_ptr + split * stride_split + at, mask=mask, other=0.0)
    return x.to(dtype)


@triton.jit
def _all_reduce_kernel(
    x_ptr, out_ptr, addresses, epochs_ptr, limit_ptr, failed_ptr, total, room,
    RANK: tl.constexpr, DEGREE: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr, SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    program = tl.program_id(0)
    element, word = tl.arange(0, BLOCK), tl.arange(0, WORDS)
    num_words = total // (BLOCK // WORDS)
    begin(PDL)
    epoch = tl.load(epochs_ptr + program) + 1
    if not AT_ONCE:
        for piece in tl.range(program, tl.cdiv(total, BLOCK), tl.num_programs(0)):
            at, word_at = piece * BLOCK + element, piece * WORDS + word
            x = _addend(x_ptr, at, at < total, total, SPLITS, dtype)
            _send(_words(x, epoch), word_at, word_at < num_words, addresses, epoch, room, RANK, DEGREE)
    for piece in tl.range(program, tl.cdiv(total, BLOCK), tl.num_programs(0)):
        at, word_at = piece * BLOCK + element, piece * WORDS + word
        mask = word_at < num_words
        x = _addend(x_ptr, at, at < total, total, SPLITS, dtype)
        if AT_ONCE:
            _send(_words(x, epoch), word_at, mask, addresses, epoch, room, RANK, DEGREE)
        x = _sum(x, word_at, mask, addresses, limit_ptr, failed_ptr, epoch, room, dtype, RANK, DEGREE)
        tl.store(out_ptr + at, x, mask=at < total)
    tl.store(epochs_ptr + program, epoch)


@triton.jit(do_not_specialize=["rows", "stride_scale"])
def _all_reduce_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scales_ptr, addresses, epochs_ptr, limit_ptr, failed_ptr, eps, offset, rows,
    size, stride_scale, room,
    RANK: tl.constexpr, DEGREE: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr, SPLITS: tl.constexpr,
    QUANTIZED: tl.constexpr, BLOCKS: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    program = tl.program_id(0)
    element, word = tl.arange(0, BLOCK), tl.arange(0, WORDS)
    num_words = size // (BLOCK // WORDS)
    mask, word_mask = element < size, word < num_words
    weight = tl.load(weight_ptr + element, mask=mask, other=0.0).to(tl.float32) + offset
    begin(PDL)
    epoch = tl.load(epochs_ptr + program) + 1
    if not AT_ONCE:
        for row in tl.range(program, rows, tl.num_programs(0)):
            x = _addend(x_ptr, row * size + element, mask, rows * size, SPLITS, dtype)
            _send(_words(x, epoch), row * num_words + word, word_mask, addresses, epoch, room, RANK, DEGREE)
    for row in tl.range(program, rows, tl.num_programs(0)):
        at, words = row * size + element, row * num_words + word
        x = _addend(x_ptr, at, mask, rows * size, SPLITS, dtype)
        if AT_ONCE:
            _send(_words(x, epoch), words, word_mask, addresses, epoch, room, RANK, DEGREE)
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = _sum(x, words, word_mask, addresses, limit_ptr, failed_ptr, epoch, room, dtype, RANK, DEGREE)
        # Rounded to the model's dtype before the norm, as the unfused sum is.
        x = (x.to(tl.float32) + residual).to(dtype)
        tl.store(residual_ptr + at, x, mask=mask)
        x = x.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
        y = (x * scale * weight).to(dtype)
        if QUANTIZED:
            y = y.to(tl.float32)
            store_quantized(y, out_ptr, scales_ptr, row, 0, size, stride_scale, BLOCK, BLOCKS, tl.max(tl.abs(y), 0))
        else:
            tl.store(out_ptr + at, y, mask=mask)
    tl.store(epochs_ptr + program, epoch)


@triton.jit(do_not_specialize=["rows"])
def _gather_kernel(
    x_ptr, out_ptr, addresses, epochs_ptr, limit_ptr, failed_ptr, rows, columns, stride_x, room,
    RANK: tl.constexpr, DEGREE: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    program = tl.program_id(0)
    element, word = tl.arange(0, BLOCK), tl.arange(0, WORDS)
    num_words = columns // (BLOCK // WORDS)
    per_row = tl.cdiv(columns, BLOCK)
    begin(PDL)
    epoch = tl.load(epochs_ptr + program) + 1
    for piece in tl.range(program, rows * per_row, tl.num_programs(0)):
        row, part = piece // per_row, piece % per_row
        at, word_at = part * BLOCK + element, part * WORDS + word
        x = tl.load(x_ptr + row * stride_x + at, mask=at < columns, other=0.0)
        where = row * num_words + word_at
        _send(_words(x, epoch), where, word_at < num_words, addresses, epoch, room, RANK, DEGREE)
        tl.store(out_ptr + (row * DEGREE + RANK) * columns + at, x, mask=at < columns)
    for piece in tl.range(program, rows * per_row, tl.num_programs(0)):
        row, part = piece // per_row, piece % per_row
        at, word_at = part * BLOCK + element, part * WORDS + word
        where = row * num_words + word_at
        for sender in tl.static_range(DEGREE):
            if sender != RANK:
                words = _received(
                    where, word_at < num_words, addresses, limit_ptr, failed_ptr, epoch, room, sender, RANK, DEGREE
                )
                out_at = (row * DEGREE + sender) * columns + at
                tl.store(out_ptr + out_at, _elements(words, dtype).to(dtype), mask=at < columns)
    tl.store(epochs_ptr + program, epoch)


def _checked(x: Tensor, inboxes: Inboxes, columns: int | None = None) -> None:
    if not x.is_contiguous() or not inboxes.holds(x, columns):
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} must be contiguous, of at most {inboxes.room} words")


def _block(x_bytes: int, size: int) -> tuple[int, int]:
    """Elements and words of a program at a time."""
    return size, size // (4 // x_bytes)


def one_shot_all_reduce(x: Tensor, inboxes: Inboxes, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over the ranks.

    Args:
        x: this rank's addend, contiguous, of an even number of elements; or [splits, rows, n] fp32 with `dtype`: its sum over
            the splits, rounded to it, is the addend (see triton_matmul).
        dtype: of the result; None: x's.
    Returns: a new tensor of x's shape, less the splits.
    Raises: ValueError for more than the inboxes hold.
    """
    splits = 1 if dtype is None or x.dim() < 3 else x.shape[0]
    shape = x.shape[1:] if dtype is not None and x.dim() == 3 else x.shape
    out = torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
    if not x.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} must be contiguous")
    _checked(out, inboxes)
    width = _PIECE_WORDS * (4 // out.element_size())
    block, words = _block(out.element_size(), width)
    pdl = use_pdl(x.device, 1)
    _all_reduce_kernel[(PROGRAMS,)](
        x, out, inboxes.addresses, inboxes.epochs, inboxes.limit, inboxes.failed, out.numel(), inboxes.room,
        RANK=inboxes.rank, DEGREE=inboxes.degree, BLOCK=block, WORDS=words, SPLITS=splits,
        AT_ONCE=out.numel() <= PROGRAMS * block, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return out


def all_reduce_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor, inboxes: Inboxes, *, offset: float = 0.0,
    kind: str | None = None,
) -> Tensor | QuantizedRows:  # fmt: skip
    """rms_norm(sum over the ranks of x, residual), see triton_norm.rms_norm, or rms_norm_quantized where a kind is given.

    Args:
        x: [rows, size] of weight's dtype, or [splits, rows, size] fp32; contiguous; size is even.
    Raises: ValueError on a shape or dtype mismatch, and for more than the inboxes hold.
    """
    rows, size = x.shape[-2:]
    splits = x.shape[0] if x.dim() == 3 else 1
    wanted = torch.float32 if x.dim() == 3 else weight.dtype
    if weight.shape != (size,) or x.dtype != wanted or not x.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit weight {tuple(weight.shape)} {weight.dtype}")
    if residual.shape != (rows, size) or residual.dtype != weight.dtype:
        raise ValueError(f"residual {tuple(residual.shape)} {residual.dtype} does not fit x {tuple(x.shape)} {x.dtype}")
    _checked(residual, inboxes, size)
    if kind is None:
        out, scales = torch.empty((rows, size), dtype=weight.dtype, device=x.device), weight
        quantized = None
    else:
        quantized = room_for(rows, size, kind, weight.dtype, x.device)
        out, scales = quantized.codes, quantized.scales
    width = triton.next_power_of_2(size)
    block, words = _block(weight.element_size(), max(SCALE_BLOCK, width))
    pdl = use_pdl(x.device, rows)
    _all_reduce_norm_kernel[(PROGRAMS,)](
        x, residual, weight, out, scales, inboxes.addresses, inboxes.epochs, inboxes.limit, inboxes.failed, eps, offset, rows,
        size, 0 if quantized is None else scales.stride(-1), inboxes.room,
        RANK=inboxes.rank, DEGREE=inboxes.degree, BLOCK=block, WORDS=words, SPLITS=splits, QUANTIZED=kind is not None,
        BLOCKS=kind == FP8_BLOCKS, AT_ONCE=rows <= PROGRAMS, PDL=pdl, num_warps=max(1, min(16, block // 512)),
        launch_pdl=pdl,
    )  # fmt: skip
    return out if quantized is None else quantized


def gather_columns(x: Tensor, inboxes: Inboxes) -> Tensor:
    """x: [rows, n], this rank's columns, n even where elements have 16 bits. Returns: [rows, n * degree], those of every rank.

    Raises: ValueError for more than the inboxes hold."""
    rows, columns = x.shape
    _checked(x, inboxes, columns)
    out = torch.empty((rows, columns * inboxes.degree), dtype=x.dtype, device=x.device)
    block, words = _block(x.element_size(), _PIECE_WORDS * (4 // x.element_size()))
    pdl = use_pdl(x.device, rows)
    _gather_kernel[(PROGRAMS,)](
        x, out, inboxes.addresses, inboxes.epochs, inboxes.limit, inboxes.failed, rows, columns, x.stride(0), inboxes.room,
        RANK=inboxes.rank, DEGREE=inboxes.degree, BLOCK=block, WORDS=words, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return out
