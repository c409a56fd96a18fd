"""The torch paths against the reference: odd shapes, fragmentation, GQA, sliding windows."""

from __future__ import annotations

import math

import pytest
import torch

from diptych.kernels.dispatch import attention_ops
from diptych.kernels.paged_attention import (
    Scratch,
    block_rows,
    chunk_attention,
    chunk_mask,
    decode_mask,
    gather_kv,
    layer_rows,
    layer_slots,
    paged_decode,
    token_slots,
    write_kv,
)
from diptych.kernels.reference import paged_attention_ref, write_kv_ref

SHAPES = [  # heads, kv heads, head_dim, block size
    (9, 3, 64, 16),
    (4, 4, 8, 5),
    (6, 1, 20, 1),
    (8, 2, 34, 7),
]
NUM_LAYERS = 3


def make_pool(kv_heads, head_dim, block_size, num_blocks=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_blocks, NUM_LAYERS, 2, block_size, kv_heads, head_dim, generator=generator)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize("window", [None, 1, 6])
def test_paged_decode(heads, kv_heads, head_dim, block_size, window):
    torch.manual_seed(5)
    pool = make_pool(kv_heads, head_dim, block_size)
    lens = [max(1, block_size * 3 - 1), block_size * 2, 1]
    tables = [[31, 2, 17], [5, 39], [0]]
    q = torch.randn(3, heads, head_dim)
    padded = torch.tensor([t + t[:1] * (3 - len(t)) for t in tables])
    mask = decode_mask(torch.tensor(lens), 3 * block_size, window, torch.float32)
    scale = head_dim**-0.5
    for layer in range(NUM_LAYERS):
        got = paged_decode(q, layer_rows(pool, layer), block_rows(padded, NUM_LAYERS), mask, kv_heads, scale, Scratch())
        for i, (table, length) in enumerate(zip(tables, lens, strict=True)):
            expected = paged_attention_ref(q[i : i + 1], pool, layer, table, length - 1, scale=scale, window=window)
            torch.testing.assert_close(got[i].double(), expected[0], atol=4e-6, rtol=1e-5)
    capped = paged_decode(
        q, layer_rows(pool, layer), block_rows(padded, NUM_LAYERS), mask, kv_heads, scale, Scratch(), 0.7
    )
    for i, (table, length) in enumerate(zip(tables, lens, strict=True)):
        expected = paged_attention_ref(
            q[i : i + 1], pool, layer, table, length - 1, scale=scale, window=window, softcap=0.7
        )
        torch.testing.assert_close(capped[i].double(), expected[0], atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("start", [0, 3, 8])
def test_chunk(heads, kv_heads, head_dim, block_size, window, start):
    torch.manual_seed(5)
    pool = make_pool(kv_heads, head_dim, block_size)
    count = 9
    table = torch.randperm(40, generator=torch.Generator().manual_seed(1))[: math.ceil((start + count) / block_size)]
    q = torch.randn(count, heads, head_dim)
    scale, scratch = head_dim**-0.5, Scratch()
    for layer in range(NUM_LAYERS):
        rows = block_rows(table, NUM_LAYERS)
        k, v = gather_kv(layer_rows(pool, layer), rows, start + count, kv_heads, head_dim, scratch)
        mask = chunk_mask(start, count, window, torch.float32, q.device)
        got = chunk_attention(q, k, v, mask, scale)
        expected = paged_attention_ref(q, pool, layer, table.tolist(), start, scale=scale, window=window)
        torch.testing.assert_close(got.double(), expected, atol=4e-6, rtol=1e-5)
        if start == 0 and window is None:
            torch.testing.assert_close(chunk_attention(q, k, v, None, scale), got, atol=4e-6, rtol=1e-5)
    capped = chunk_attention(q, k, v, None if start == 0 and window is None else mask, scale, 0.7)
    expected = paged_attention_ref(q, pool, layer, table.tolist(), start, scale=scale, window=window, softcap=0.7)
    torch.testing.assert_close(capped.double(), expected, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_write_kv(heads, kv_heads, head_dim, block_size):
    count, start, table = 11, 4, [9, 3, 27, 1, *range(28, 40)]
    for layer in range(NUM_LAYERS):
        pool = make_pool(kv_heads, head_dim, block_size)
        expected = pool.clone()
        kv = torch.randn(count, 2 * kv_heads, head_dim)
        k, v = kv[:, :kv_heads], kv[:, kv_heads:]
        write_kv_ref(expected, layer, table, start, k, v)
        at = torch.arange(start, start + count)
        blocks = torch.tensor(table)[at // block_size]
        slots = token_slots(blocks, at % block_size, NUM_LAYERS, block_size)
        write_kv(layer_slots(pool, layer), slots, slots + block_size, k.flatten(1), v.flatten(1))
        assert torch.equal(pool, expected)


def test_scratch_grows_and_is_used_again():
    scratch, like = Scratch(), torch.zeros(1, 6)
    small = scratch.take(2, like)
    assert small.shape == (2, 6)
    big = scratch.take(50, like)
    assert scratch.take(3, like).data_ptr() == big.data_ptr()


def test_dispatch_knows_its_devices():
    assert attention_ops("cpu") is attention_ops("cuda")
    with pytest.raises(ValueError, match="no attention for device 'tpu'"):
        attention_ops("tpu")
