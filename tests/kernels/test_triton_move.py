"""Moving KV between blocks and a flat range, with its sum: against kv_pack and the reference of the sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from diptych.kernels.kv_pack import pack, pool_bytes
from diptych.kernels.kv_sum import kv_sum
from diptych.kernels.triton_move import PULL_PROGRAMS, move_blocks

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1")


def check(device, dtype, num_tokens, block_size, heads, head_dim, programs):
    pool = torch.randn(12, 3, 2, block_size, heads, head_dim, device=device).to(dtype)
    count = -(-num_tokens // block_size)
    ids = [7, 0, 11, 4, 9][:count]
    expected = bytearray(num_tokens * 6 * heads * head_dim * pool.element_size())
    pack(pool_bytes(pool), ids, num_tokens, memoryview(expected))
    there = torch.tensor(ids, dtype=torch.int32, device=device)
    flat = torch.full((len(expected) + 64,), 0x5A, dtype=torch.uint8, device=device)
    total = torch.zeros(1, dtype=torch.int64, device=device)
    kwargs = {"programs": programs}
    size = move_blocks(pool_bytes(pool), there, num_tokens, flat.data_ptr(), total, pack=True, **kwargs)
    assert size == len(expected)
    assert bytes(flat[:size].cpu().numpy()) == bytes(expected)
    assert bool((flat[size:] == 0x5A).all())
    wanted = kv_sum(np.frombuffer(expected, np.uint8))
    assert int(total) & (2**64 - 1) == wanted

    other = torch.zeros_like(pool)
    into = [1, 2, 3, 5, 6][:count]
    total.zero_()
    move_blocks(
        pool_bytes(other),
        torch.tensor(into, dtype=torch.int32, device=device),
        num_tokens,
        flat.data_ptr(),
        total,
        pack=False,
        **kwargs,
    )
    again = bytearray(size)
    pack(pool_bytes(other), into, num_tokens, memoryview(again))
    assert again == expected
    assert int(total) & (2**64 - 1) == wanted
    untouched = [i for i in range(12) if i not in into]
    assert not other[untouched].any()
    tail = num_tokens % block_size
    assert not tail or not other[into[-1], :, :, tail:].any()


@interpreted
@pytest.mark.parametrize(("num_tokens", "block_size", "heads", "head_dim"), [
    (1, 4, 1, 4), (8, 4, 2, 4), (17, 4, 2, 8), (19, 16, 1, 16), (1, 4, 1, 5), (17, 4, 3, 3), (19, 16, 1, 9), (9, 3, 1, 17),
])  # fmt: skip
@pytest.mark.parametrize("programs", [1, 3])
def test_move_equals_pack_and_sums(num_tokens, block_size, heads, head_dim, programs):
    check("cpu", torch.float32, num_tokens, block_size, heads, head_dim, programs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_tokens", "block_size"), [(1, 16), (64, 16), (77, 16), (200, 64)])
def test_move_on_the_gpu(cuda, dtype, num_tokens, block_size):
    check(cuda, dtype, num_tokens, block_size, 8, 128, PULL_PROGRAMS)
    check(cuda, torch.float32, num_tokens, block_size, 1, 17, PULL_PROGRAMS)  # of a slot half a word is left


def test_the_sum_sees_a_changed_word_swapped_words_and_another_place():
    data = np.random.default_rng(1).integers(0, 256, 4096, np.uint8)
    one = data.copy()
    one[77] ^= 1
    swapped = data.copy()
    swapped[:8], swapped[8:16] = data[8:16], data[:8]
    shifted = np.concatenate([data[8:], data[:8]])
    assert len({kv_sum(x) for x in (data, one, swapped, shifted, data[:-8])}) == 5


def test_what_does_not_fit_is_refused():
    data, total = pool_bytes(torch.zeros(4, 1, 2, 4, 1, 4)), torch.zeros(1, dtype=torch.int64)
    ids = torch.tensor([1], dtype=torch.int32)
    for args, words in (
        ((data, ids, 5, 8), "need 2 int32 block ids"),
        ((data, ids, 4, 12), "8-byte words"),
        ((pool_bytes(torch.zeros(4, 1, 2, 4, 1, 1).half()), ids, 4, 8), "8-byte words"),
    ):
        with pytest.raises(ValueError, match=words):
            move_blocks(*args, total, pack=True, programs=1)
