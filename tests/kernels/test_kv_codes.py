"""Codes and scales of a quantized KV cache, against one element at a time."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from diptych.kernels.kv_codes import SlotCodec, quantize

STEPS = {torch.int8: (None, None), torch.float8_e4m3fn: (3, -6), torch.float8_e5m2: (2, -14)}
"""Bits behind the point of a code, and the exponent of the least normal one."""
LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448, torch.float8_e5m2: 57344}


@pytest.fixture(params=list(STEPS), ids=str)
def dtype(request):
    return request.param


def codec_of(dtype, heads=3, dim=8):
    return SlotCodec(heads, dim, dtype, heads * (dim + 4))


def nearest_code(value, dtype):
    """The code nearest to `value`, ties to even, by the steps between codes."""
    bits, least = STEPS[dtype]
    if bits is None:
        return float(round(value))
    if value == 0.0:
        return 0.0
    exponent = max(math.frexp(abs(value))[1] - 1, least)
    step = 2.0 ** (exponent - bits)
    return round(value / step) * step


def test_codes_are_the_nearest_ones_of_each_head(dtype):
    rng = random.Random(5)
    codec = codec_of(dtype)
    x = torch.tensor(
        [[[rng.gauss(0, 1) * 10 ** rng.uniform(-3, 0) for _ in range(8)] for _ in range(3)] for _ in range(40)]
    )
    slots = codec.encode(x)
    assert slots.shape == (40, codec.slot_bytes)
    assert codec.slot_bytes == 3 * (8 + 4)
    codes, scales = codec.codes_of(slots), codec.scales_of(slots)
    for token in range(40):
        for head in range(3):
            most = np.float32(max(abs(v) for v in x[token, head].tolist()))
            scale = most / np.float32(LARGEST[dtype])
            assert scales[token, head].item() == scale
            for value, code in zip(x[token, head].numpy(), codes[token, head].float().tolist(), strict=True):
                assert code == nearest_code(float(value / scale), dtype)
    assert torch.equal(codec.decode(slots, torch.float32), codes.float() * scales[..., None])


def test_the_error_of_an_element_is_bounded(dtype):
    x = torch.randn(200, 3, 64, generator=torch.Generator().manual_seed(1))
    codec = codec_of(dtype, dim=64)
    error = (codec.decode(codec.encode(x), torch.float32) - x).abs()
    most = x.abs().amax(-1, keepdim=True)
    bits = STEPS[dtype][0]
    bound = most / 254 if bits is None else x.abs() * 2.0 ** -(bits + 1) + most * 2.0**-18
    assert (error <= bound * 1.0001).all()


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_element_comes_back(dtype, source):
    """Also in half precision: it is the scale's."""
    x = torch.randn(50, 3, 16, generator=torch.Generator().manual_seed(2)).to(source)
    back = codec_of(dtype, dim=16)
    found = back.decode(back.encode(x), torch.float32).abs().amax(-1)
    torch.testing.assert_close(found, x.float().abs().amax(-1), rtol=1e-6, atol=0)


def test_zeros_and_what_is_too_small_for_a_scale(dtype):
    codec = codec_of(dtype)
    x = torch.zeros(2, 3, 8)
    x[1] = 1e-45
    slots = codec.encode(x)
    assert not codec.decode(slots, torch.float32).isnan().any()
    assert not slots[0].any(), "zeros are zero bytes, as in a pool that nobody wrote"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_head_that_is_not_finite_is_nan_and_its_neighbours_are_not(dtype, bad):
    codec = codec_of(dtype)
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(3))
    clean = codec.decode(codec.encode(x), torch.float32)
    x[2, 1, 5] = bad
    slots = codec.encode(x)
    got = codec.decode(slots, torch.float32)
    assert got[2, 1].isnan().all()
    assert codec.codes_of(slots).float().isfinite().all()
    got[2, 1] = clean[2, 1]
    assert torch.equal(got, clean)
    codec.scrub(slots)
    assert not codec.decode(slots, torch.float32)[2, 1].any()


def test_scrubbing_leaves_finite_elements_and_removes_any_other_bytes(dtype):
    codec = codec_of(dtype)
    slots = torch.randint(
        0, 256, (500, codec.slot_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(4)
    )
    before = codec.decode(slots, torch.float32)
    codec.scrub(slots)
    after = codec.decode(slots, torch.float32)
    assert not after.isnan().any()
    kept = before.isfinite().all(-1)
    assert kept.any()
    assert torch.equal(after[kept], before[kept])


def test_an_element_does_not_depend_on_the_other_tokens_or_heads(dtype):
    x = torch.randn(17, 3, 8, generator=torch.Generator().manual_seed(6))
    codes, scales = quantize(x, dtype)
    for token in range(17):
        alone, scale = quantize(x[token : token + 1, 1:2], dtype)
        assert torch.equal(alone.float()[0, 0], codes[token, 1].float())
        assert scale[0, 0] == scales[token, 1]


def test_quantized_twice_is_quantized_once(dtype):
    """What is read back and written again has the same elements to a rounding of the scale."""
    codec = codec_of(dtype)
    once = codec.decode(codec.encode(torch.randn(9, 3, 8, generator=torch.Generator().manual_seed(7))), torch.float32)
    again = codec.decode(codec.encode(once), torch.float32)
    torch.testing.assert_close(again, once, rtol=1e-6, atol=0)
