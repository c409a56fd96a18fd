from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import xxhash

from diptych.common.compat import Compat
from diptych.common.errors import ConfigError, StaleReferenceError, TransferError
from diptych.common.kv_format import Shard, full_format, windowed_format
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.slabs.handle import Refusal
from diptych.kvtransfer.slabs.layout import (
    HEADER_BYTES,
    TRAILER_BYTES,
    Ring,
    RingSpec,
    check_slab,
    clear_frame,
    layout_hash,
    message_bytes,
    payload_capacity,
    read_refusal,
    refusal_message,
    write_frame,
)

KV = full_format(2, 1, 4, block_size=16, dtype="float32")
COMPAT = Compat("m", "r", "t", KV, "float32", "a1", "s1", b"golden")
SIZE = 1000


@pytest.fixture
def framed(handle):
    """A slab as it should arrive, and its handle."""
    slab = memoryview(bytearray(4096))
    slab[HEADER_BYTES : HEADER_BYTES + SIZE] = bytes(range(250)) * 4
    named = handle(checksum=xxhash.xxh3_64_intdigest(slab[HEADER_BYTES : HEADER_BYTES + SIZE]))
    write_frame(slab, named)
    return slab, named


def test_ring_is_page_aligned_and_slabs_do_not_overlap():
    ring = Ring(RingSpec(3, 4096))
    assert ring.array.ctypes.data % mmap.PAGESIZE == 0
    for index in range(3):
        ring.slab(index)[:] = bytes([index + 1]) * 4096
    assert [ring.slab(index)[0] for index in range(3)] == [1, 2, 3]
    assert len(ring.payload(0)) == payload_capacity(4096) == 4096 - HEADER_BYTES - TRAILER_BYTES
    ring.payload(1)[0] = 99
    assert ring.slab(1)[HEADER_BYTES] == 99
    assert ring.message(1, SIZE).size == message_bytes(SIZE)
    assert ring.message(1, SIZE)[HEADER_BYTES] == 99


@pytest.mark.parametrize(("slabs", "size"), [(0, 4096), (1, 0), (1, 4095), (1, -4096)])
def test_ring_sizes_that_cannot_be(slabs, size):
    with pytest.raises(ConfigError):
        RingSpec(slabs, size)


@pytest.mark.parametrize("field", ["transport", "lease_s", "peer_quota", "quarantine_cap", "num_slabs"])
def test_config_names_the_field(field):
    bad = "carrier pigeon" if field == "transport" else -1
    with pytest.raises(ConfigError, match=field):
        TransferConfig(**{field: bad})


def test_layout_hash_sees_what_decides_the_bytes_and_nothing_else():
    base = layout_hash(COMPAT)
    shapes = (
        full_format(3, 1, 4, block_size=16, dtype="float32"),
        full_format(2, 1, 4, block_size=16, dtype="float16"),
        full_format(2, 1, 4, block_size=32, dtype="float32"),
        full_format(2, 1, 4, block_size=16, dtype="float32", order="block-major-hnd"),
        full_format(2, 1, 4, block_size=16, dtype="float32", scale_dtype="float32"),
        full_format(2, 1, 4, block_size=16, dtype="float32", shard=Shard(0, 2)),
        full_format(2, 1, 4, block_size=16, dtype="float32", shard=Shard(1, 2)),
        windowed_format([0, 8], 1, 4, block_size=16, dtype="float32"),
        windowed_format([8, 0], 1, 4, block_size=16, dtype="float32"),
        windowed_format([0, 9], 1, 4, block_size=16, dtype="float32"),
    )
    others = [layout_hash(replace(COMPAT, kv=kv)) for kv in shapes]
    values = ({"model_revision": "q"}, {"method": "fp8"}, {"compute_dtype": "float16"}, {"backend": "c"})
    others += [layout_hash(replace(COMPAT, **change)) for change in values]
    assert len({base, *others}) == 1 + len(others)
    assert layout_hash(replace(COMPAT, sampler_version="s2")) == base


def test_intact_slab_passes(framed):
    slab, named = framed
    assert check_slab(slab, named) is None


@pytest.mark.parametrize("offset", [HEADER_BYTES, HEADER_BYTES + SIZE // 2, HEADER_BYTES + SIZE - 1])
def test_one_flipped_payload_bit_is_seen_unless_switched_off(framed, offset):
    slab, named = framed
    slab[offset] ^= 0x40
    assert isinstance(check_slab(slab, named), TransferError)
    assert check_slab(slab, named, verify_checksum=False) is None


@pytest.mark.parametrize("offset", [0, 4, 6, 10, 26, 34, 42, 50, 60])
def test_a_damaged_header_is_seen_without_the_checksum(framed, offset):
    slab, named = framed
    slab[offset] ^= 1
    assert check_slab(slab, named, verify_checksum=False) is not None


@pytest.mark.parametrize("offset", [0, 10, 26])
def test_a_damaged_trailer_is_seen_without_the_checksum(framed, offset):
    slab, named = framed
    slab[HEADER_BYTES + SIZE + offset] ^= 1
    assert "trailer" in str(check_slab(slab, named, verify_checksum=False))


@pytest.mark.parametrize("change", [{"attempt": "other"}, {"generation": 2}, {"size_bytes": 999}, {"layout_hash": 8}])
def test_another_life_of_the_slab_is_seen(framed, change):
    slab, named = framed
    assert check_slab(slab, replace(named, **change), verify_checksum=False) is not None


def test_what_the_slab_held_before_does_not_pass_for_an_answer(framed):
    slab, named = framed
    clear_frame(slab, SIZE)
    assert check_slab(slab, named) is not None


def test_a_refusal_is_typed_and_is_no_slab(framed):
    slab, named = framed
    assert read_refusal(slab) is None
    slab[:HEADER_BYTES] = refusal_message(Refusal.STALE)
    assert read_refusal(slab) is Refusal.STALE
    assert isinstance(check_slab(slab, named), StaleReferenceError)
