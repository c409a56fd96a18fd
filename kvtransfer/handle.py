"""A handle names one slab of a prefill worker and what lies in it. Made and checked by prefill; used once."""

from __future__ import annotations

from dataclasses import dataclass


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
    mac: bytes = b""
