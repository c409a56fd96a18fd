from __future__ import annotations

import hashlib
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.errors import StaleReferenceError, TransferError
from diptych.kvtransfer.slabs.handle import Refusal, SlabHandle, decode, encode, refusal_error, sign, verify
from diptych.worker.wire import handle_to_proto

NUMBERS = st.integers(0, 2**64 - 1)
TEXTS = st.text(max_size=40)


def test_a_signed_handle_verifies_with_its_own_key_only(handle, key):
    assert verify(key, handle())
    assert not verify(b"x" * 32, handle())


@pytest.mark.parametrize("name", [field.name for field in fields(SlabHandle)])
def test_every_field_is_under_the_mac(handle, key, name):
    signed = handle()
    value = getattr(signed, name)
    other = b"" if name == "mac" else value + (1 if isinstance(value, int) else "x")
    assert not verify(key, replace(signed, **{name: other}))


def test_moving_a_byte_between_neighbouring_fields_is_seen(handle, key):
    signed = handle(worker_id="p0", incarnation="1a")
    assert not verify(key, replace(signed, worker_id="p01", incarnation="a"))


def test_a_field_that_cannot_be_encoded_is_not_authentic(handle, key):
    assert not verify(key, replace(handle(), slab=-1))
    assert not verify(key, replace(handle(), attempt="x" * 1000))
    with pytest.raises(ValueError):
        sign(key, replace(handle(), attempt="x" * 1000))


@given(texts=st.tuples(TEXTS, TEXTS, TEXTS), numbers=st.lists(NUMBERS, min_size=10, max_size=10))
def test_encode_decode_round_trip(texts, numbers):
    signed = sign(b"k" * 32, SlabHandle(*texts, *numbers))
    assert decode(encode(signed)) == signed
    assert verify(b"k" * 32, decode(encode(signed)))


@given(texts=st.tuples(TEXTS, TEXTS, TEXTS), numbers=st.lists(NUMBERS, min_size=10, max_size=10), part=NUMBERS)
def test_17_a_a_handle_with_a_rank_round_trips(texts, numbers, part):
    signed = sign(b"k" * 32, SlabHandle(*texts, *numbers, part=part))
    assert decode(encode(signed)) == signed
    assert verify(b"k" * 32, decode(encode(signed)))


def test_17_a_one_rank_is_on_the_wire_what_it_was():
    """A worker of a build without ranks parses it, and the other way round."""
    signed = sign(b"k" * 32, SlabHandle("p0", "life1", "att", 0, 1, 0, 16, 0, 2, 7, 1000, 5, 99, group=1))
    raw = encode(signed)
    assert hashlib.sha256(raw).hexdigest() == "b163138a12e9f8ab6ac4960b32e796f8326c8083eec7941b67ccc159770fd04e"
    assert handle_to_proto(signed).SerializeToString() == handle_to_proto(replace(signed, part=0)).SerializeToString()
    assert len(encode(replace(signed, part=1))) == len(raw) + 12


@given(st.binary(max_size=2000))
def test_decode_of_anything_raises_value_error_at_worst(raw):
    with pytest.raises(ValueError):
        decode(raw)


@given(cut=st.integers(0, 400), flip=st.integers(0, 400))
def test_decode_of_a_damaged_handle_never_passes_for_another(cut, flip):
    signed = sign(b"k" * 32, SlabHandle("p0", "life1", "att", 0, 1, 0, 16, 0, 2, 7, 1000, 5, 99))
    raw = bytearray(encode(signed))
    raw[flip % len(raw)] ^= 1
    for damaged in (bytes(raw), encode(signed)[: cut % len(raw)], encode(signed) + b"x"):
        try:
            parsed = decode(damaged)
        except ValueError:
            continue
        assert not verify(b"k" * 32, parsed)


def test_refusals_are_typed():
    for reason in (Refusal.UNKNOWN, Refusal.STALE, Refusal.USED, Refusal.EXPIRED):
        assert isinstance(refusal_error(reason, "p0"), StaleReferenceError)
    for reason in (Refusal.FORGED, Refusal.OUT_OF_RANGE, Refusal.MALFORMED, Refusal.UNUSABLE):
        error = refusal_error(reason, "p0")
        assert isinstance(error, TransferError)
        assert reason.name in str(error)
