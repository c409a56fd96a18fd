from __future__ import annotations

import pytest
import torch

from diptych.kernels.kv_pack import pack, pool_bytes, unpack
from diptych.kernels.reference import pack_ref


def make_pool(dtype, block_size=5):
    return torch.randn(12, 2, 2, block_size, 3, 4).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 6, 15, 17])
def test_pack_equals_reference_and_unpack_inverts_it(dtype, num_tokens):
    pool = make_pool(dtype)
    ids = [7, 0, 11, 4]
    expected = pack_ref(pool, ids[: -(-num_tokens // 5)], num_tokens)
    out = bytearray(len(expected) + 3)
    assert pack(pool_bytes(pool), ids, num_tokens, memoryview(out)) == len(expected)
    assert bytes(out) == expected + b"\0\0\0"
    other = torch.zeros_like(pool)
    unpack(pool_bytes(other), [1, 2, 3, 5], num_tokens, memoryview(bytes(out)))
    assert pack_ref(other, [1, 2, 3, 5][: -(-num_tokens // 5)], num_tokens) == expected
    untouched = [0, 4, 6, 7, 8, 9, 10, 11]
    assert not other[untouched].any()


@pytest.mark.parametrize(
    ("ids", "num_tokens", "size", "words"),
    [
        ([1], 6, 10**5, "do not fit 1 blocks"),
        ([1], 0, 10**5, "do not fit"),
        ([1, 12], 6, 10**5, "not all in"),
        ([-1], 3, 10**5, "not all in"),
        ([1, 2], 6, 100, "payload has 100 bytes"),
    ],
)
def test_what_does_not_fit_is_refused(ids, num_tokens, size, words):
    data = pool_bytes(make_pool(torch.float32))
    for op in (pack, unpack):
        with pytest.raises(ValueError, match=words):
            op(data, ids, num_tokens, memoryview(bytearray(size)))


def test_pack_into_a_read_only_payload_is_refused():
    with pytest.raises(ValueError, match="read-only"):
        pack(pool_bytes(make_pool(torch.float32)), [1], 5, memoryview(bytes(10**5)))
