"""Conversion of KV between layouts, bit by bit, over all small combinations; torch and plain loops are the reference."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch

from diptych.common.errors import ConfigError, IncompatibleWorkersError, TransferError
from diptych.common.kv_format import KV_SCALE_DTYPE, ORDERS, KvFormat, Shard, full_format, windowed_format
from diptych.kernels.kv_codes import SlotCodec
from diptych.kvtransfer.slabs import kv_codes
from diptych.kvtransfer.slabs.convert import FedRange, RangeConverter, cast
from diptych.kvtransfer.slabs.planner import check_parts_fit, first_token_to_ask

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


def ranks_of(shape: KvFormat) -> tuple[KvFormat, ...]:
    """All ranks of the side of which `shape` is one."""
    return tuple(replace(shape, shard=Shard(rank, shape.shard.degree)) for rank in range(shape.shard.degree))


SIDES = [(size, layout, tp) for size in (2, 3, 4) for layout in ("NHD", "HND") for tp in (1, 2, 4)]


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES)), ids="-".join)
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_all_small_combinations_bit_by_bit(dtypes, heads):
    tokens = 7
    kv = whole(tokens, heads)
    narrowed = kv.to(getattr(torch, dtypes[0]))
    sent = cache(partial(packed, kv, first=0, num=tokens))
    right = cache(partial(packed, narrowed, first=0, num=tokens))
    for (s_size, s_layout, s_tp), (t_size, t_layout, t_tp) in itertools.product(SIDES, SIDES):
        rank = (s_size + t_size) % t_tp
        source = side(heads, s_size, dtypes[0], s_layout, s_tp)
        target = side(heads, t_size, dtypes[1], t_layout, t_tp, rank)
        converter = RangeConverter(ranks_of(source), [target], 0, tokens)
        found = bytearray(tokens * target.bytes_per_token)
        for source_rank in converter.ranks:
            fed = FedRange(0, tokens, sent(source, source_rank), source_rank)
            for part in converter.feed(fed):
                start = part.first_token * target.bytes_per_token
                found[start : start + part.payload.nbytes] = part.payload
        assert converter.num_open == 0
        assert memoryview(found) == right(target, rank), (source, target, rank)


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
    converter = RangeConverter([source], [target], first, end)
    got: dict[int, bytes] = {}
    for start, num in ranges:
        for part in converter.feed(FedRange(int(start), int(num), packed(kv, source, 0, int(start), int(num)))):
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


# ---- quantized ----

CODES = ("int8", "float8_e4m3fn", "float8_e5m2")
WIDE = 8


def quantized_side(heads: int, size: int, dtype: str, tp: int = 1, rank: int = 0) -> KvFormat:
    scale = KV_SCALE_DTYPE if dtype in CODES else ""
    return full_format(LAYERS, heads, WIDE, block_size=size, dtype=dtype, shard=Shard(rank, tp), scale_dtype=scale)


def packed_slots(kv: torch.Tensor, shape: KvFormat, rank: int) -> bytes:
    """As pack writes it, by loops. kv: [layers, 2, tokens, heads, dim]: its elements are encoded here."""
    group = shape.only_group
    heads = Shard(rank, shape.shard.degree).heads(group.heads)
    mine = kv[:, :, :, heads.start : heads.stop]
    codec = SlotCodec(len(heads), WIDE, getattr(torch, group.dtype), len(heads) * (WIDE + 4))
    out = b""
    for at in range(0, kv.shape[2], group.block_size):
        part = mine[:, :, at : at + group.block_size]
        if group.quantized:
            out += codec.encode(part.flatten(0, 2)).numpy().tobytes()
        else:
            out += bits(part.to(getattr(torch, group.dtype))).tobytes()
    return out


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("plain", [*DTYPES, None])
def test_quantized_kv_is_recoded_once_and_its_scales_go_with_it(codes, plain):
    """Codes to elements, elements to codes, and codes as they are to blocks of another size and other ranks. None: the last."""
    tokens, heads = 7, 4
    sizes = list(itertools.product((2, 3, 4), (1, 2, 4)))
    kv = whole(tokens, heads).repeat(1, 1, 1, 1, 3)[..., :WIDE]
    for source_dtype, target_dtype in ((codes, plain or codes), (plain or codes, codes)):
        if source_dtype in DTYPES:
            read = kv.to(getattr(torch, source_dtype)).float()
        else:
            codec = SlotCodec(heads, WIDE, getattr(torch, source_dtype), heads * (WIDE + 4))
            read = codec.decode(codec.encode(kv.flatten(0, 2)), torch.float32).view(kv.shape)
        sent = cache(partial(packed_slots, kv))
        # Codes stay as they were: what is read of them is not encoded again.
        right = cache(partial(packed_slots, kv if plain is None else read))
        for (s_size, s_tp), (t_size, t_tp) in itertools.product(sizes, sizes):
            rank = (s_size + t_size) % t_tp
            source = quantized_side(heads, s_size, source_dtype, s_tp)
            target = quantized_side(heads, t_size, target_dtype, t_tp, rank)
            converter = RangeConverter(ranks_of(source), [target], 0, tokens)
            assert converter.changes_values == (plain is not None)
            found = bytearray(tokens * target.bytes_per_token)
            for source_rank in converter.ranks:
                payload = memoryview(sent(source, source_rank))
                for part in converter.feed(FedRange(0, tokens, payload, source_rank)):
                    start = part.first_token * target.bytes_per_token
                    found[start : start + part.payload.nbytes] = part.payload
            assert bytes(found) == right(target, rank), (source, target, rank)


@pytest.mark.parametrize("codes", CODES)
def test_the_codes_of_numpy_are_those_of_torch(codes):
    sizes = torch.logspace(-42, 30, 300)[:, None, None]
    x = torch.randn(300, 3, 16, generator=torch.Generator().manual_seed(3)) * sizes
    x[5, 1, 3], x[6, 2, 1], x[7] = float("nan"), float("inf"), 0.0
    codec = SlotCodec(3, 16, getattr(torch, codes), 3 * 20)
    slots = codec.encode(x)
    records = kv_codes.encode(x.numpy(), codes)
    assert np.array_equal(kv_codes.slots_of(records), slots.numpy())
    assert np.array_equal(kv_codes.records_of(slots.numpy(), 3, 16), records)
    found, expected = kv_codes.decode(records, codes), codec.decode(slots, torch.float32).numpy()
    assert np.array_equal(found, expected, equal_nan=True)


def test_kv_is_not_quantized_twice():
    source, target = (quantized_side(2, 4, dtype) for dtype in ("int8", "float8_e4m3fn"))
    with pytest.raises(IncompatibleWorkersError, match="kv_dtype: int8 and float8_e4m3fn: KV is quantized once"):
        check_parts_fit((source,), (target,))


def test_nan_stays_nan():
    nan = np.array([np.nan], np.float32).view(np.uint32)
    assert torch.from_numpy(cast(nan, "float32", "bfloat16").view(np.int16)).view(torch.bfloat16).isnan().all()
    assert np.isnan(cast(nan, "float32", "float16").view(np.float16)).all()


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
            check_parts_fit((good,), (other,))
    converter = RangeConverter([good], [made(32)], 0, 16)
    with pytest.raises(TransferError, match="bytes"):
        converter.feed(FedRange(0, 16, memoryview(bytes(15))))
    with pytest.raises(TransferError, match="ends behind"):
        converter.feed(FedRange(16, 16, memoryview(bytes(16 * good.bytes_per_token))))
    with pytest.raises(TransferError, match="rank 1"):
        converter.feed(FedRange(0, 16, memoryview(bytes(16 * good.bytes_per_token)), 1))
    wide = RangeConverter([good], [made(32)], 0, 32)
    wide.feed(FedRange(0, 16, memoryview(bytes(16 * good.bytes_per_token))))
    with pytest.raises(TransferError, match="twice"):
        wide.feed(FedRange(0, 16, memoryview(bytes(16 * good.bytes_per_token))))
