"""Bytes, blocks and groups of a KV format, counted again by loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.errors import ConfigError
from diptych.common.kv_format import (
    COMPUTE_DTYPES,
    DTYPES,
    KvFormat,
    KvGroup,
    KvKind,
    Shard,
    TransferCharge,
    full_format,
    kv_group,
    windowed_format,
)

LLAMA_8B = full_format(32, 8, 128, block_size=16, dtype="bfloat16")


def test_a_model_of_one_group():
    assert (LLAMA_8B.bytes_per_token, LLAMA_8B.block_bytes, LLAMA_8B.num_layers) == (131_072, 2_097_152, 32)
    assert LLAMA_8B.only_group.name == "full"
    assert LLAMA_8B.with_dtype("float32").bytes_per_token == 262_144
    assert str(LLAMA_8B) == (
        "kv_layout=block-major, tensor_parallel_size=1, num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, "
        "kv_dtype=bfloat16"
    )


def test_scales_lie_beside_each_token_and_head():
    quantized = full_format(2, 4, 64, block_size=16, dtype="int8", scale_dtype="float32")
    assert quantized.bytes_per_token == 2 * 4 * 2 * (64 + 4)
    half = replace(quantized, shard=Shard(1, 2))
    assert half.bytes_per_token * 2 == quantized.bytes_per_token, "a shard keeps the scales of its heads"


def test_latent_and_recurrent_groups():
    latent = KvGroup(KvKind.LATENT, tuple(range(61)), 1, (576,), "bfloat16", 64)
    state = KvGroup(KvKind.RECURRENT, (61, 62), 1, (100, 30), "float32", 1, part_dtypes=("float32", "bfloat16"))
    kv = KvFormat((latent, state), Shard(3, 4))
    assert kv.bytes_per_token == 61 * 576 * 2, "every rank holds the whole latent"
    assert state.state_bytes == 2 * (100 * 4 + 30 * 2)
    assert kv.bytes_held(65) == 2 * 64 * 61 * 576 * 2 + state.state_bytes
    assert kv.transfer_bytes(0, 65) == 65 * 61 * 576 * 2 + state.state_bytes
    assert kv.bytes_held(0) == 0


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_ranks_hold_every_head_and_no_more_than_they_must(heads, degree):
    held = [list(Shard(rank, degree).heads(heads)) for rank in range(degree)]
    assert {head for part in held for head in part} == set(range(heads))
    assert {len(part) for part in held} == {max(1, heads // degree)}
    assert all(sum(head in part for part in held) == max(1, degree // heads) for head in range(heads))


def test_a_gemma_3_like_model_keeps_a_quarter_at_8192_tokens():
    """Five layers of a window of 512 to each full one."""
    windows = [0 if (layer + 1) % 6 == 0 else 512 for layer in range(30)]
    kv = windowed_format(windows, 1, 256, block_size=16, dtype="bfloat16")
    full = full_format(30, 1, 256, block_size=16, dtype="bfloat16")
    assert kv.bytes_per_token == full.bytes_per_token
    assert kv.bytes_held(8192) <= 0.25 * full.bytes_held(8192)
    assert kv.transfer_bytes(0, 8192) <= 0.25 * full.transfer_bytes(0, 8192)


def visible(position: int, window: int) -> set[int]:
    return {token for token in range(position + 1) if not window or position - token < window}


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 200), st.integers(0, 40), st.integers(1, 9))
def test_what_a_group_keeps_is_what_any_later_token_can_see(num_tokens, window, block_size):
    group = kv_group(1, 1, 4, block_size=block_size, dtype="float32", window=window)
    seen = {
        token for later in range(num_tokens, num_tokens + 50) for token in visible(later, window) if token < num_tokens
    }
    assert group.first_needed(num_tokens) == min(seen, default=num_tokens)
    blocks = {token // block_size for token in seen}
    kept = range(group.first_block(num_tokens), -(-num_tokens // block_size))
    assert blocks <= set(kept)
    assert group.blocks_held(num_tokens) == len(kept)
    assert not blocks or group.first_block(num_tokens) == min(blocks), "nothing behind the window is kept"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from((0, 5, 9)), min_size=1, max_size=6), st.integers(0, 60), st.integers(0, 60))
def test_the_charge_of_a_router_is_what_a_transfer_moves(windows, first, more):
    kv = windowed_format(windows, 2, 4, block_size=4, dtype="float16")
    end = first + more
    assert kv.charge.bytes(more) == kv.transfer_bytes(first, end)
    by_hand = sum(
        kv.bytes_per_token // len(windows)
        for window in windows
        for token in range(first, end)
        if token in visible(end, window)
    )
    assert kv.transfer_bytes(first, end) == by_hand


def test_a_charge_needs_no_format():
    assert TransferCharge(10, 5, ((4, 100),)).bytes(7) == 70 + 5 + 300


GROUP = kv_group(2, 2, 4, block_size=16, dtype="float32")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layers": ()}, "layers"),
        ({"layers": (1, 0)}, "layers"),
        ({"layers": (0, 0)}, "layers"),
        ({"heads": 0}, "num_kv_heads"),
        ({"dims": ()}, "head_dim"),
        ({"dims": (4, 0)}, "head_dim"),
        ({"dtype": "float12"}, "kv_dtype"),
        ({"scale_dtype": "float12"}, "kv_scale_dtype"),
        ({"block_size": 0}, "block_size"),
        ({"window": 5}, "window"),
        ({"kind": KvKind.WINDOW}, "window"),
        ({"kind": KvKind.LATENT}, "num_kv_heads"),
        ({"part_dtypes": ("float32", "float32")}, "part_dtypes"),
        ({"kind": KvKind.RECURRENT, "heads": 1, "part_dtypes": ("float32",)}, "part_dtypes"),
    ],
)
def test_a_group_without_sense_names_the_field(change, field):
    with pytest.raises(ConfigError) as caught:
        replace(GROUP, **change)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("groups", "more", "field"),
    [
        ((), {}, "layers"),
        ((GROUP, GROUP), {}, "layers"),
        ((replace(GROUP, layers=(0, 2)),), {}, "layers"),
        ((replace(GROUP, layers=(0,)), replace(GROUP, layers=(1,))), {}, "groups"),
        ((GROUP,), {"order": "sideways"}, "kv_layout"),
        ((GROUP,), {"shard": Shard(0, 3)}, "num_kv_heads"),
    ],
)
def test_a_format_without_sense_names_the_field(groups, more, field):
    with pytest.raises(ConfigError) as caught:
        KvFormat(groups, **more)
    assert caught.value.field == field


def test_a_rank_outside_its_degree_is_refused():
    with pytest.raises(ConfigError, match="rank"):
        Shard(2, 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        Shard(0, 0)


def test_torch_agrees_on_the_bytes_of_every_dtype():
    torch = pytest.importorskip("torch")
    assert all(torch.empty(1, dtype=getattr(torch, name)).element_size() == d.size_bytes for name, d in DTYPES.items())
    assert set(COMPUTE_DTYPES) == {"float32", "float16", "bfloat16"}
