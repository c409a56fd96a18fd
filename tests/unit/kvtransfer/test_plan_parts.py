"""Unequal ranks on both sides: the plan over all small degrees, and the bytes that each rank of the reader gets by it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from diptych.common.errors import ConfigError, IncompatibleWorkersError, TransferError
from diptych.common.kv_format import (
    KV_SCALE_DTYPE,
    ORDERS,
    KvFormat,
    KvGroup,
    KvKind,
    Shard,
    full_format,
    windowed_format,
)
from diptych.common.kv_groups import expected_ranges
from diptych.common.kv_parts import split
from diptych.engine.messages import DeviceRange
from diptych.kvtransfer.slabs import kv_codes
from diptych.kvtransfer.slabs.convert import FedRange, RangeConverter
from diptych.kvtransfer.slabs.planner import (
    all_straight,
    check_parts_fit,
    is_identity,
    plan_parts,
    straight_pieces,
    wanted_ranks,
)

LAYERS, DIM, BLOCK, END = 5, 3, 4, 22
DEGREES = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 3)]
PAIRS = list(itertools.product(DEGREES, DEGREES))


def model(heads: int, *, windows: tuple[int, ...] = (), **changes: object) -> KvFormat:
    sizes: dict[str, object] = {"block_size": BLOCK, "dtype": "float16", **changes}
    if windows:
        return windowed_format(windows, heads, DIM, **sizes)  # type: ignore[arg-type]
    return full_format(LAYERS, heads, DIM, **sizes)  # type: ignore[arg-type]


def sides(kv: KvFormat, degrees: list[tuple[int, int]]) -> Iterator[tuple[KvFormat, ...]]:
    for tp, pp in degrees:
        yield split(kv, tensor_parallel=tp, pipeline=pp)


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("windows", [(), (0, 9, 9, 0, 9)], ids=["full", "windows"])
def test_each_rank_gets_each_of_its_heads_once_and_each_head_crosses_once(heads: int, windows: tuple[int, ...]) -> None:
    kv = model(heads, windows=windows)
    for source, target in itertools.product(sides(kv, DEGREES), sides(kv, DEGREES)):
        for turn in (0, 5):
            plan = plan_parts(source, target, turn)
            for mine, pieces in zip(target, plan, strict=True):
                filled: Counter[tuple[int, int, int]] = Counter()
                for piece in pieces:
                    there, here = source[piece.rank].groups[piece.group], mine.groups[piece.at_group]
                    for layer, head in itertools.product(range(len(piece.layers)), range(len(piece.heads))):
                        at = piece.at_layer + layer, piece.at_head + head
                        assert there.layers[piece.layers[layer]] == here.layers[at[0]]
                        held = source[piece.rank].shard.heads(heads)[piece.heads[head]]
                        assert held == mine.shard.heads(heads)[at[1]]
                        filled[piece.at_group, *at] += 1
                assert filled == {
                    (group, layer, head): 1
                    for group, own in enumerate(mine.groups)
                    for layer in range(own.num_layers)
                    for head in range(own.heads_per_rank(mine.shard))
                }
            assert sum(source[rank].bytes_per_token for rank in wanted_ranks(plan)) == kv.bytes_per_token
            assert is_identity(plan, source, target) == (source == target and source[0].shard.degree <= heads)


def test_replicas_are_taken_in_turn() -> None:
    kv = model(2)
    [target], source = split(kv), split(kv, tensor_parallel=8)
    assert [wanted_ranks(plan_parts(source, (target,), turn)) for turn in range(5)] == [
        (0, 4), (1, 5), (2, 6), (3, 7), (0, 4),
    ]  # fmt: skip


def test_what_has_the_same_bytes_goes_straight() -> None:
    """To each rank that holds it. Stages go straight into one rank, which takes ranges of some layers, and not into several."""
    kv = model(2)
    one, two, four, stages = (
        split(kv), split(kv, tensor_parallel=2), split(kv, tensor_parallel=4), split(kv, pipeline=2),
    )  # fmt: skip
    straight = {
        (a, b)
        for (a, source), (b, target) in itertools.permutations(enumerate((one, two, four, stages)), 2)
        if all_straight(plan_parts(source, target), source, target)
    }
    assert straight == {(1, 2), (2, 1), (3, 0)}
    assert all_straight(plan_parts(four, four), four, four)
    assert not is_identity(plan_parts(four, four), four, four), "two of four are sent"


LATENT = KvGroup(KvKind.LATENT, (0, 1), 1, (6,), "float16", BLOCK)
STATE = KvGroup(KvKind.RECURRENT, (0, 1), 1, (6, 6), "float32", BLOCK)


def test_a_group_on_all_ranks_is_taken_from_one() -> None:
    kv = KvFormat((LATENT, replace(LATENT, kind=KvKind.FULL, layers=(2, 3), heads=2, dims=(4, 4))))
    source, target = split(kv, tensor_parallel=2), split(kv)
    [pieces] = check_parts_fit(source, target)
    assert [(piece.rank, piece.group, piece.heads) for piece in pieces] == [
        (0, 0, range(1)), (0, 1, range(1)), (1, 1, range(1)),
    ]  # fmt: skip


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    state = KvFormat((STATE,))
    assert check_parts_fit(split(state, tensor_parallel=2), split(state)), "the same state is on both"
    stages = KvFormat((replace(STATE, layers=(0, 1, 2)),))
    for kv, named in (
        (stages, "KV group recurrent of tensor parallel 1, pipeline 2 cannot be cut for tensor parallel 1, pipeline 3"),
        (
            KvFormat((KvGroup(KvKind.FULL, (0, 1, 2), 2, (4, 6), "float16", BLOCK),)),
            "KV group full of tensor parallel 1, pipeline 2 cannot be cut",
        ),
        (
            model(2, dtype="int8", scale_dtype=KV_SCALE_DTYPE, order="block-major-hnd"),
            "kv_layout 'block-major-hnd' of quantized KV",
        ),
    ):
        with pytest.raises(IncompatibleWorkersError, match=named):
            check_parts_fit(split(kv, pipeline=2), split(kv, pipeline=3))
    with pytest.raises(IncompatibleWorkersError, match="num_kv_heads: 4 and 2"):
        plan_parts((model(4),), (model(2),))
    with pytest.raises(IncompatibleWorkersError, match="layer 2 of KV group full is in no rank"):
        plan_parts(split(model(2), pipeline=2)[:1], split(model(2), pipeline=2)[1:])
    with pytest.raises(ConfigError, match="num_kv_heads"):
        split(model(2), tensor_parallel=3)


# ---- the bytes ----


def whole(kv: KvFormat) -> dict[int, np.ndarray]:
    """By layer: [K and V, END, heads, width] of what every rank's KV is cut from; of quantized KV the bytes of records."""
    rng = np.random.default_rng(7)
    group = kv.groups[0]
    width, dtype = (group.dims[0] + 4, np.uint8) if group.quantized else (group.dims[0], np.uint16)
    return {
        layer: rng.integers(0, np.iinfo(dtype).max, (2, END, group.heads, width), dtype=dtype)
        for layer in range(kv.num_layers)
    }


def packed(
    data: dict[int, np.ndarray], kv: KvFormat, group: int, first: int, num: int, layers: range | None = None
) -> bytes:
    """As a rank's pack writes them, by loops."""
    one = kv.groups[group]
    heads = kv.shard.heads(one.heads)
    chosen = one.layers if layers is None else one.layers[layers.start : layers.stop]
    rows = np.concatenate([data[layer][:, :, heads.start : heads.stop] for layer in chosen])
    out = b""
    for at in range(first, first + num, BLOCK):
        part = rows[:, at : min(at + BLOCK, first + num)]
        if one.quantized:
            part = kv_codes.slots_of(part)
        elif ORDERS[kv.order] == "HND":
            part = part.swapaxes(1, 2)
        out += part.tobytes()
    return out


def checked(source: tuple[KvFormat, ...], target: tuple[KvFormat, ...], data: dict[int, np.ndarray], seed: int) -> None:
    """Feed every range of every wanted rank, cut and shuffled by `seed`, some of them by layers. Each of our ranks must get each
    of its bytes once."""
    rng = np.random.default_rng(seed)
    first = BLOCK * int(rng.integers(0, 3))
    converter = RangeConverter(source, target, first, END, turn=seed)
    assert not converter.changes_values
    fed: list[FedRange] = []
    for rank in converter.ranks:
        kv = source[rank]
        for one in expected_ranges(kv, first, END):
            middle = min(END, one.first + BLOCK * int(rng.integers(1, 4)))
            layers = kv.groups[one.group].num_layers
            cut = int(rng.integers(0, layers)) if len(kv.groups) == 1 else 0
            for start, stop in ((one.first, middle), (middle, END)):
                for some in (range(cut), range(cut, layers)):
                    if stop > start and len(some):
                        bytes_ = packed(data, kv, one.group, start, stop - start, some)
                        fed.append(
                            FedRange(start, stop - start, memoryview(bytes_), rank, one.group, some.start, len(some))
                        )
    rng.shuffle(fed)  # type: ignore[arg-type]
    seen: Counter[tuple[int, int, int, int]] = Counter()
    for one_fed in fed:
        for got in converter.feed(one_fed):
            mine = target[got.part]
            layers = range(got.first_layer, got.first_layer + got.num_layers)
            assert bytes(got.payload) == packed(data, mine, got.group, got.first_token, got.num_tokens, layers)
            assert len(target) == 1 or len(layers) == mine.groups[got.group].num_layers
            for token in range(got.first_token, got.first_token + got.num_tokens):
                seen.update((got.part, got.group, layer, token) for layer in layers)
    assert converter.num_open == 0
    assert seen == {
        (rank, one.group, layer, token): 1
        for rank, kv in enumerate(target)
        for one in expected_ranges(kv, first, END)
        for layer in range(kv.groups[one.group].num_layers)
        for token in range(one.first, END)
    }


KINDS = {
    "NHD": {},
    "HND": {"order": "block-major-hnd"},
    "quantized": {"dtype": "float8_e4m3fn", "scale_dtype": KV_SCALE_DTYPE},
    "windows": {"windows": (0, 9, 9, 0, 9)},
}


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_its_bytes_of_ranges_in_any_order(kind: str, heads: int) -> None:
    kv = model(heads, **KINDS[kind])  # type: ignore[arg-type]
    data = whole(kv)
    small = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 3)]
    for seed, (source, target) in enumerate(itertools.product(sides(kv, small), sides(kv, small))):
        checked(source, target, data, seed)


def test_stages_of_different_degrees() -> None:
    kv = model(4)
    first, last = split(kv, pipeline=2)
    odd = (first, *(replace(last, shard=Shard(rank, 2)) for rank in range(2)))
    for seed, other in enumerate(sides(kv, [(1, 1), (2, 2), (4, 1)])):
        checked(odd, other, whole(kv), seed)
        checked(other, odd, whole(kv), seed)


def test_ranges_that_do_not_fit_are_refused_and_change_nothing() -> None:
    kv = model(2)
    source, target = split(kv, tensor_parallel=2), split(kv)
    data = whole(kv)
    converter = RangeConverter(source, target, 0, END)
    good = FedRange(0, 8, memoryview(packed(data, source[0], 0, 0, 8)))
    for bad, named in (
        (replace(good, part=2), "nothing is wanted of rank 2"),
        (replace(good, num_tokens=7), "7 tokens take .* bytes"),
        (replace(good, num_layers=4), "8 tokens take .* bytes"),
        (replace(good, first_token=END - 4), "ends behind"),
        (replace(good, payload=DeviceRange(1, len(good.payload))), "KV in GPU memory is not converted"),
    ):
        with pytest.raises(TransferError, match=named):
            converter.feed(bad)
    assert converter.num_open == 0
    assert not converter.feed(good)
    with pytest.raises(TransferError, match="twice"):
        converter.feed(good)
    [whole_range] = converter.feed(FedRange(0, 8, memoryview(packed(data, source[1], 0, 0, 8)), 1))
    assert bytes(whole_range.payload) == packed(data, kv, 0, 0, 8)


def test_gpu_memory_goes_straight_to_every_rank_that_holds_it() -> None:
    kv = model(2)
    source, target = split(kv, tensor_parallel=2), split(kv, tensor_parallel=4)
    converter = RangeConverter(source, target, 0, END)
    size = 8 * source[1].bytes_per_token
    ranges = converter.feed(FedRange(0, 8, DeviceRange(4096, size, 5), 1))
    assert [(one.part, one.payload, one.is_straight) for one in ranges] == [
        (2, DeviceRange(4096, size, 5), True), (3, DeviceRange(4096, size, 5), True),
    ]  # fmt: skip


def test_the_rank_of_a_piece_and_its_bytes() -> None:
    """One written out: ranks 2 and 3 of four hold the layers behind the cut, and half of the heads each."""
    kv = model(4)
    source, target = split(kv, tensor_parallel=2, pipeline=2), split(kv, tensor_parallel=4)
    third = plan_parts(source, target)[2]
    assert [(p.rank, p.layers, p.heads, p.at_layer, p.at_head) for p in third] == [
        (1, range(2), range(1), 0, 0), (3, range(3), range(1), 2, 0),
    ]  # fmt: skip
    assert not any(straight_pieces(plan_parts(source, target), source, target)[2])
