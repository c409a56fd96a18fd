"""Conversion of KV between layouts, bit by bit, over all small combinations; torch and plain loops are the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from diptych.common.errors import ConfigError, IncompatibleWorkersError, TransferError
from diptych.common.kv_format import ORDERS, KvFormat, Shard, full_format, windowed_format
from diptych.kvtransfer.slabs.convert import RangeConverter, cast
from diptych.kvtransfer.slabs.planner import first_token_to_ask, plan_heads

DTYPES = ("float32", "float16", "bfloat16")
LAYERS, DIM = 2, 3


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32).numpy()


def whole(tokens: int, heads: int) -> torch.Tensor:
    """[layers, 2, tokens, heads, dim], float32: what every side means."""
    return torch.randn((LAYERS, 2, tokens, heads, DIM), generator=torch.Generator().manual_seed(tokens * 31 + heads))


def side(heads: int, size: int, dtype: str = "float32", order: str = "NHD", tp: int = 1, rank: int = 0) -> KvFormat:
    name = next(name for name, dims in ORDERS.items() if dims == order)
    return full_format(LAYERS, heads, DIM, block_size=size, dtype=dtype, order=name, shard=Shard(rank, tp))


def packed(kv: torch.Tensor, shape: KvFormat, rank: int, first: int, num: int) -> memoryview:
    """As pack writes it: block after block, then the tail; by loops."""
    group = shape.only_group
    heads = Shard(rank, shape.shard.degree).heads(group.heads)
    mine = kv[:, :, :, heads.start : heads.stop].to(getattr(torch, group.dtype))
    out = []
    for at in range(first, first + num, group.block_size):
        part = mine[:, :, at : min(at + group.block_size, first + num)]
        out.append(bits(part if ORDERS[shape.order] == "NHD" else part.transpose(2, 3)).reshape(-1))
    return memoryview(np.concatenate(out)).cast("B")


SIDES = [(size, layout, tp) for size in (2, 3, 4) for layout in ("NHD", "HND") for tp in (1, 2, 4)]


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES)), ids="-".join)
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_all_small_combinations_bit_by_bit(dtypes, heads):
    tokens = 7
    kv = whole(tokens, heads)
    narrowed = kv.to(getattr(torch, dtypes[0]))
    for (s_size, s_layout, s_tp), (t_size, t_layout, t_tp) in itertools.product(SIDES, SIDES):
        rank = (s_size + t_size) % t_tp
        source = side(heads, s_size, dtypes[0], s_layout, s_tp)
        target = side(heads, t_size, dtypes[1], t_layout, t_tp, rank)
        converter = RangeConverter(source, target, 0, tokens)
        found = bytearray(tokens * target.bytes_per_token)
        for source_rank in converter.ranks:
            for part in converter.feed(0, tokens, packed(kv, source, source_rank, 0, tokens), rank=source_rank):
                start = part.first_token * target.bytes_per_token
                found[start : start + part.payload.nbytes] = part.payload
        assert converter.num_open == 0
        assert bytes(found) == bytes(packed(narrowed, target, rank, 0, tokens)), (source, target, rank)


@pytest.mark.parametrize("seed", range(40))
def test_ranges_in_any_order_give_whole_blocks_and_skip_what_is_cached(seed):
    rng = np.random.default_rng(seed)
    s_size, t_size, end = int(rng.integers(1, 6)), int(rng.integers(1, 6)), int(rng.integers(3, 40))
    source = side(2, s_size)
    target = side(2, t_size, "bfloat16")
    first = int(rng.integers(0, end)) // t_size * t_size
    asked = first_token_to_ask(first, s_size)
    assert asked <= first
    assert asked % s_size == 0
    kv = whole(end, 2)
    cuts = [asked, *sorted({int(c) // s_size * s_size for c in rng.integers(asked, end, 4)} - {asked}), end]
    ranges = [(a, b - a) for a, b in itertools.pairwise(cuts) if b > a >= asked]
    rng.shuffle(ranges)
    converter = RangeConverter(source, target, first, end)
    got: dict[int, bytes] = {}
    for start, num in ranges:
        for part in converter.feed(int(start), int(num), packed(kv, source, 0, int(start), int(num))):
            assert part.first_token % t_size == 0
            stop = part.first_token + part.num_tokens
            assert stop % t_size == 0 or stop == end
            got[part.first_token] = bytes(part.payload)
    assert converter.num_open == 0
    assert b"".join(got[start] for start in sorted(got)) == bytes(packed(kv, target, 0, first, end - first))


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(DTYPES, 2)))
def test_casts_are_torchs_over_all_short_patterns_and_the_odd_ones(source, target):
    if source == "float32":
        odd = [
            0.0,
            -0.0,
            float("inf"),
            float("-inf"),
            1e-45,
            3.4e38,
            65504.0,
            65520.0,
            1e-8,
            1.0 + 2**-8,
            1.0 + 3 * 2**-9,
        ]
        values = torch.cat([torch.tensor(odd), torch.randn(50_000, generator=torch.Generator().manual_seed(1)) * 1e3])
    else:
        values = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(getattr(torch, source))
    values = values[~values.isnan()]
    right = bits(values.to(torch.float32).to(getattr(torch, target)))
    kind = np.uint16 if source != "float32" else np.uint32
    found = cast(bits(values).view(kind), source, target)
    assert np.array_equal(found.view(right.dtype), right)


def test_nan_stays_nan():
    nan = np.array([np.nan], np.float32).view(np.uint32)
    assert torch.from_numpy(cast(nan, "float32", "bfloat16").view(np.int16)).view(torch.bfloat16).isnan().all()
    assert np.isnan(cast(nan, "float32", "float16").view(np.float16)).all()


@pytest.mark.parametrize(("heads", "s_tp", "t_tp"), list(itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))))
def test_every_head_of_a_target_rank_comes_once_from_a_rank_that_has_it(heads, s_tp, t_tp):
    source = side(heads, 1, tp=s_tp)
    for rank in range(t_tp):
        target = side(heads, 1, tp=t_tp, rank=rank)
        pieces = plan_heads(source, target)
        filled = [piece.at + i for piece in pieces for i in range(piece.count)]
        assert filled == list(range(target.shard.heads_per_rank(heads)))
        for piece in pieces:
            for i in range(piece.count):
                there = Shard(piece.rank, s_tp).heads(heads)
                assert there[piece.first + i] == target.shard.heads(heads)[piece.at + i]


def test_what_cannot_be_converted_is_refused():
    def made(size: int = 16, dim: int = 8, dtype: str = "float32", **changes: object) -> KvFormat:
        return full_format(2, 4, dim, block_size=size, dtype=dtype, **changes)

    good = made()
    for change in ({"dtype": "int3"}, {"order": "XYZ"}, {"shard": Shard(0, 3)}, {"size": 0}):
        with pytest.raises(ConfigError):
            made(**change)
    windows = windowed_format([0, 8], 4, 8, block_size=16, dtype="float32")
    for other, named in (
        (made(dtype="int8"), "int8"), (made(scale_dtype="float32"), "float32"), (windows, "window-8"), (made(dim=4), "head_dim"),
    ):  # fmt: skip
        with pytest.raises(IncompatibleWorkersError, match=named):
            RangeConverter(good, other, 0, 16)
    converter = RangeConverter(good, made(32), 0, 16)
    with pytest.raises(TransferError, match="bytes"):
        converter.feed(0, 16, memoryview(bytes(15)))
    with pytest.raises(TransferError, match="ends behind"):
        converter.feed(16, 16, memoryview(bytes(16 * good.bytes_per_token)))
    with pytest.raises(TransferError, match="rank 1"):
        converter.feed(0, 16, memoryview(bytes(16 * good.bytes_per_token)), rank=1)
    wide = RangeConverter(good, made(32), 0, 32)
    wide.feed(0, 16, memoryview(bytes(16 * good.bytes_per_token)))
    with pytest.raises(TransferError, match="twice"):
        wide.feed(0, 16, memoryview(bytes(16 * good.bytes_per_token)))
