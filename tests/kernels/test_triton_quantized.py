"""Kernels for quantized linear layers against their references: right within rounding; the same bits in any company where that is
promised."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from diptych.kernels.reference_fused import gate_mul_ref
from diptych.kernels.reference_quant import int4_weight_ref, quantize_rows_ref, w8a8_ref
from diptych.kernels.triton_int4 import Int4Shape, choose_int4, dequantize_int4, int4_matmul, pack_int4
from diptych.kernels.triton_int4_words import (
    WordsShape,
    choose_words,
    dequantize_int4_words,
    int4_words_matmul,
    pack_int4_words,
)
from diptych.kernels.triton_norm import gate_mul, gate_quantized, rms_norm, rms_norm_quantized
from diptych.kernels.triton_quantize import FP8, FP8_BLOCKS, INT8, KINDS, QuantizedRows, quantize_rows
from diptych.kernels.triton_w8a8 import W8A8Shape, choose_w8a8, w8a8_matmul

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1")
CODES = {INT8: torch.int8, FP8: torch.float8_e4m3fn, FP8_BLOCKS: torch.float8_e4m3fn}
BF16 = 6e-3
"""Relative error of a result in bf16."""
FAST_SUMS = 1e-3
"""And of FP8's sums in fp32 within 128 inputs, which tensor cores keep with 14 bits."""


def error(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def silu_of(product):
    return gate_mul_ref(product.float()).double()


# ---- rows ----


def check_rows(rows, size, kind, *, dtype, device):
    x = torch.randn(rows, size, device=device).to(dtype)
    x[rows // 2] = 0
    x[-1] *= 1000
    got = quantize_rows(x, kind)
    codes, scales = quantize_rows_ref(x.cpu(), CODES[kind], block=kind == FP8_BLOCKS)
    assert torch.equal(got.scales.cpu(), scales)
    # A reciprocal instead of a division: at a tie the neighbour.
    off = got.codes.cpu().float() != codes.float()
    step = 1.0 if kind == INT8 else 32.0
    assert off.float().mean() < 2e-3
    assert (got.codes.cpu().float() - codes.float()).abs().max() <= step
    assert not got.codes[rows // 2].float().any()
    assert not got.scales[rows // 2].any()


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 300), (65, 20)])
def test_rows_are_quantized_by_the_rule(rows, size, kind):
    check_rows(rows, size, kind, dtype=torch.float32, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 33, 200])
def test_rows_are_quantized_by_the_rule_gpu(cuda, rows, kind):
    for size in (4096, 14336, 1000):
        check_rows(rows, size, kind, dtype=torch.bfloat16, device=cuda)


def check_fused_rows(kind, device, dtype, size=70):
    """What a norm or an activation quantizes is what quantize_rows makes of its result; few rows as many."""
    x, residual = (torch.randn(5, 2 * size, device=device).to(dtype) for _ in range(2))
    many = torch.randn(66, 40, device=device).to(dtype)
    weight = torch.rand(2 * size, device=device).to(dtype)
    left, right = residual.clone(), residual.clone()
    normed = quantize_rows(rms_norm(x, weight, 1e-5, left), kind)
    pairs = [
        (rms_norm_quantized(x, weight, 1e-5, right, kind=kind), normed),
        (gate_quantized(x, "gelu", kind), quantize_rows(gate_mul(x, "gelu"), kind)),
        (quantize_rows(many[:3], kind), QuantizedRows(*(t[:3] for t in whole(quantize_rows(many, kind))), dtype)),
    ]
    assert torch.equal(left, right)
    for got, expected in pairs:
        assert torch.equal(got.codes.float(), expected.codes.float())
        assert torch.equal(got.scales, expected.scales)


def whole(rows):
    return rows.codes, rows.scales


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_fused_quantization_is_the_separate_one(kind):
    check_fused_rows(kind, "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_fused_quantization_is_the_separate_one_gpu(cuda, kind):
    check_fused_rows(kind, cuda, torch.bfloat16, 4096)


@interpreted
def test_a_gate_adds_up_splits():
    parts = torch.randn(3, 4, 40)
    assert torch.equal(gate_mul(parts, "silu", torch.float32), gate_mul(parts.sum(0)))


# ---- W8A8 ----


def a_weight(outputs, size, kind, device="cpu"):
    weight = torch.randn(outputs, size, device=device)
    if kind != FP8_BLOCKS:
        return quantize_rows_ref(weight, CODES[kind])
    shape = -(-outputs // 128), -(-size // 128)
    return (weight * 100).clamp(-448, 448).to(CODES[kind]), torch.rand(shape, device=device) * 0.01 + 0.001


def check_w8a8(rows, size, outputs, kind, shapes, *, dtype, device, tolerance):
    x = torch.randn(rows, size, device=device).to(dtype)
    quantized = quantize_rows(x, kind)
    weight, scales = a_weight(outputs, size, kind, device)
    product = w8a8_ref(quantized.codes, quantized.scales, weight, scales)
    bias = torch.randn(outputs, device=device).to(dtype)
    for shape in shapes:
        one = replace(shape, splits=1)
        got = {
            "plain": (w8a8_matmul(quantized, weight, scales, shape=one), product),
            "bias": (w8a8_matmul(quantized, weight, scales, bias, shape=one), product + bias.double()),
            "splits": (w8a8_matmul(quantized, weight, scales, shape=replace(shape, splits=2)).double().sum(0), product),
        }
        if kind != FP8_BLOCKS or outputs // 2 % 128 == 0:
            got["silu"] = w8a8_matmul(quantized, weight, scales, silu=True, shape=one), silu_of(product)
        for name, (out, expected) in got.items():
            assert error(out, expected) < tolerance, f"{kind} {name} {shape}"


SMALL_W8A8 = [
    W8A8Shape(16, 128, 128, 4, 3),
    W8A8Shape(16, 64, 128, 4, 3, swap=True),
    W8A8Shape(32, 64, 128, 4, 3, tma=True),
]


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "size", "outputs"), [(1, 128, 32), (3, 300, 20), (17, 256, 256)])
def test_w8a8_small(rows, size, outputs, kind):
    check_w8a8(rows, size, outputs, kind, SMALL_W8A8, dtype=torch.float32, device="cpu", tolerance=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 16, 33, 64, 300])
def test_w8a8_gpu(cuda, rows, kind):
    for size, outputs in ((4096, 6144), (1024, 272), (14336, 4096)):
        shapes = [choose_w8a8(rows, outputs, size, silu=False, blocks=kind == FP8_BLOCKS, splits=1)]
        check_w8a8(rows, size, outputs, kind, shapes, dtype=torch.bfloat16, device=cuda, tolerance=BF16 + FAST_SUMS)


def check_bits(count, make):
    """Of a row alone, and of the first rows, in steps of any size. make(rows) -> [..., rows, columns]."""
    every = make(count)
    for rows in (1, 2, 16, 17, 33, 64, 65):
        assert torch.equal(make(rows), every[..., :rows, :]), f"{rows} rows"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_w8a8_bits_do_not_depend_on_the_number_of_rows_gpu(cuda, kind):
    blocks = kind == FP8_BLOCKS
    for size, outputs in ((4096, 6144), (14336, 4096)):
        x = torch.randn(300, size, device=cuda).to(torch.bfloat16)
        weight, scales = a_weight(outputs, size, kind, cuda)
        for silu, splits in ((False, 1), (False, 2), (True, 1)):

            def make(rows, silu=silu, splits=splits, x=x, weight=weight, scales=scales, columns=outputs // (1 + silu)):
                shape = choose_w8a8(rows, columns, x.shape[1], silu=silu, blocks=blocks, splits=splits)
                return w8a8_matmul(quantize_rows(x[:rows], kind), weight, scales, silu=silu, shape=shape)

            check_bits(300, make)


def test_w8a8_what_does_not_fit_is_refused():
    x = QuantizedRows(torch.zeros(3, 128, dtype=torch.int8), torch.ones(3), torch.float32)
    weight, scales, bias = torch.zeros(6, 128, dtype=torch.int8), torch.ones(6), torch.ones(6)
    for call, words in (
        (lambda: w8a8_matmul(x, weight.to(torch.float8_e4m3fn), scales), "does not fit weight"),
        (lambda: w8a8_matmul(x, weight, scales[:5]), "scales"),
        (lambda: w8a8_matmul(x, weight[:5], scales[:5], silu=True), "not gate and up"),
        (lambda: w8a8_matmul(x, weight, scales, bias, shape=replace(SMALL_W8A8[0], splits=2)), "the whole sum"),
        (lambda: w8a8_matmul(x, weight, scales, bias[:3]), "does not fit 6 outputs"),
        (lambda: quantize_rows(torch.zeros(2, 3), "int9"), "no kind 'int9'"),
        (lambda: quantize_rows(torch.zeros(3, 2).t(), INT8), "contiguous"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_w8a8_a_tile_of_blocks_has_one_scale():
    x = QuantizedRows(torch.zeros(3, 128).to(torch.float8_e4m3fn), torch.ones(3, 1), torch.float32)
    weight, scales = torch.zeros(384, 128).to(torch.float8_e4m3fn), torch.ones(3, 1)
    with pytest.raises(ValueError, match="has one scale"):
        w8a8_matmul(x, weight, scales, shape=W8A8Shape(16, 256, 128, 4, 3))
    with pytest.raises(ValueError, match="share a block"):
        w8a8_matmul(x, weight, scales, silu=True)


# ---- int4 ----


def an_int4(outputs, inputs, group_size, dtype, device="cpu"):
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=device)
    scales = (torch.rand(outputs, inputs // group_size, device=device) * 0.01 + 0.001).to(dtype)
    zeros = torch.randint(0, 17, scales.shape, dtype=torch.uint8, device=device)
    return codes, scales, zeros, group_size


def check_int4(rows, inputs, outputs, group_size, shapes, *, dtype, device, tolerance):
    raw = an_int4(outputs, inputs, group_size, dtype, device)
    packed, dense = pack_int4(*raw), int4_weight_ref(*raw)
    assert (packed.outputs, packed.inputs) == (outputs, inputs)
    assert error(dequantize_int4(packed), dense) < tolerance
    x = torch.randn(rows, 2 * inputs, device=device).to(dtype)[:, :inputs]
    product = x.double() @ dense.T
    bias = torch.randn(outputs, device=device).to(dtype)
    for shape in shapes:
        one = replace(shape, splits=1)
        got = {
            "plain": (int4_matmul(x, packed, shape=one), product),
            "bias": (int4_matmul(x, packed, bias, shape=one), product + bias.double()),
            "silu": (int4_matmul(x, packed, silu=True, shape=one), silu_of(product)),
            "splits": (int4_matmul(x, packed, shape=replace(shape, splits=2)).double().sum(0), product),
        }
        for name, (out, expected) in got.items():
            assert error(out, expected) < tolerance, f"{name} {shape}"


SMALL_INT4 = [Int4Shape(16, 16, 4, 3), Int4Shape(32, 16, 4, 2, swap=True)]


@interpreted
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "group_size"),
    [(1, 128, 32, 64), (3, 256, 20, 128), (17, 96, 40, 32), (5, 576, 18, 192)],
)
def test_int4_small(rows, inputs, outputs, group_size, dtype, tolerance):
    check_int4(rows, inputs, outputs, group_size, SMALL_INT4, dtype=dtype, device="cpu", tolerance=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, BF16), (torch.float16, 1e-3)], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 300])
def test_int4_gpu(cuda, rows, dtype, tolerance):
    for inputs, outputs, size in ((4096, 6144, 128), (1024, 202, 64), (2048, 4096, 32)):
        groups = inputs // size
        shapes = [choose_int4(rows, outputs, groups, silu=False, splits=splits) for splits in (None, 1)]
        check_int4(rows, inputs, outputs, size, shapes, dtype=dtype, device=cuda, tolerance=tolerance)


@pytest.mark.gpu
def test_int4_bits_do_not_depend_on_the_number_of_rows_gpu(cuda):
    packed = pack_int4(*an_int4(6144, 4096, 128, torch.bfloat16, cuda))
    x = torch.randn(300, 4096, device=cuda).to(torch.bfloat16)
    for splits in (1, 2):
        check_bits(
            300,
            lambda rows, splits=splits: int4_matmul(
                x[:rows], packed, shape=choose_int4(rows, 6144, 32, silu=False, splits=splits)
            ),
        )


def test_int4_what_does_not_fit_is_refused():
    codes, scales, zeros, size = an_int4(6, 128, 64, torch.float32)
    packed = pack_int4(codes, scales, zeros, size)
    x = torch.zeros(3, 128)
    for call, words in (
        (
            lambda: pack_int4(codes, scales, zeros, 48),
            "groups of 48 of 128 inputs: must divide them, and be a multiple of 32",
        ),
        (lambda: pack_int4(codes, scales[:, :1], zeros, size), "do not fit 6 outputs of 2 groups"),
        (lambda: int4_matmul(x.half(), packed), "does not fit a weight"),
        (lambda: int4_matmul(x[:, :64], packed), "does not fit a weight"),
        (lambda: int4_matmul(x, packed, torch.zeros(5)), "does not fit 6 outputs"),
        (lambda: int4_matmul(x, packed, silu=True, shape=replace(SMALL_INT4[0], splits=2)), "the whole sum"),
        (lambda: int4_matmul(x, pack_int4(codes[:5], scales[:5], zeros[:5], size), silu=True), "not gate and up"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


# ---- int4 in words ----


def check_words(raw, rows, shapes, *, dtype, device, tolerance):
    """raw: see an_int4."""
    packed, dense = pack_int4_words(*raw), int4_weight_ref(*raw)
    outputs, inputs = dense.shape
    assert (packed.outputs, packed.inputs) == (outputs, inputs)
    assert error(dequantize_int4_words(packed), dense) < tolerance
    x = torch.randn(rows, 2 * inputs, device=device).to(dtype)[:, :inputs]
    product = x.double() @ dense.T
    bias = torch.randn(outputs, device=device).to(dtype)
    for shape in shapes:
        one = replace(shape, splits=1)
        got = {
            "plain": (int4_words_matmul(x, packed, shape=one), product),
            "bias": (int4_words_matmul(x, packed, bias, shape=one), product + bias.double()),
            "splits": (int4_words_matmul(x, packed, shape=replace(shape, splits=2)).double().sum(0), product),
        }
        if packed.paired:
            got["silu"] = int4_words_matmul(x, packed, silu=True, shape=one), silu_of(product)
            both = int4_words_matmul(x, packed, bias, silu=True, shape=one), silu_of(product + bias.double())
            got["silu and bias"] = both
        for name, (out, expected) in got.items():
            assert error(out, expected) < tolerance, f"{name} {shape}"


SMALL_WORDS = [WordsShape(16, 16, 4, 3), WordsShape(32, 32, 4, 2, rounded=True), WordsShape(16, 16, 4, 3, tma=True)]


@interpreted
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "group_size"),
    [(1, 128, 32, 64), (3, 256, 20, 128), (17, 96, 48, 32), (5, 576, 18, 192)],
)
def test_words_small(rows, inputs, outputs, group_size, dtype, tolerance, symmetric):
    codes, scales, zeros, size = an_int4(outputs, inputs, group_size, dtype)
    raw = codes, scales, torch.full_like(zeros, 8) if symmetric else zeros, size
    assert (pack_int4_words(*raw).zero == 8) is symmetric
    check_words(raw, rows, SMALL_WORDS, dtype=dtype, device="cpu", tolerance=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, BF16), (torch.float16, 1e-3)], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 300])
def test_words_gpu(cuda, rows, dtype, tolerance, symmetric):
    for inputs, outputs, size in ((4096, 6144, 128), (1024, 202, 64), (2048, 4096, 32)):
        codes, scales, zeros, _ = an_int4(outputs, inputs, size, dtype, cuda)
        raw = codes, scales, torch.full_like(zeros, 8) if symmetric else zeros, size
        groups = inputs // size
        shapes = [choose_words(rows, outputs, groups, silu=False, splits=splits) for splits in (None, 1)]
        check_words(raw, rows, shapes, dtype=dtype, device=cuda, tolerance=tolerance)


@pytest.mark.gpu
def test_words_bits_do_not_depend_on_the_number_of_rows_gpu(cuda):
    packed = pack_int4_words(*an_int4(6144, 4096, 128, torch.bfloat16, cuda))
    x = torch.randn(300, 4096, device=cuda).to(torch.bfloat16)
    for silu, splits in ((False, 1), (False, 2), (True, 1)):
        check_bits(
            300,
            lambda rows, silu=silu, splits=splits: int4_words_matmul(
                x[:rows],
                packed,
                silu=silu,
                shape=choose_words(rows, 6144, 32, silu=silu, splits=splits, invariant=True),
            ),
        )


def check_gate(packed, x):
    """The activation in the product has the bits of the separate one: a row has them with and without adapters."""
    outputs, groups = packed.outputs, packed.codes.shape[0]
    for rows in (1, 17, 66):
        shape = choose_words(rows, outputs, groups, silu=True, splits=1, invariant=True)
        fused = int4_words_matmul(x[:rows], packed, silu=True, shape=shape)
        assert torch.equal(fused, gate_mul(int4_words_matmul(x[:rows], packed, shape=shape), "silu"))


@pytest.mark.gpu
def test_words_with_the_activation_gpu(cuda):
    packed = pack_int4_words(*an_int4(6144, 4096, 128, torch.bfloat16, cuda))
    check_gate(packed, torch.randn(66, 4096, device=cuda).to(torch.bfloat16))


@interpreted
def test_words_with_the_activation():
    check_gate(pack_int4_words(*an_int4(64, 256, 64, torch.float16)), torch.randn(66, 256).half())


@interpreted
def test_words_bits_do_not_depend_on_the_number_of_rows():
    packed = pack_int4_words(*an_int4(64, 256, 64, torch.float16))
    x = torch.randn(66, 256).half()
    for silu, splits in ((False, 1), (False, 2), (True, 1)):
        check_bits(
            66,
            lambda rows, silu=silu, splits=splits: int4_words_matmul(
                x[:rows], packed, silu=silu, shape=choose_words(rows, 64, 4, silu=silu, splits=splits, invariant=True)
            ),
        )


def test_words_what_does_not_fit_is_refused():
    codes, scales, zeros, size = an_int4(6, 128, 64, torch.float32)
    packed = pack_int4_words(codes, scales, zeros, size)
    x = torch.zeros(3, 128)
    shape = replace(SMALL_WORDS[0], splits=2)
    for call, words in (
        (
            lambda: pack_int4_words(codes, scales, zeros, 48),
            "groups of 48 of 128 inputs: must divide them, and be a multiple of 32",
        ),
        (lambda: pack_int4_words(codes, scales[:, :1], zeros, size), "do not fit 6 outputs of 2 groups"),
        (lambda: int4_words_matmul(x.half(), packed), "does not fit a weight"),
        (lambda: int4_words_matmul(x[:, :64], packed), "does not fit a weight"),
        (lambda: int4_words_matmul(x, packed, torch.zeros(5)), "does not fit 6 outputs"),
        (lambda: int4_words_matmul(x, packed, torch.zeros(6), shape=shape), "the whole sum"),
        (lambda: int4_words_matmul(x, packed, silu=True), "not pairs of gate and up"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
