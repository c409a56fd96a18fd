"""Rows of the store as bytes, and back. Rows are untrusted: every field is bounded."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import msgspec

from diptych.common.block_identity import KEY_BYTES
from diptych.common.request import is_adapter_id
from diptych.common.store.adapters import (
    MAX_FOLDER_CHARS,
    MAX_GONE,
    MAX_VERSIONS,
    AdapterEntry,
    AdapterVersion,
    is_adapter_name,
)
from diptych.common.store.interface import KvEvent, Pending
from diptych.common.store.worker_record import WorkerRecord
from diptych.common.tiers import DEVICE, TIER_NAMES

MAX_RECORD_BYTES = 64 * 1024
MAX_GONE_BYTES = 256 * 1024
MAX_KEYS_PER_EVENT = 8192
MAX_PENDING_WORKERS = 1024
MAX_KV_WINDOWS = 64
MAX_THROTTLED = 16
MAX_ADAPTERS = 1024
MAX_REASON_CHARS = 64
MAX_COUNT = 2**53
ROLES = ("prefill", "decode")
STATES = ("ready", "stalled", "draining")
EVENT_KINDS = ("stored", "evicted", "cleared")

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_ADDRESS = re.compile(r"[A-Za-z0-9.:_\[\]-]{1,255}:[0-9]{1,5}|unix:[^\x00-\x1f]{1,255}")
_decoder = msgspec.json.Decoder(WorkerRecord)
_adapter_decoder = msgspec.json.Decoder(AdapterEntry)
_gone_decoder = msgspec.json.Decoder(list[tuple[str, int]])


class BadRowError(ValueError):
    """A row of the store is invalid; the text names the field."""


def check_id(value: str, what: str = "worker_id") -> str:
    """Check an id; ids become part of keys and labels. Raises: BadRowError unless 1-128 letters, digits, `.`, `_`, `:`
    or `-`."""
    if not _ID.fullmatch(value):
        raise BadRowError(f"{what}: must be 1-128 letters, digits or ._:-")
    return value


def encode_record(record: WorkerRecord) -> bytes:
    return msgspec.json.encode(record)


def decode_record(raw: bytes) -> WorkerRecord:
    """Raises: BadRowError unless `raw` is a worker record with values in range."""
    if len(raw) > MAX_RECORD_BYTES:
        raise BadRowError(f"record: {len(raw)} bytes, more than {MAX_RECORD_BYTES}")
    try:
        record = _decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise BadRowError(f"record: {err}") from None
    check_id(record.worker_id)
    check_id(record.incarnation, "incarnation")
    if record.role not in ROLES:
        raise BadRowError(f"role: must be one of {ROLES}")
    if record.state not in STATES:
        raise BadRowError(f"state: must be one of {STATES}")
    if not _ADDRESS.fullmatch(record.address):
        raise BadRowError("address: must be host:port")
    for name, least in (
        ("pid", 0),
        ("kv_bytes_per_token", 0),
        ("num_blocks", 1),
        ("block_size", 1),
        ("max_model_len", 1),
        ("max_num_seqs", 1),
        ("event_epoch", 0),
        ("max_loras", 0),
        ("max_lora_rank", 0),
        ("tensor_parallel", 1),
        ("pipeline", 1),
        ("nodes", 1),
    ):
        if not least <= getattr(record, name) <= MAX_COUNT:
            raise BadRowError(f"{name}: out of range")
    if len({tier.name for tier in record.tiers}) != len(record.tiers):
        raise BadRowError("tiers: each must be there once")
    for tier in record.tiers:  # one that this version does not know is passed over by name
        check_id(tier.name, "tiers.name")
        for name in ("event_sequence", "num_bytes"):
            if not 0 <= getattr(tier, name) <= MAX_COUNT:
                raise BadRowError(f"tiers.{name}: out of range")
    if len(record.kv_windows) > MAX_KV_WINDOWS or not all(
        1 <= value <= MAX_COUNT for pair in record.kv_windows for value in pair
    ):
        raise BadRowError("kv_windows: out of range")
    load = record.load
    for name in ("num_running", "num_waiting", "waiting_prompt_tokens"):
        if not 0 <= getattr(load, name) <= MAX_COUNT:
            raise BadRowError(f"load.{name}: out of range")
    rates = [load.kv_usage, load.prefill_tokens_per_s, load.decode_step_s, load.prompt_step_s, load.poll_interval_s]
    rates += [*load.link_bytes_per_s.values(), *load.pull_overhead_s.values(), *(t.bytes_per_s for t in record.tiers)]
    if load.gpu is not None:
        rates += [load.gpu.busy, load.gpu.memory_usage, load.gpu.power_watts, load.gpu.sm_clock_hz]
        throttled = load.gpu.throttled
        if len(throttled) > MAX_THROTTLED or any(len(reason) > MAX_REASON_CHARS for reason in throttled):
            raise BadRowError("load.gpu.throttled: too long")
    if len(load.adapters) > MAX_ADAPTERS or not all(
        is_adapter_id(name) and 0 <= count <= MAX_COUNT for name, count in load.adapters.items()
    ):
        raise BadRowError(f"load.adapters: must be at most {MAX_ADAPTERS} ids with their requests")
    if not all(math.isfinite(rate) and rate >= 0.0 for rate in rates):
        raise BadRowError("load: a rate is negative or not finite")
    if not 0.0 <= record.leaves_in_s <= MAX_COUNT:
        raise BadRowError("leaves_in_s: out of range")
    return record


def encode_event(event: KvEvent) -> dict[bytes, bytes]:
    return {
        b"i": event.incarnation.encode(),
        b"e": b"%d" % event.epoch,
        b"s": b"%d" % event.sequence,
        b"k": event.kind.encode(),
        b"b": b"".join(event.keys),
        b"t": event.tier.encode(),
    }


def decode_event(fields: Mapping[bytes, bytes]) -> KvEvent:
    """Raises: BadRowError unless `fields` are an event with values in range."""
    try:
        incarnation = fields[b"i"].decode()
        epoch, sequence = _count(fields[b"e"], "epoch"), _count(fields[b"s"], "sequence")
        kind, blob = fields[b"k"].decode(), fields[b"b"]
        tier = fields.get(b"t", DEVICE.encode()).decode()
    except KeyError as err:
        raise BadRowError(f"event: field {err} is missing") from None
    except UnicodeDecodeError:
        raise BadRowError("event: not UTF-8") from None
    check_id(incarnation, "incarnation")
    if kind not in EVENT_KINDS:
        raise BadRowError(f"kind: must be one of {EVENT_KINDS}")
    if tier not in TIER_NAMES:
        raise BadRowError(f"tier: must be one of {TIER_NAMES}")
    if len(blob) % KEY_BYTES or len(blob) > MAX_KEYS_PER_EVENT * KEY_BYTES:
        raise BadRowError("keys: must be a bounded number of complete keys")
    keys = tuple(blob[i : i + KEY_BYTES] for i in range(0, len(blob), KEY_BYTES))
    return KvEvent(incarnation, epoch, sequence, kind, keys, tier)


def encode_pending(pending: Pending) -> dict[str, bytes]:
    return {worker_id: b"%d %d" % sums for worker_id, sums in pending.items()}


def decode_pending(fields: Mapping[bytes, bytes]) -> dict[str, tuple[int, int]]:
    """Raises: BadRowError unless `fields` are a row of sums in range."""
    if len(fields) > MAX_PENDING_WORKERS:
        raise BadRowError(f"pending: more than {MAX_PENDING_WORKERS} workers")
    found = {}
    for raw_id, raw in fields.items():
        tokens, _, requests = raw.partition(b" ")
        try:
            worker_id = check_id(raw_id.decode())
        except UnicodeDecodeError:
            raise BadRowError("pending: worker id is not UTF-8") from None
        found[worker_id] = (_count(tokens, "tokens"), _count(requests, "requests"))
    return found


def encode_adapter(entry: AdapterEntry) -> bytes:
    return msgspec.json.encode(entry)


def decode_adapter(name: str, raw: bytes) -> AdapterEntry:
    """Raises: BadRowError unless `raw` is this name's entry, with values in range and pointers to versions that it has."""
    if len(raw) > MAX_RECORD_BYTES:
        raise BadRowError(f"adapter: {len(raw)} bytes, more than {MAX_RECORD_BYTES}")
    try:
        entry = _adapter_decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise BadRowError(f"adapter: {err}") from None
    if entry.name != name or not is_adapter_name(name):
        raise BadRowError("adapter: names another one")
    if not 0 < len(entry.versions) <= MAX_VERSIONS:
        raise BadRowError("adapter.versions: out of range")
    for version in entry.versions:
        _check_version(version)
    if len({version.number for version in entry.versions}) != len(entry.versions):
        raise BadRowError("adapter.versions: two have one number")
    if not entry.has(entry.stable) or (entry.canary and not entry.has(entry.canary)):
        raise BadRowError("adapter.stable: there is no such version")
    if not 0.0 <= entry.canary_share <= 1.0:
        raise BadRowError("adapter.canary_share: out of range")
    return entry


def encode_gone(gone: Mapping[str, int]) -> bytes:
    return msgspec.json.encode(list(gone.items()))


def decode_gone(raw: bytes) -> dict[str, int]:
    """Raises: BadRowError unless `raw` is a list of adapters' names with the last numbers of their versions."""
    if len(raw) > MAX_GONE_BYTES:
        raise BadRowError(f"gone: {len(raw)} bytes, more than {MAX_GONE_BYTES}")
    try:
        gone = dict(_gone_decoder.decode(raw))
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise BadRowError(f"gone: {err}") from None
    if len(gone) > MAX_GONE or not all(is_adapter_name(name) for name in gone):
        raise BadRowError("gone: too many names, or one that is none")
    if not all(1 <= number <= MAX_COUNT for number in gone.values()):
        raise BadRowError("gone: a number is out of range")
    return gone


def _check_version(version: AdapterVersion) -> None:
    if not is_adapter_id(version.adapter_id):
        raise BadRowError("adapter.adapter_id: must be 32 hexadecimal digits")
    if not 0 < len(version.folder) <= MAX_FOLDER_CHARS:
        raise BadRowError("adapter.folder: empty or too long")
    if len(version.other_base) > MAX_FOLDER_CHARS or not version.other_base.isprintable():
        raise BadRowError("adapter.other_base: too long, or not printable")
    for name, least in (("number", 1), ("rank", 1), ("num_bytes", 0), ("created", 0)):
        if not least <= getattr(version, name) <= MAX_COUNT:
            raise BadRowError(f"adapter.{name}: out of range")


def _count(raw: bytes, what: str) -> int:
    if not raw.isdigit() or len(raw) > 16:
        raise BadRowError(f"{what}: must be a number of at most 16 digits")
    return int(raw)
