import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.store.codec import (
    BadRowError,
    decode_event,
    decode_pending,
    decode_record,
    encode_event,
    encode_pending,
    encode_record,
)
from diptych.common.store.interface import KvEvent
from diptych.common.store.worker_record import GpuLoad, WorkerLoad
from diptych.common.tiers import TierState
from diptych_tests.records import worker_record

RECORD = worker_record(
    compat={"x": "y"},
    event_epoch=3,
    max_loras=8,
    max_lora_rank=16,
    tensor_parallel=2,
    pipeline=3,
    nodes=2,
    load=WorkerLoad(
        prefill_tokens_per_s=3.5,
        link_bytes_per_s={"p1": 2.0},
        gpu=GpuLoad(0.5, 0.1, 300.0, 1e9, ("hw_thermal",)),
        adapters={"0f" * 16: 2},
    ),
)
EVENT = KvEvent("a", 1, 2, "stored", (bytes(16), b"x" * 16))


def test_round_trip():
    assert decode_record(encode_record(RECORD)) == RECORD
    assert decode_event(encode_event(EVENT)) == EVENT
    far = KvEvent("a", 1, 2, "stored", (bytes(16),), "host")
    assert decode_event(encode_event(far)) == far
    plain = encode_event(EVENT)
    del plain[b"t"]  # as a worker without tiers writes it
    assert decode_event(plain) == EVENT


def test_pending_rows():
    row = {"p0": (100, 2), "d0": (0, 1)}
    assert decode_pending({name.encode(): raw for name, raw in encode_pending(row).items()}) == row


@pytest.mark.parametrize(
    "fields",
    [
        {b"p0": b"1"},
        {b"p0": b"1 -1"},
        {b"p0": b"x 1"},
        {b"../p": b"1 1"},
        {b"\xff": b"1 1"},
        {b"p%d" % i: b"1 1" for i in range(1025)},
    ],
)
def test_broken_pending_rows_are_refused(fields):
    with pytest.raises(BadRowError):
        decode_pending(fields)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"worker_id": "../p0"}, "worker_id"),
        ({"worker_id": ""}, "worker_id"),
        ({"incarnation": "a" * 129}, "incarnation"),
        ({"role": "router"}, "role"),
        ({"state": "dead"}, "state"),
        ({"address": "127.0.0.1"}, "address"),
        ({"address": "a b:1"}, "address"),
        ({"block_size": 0}, "block_size"),
        ({"kv_bytes_per_token": -1}, "kv_bytes_per_token"),
        ({"num_blocks": 2**60}, "num_blocks"),
        ({"tiers": (TierState("device", -1),)}, "event_sequence"),
        ({"tiers": (TierState("host", num_bytes=-1),)}, "num_bytes"),
        ({"tiers": (TierState("a/b"),)}, "tiers"),
        ({"tiers": (TierState("host"), TierState("host"))}, "tiers"),
        ({"tiers": (TierState("host", bytes_per_s=float("inf")),)}, "record|rate"),
        ({"load": WorkerLoad(num_running=-1)}, "num_running"),
        ({"load": WorkerLoad(decode_step_s=-0.1)}, "rate"),
        ({"load": WorkerLoad(gpu=GpuLoad(busy=-0.1))}, "rate"),
        ({"load": WorkerLoad(gpu=GpuLoad(throttled=("x",) * 17))}, "load.gpu.throttled"),
        ({"load": WorkerLoad(gpu=GpuLoad(throttled=("x" * 65,)))}, "load.gpu.throttled"),
        ({"max_loras": -1}, "max_loras"),
        ({"max_lora_rank": 2**60}, "max_lora_rank"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"pipeline": 2**60}, "pipeline"),
        ({"nodes": 0}, "nodes"),
        ({"load": WorkerLoad(adapters={"french": 1})}, "load.adapters"),
        ({"load": WorkerLoad(adapters={"0f" * 16: -1})}, "load.adapters"),
        ({"load": WorkerLoad(adapters={f"{i:032x}": 0 for i in range(1025)})}, "load.adapters"),
    ],
)
def test_values_that_make_no_sense_are_refused(change, field):
    with pytest.raises(BadRowError, match=field):
        decode_record(encode_record(msgspec.structs.replace(RECORD, **change)))


def test_a_tier_of_another_version_costs_nothing_but_itself():
    tiers = (TierState("device", 7), TierState("tape", 9, 5, 2.0), TierState("host", 8, 3, 1.0))
    record = decode_record(encode_record(msgspec.structs.replace(RECORD, tiers=tiers)))
    assert record.event_sequences[:2] == (7, 8)


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"\xff", b"[" * 5000, b"1" * 100_000, b'{"worker_id": 1}'])
def test_junk_is_refused(raw):
    with pytest.raises(BadRowError):
        decode_record(raw)


@given(st.binary(max_size=300))
def test_no_bytes_do_worse_than_a_refusal(raw):
    with pytest.raises(BadRowError):
        decode_record(raw)


@given(st.dictionaries(st.sampled_from([b"i", b"e", b"s", b"k", b"b", b"z"]), st.binary(max_size=40)))
def test_no_event_does_worse_than_a_refusal(fields):
    try:
        event = decode_event(fields)
    except BadRowError:
        return
    assert event.kind in ("stored", "evicted", "cleared")


@pytest.mark.parametrize(
    "change",
    [
        {b"b": b"x" * 15},
        {b"e": b"-1"},
        {b"s": b"1" * 17},
        {b"k": b"boom"},
        {b"t": b"tape"},
        {b"i": b"\xff"},
        {b"b": b"x" * 16 * 9000},
    ],
)
def test_broken_events_are_refused(change):
    with pytest.raises(BadRowError):
        decode_event(encode_event(EVENT) | change)
