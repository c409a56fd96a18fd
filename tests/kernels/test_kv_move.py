"""Packing and unpacking in C: the same bytes as kv_pack, and the same sums as xxhash."""

from __future__ import annotations

import pytest
import torch
import xxhash

from diptych.common.compiled import ALL_LANES
from diptych.common.paths import cache_dir
from diptych.kernels import kv_pack
from diptych.kernels.native.kv_move import SOURCES, KvMoves


@pytest.fixture(params=ALL_LANES)
def moves(request, compiler):
    return KvMoves(SOURCES.build(cache_dir() / "native", compiler, request.param))


def make_pool(slot_values, block_size=8, layers=4, blocks=12):
    return torch.randn(blocks, layers, 2, block_size, 1, slot_values)


@pytest.mark.parametrize("slot_values", [1, 3, 16, 333])
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 31, 48])
@pytest.mark.parametrize("layers", [None, range(1, 3)])
def test_the_bytes_of_kv_pack_and_the_sums_of_xxhash(moves, slot_values, num_tokens, layers):
    pool = make_pool(slot_values)
    data = kv_pack.pool_bytes(pool)
    rows = data if layers is None else data[:, 2 * layers.start : 2 * layers.stop]
    ids = [7, 0, 11, 4, 9, 3]
    expected, out = bytearray(1 << 20), bytearray(1 << 20)
    size = kv_pack.pack(rows, ids, num_tokens, memoryview(expected))
    assert moves.pack(rows, ids, num_tokens, memoryview(out)) == (size, xxhash.xxh3_64_intdigest(expected[:size]))
    assert out == expected

    there, here = torch.full_like(pool, 7.0), torch.full_like(pool, 7.0)
    for target, unpack in ((there, kv_pack.unpack), (here, moves.unpack)):
        part = kv_pack.pool_bytes(target)
        part = part if layers is None else part[:, 2 * layers.start : 2 * layers.stop]
        unpack(part, [5, 1, 2, 8, 10, 6], num_tokens, memoryview(bytes(out)))
    assert torch.equal(here, there)


@pytest.mark.parametrize("num_bytes", [240, 241, 256, 1024, 1025, 1088, 1089, 8192, 8193, 65536, 70001])
def test_sums_of_every_kind_of_length(moves, num_bytes):
    data = torch.randint(0, 256, (1, 1, 1, num_bytes), dtype=torch.uint8)
    out = bytearray(num_bytes)
    assert moves.pack(data, [0], 1, memoryview(out)) == (num_bytes, xxhash.xxh3_64_intdigest(data.numpy().tobytes()))


def test_what_does_not_fit_is_refused(moves):
    data = kv_pack.pool_bytes(make_pool(3))
    for op in (moves.pack, moves.unpack):
        with pytest.raises(ValueError, match="do not fit 1 blocks"):
            op(data, [1], 9, memoryview(bytearray(10**5)))
        with pytest.raises(ValueError, match="not all in"):
            op(data, [12], 3, memoryview(bytearray(10**5)))
        with pytest.raises(ValueError, match="payload has 9 bytes"):
            op(data, [1], 3, memoryview(bytearray(9)))
        with pytest.raises(ValueError, match="in one piece"):
            op(data.transpose(1, 2), [1], 1, memoryview(bytearray(10**5)))
    with pytest.raises(ValueError, match="read-only"):
        moves.pack(data, [1], 3, memoryview(bytes(10**5)))
