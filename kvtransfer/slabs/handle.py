"""A handle names one slab of a prefill worker and what lies in it. Made and checked by prefill; used once.

The MAC is keyed blake3 over a canonical encoding of all other fields: a domain tag, then every field with its length in
front, so that no two handles share an encoding. The key is drawn at start and never leaves the process: a handle of
another life cannot verify.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum

from blake3 import blake3

from diptych.common.errors import DiptychError, StaleReferenceError, TransferError

KEY_BYTES = 32
MAC_BYTES = 32
MAX_TEXT_BYTES = 256
MAX_ENCODED_BYTES = 1500
_DOMAIN = b"diptych slab handle v2"
_RENEW = b"renew "
"""In front of a handle in a note: its slab is still wanted. A bare handle is an acknowledgement."""
_TEXT = ("worker_id", "incarnation", "attempt")
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class SlabHandle:
    """Fields as in proto SlabHandle. `mac` is keyed blake3 over all other fields, with a key private to the incarnation."""

    worker_id: str
    incarnation: str
    attempt: str
    slab: int
    generation: int
    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int
    layout_hash: int
    size_bytes: int
    checksum: int
    expires_ns: int
    mac: bytes = field(default=b"", repr=False)
    group: int = 0
    """Index of the KV group in the format of the part; layers count within it."""
    part: int = 0
    """Rank whose KV is in the slab, see common/kv_parts.py; 0 where there is one."""


_SIGNED = tuple(one.name for one in fields(SlabHandle) if one.name not in ("mac", "part"))
"""`part` is behind them, and only where it is not 0: a worker of one rank encodes what workers without parts do."""


class Refusal(IntEnum):
    """Why prefill does not answer a read with the slab. The numbers travel; never re-use one."""

    UNKNOWN = 1
    """No such slab is published: it was freed, or the handle names another worker."""
    STALE = 2
    """The slab (or the worker) has another generation (or incarnation) by now."""
    FORGED = 3
    """The MAC does not fit the fields."""
    USED = 4
    """The handle was read before."""
    OUT_OF_RANGE = 5
    """Slab number, size or layout are not ours."""
    EXPIRED = 6
    """The slab lease ran out."""
    MALFORMED = 7
    """The request does not parse."""
    UNUSABLE = 8
    """Too many slabs of this pair are quarantined."""


_STALE = frozenset({Refusal.UNKNOWN, Refusal.STALE, Refusal.USED, Refusal.EXPIRED})


def refusal_error(reason: Refusal, where: str) -> DiptychError:
    """The typed error of a refused handle: StaleReferenceError if it names another life of the slab, else TransferError."""
    cls = StaleReferenceError if reason in _STALE else TransferError
    return cls(f"{where} refused the handle: {reason.name}")


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def _text(value: str, name: str) -> bytes:
    raw = value.encode()
    if len(raw) > MAX_TEXT_BYTES:
        raise ValueError(f"{name} has {len(raw)} bytes, more than {MAX_TEXT_BYTES}")
    return raw


def _signed_bytes(handle: SlabHandle) -> bytes:
    parts = [_DOMAIN]
    for name in _SIGNED:
        value = getattr(handle, name)
        raw = _text(value, name) if name in _TEXT else _NUMBER.pack(value)
        parts += (_LENGTH.pack(len(raw)), raw)
    if handle.part:
        parts += (_LENGTH.pack(_NUMBER.size), _NUMBER.pack(handle.part))
    return b"".join(parts)


def sign(key: bytes, handle: SlabHandle) -> SlabHandle:
    """The handle with its MAC. Raises: ValueError, struct.error if a field is out of its encoding's range."""
    return replace(handle, mac=blake3(_signed_bytes(handle), key=key).digest(MAC_BYTES))


def verify(key: bytes, handle: SlabHandle) -> bool:
    """True if this process signed exactly these fields. In constant time."""
    try:
        expected = blake3(_signed_bytes(handle), key=key).digest(MAC_BYTES)
    except (ValueError, struct.error):
        return False
    return hmac.compare_digest(expected, handle.mac)


def encode(handle: SlabHandle) -> bytes:
    """Bytes for a request message; at most MAX_ENCODED_BYTES."""
    return _signed_bytes(handle) + _LENGTH.pack(len(handle.mac)) + handle.mac


def encode_renewal(handle: SlabHandle) -> bytes:
    """A note that the slab is still wanted."""
    return _RENEW + encode(handle)


def decode_note(raw: bytes) -> tuple[SlabHandle, bool]:
    """The handle that a note names, and whether it asks for a renewal (else it acknowledges). Raises: ValueError."""
    renewal = raw.startswith(_RENEW)
    return decode(raw[len(_RENEW) :] if renewal else raw), renewal


def decode(raw: bytes) -> SlabHandle:
    """Parse what anybody may have sent. Raises: ValueError."""
    if len(raw) > MAX_ENCODED_BYTES or not raw.startswith(_DOMAIN):
        raise ValueError("not a slab handle")
    at = len(_DOMAIN)
    values: dict[str, str | int | bytes] = {}
    for name in (*_SIGNED, "mac or part", "mac"):
        if name == "mac" and "mac" in values:
            break
        if at + _LENGTH.size > len(raw):
            raise ValueError("slab handle is cut")
        (length,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size
        piece = raw[at : at + length]
        if length > MAX_TEXT_BYTES or len(piece) != length:
            raise ValueError("slab handle is cut")
        at += length
        if name == "mac or part":
            # A MAC has another length; part 0 is never encoded.
            name = "part" if length == _NUMBER.size and piece != bytes(_NUMBER.size) else "mac"
        if name == "mac":
            values[name] = piece
        elif name in _TEXT:
            values[name] = piece.decode()
        elif length == _NUMBER.size:
            values[name] = _NUMBER.unpack(piece)[0]
        else:
            raise ValueError(f"{name} has {length} bytes")
    if at != len(raw):
        raise ValueError("slab handle has bytes behind its end")
    return SlabHandle(**values)  # type: ignore[arg-type]
