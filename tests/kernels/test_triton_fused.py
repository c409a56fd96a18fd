"""Rope + KV write, norms, SiLU-mul, and block copies in Triton against their references."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from diptych.kernels import kv_pack
from diptych.kernels.reference import pack_ref
from diptych.kernels.reference_fused import gate_mul_ref, rms_norm_ref, rope_ref
from diptych.kernels.triton_norm import ACTIVATIONS, gate_mul, rms_norm
from diptych.kernels.triton_pack import pack_blocks, unpack_blocks
from diptych.kernels.triton_rope import rope_write

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1")
# A gate far below zero: NumPy warns where exp ends in infinity; the result is right.
exp_may_end_in_infinity = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def close(got, expected, dtype):
    error = (got.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-9)
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


def check_rope(num_tokens, heads, kv_heads, head_dim, *, block_size, dtype, device, norm):
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    before = qkv.clone()
    pool = torch.full((40, 2, 2, block_size, kv_heads, head_dim), 7.0, dtype=dtype, device=device)
    angles = torch.rand(64, head_dim // 2, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(0, 64, (num_tokens,), device=device, dtype=torch.int32)
    slots = torch.randperm(40 * block_size, device=device)[:num_tokens].to(torch.int32)
    slots[0] = -1
    weights = [torch.rand(head_dim, device=device).to(dtype) + 0.5 for _ in range(2)] if norm else [None, None]
    plus = 1.0 if norm == "offset" else 0.0
    q = rope_write(
        qkv,
        pool[:, 1],
        cos,
        sin,
        positions,
        slots,
        num_q_heads=heads,
        q_norm=weights[0],
        k_norm=weights[1],
        eps=1e-6,
        offset=plus,
    )
    assert torch.equal(qkv[0], before[0]), "a padded row was written"
    parts = before.unflatten(1, (-1, head_dim)).split([heads, kv_heads, kv_heads], 1)
    if norm:
        q_part, k_part = (rms_norm_ref(parts[i], weights[i], 1e-6, plus) for i in range(2))
        parts = (q_part, k_part, parts[2])
    close(q[1:], rope_ref(parts[0], cos, sin, positions)[1:], dtype)
    block, offset = (slots[1:] // block_size).long(), (slots[1:] % block_size).long()
    close(pool[block, 1, 0, offset], rope_ref(parts[1], cos, sin, positions)[1:], dtype)
    assert torch.equal(pool[block, 1, 1, offset], parts[2][1:].to(dtype))
    written = pool[block, 1].clone()
    pool[block, 1, :, offset] = 7.0
    assert (pool == 7.0).all(), "a slot of another token was written"
    # The same out of a projection in splits, to the bit where the splits add up to the same numbers.
    whole = before.float()
    splits = torch.stack((whole * 0.25, whole * 0.5, whole * 0.25))
    kept = splits.clone()
    again = torch.full_like(pool, 7.0)
    from_splits = rope_write(
        splits,
        again[:, 1],
        cos,
        sin,
        positions,
        slots,
        num_q_heads=heads,
        q_norm=weights[0],
        k_norm=weights[1],
        eps=1e-6,
        offset=plus,
    )
    assert torch.equal(from_splits[1:], q[1:])
    assert torch.equal(splits, kept)
    assert torch.equal(again[block, 1], written)


def check_norm(rows, size, *, dtype, device):
    x = torch.randn(rows, 2 * size, device=device).to(dtype)[:, :size]
    weight = torch.rand(size, device=device).to(dtype) + 0.5
    close(rms_norm(x, weight, 1e-5), rms_norm_ref(x, weight, 1e-5), dtype)
    close(rms_norm(x, weight - 1, 1e-5, offset=1.0), rms_norm_ref(x, weight - 1, 1e-5, 1.0), dtype)
    residual = torch.randn(rows, size, device=device).to(dtype)
    total = x + residual
    close(rms_norm(x, weight, 1e-5, residual), rms_norm_ref(total, weight, 1e-5), dtype)
    assert torch.equal(residual, total)
    for activation in ACTIVATIONS:
        close(gate_mul(x * 4, activation), gate_mul_ref(x * 4, activation), dtype)


def check_pack(num_tokens, *, block_size, slot, dtype, device):
    pool = torch.randn(9, 2, 2, block_size, 1, slot, device=device).to(dtype)
    ids = torch.tensor([7, 0, 5, 8, 2][: -(-num_tokens // block_size)], dtype=torch.int32, device=device)
    expected = torch.frombuffer(bytearray(pack_ref(pool.cpu(), ids.tolist(), num_tokens)), dtype=torch.uint8)
    slab = torch.full((expected.numel() + 5,), 0xAA, dtype=torch.uint8, device=device)
    assert pack_blocks(kv_pack.pool_bytes(pool), ids, num_tokens, slab) == expected.numel()
    assert torch.equal(slab.cpu()[:-5], expected)
    assert (slab[-5:] == 0xAA).all()
    other = torch.zeros_like(pool)
    unpack_blocks(kv_pack.pool_bytes(other), ids, num_tokens, slab)
    used = torch.zeros(9, block_size, dtype=torch.bool, device=device)
    for i, block in enumerate(ids.tolist()):
        used[block, : num_tokens - i * block_size] = True
    keep = used[:, None, None, :, None, None].expand_as(pool)
    assert torch.equal(other, torch.where(keep, pool, torch.zeros_like(pool)))


@interpreted
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (3, 1, 20), (2, 2, 8)])
@pytest.mark.parametrize("norm", [False, True, "offset"])
def test_rope_small(heads, kv_heads, head_dim, norm):
    check_rope(3, heads, kv_heads, head_dim, block_size=4, dtype=torch.float32, device="cpu", norm=norm)


@interpreted
@exp_may_end_in_infinity
@pytest.mark.parametrize("size", [16, 50])
def test_norm_and_silu_small(size):
    check_norm(2, size, dtype=torch.float32, device="cpu")


@interpreted
@exp_may_end_in_infinity
def test_gates_at_the_ends_of_the_range():
    ends = torch.tensor([[-1e4, -20.0, -0.0, 20.0, 1e4, *([1.0] * 5)]])
    for activation in ACTIVATIONS:
        assert gate_mul(ends, activation)[0].tolist() == pytest.approx(
            gate_mul_ref(ends, activation)[0].tolist(), abs=1e-6
        )
    with pytest.raises(ValueError, match="no activation 'relu'"):
        gate_mul(ends, "relu")


@interpreted
@pytest.mark.parametrize("num_tokens", [1, 4, 7])
@pytest.mark.parametrize(("slot", "dtype"), [(6, torch.float32), (3, torch.float16), (8, torch.float16)])
def test_pack_small(num_tokens, slot, dtype):
    check_pack(num_tokens, block_size=4, slot=slot, dtype=dtype, device="cpu")


@pytest.mark.parametrize(
    ("ids", "num_tokens", "size", "words"),
    [([1], 6, 10**5, "need 2 int32"), ([1], 0, 10**5, "0 tokens"), ([1, 2], 6, 100, "are needed")],
)
def test_blocks_that_do_not_fit_are_refused(ids, num_tokens, size, words):
    data = kv_pack.pool_bytes(torch.zeros(9, 2, 2, 5, 1, 4))
    slab = torch.zeros(size, dtype=torch.uint8)
    for op in (pack_blocks, unpack_blocks):
        with pytest.raises(ValueError, match=words):
            op(data, torch.tensor(ids, dtype=torch.int32), num_tokens, slab)


def test_rope_refuses_what_does_not_fit():
    kv = torch.zeros(3, 2, 4, 2, 8)
    tables = torch.zeros(9, 4)
    at = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="heads of 8"):
        rope_write(torch.zeros(2, 30), kv, tables, tables, at, at, num_q_heads=4)
    with pytest.raises(ValueError, match="rope tables"):
        rope_write(torch.zeros(2, 64), kv, tables[:, :3], tables[:, :3], at, at, num_q_heads=4)
    with pytest.raises(ValueError, match="positions"):
        rope_write(torch.zeros(2, 64), kv, tables, tables, at[:1], at, num_q_heads=4)
    with pytest.raises(ValueError, match="come together"):
        rope_write(torch.zeros(2, 64), kv, tables, tables, at, at, num_q_heads=4, q_norm=torch.zeros(8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (16, 2, 80), (8, 1, 256)])
def test_fused_gpu(cuda, heads, kv_heads, head_dim, dtype):
    for norm in (False, True, "offset"):
        check_rope(257, heads, kv_heads, head_dim, block_size=16, dtype=dtype, device=cuda, norm=norm)
    for rows, size in ((1, 4096), (300, heads * head_dim), (64, 28672)):
        check_norm(rows, size, dtype=dtype, device=cuda)
    for num_tokens in (1, 16, 79):
        check_pack(num_tokens, block_size=16, slot=head_dim, dtype=dtype, device=cuda)
