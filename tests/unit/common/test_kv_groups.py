"""Window edges: what a hand-off moves, what a prefix hit may use and what is freed, against sets of visible tokens."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.kv_format import KvFormat, KvGroup, KvKind, kv_group, windowed_format
from diptych.common.kv_groups import (
    UNBOUNDED,
    PoolDemand,
    expected_ranges,
    hit_end,
    holds,
    longest_hit,
    most_blocks_held,
)
from diptych.common.kv_parts import split


def visible(position: int, window: int) -> set[int]:
    """Tokens that the query at `position` reads, its own left out."""
    return {token for token in range(position) if not window or position - token < window}


@st.composite
def formats(draw: st.DrawFn) -> KvFormat:
    windows = draw(st.lists(st.sampled_from((0, 1, 4, 7, 16)), min_size=1, max_size=5))
    kv = windowed_format(windows, 1, 4, block_size=4, dtype="float16")
    sizes = [draw(st.sampled_from((2, 3, 4))) for _ in kv.groups]
    return KvFormat(
        tuple(
            kv_group(group.layers, 1, 4, block_size=size, dtype="float16", window=group.window)
            for group, size in zip(kv.groups, sizes, strict=True)
        )
    )


@settings(max_examples=100, deadline=None)
@given(formats(), st.integers(0, 60), st.integers(0, 60))
def test_a_hand_off_moves_what_the_next_token_reads_and_no_block_more(kv: KvFormat, first: int, more: int) -> None:
    end = first + more
    ranges = {part.group: part for part in expected_ranges(kv, first, end)}
    for index, group in enumerate(kv.groups):
        needed = {token for token in visible(end, group.window) if token >= first}
        moved = set(range(ranges[index].first, ranges[index].end)) if index in ranges else set()
        assert needed <= moved
        assert moved <= set(range(first, end))
        blocks = {token // group.block_size for token in needed}
        assert {token // group.block_size for token in moved} <= blocks | {end // group.block_size}


@settings(max_examples=100, deadline=None)
@given(formats(), st.integers(1, 60))
def test_what_a_reusable_hand_off_leaves_is_the_longest_hit_that_its_prompt_may_use(kv: KvFormat, end: int) -> None:
    """And of one block size it moves at most one block more of each group."""
    plain = {part.group: part for part in expected_ranges(kv, 0, end)}
    present = []
    for part in expected_ranges(kv, 0, end, reusable=True):
        size = kv.groups[part.group].block_size
        present.append([part.first <= i * size for i in range(end // size)])
        if len({group.block_size for group in kv.groups}) == 1:
            first = plain[part.group].first if part.group in plain else end // size * size
            assert first - part.first in (0, size)
    edge = hit_end(math.lcm(*(group.block_size for group in kv.groups)), end)
    assert longest_hit(kv, present, end - 1) == edge


@settings(max_examples=100, deadline=None)
@given(formats(), st.data())
def test_a_prefix_hit_is_the_longest_after_which_every_group_has_what_is_read(
    kv: KvFormat, data: st.DataObject
) -> None:
    limit = data.draw(st.integers(0, 40))
    present = [
        data.draw(st.lists(st.booleans() if data.draw(st.booleans()) else st.just(True), max_size=20))
        for _ in kv.groups
    ]

    def usable(num_tokens: int) -> bool:
        for group, held in zip(kv.groups, present, strict=True):
            if num_tokens % group.block_size:
                return False
            blocks = {token // group.block_size for token in visible(num_tokens, group.window)}
            reach = num_tokens // group.block_size
            if reach > len(held) or any(not held[block] for block in blocks):
                return False
        return True

    assert longest_hit(kv, present, limit) == max(n for n in range(limit + 1) if n == 0 or usable(n))


def test_a_recurrent_group_hits_at_its_checkpoints_only() -> None:
    full = kv_group(1, 1, 4, block_size=4, dtype="float16")
    state = KvGroup(KvKind.RECURRENT, (1,), 1, (10,), "float32", 4)
    kv = KvFormat((full, state))
    assert longest_hit(kv, [[True] * 5, [False, True, False, False, False]], 20) == 8
    assert longest_hit(kv, [[True] * 5, [False] * 5], 20) == 0
    assert longest_hit(kv, [[True, False, True, True, True], [False, True, False, False, True]], 20) == 0
    assert [(part.group, part.first, part.end) for part in expected_ranges(kv, 4, 18)] == [(0, 4, 18), (1, 17, 18)]


@settings(max_examples=80, deadline=None)
@given(formats(), st.lists(st.integers(1, 9), max_size=12))
def test_blocks_are_freed_once_and_never_one_that_is_read_later(kv: KvFormat, chunks: list[int]) -> None:
    freed: list[set[int]] = [set() for _ in kv.groups]
    computed = 0
    for chunk in chunks:
        for gone, group in zip(freed, kv.groups, strict=True):
            blocks = range(group.first_block(computed), group.first_block(computed + chunk))
            assert not gone & set(blocks), "freed twice"
            gone |= set(blocks)
        computed += chunk
        for group, gone in zip(kv.groups, freed, strict=True):
            read = {
                token // group.block_size
                for later in range(computed, computed + 40)
                for token in visible(later, group.window)
            }
            assert not gone & read
            total = math.ceil(computed / group.block_size)
            assert total - len({block for block in gone if block < total}) == group.blocks_held(computed)


@pytest.mark.parametrize("num_tokens", [0, 1, 511, 512, 513, 8192])
def test_a_gemma_3_like_model_moves_little_more_than_its_windows(num_tokens: int) -> None:
    kv = windowed_format(
        [0 if (layer + 1) % 6 == 0 else 512 for layer in range(30)], 1, 256, block_size=16, dtype="bfloat16"
    )
    moved = sum(
        part.num_tokens * kv.groups[part.group].bytes_per_token(kv.shard) for part in expected_ranges(kv, 0, num_tokens)
    )
    edge = sum(group.block_size * group.bytes_per_token(kv.shard) for group in kv.groups if group.window)
    assert kv.transfer_bytes(0, num_tokens) <= moved <= kv.transfer_bytes(0, num_tokens) + edge


@settings(max_examples=80, deadline=None)
@given(formats(), st.integers(1, 20), st.data())
def test_no_sequence_holds_more_than_what_is_counted_for_it(kv: KvFormat, chunk: int, data: st.DataObject) -> None:
    """A chunk's blocks are there before it is computed, and those behind the window go when it is."""
    num_tokens = data.draw(st.integers(1, 80))
    for group in kv.groups:
        most = computed = 0
        while computed < num_tokens:
            end = min(num_tokens, computed + data.draw(st.integers(1, chunk)))
            most = max(most, -(-end // group.block_size) - group.first_block(computed))
            computed = end
        assert most <= most_blocks_held(group, num_tokens, chunk)


@settings(max_examples=80, deadline=None)
@given(formats(), st.integers(1, 8), st.integers(1, 64), st.integers(1, 200))
def test_pools_take_the_memory_that_there_is_and_hold_what_the_first_group_holds(
    kv: KvFormat, num_seqs: int, chunk: int, num_blocks: int
) -> None:
    demand = PoolDemand(num_seqs, chunk)
    size_bytes = demand.pool_bytes(kv, num_blocks)
    assert demand.pool_bytes(kv, most := demand.most_blocks(kv, size_bytes)) <= size_bytes
    assert most >= num_blocks
    assert demand.pool_bytes(kv, most + 1) > size_bytes
    counts = demand.group_blocks(kv, num_blocks)
    assert counts[0] == num_blocks
    if not kv.groups[0].window and len({group.block_size for group in kv.groups}) == 1:
        assert holds(kv, counts, num_blocks * kv.block_size, chunk), "a window group is never what refuses a prompt"


@settings(max_examples=100, deadline=None)
@given(formats(), st.integers(1, 4), st.integers(1, 64), st.integers(1, 200))
def test_the_pools_of_all_stages_have_the_blocks_of_one_worker(
    kv: KvFormat, pipeline: int, chunk: int, num_blocks: int
) -> None:
    """A stage without the first group has no bound of its own: its window pools do not grow with the first group's."""
    parts, demand = split(kv, pipeline=min(pipeline, kv.num_layers)), PoolDemand(3, chunk)
    size_bytes = demand.pool_bytes(kv, num_blocks)
    assert size_bytes == demand.pool_bytes(kv, num_blocks, parts)
    assert size_bytes == sum(demand.pool_bytes(kv, num_blocks, (part,)) for part in parts)
    assert demand.most_blocks(kv, size_bytes, parts) == demand.most_blocks(kv, size_bytes) >= num_blocks
    for part in parts:
        own_bytes = demand.pool_bytes(kv, num_blocks, (part,))
        own = demand.most_blocks(kv, own_bytes, (part,))
        assert own >= num_blocks
        assert own == UNBOUNDED or demand.pool_bytes(kv, own + 1, (part,)) > own_bytes
        has_first = any(group.name == kv.groups[0].name for group in part.groups)
        assert (demand.most_blocks(kv, demand.pool_bytes(kv, 1000, (part,)), (part,)) == UNBOUNDED) is not has_first
