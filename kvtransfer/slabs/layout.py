"""What lies in a slab, and the arithmetic of the ring.

    | header, 128 bytes | payload, size_bytes | trailer, 32 bytes |
    magic, version, kind, attempt digest, generation, size, checksum, layout hash, token range, group, layers, part
                                             magic, attempt digest, generation

Header and trailer name the same life of the slab: a message that is cut, mixed from two lives or late shows. A refusal is
a message that is a header alone, of another kind.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

import numpy as np
import xxhash
from blake3 import blake3

from diptych.common.compat import Compat
from diptych.common.errors import ConfigError, DiptychError, TransferError
from diptych.common.shared_memory import SharedArea
from diptych.engine.messages import Payload
from diptych.kvtransfer.slabs.handle import Refusal, SlabHandle, refusal_error

HEADER_BYTES = 128
TRAILER_BYTES = 32
VERSION = 2
_MAGIC = b"DKVs"
_END = b"DKVe"
_KIND_SLAB, _KIND_REFUSAL = 1, 2
_DIGEST_BYTES = 16
_HEADER = struct.Struct("<4sHH16sQQQQIIIIII")
_TRAILER = struct.Struct("<4s4x16sQ")


def layout_hash(compat: Compat) -> int:
    """64 bits over everything that decides how bytes of KV are read and what they mean. Equal on both sides, or the slab is
    refused."""
    return compat.kv.layout_digest(
        compat.model, compat.model_revision, compat.method, compat.compute_dtype, compat.attention_version,
        compat.backend, compat.protocol_version, *(part.layout_digest() for part in compat.kv_parts),
    )  # fmt: skip


def attempt_digest(attempt: str) -> bytes:
    return blake3(attempt.encode()).digest(_DIGEST_BYTES)


def payload_capacity(slab_bytes: int) -> int:
    """Payload bytes that fit into a slab of `slab_bytes`."""
    return slab_bytes - HEADER_BYTES - TRAILER_BYTES


def message_bytes(size_bytes: int) -> int:
    """Bytes on the wire for a payload of `size_bytes`."""
    return HEADER_BYTES + size_bytes + TRAILER_BYTES


@dataclass(frozen=True, slots=True)
class RingSpec:
    """Sizes of a staging ring. Raises: ConfigError."""

    num_slabs: int
    slab_bytes: int

    def __post_init__(self) -> None:
        if self.num_slabs < 1:
            raise ConfigError("num_slabs", self.num_slabs, "must be at least 1")
        if self.slab_bytes % mmap.PAGESIZE or payload_capacity(self.slab_bytes) < 1:
            raise ConfigError("slab_bytes", self.slab_bytes, f"must be a positive multiple of {mmap.PAGESIZE}")

    @property
    def total_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes


@dataclass(frozen=True, slots=True)
class SlabQuotas:
    """Parts of one arena: slabs to publish from, and slabs to read into. Neither waits for the other. 0: the worker does not do
    this. Raises: ConfigError."""

    publish: int
    read: int

    def __post_init__(self) -> None:
        if min(self.publish, self.read) < 0 or not self.total:
            raise ConfigError("num_slabs", (self.publish, self.read), "must be 0 or more each, and not both 0")

    @property
    def total(self) -> int:
        return self.publish + self.read


class Ring:
    """One page-aligned allocation, cut into slabs. Never moves and never shrinks while the worker lives. Other processes of the
    worker can map it: ranks write their KV into slabs, and read it there."""

    verifies_later = False
    """True: a received payload is summed where it is unpacked, not when it arrives (kvtransfer/gpu/ring.py)."""

    def __init__(self, spec: RingSpec) -> None:
        self.spec = spec
        self._area = SharedArea(spec.total_bytes)
        self.array = np.frombuffer(self._area.memory, dtype=np.uint8)
        self._view = memoryview(self._area.memory)

    def slab(self, index: int) -> memoryview:
        """All bytes of a slab, writable."""
        start = index * self.spec.slab_bytes
        return self._view[start : start + self.spec.slab_bytes]

    def received(self, index: int, handle: SlabHandle, *, verify: bool) -> Payload:
        """The payload of a slab that was read; `verify`: check its sum when it is unpacked, if the ring verifies later."""
        return self.slab(index)[HEADER_BYTES : HEADER_BYTES + handle.size_bytes]

    def payload(self, index: int) -> Payload:
        """The payload part, payload_capacity() bytes, writable."""
        return self.slab(index)[HEADER_BYTES : self.spec.slab_bytes - TRAILER_BYTES]

    def message(self, index: int, size_bytes: int) -> np.ndarray:
        """The slab's first message_bytes(size_bytes) bytes, as the transport sends or receives them."""
        start = index * self.spec.slab_bytes
        return self.array[start : start + message_bytes(size_bytes)]


def write_frame(slab: memoryview, handle: SlabHandle) -> None:
    """Write header and trailer around a payload of handle.size_bytes. The slab may be announced only afterwards."""
    digest = attempt_digest(handle.attempt)
    _HEADER.pack_into(
        slab, 0, _MAGIC, VERSION, _KIND_SLAB, digest, handle.generation, handle.size_bytes, handle.checksum,
        handle.layout_hash, handle.first_token, handle.num_tokens, handle.group, handle.first_layer, handle.num_layers,
        handle.part,
    )  # fmt: skip
    _TRAILER.pack_into(slab, HEADER_BYTES + handle.size_bytes, _END, digest, handle.generation)


def frame_generation(slab: memoryview) -> int:
    """Generation in the header of a slab whose frame is written."""
    return int(_HEADER.unpack_from(slab, 0)[4])


def clear_frame(slab: memoryview, size_bytes: int) -> None:
    """Before a receive: nothing of the slab's last life may pass for an answer."""
    slab[:HEADER_BYTES] = bytes(HEADER_BYTES)
    end = HEADER_BYTES + size_bytes
    slab[end : end + TRAILER_BYTES] = bytes(TRAILER_BYTES)


def refusal_message(reason: Refusal) -> bytes:
    """The answer to a read that is not granted: HEADER_BYTES bytes."""
    head = _HEADER.pack(_MAGIC, VERSION, _KIND_REFUSAL, bytes(_DIGEST_BYTES), int(reason), 0, 0, 0, 0, 0, 0, 0, 0, 0)
    return head.ljust(HEADER_BYTES, b"\0")


def read_refusal(slab: memoryview) -> Refusal | None:
    """The reason, if what was received is a refusal."""
    magic, version, kind, _, code, *_ = _HEADER.unpack_from(slab, 0)
    if magic != _MAGIC or version != VERSION or kind != _KIND_REFUSAL:
        return None
    try:
        return Refusal(code)
    except ValueError:
        return Refusal.MALFORMED


def check_slab(slab: memoryview, handle: SlabHandle, *, verify_checksum: bool = True) -> DiptychError | None:
    """What is wrong with a received slab; None: it is exactly what `handle` names.

    Args:
        slab: at least message_bytes(handle.size_bytes) bytes.
        verify_checksum: False only in tests that must see damaged KV downstream.
    """
    refused = read_refusal(slab)
    if refused is not None:
        return refusal_error(refused, handle.worker_id)
    magic, version, kind, digest, generation, size, checksum, layout, first, num, *part = _HEADER.unpack_from(slab, 0)
    expected = attempt_digest(handle.attempt)
    end, end_digest, end_generation = _TRAILER.unpack_from(slab, HEADER_BYTES + handle.size_bytes)
    for name, got, want in (
        ("magic", magic, _MAGIC),
        ("version", version, VERSION),
        ("kind", kind, _KIND_SLAB),
        ("attempt", digest, expected),
        ("generation", generation, handle.generation),
        ("size", size, handle.size_bytes),
        ("checksum field", checksum, handle.checksum),
        ("layout", layout, handle.layout_hash),
        ("token range", (first, num), (handle.first_token, handle.num_tokens)),
        ("group, layers and part", part, [handle.group, handle.first_layer, handle.num_layers, handle.part]),
        ("trailer", end, _END),
        ("trailer attempt", end_digest, expected),
        ("trailer generation", end_generation, handle.generation),
    ):
        if got != want:
            return TransferError(f"slab {handle.slab} of {handle.worker_id} is damaged: {name}")
    if verify_checksum:
        found = xxhash.xxh3_64_intdigest(slab[HEADER_BYTES : HEADER_BYTES + handle.size_bytes])
        if found != handle.checksum:
            return TransferError(
                f"slab {handle.slab} of {handle.worker_id} is damaged: checksum {found:016x}, not {handle.checksum:016x}"
            )
    return None
