"""Linear layers with bfloat16 weights on the compiled kernels: one order of sums, whatever computes them, and the same bits in
any company."""

from __future__ import annotations

import pytest
import torch

from diptych.common.compiled import ALL_LANES
from diptych.common.paths import cache_dir
from diptych.engine.exec.methods.base import PLAIN_ROWS
from diptych.engine.exec.methods.plain import PlainWeights
from diptych.engine.exec.native.weights import Packer
from diptych.kernels.native.api import Library
from diptych.kernels.native.build import build
from diptych_tests.native_layers import GEMMA2, LLAMA, QWEN3, Layers, in_chunks

TILES = "AMX tiles"
ROWS = (1, 2, 3, 4, 5, 6, 7, 13, 16, 17, 31, 32, 33, 49, 64, 100)
SHAPES = [(64, 96), (75, 33), (1, 8), (50, 600), (7, 3), (33, 32)]
BLOCK = 32
"""Inputs whose products are added up before they meet the others."""


@pytest.fixture(params=[*ALL_LANES, TILES])
def library(request, compiler):
    """By vectors of each width, and by tiles where the machine has them."""
    lanes = None if request.param == TILES else request.param
    library = Library(build(cache_dir() / "native", compiler, lanes))
    if library.use_tiles(request.param == TILES) != (request.param == TILES):
        pytest.skip("this machine has no AMX tiles")
    yield library
    library.use_tiles(False)


def in_order(x, weight):
    """The reference: float32, and the order that kernels/native/bf16.h says. A product of two bfloat16 is exact."""
    blocks = -(-x.shape[1] // BLOCK)
    padded = [torch.zeros(len(y), blocks * BLOCK) for y in (x, weight)]
    for whole, y in zip(padded, (x, weight), strict=True):
        whole[:, : y.shape[1]] = y.bfloat16().float()
    products = padded[0][:, None] * padded[1]
    sums = torch.zeros(len(x), len(weight))
    for block in products.split(BLOCK, dim=2):
        even, odd = torch.zeros_like(sums), torch.zeros_like(sums)
        for k in range(0, BLOCK, 2):
            even, odd = even + block[:, :, k], odd + block[:, :, k + 1]
        sums = sums + (even + odd)
    return sums


def random_linear(outputs, inputs):
    return torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_product_has_the_bits_of_its_one_order(library, outputs, inputs):
    torch.manual_seed(0)
    (weight, bias), x = random_linear(outputs, inputs), torch.randn(100, inputs)
    linear, expected = Packer(library)(PlainWeights(weight, bias)), in_order(x, weight) + bias
    for rows in ROWS:
        assert torch.equal(linear(x[:rows], PLAIN_ROWS), expected[:rows])
    assert torch.equal(linear(x[5:6], PLAIN_ROWS), expected[5:6])
    no_bias = Packer(library)(PlainWeights(weight, None))
    assert torch.equal(no_bias(x, PLAIN_ROWS), in_order(x, weight))


def test_it_is_close_to_torchs_own(library):
    """Both add products of the same bfloat16 up in float32; torch rounds the sum once more."""
    torch.manual_seed(0)
    weight, x = torch.randn(50, 600).bfloat16(), torch.randn(40, 600)
    ours = Packer(library)(PlainWeights(weight, None))(x, PLAIN_ROWS)
    theirs = torch.nn.functional.linear(x.bfloat16(), weight).float()
    assert (ours - theirs).abs().max() < 2**-8 * theirs.abs().max()


def test_rows_are_rounded_to_the_nearest_half_to_even(library):
    """What torch rounds to, all 65,536 upper halves of a float with what may follow them; tiny numbers count as zero."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] | lower).to(torch.int32).view(torch.float32).view(-1, BLOCK)
    finite = bits.isfinite() & (bits.abs() < torch.finfo(torch.bfloat16).max)
    normal = finite & (bits.abs().bfloat16().float() >= torch.finfo(torch.float32).tiny)
    linear = Packer(library)(PlainWeights(torch.eye(BLOCK).bfloat16(), None))
    out = linear(torch.where(finite, bits, 0.0), PLAIN_ROWS)
    assert torch.equal(out[normal], bits[normal].bfloat16().float())
    assert not out[finite & ~normal].any()


def test_tiny_numbers_are_the_same_by_tiles_and_vectors(compiler):
    library = Library(build(cache_dir() / "native", compiler))
    if not library.use_tiles(True):
        pytest.skip("this machine has no AMX tiles")
    torch.manual_seed(0)
    scale = torch.logspace(-42, 0, 600)
    weight = (torch.randn(40, 600) * scale.flip(0)).bfloat16()
    x = torch.randn(33, 600) * scale[torch.randperm(600)]
    linear = Packer(library)(PlainWeights(weight, None))
    by_tiles = linear(x, PLAIN_ROWS)
    assert by_tiles.isfinite().all()
    library.use_tiles(False)
    assert torch.equal(linear(x, PLAIN_ROWS), by_tiles)


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_in_its_row(library, strange):
    torch.manual_seed(0)
    linear, x = Packer(library)(PlainWeights(*random_linear(40, 70))), torch.randn(35, 70)
    for at in (0, 33, 69):
        bad = x.clone()
        bad[17, at] = strange
        out, rest = linear(bad, PLAIN_ROWS), [i for i in range(35) if i != 17]
        assert not out[17].isfinite().any()
        assert torch.equal(out[rest], linear(x, PLAIN_ROWS)[rest])


def test_threads_change_no_bit(library):
    torch.manual_seed(0)
    linear, x = Packer(library)(PlainWeights(*random_linear(700, 600))), torch.randn(200, 600)
    alone = linear(x, PLAIN_ROWS)
    try:
        torch.set_num_threads(3)
        assert torch.equal(linear(x, PLAIN_ROWS), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("features", [(LLAMA,), (QWEN3,), GEMMA2], ids=["llama", "bias and q/k norm", "gemma2"])
def test_layers_are_what_torch_computes_in_any_company(library, features):
    """With KV in bfloat16; beside a sequence of another length, and in chunks of any size."""
    layers = Layers(library, features, method="bfloat16", codes=torch.bfloat16)
    expected = layers.reference(layers.sequence(37).x)
    alone = in_chunks(layers, 1, 37).output
    # K and V are rounded here, and not there.
    assert (alone.double() - expected).abs().max() < 0.01 * expected.abs().max()
    for chunk in (2, 17, 37):
        assert torch.equal(in_chunks(layers, chunk, 37).output, alone)
    sequence, other = layers.sequence(37), layers.sequence(60, seed=2)
    while sequence.done < 37:
        layers.run((other, 1), (sequence, 1), threads=3)
    assert torch.equal(sequence.output, alone)


def test_kv_is_rounded_to_bfloat16(library):
    """And to nothing else: what lies in the pool is what the pool of floats holds, rounded."""
    pools = []
    for codes in (None, torch.bfloat16):
        layers = Layers(library, (LLAMA,), method="bfloat16", codes=codes)
        sequence = layers.sequence(8)
        layers.run((sequence, 8))
        pools.append(layers.pools[0][sequence.tables[0][0]])
    floats, rounded = pools
    assert torch.equal(floats.flatten().bfloat16(), rounded.flatten().view(torch.bfloat16))
