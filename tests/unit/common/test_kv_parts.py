"""The KV of several ranks: each has its layers and heads, and together they are the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.compat import Compat, as_strings, differences, identified
from diptych.common.errors import ConfigError, IncompatibleWorkersError
from diptych.common.kv_format import Shard, full_format, windowed_format
from diptych.common.kv_parts import GroupPart, check_parts, degrees, group_parts, numerics, shape, split
from diptych.router.cluster.compatibility import pair_differences
from diptych.rpc import convert

KV = windowed_format([0, 9, 9, 0, 9, 0], 4, 8, block_size=16, dtype="float16")
PLAIN = Compat("m", "w", "t", KV, "float16", "1", "1")


@given(
    st.lists(st.sampled_from((0, 7, 20)), min_size=1, max_size=8),
    st.sampled_from((1, 2, 4, 8)),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_the_parts_together_are_the_whole(windows: list[int], heads: int, log_degree: int, pipeline: int) -> None:
    kv = windowed_format(windows, heads, 8, block_size=16, dtype="float16")
    degree = 2 ** (log_degree - 1)
    if pipeline > len(windows):
        with pytest.raises(ConfigError, match="pipeline_parallel_size"):
            split(kv, tensor_parallel=degree, pipeline=pipeline)
        return
    parts = split(kv, tensor_parallel=degree, pipeline=pipeline)
    assert len(parts) == degree * pipeline
    check_parts(kv, parts)
    owners: dict[tuple[int, int], int] = {}
    for part in parts:
        for group in part.groups:
            for layer in group.layers:
                for head in part.shard.heads(group.heads):
                    owners[layer, head] = owners.get((layer, head), 0) + 1
    copies = max(1, degree // heads)
    assert owners == {(layer, head): copies for layer in range(len(windows)) for head in range(heads)}
    if degree <= heads:
        assert sum(part.bytes_per_token for part in parts) == kv.bytes_per_token


def test_one_rank_is_the_whole() -> None:
    assert split(KV) == (KV,)
    sizes = [(group.num_layers, group.bytes_per_token(KV.shard)) for group in KV.groups]
    assert group_parts(KV, (KV,)) == tuple(GroupPart(i, 0, i, *size) for i, size in enumerate(sizes))


def test_a_stage_counts_the_groups_of_its_own_layers() -> None:
    """Layers 0 and 1, 2 to 4, 5 and 6 of seven, with two KV groups: the last stage has one of them only."""
    kv = windowed_format([9, 9, 9, 0, 9, 0, 0], 4, 8, block_size=16, dtype="float16")
    assert [group.name for group in kv.groups] == ["full", "window-9"]
    layer = 2 * 2 * 8 * 2  # two heads, K and V
    assert [
        (one.part, one.own, one.group, one.num_layers, one.bytes_per_token)
        for one in group_parts(kv, split(kv, tensor_parallel=2, pipeline=3))
    ] == [
        (0, 0, 1, 2, 2 * layer), (1, 0, 1, 2, 2 * layer),
        (2, 0, 0, 1, layer), (2, 1, 1, 1, layer), (3, 0, 0, 1, layer), (3, 1, 1, 1, layer),
        (4, 0, 0, 2, 2 * layer), (4, 1, 1, 1, layer), (5, 0, 0, 2, 2 * layer), (5, 1, 1, 1, layer),
    ]  # fmt: skip


@pytest.mark.parametrize("degree", [3, 6])
def test_heads_that_cannot_be_divided_are_refused(degree: int) -> None:
    with pytest.raises(ConfigError, match="num_kv_heads"):
        split(KV, tensor_parallel=degree)


def test_parts_that_are_not_the_whole_are_refused() -> None:
    parts = split(KV, tensor_parallel=2, pipeline=2)
    for wrong in (parts[:3], parts[:2], parts[2:], parts[::-1], (parts[0], parts[0], *parts[2:]), (*parts, parts[3])):
        with pytest.raises(ConfigError, match="kv_parts"):
            check_parts(KV, wrong)
    with pytest.raises(ConfigError, match="kv_parts"):
        check_parts(KV, split(KV.with_dtype("float32"), tensor_parallel=2))
    with pytest.raises(ConfigError, match="every layer and head"):
        check_parts(replace(KV, shard=Shard(0, 2)), parts)


def test_a_stage_keeps_the_layers_numbers() -> None:
    first, second = split(KV, pipeline=2)
    assert (first.layers, second.layers) == (range(3), range(3, 6))
    assert f"{first.value_rule},{second.value_rule}" == KV.value_rule


def test_ranks_cross_the_handshake_and_unequal_ones_are_no_difference() -> None:
    sharded = replace(PLAIN, kv_parts=split(KV, tensor_parallel=2))
    assert convert.compat_from_proto(convert.compat_to_proto(sharded)) == sharded
    assert convert.compat_from_proto(convert.compat_to_proto(PLAIN)) == PLAIN
    assert not convert.compat_to_proto(PLAIN).kv_parts
    for other in (
        sharded,
        PLAIN,
        replace(PLAIN, kv_parts=split(KV, tensor_parallel=4)),
        replace(PLAIN, kv_parts=split(KV, pipeline=2)),
    ):
        assert differences(sharded, other) == pair_differences(as_strings(sharded), as_strings(other)) == []
    wrong = convert.compat_to_proto(sharded)
    del wrong.kv_parts[1]
    with pytest.raises(IncompatibleWorkersError, match="kv_parts"):
        convert.compat_from_proto(wrong)


@pytest.mark.parametrize(
    ("mine", "theirs", "named"),
    [
        ({"tensor_parallel": 2}, {}, ("tp2", "tp1")),
        ({"tensor_parallel": 2}, {"tensor_parallel": 4}, ("tp2", "tp4")),
        ({"pipeline": 3}, {"tensor_parallel": 4, "pipeline": 2}, ("tp1", "tp4")),
        ({"tensor_parallel": 2, "pipeline": 3}, {"tensor_parallel": 2}, None),
        ({"pipeline": 3}, {}, None),
    ],
)
def test_where_batch_invariance_is_promised_the_degree_is_a_fact(
    mine: dict[str, int], theirs: dict[str, int], named: tuple[str, str] | None
) -> None:
    """Refused by name: the order in which sums are added up decides their last bits. Stages add nothing up. Without the promise
    it is as what else runs in a batch."""
    one, other = (
        replace(PLAIN, kv_parts=split(KV, **sizes) if sizes else (), batch_invariant=True) for sizes in (mine, theirs)
    )
    found = differences(one, other, converting=True)
    assert found == ([] if named is None else [f"numerics: mine {named[0]}, theirs {named[1]}"])
    seen = pair_differences(as_strings(one), as_strings(other))
    assert seen == ([] if named is None else [f"numerics: prefill {named[0]}, decode {named[1]}"])
    assert identified(one, bytes(32))[0] == identified(PLAIN, bytes(32))[0], "blocks are named the same"


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({}, "tensor parallel 1"),
        ({"tensor_parallel": 4}, "tensor parallel 4"),
        ({"tensor_parallel": 2, "pipeline": 3}, "tensor parallel 2, pipeline 3"),
    ],
)
def test_degrees_in_words(sizes: dict[str, int], named: str) -> None:
    assert degrees(split(KV, **sizes)) == named


def test_stages_may_have_different_degrees() -> None:
    first, last = split(KV, pipeline=2)
    halves = tuple(replace(last, shard=Shard(rank, 2)) for rank in range(2))
    check_parts(KV, (first, *halves))
    assert degrees((first, *halves)) == "tensor parallel 1+2, pipeline 2"
    assert numerics((first, *halves)) == "tp1+2"


def test_the_shape_says_which_rank_has_what() -> None:
    kv = full_format(4, 2, 8, block_size=16, dtype="float16")
    assert shape(split(kv, tensor_parallel=2, pipeline=2)) == (
        "rank 0: layers 0-1, 1 of 2; rank 1: layers 0-1, 2 of 2; rank 2: layers 2-3, 1 of 2; rank 3: layers 2-3, 2 of 2"
    )
