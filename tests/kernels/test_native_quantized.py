"""Linear layers with quantized weights on the compiled kernels, at every width of vectors and with every kind of
instruction: what torch computes, and the same bits in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diptych.common.compiled import ALL_LANES
from diptych.common.paths import cache_dir
from diptych.engine.exec.methods.base import PLAIN_ROWS
from diptych.engine.exec.methods.gguf_blocks import decoded
from diptych.engine.exec.methods.gguf_kinds import KINDS
from diptych.engine.exec.methods.plain import PlainWeights
from diptych.engine.exec.methods.quantized import GgufParts, Int4Weights, Int8Weights
from diptych.engine.exec.native.weights import Packer
from diptych.kernels.native.api import Library
from diptych.kernels.native.build import SOURCES
from diptych_tests.native_layers import (
    GEMMA2,
    LLAMA,
    QWEN3,
    Layers,
    gguf_of,
    in_chunks,
    in_fixed_point,
    int4_of,
    int4_product,
)

# What other machines' compilers would choose, beside what this one's does. A flag that names no instruction set of the machine
# changes nothing.
INSTRUCTIONS = {
    **{f"{lanes} lanes": (lanes, ()) for lanes in ALL_LANES},
    "AVX-512 without VNNI": (16, ("-mno-avx512vnni",)),
    "AVX2 without VNNI": (8, ("-mno-avxvnni",)),
    "one product at a time": (8, ("-DDOT_PLAIN",)),
}
SHAPES = [(64, 96), (75, 33), (1, 8), (50, 600), (7, 3)]


@pytest.fixture(params=INSTRUCTIONS)
def library(request, compiler):
    lanes, flags = INSTRUCTIONS[request.param]
    sources = replace(SOURCES, flags=(*SOURCES.flags, *flags))
    return Library(sources.build(cache_dir() / "native", compiler, lanes))


def int8_linear(weights, x):
    """The reference: integer sums, and each step after them rounded to float32."""
    scale = x.abs().amax(1) / 127
    codes = torch.where(scale[:, None] > 0, x / scale[:, None], 0.0).round().clamp(-127, 127)
    sums = codes.long() @ weights.weight.long().T
    out = sums.float() * (scale[:, None] * weights.scales)
    return out if weights.bias is None else out + weights.bias


def random_int8(outputs, inputs, *, bias=True):
    codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    return Int8Weights(codes, torch.rand(outputs) + 0.1, torch.randn(outputs) if bias else None)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_int8_is_what_integers_compute(library, outputs, inputs):
    torch.manual_seed(0)
    weights, x = random_int8(outputs, inputs), torch.randn(160, inputs) * torch.logspace(-20, 20, 160)[:, None]
    x[7] = 0.0
    linear, expected = Packer(library)(weights), int8_linear(weights, x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 160):
        assert torch.equal(linear(x[:rows], PLAIN_ROWS), expected[:rows])
    assert torch.equal(linear(x[5:6], PLAIN_ROWS), expected[5:6])
    no_bias = replace(weights, bias=None)
    assert torch.equal(Packer(library)(no_bias)(x, PLAIN_ROWS), int8_linear(no_bias, x))


def test_the_largest_codes_do_not_saturate(library):
    """Sums of two or four products of bytes overflow 16 bits."""
    for sign in (1, -1):
        weights = Int8Weights(torch.full((40, 4096), -128, dtype=torch.int8), torch.ones(40), None)
        x = torch.full((3, 4096), 127.0 * sign)
        expected = -128.0 * 127 * 4096 * sign
        assert Packer(library)(weights)(x, PLAIN_ROWS).unique().tolist() == [expected]


def test_halves_are_rounded_to_even(library):
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]])
    weights = Int8Weights(torch.eye(8, dtype=torch.int8), torch.ones(8), None)
    assert Packer(library)(weights)(x, PLAIN_ROWS).tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


# Groups below, at and above a stretch, and as long as the row.
GROUPED = [(64, 96, 32), (75, 48, 48), (1, 16, 16), (50, 768, 128), (7, 1536, 192), (70, 576, 576), (33, 640, 64)]


@pytest.mark.parametrize("has_order", [False, True])
@pytest.mark.parametrize(("outputs", "inputs", "group"), GROUPED)
def test_int4_is_what_torch_computes_and_a_row_depends_on_nothing_else(library, outputs, inputs, group, has_order):
    torch.manual_seed(0)
    order = torch.randperm(inputs) if has_order else None
    weights = replace(int4_of(torch.randn(outputs, inputs), group, order=order), bias=torch.randn(outputs))
    linear, x = Packer(library)(weights), torch.randn(200, inputs)
    alone = torch.cat([linear(x[i : i + 1], PLAIN_ROWS) for i in range(len(x))])
    ordered = x if order is None else x[:, order]
    expected = int4_product(in_fixed_point(ordered, group), replace(weights, order=None)) + weights.bias
    assert (alone.double() - expected).abs().max() < 1e-6 * inputs
    exact = int4_product(x, weights)
    assert (expected - weights.bias - exact).norm() < 1e-4 * exact.norm()
    for rows in (2, 3, 4, 5, 6, 7, 13, 96, 97, 200):
        assert torch.equal(linear(x[:rows], PLAIN_ROWS), alone[:rows])


def test_every_code_and_zero_is_what_it_means(library):
    """One input at a time, where nothing is rounded."""
    codes = torch.arange(16, dtype=torch.uint8).repeat_interleave(16)[:, None].repeat(1, 32)
    zeros = torch.arange(16, dtype=torch.uint8).repeat(16)[:, None].repeat(1, 2)
    scales = torch.tensor([[0.5, 4.0]]).repeat(256, 1)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    linear = Packer(library)(Int4Weights(packed, scales, zeros, 16, None, None))
    expected = (codes.float() - zeros.float().repeat_interleave(16, 1)) * scales.repeat_interleave(16, 1)
    assert torch.equal(linear(torch.eye(32), PLAIN_ROWS), expected.T)
    assert torch.equal(linear(torch.eye(32)[3:4], PLAIN_ROWS), expected.T[3:4])


def gguf_linear(weights, x):
    """In float64, of rows as the kernels hold them."""
    codes, scales, offsets = (None if part is None else part.double() for part in decoded(weights.kind, weights.blocks))
    group = codes.shape[1] // scales.shape[1]
    weight = codes * scales.repeat_interleave(group, 1)
    if offsets is not None:
        weight += offsets.repeat_interleave(group, 1)
    x = in_fixed_point(x, group)
    return x @ weight.T + weights.bias, (x.abs() @ weight.abs().T).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(75, 768), (3, 256), (64, 1024)])
def test_gguf_is_what_torch_computes_and_a_row_depends_on_nothing_else(library, kind, outputs, inputs):
    torch.manual_seed(0)
    weights, x = gguf_of(kind, outputs, inputs), torch.randn(100, inputs)
    linear = Packer(library)(weights)
    alone = torch.cat([linear(x[i : i + 1], PLAIN_ROWS) for i in range(len(x))])
    expected, size = gguf_linear(weights, x)
    assert (alone.double() - expected).abs().max() < 1e-6 * size
    for rows in (2, 3, 4, 7, 13, 97, 100):
        assert torch.equal(linear(x[:rows], PLAIN_ROWS), alone[:rows])


@pytest.mark.parametrize("kind", KINDS)
def test_one_input_of_gguf_is_the_weight_itself(library, kind):
    """Every code, scale and offset is where it belongs: sums of one product."""
    torch.manual_seed(0)
    weights = replace(gguf_of(kind, 40, 256), bias=None)
    weight = Packer(library)(weights)(torch.eye(256), PLAIN_ROWS).T
    expected, _ = gguf_linear(replace(weights, bias=torch.zeros(40)), torch.eye(256))
    torch.testing.assert_close(weight.double(), expected.T, atol=2e-4, rtol=1e-6)


def test_parts_of_several_kinds_are_one_layer(library):
    torch.manual_seed(0)
    parts = tuple(gguf_of(kind, outputs, 768) for kind, outputs in (("Q4_K", 75), ("Q6_K", 32), ("Q8_0", 7)))
    x = torch.randn(9, 768)
    together = Packer(library)(GgufParts(parts))
    apart = [Packer(library)(part) for part in parts]
    assert torch.equal(together(x, PLAIN_ROWS), torch.cat([linear(x, PLAIN_ROWS) for linear in apart], 1))
    assert together.num_bytes == sum(linear.num_bytes for linear in apart)


def test_bfloat16_values_give_the_bits_of_float32(library):
    torch.manual_seed(0)
    weight, x = torch.randn(75, 640).bfloat16().float(), torch.randn(100, 640)
    other = weight.clone()
    other[-1, -1] += 1e-6  # no bfloat16: the whole weight is kept in float32
    linear, wide = (Packer(library)(PlainWeights(one, torch.randn(75))) for one in (weight, other))
    assert linear.num_bytes < 0.6 * wide.num_bytes
    for rows in (1, 2, 3, 4, 13, 100):
        assert torch.equal(
            *(Packer(library)(PlainWeights(one, None))(x[:rows], PLAIN_ROWS)[:, :-1] for one in (weight, other))
        )


def test_every_instruction_set_has_the_same_int4_bits(library, compiler):
    """Sums within a stretch are exact, and stretches follow each other in one order."""
    torch.manual_seed(0)
    weights, x = int4_of(torch.randn(75, 768), 128), torch.randn(9, 768)
    usual = Library(SOURCES.build(cache_dir() / "native", compiler))
    a, b = (Packer(one)(weights)(x, PLAIN_ROWS) for one in (library, usual))
    if 4 in (library.lanes, usual.lanes):  # SSE has no fused multiply-add
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)
    else:
        assert torch.equal(a, b)


@pytest.mark.parametrize("power", [-140, -120, -100, -20, 0, 20, 100, 126])
def test_fixed_point_has_a_unit_for_every_size(library, power):
    """Rows of any size of numbers, also below the normal ones, and the edges of a unit."""
    torch.manual_seed(0)
    ones, eights = torch.full((3, 16), 0x99, dtype=torch.uint8), torch.full((3, 2), 8, dtype=torch.uint8)
    weights = Int4Weights(ones, torch.ones(3, 2), eights, 16, None, None)
    x = torch.zeros(6, 32)
    x[:, 5] = torch.tensor([1.0, 1.9, 1.99, 1.999, -1.999, 0.0]) * 2.0**power
    x[4, 9] = 2.0 ** (power - 14)
    out = Packer(library)(weights)(x, PLAIN_ROWS)
    expected = x.double().sum(1)
    unit = max(2.0 ** (power - 13), 2.0**-126)  # of the largest: half of it for each of two numbers
    assert ((out[:, 0].double() - expected).abs() <= unit).all()
    assert out[5].abs().max() == 0
    assert torch.equal(out[4:5], Packer(library)(weights)(x[4:5], PLAIN_ROWS))


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_what_is_no_number_is_never_hidden(library, method, strange):
    torch.manual_seed(0)
    weights = random_int8(40, 80) if method == "int8" else int4_of(torch.randn(40, 80), 16)
    linear, x = Packer(library)(weights), torch.randn(3, 80)
    for at in (0, 33, 79):
        bad = x.clone()
        bad[1, at] = strange
        out = linear(bad, PLAIN_ROWS)
        assert not out[1].isfinite().any()
        assert torch.equal(out[::2], linear(x, PLAIN_ROWS)[::2])


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_threads_change_no_bit(library, method):
    torch.manual_seed(0)
    weights = random_int8(700, 640) if method == "int8" else int4_of(torch.randn(700, 640), 64)
    linear, x = Packer(library)(weights), torch.randn(160, 640)
    alone = linear(x, PLAIN_ROWS)
    try:
        torch.set_num_threads(3)
        assert torch.equal(linear(x, PLAIN_ROWS), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize("features", [(LLAMA,), (QWEN3,), GEMMA2], ids=["llama", "bias and q/k norm", "gemma2"])
def test_layers_are_what_torch_computes_in_any_company(library, features, method):
    """Beside a sequence of another length, and in chunks of any size."""
    layers = Layers(library, features, method=method)
    expected = layers.reference(layers.sequence(37).x)
    alone = in_chunks(layers, 1, 37).output
    # Of int8 a code may be rounded the other way than in float64.
    assert (alone.double() - expected).abs().max() < (0.05 if method == "int8" else 0.01)
    assert (alone.double() - Layers(library, features).reference(layers.sequence(37).x)).abs().max() > 0.001
    for chunk in (2, 17, 37):
        assert torch.equal(in_chunks(layers, chunk, 37).output, alone)
    sequence, other = layers.sequence(37), layers.sequence(60, seed=2)
    while sequence.done < 37:
        layers.run((other, 1), (sequence, 1), threads=3)
    assert torch.equal(sequence.output, alone)
