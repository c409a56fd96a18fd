"""The file of one block: its name, its head, and what is not taken for it. Pure.

KEY-INDEX     64 bytes of head, then the block as it lies in the pool of each KV group, or of each rank
.KEY          is being written
"""

from __future__ import annotations

import errno
import re
import struct
from collections.abc import Iterable, Sequence

import xxhash
from blake3 import blake3

from diptych.engine.disk_messages import DiskBlock

_HEAD = struct.Struct("<8s16s16sQ16s")
"""Magic, identity, key, bytes of the block, checksum."""
HEAD_BYTES = _HEAD.size
_MAGIC = b"DIPTYKV1"
_NAME = re.compile(r"([0-9a-f]{32})-(\d{1,9})")
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}")
MISSING = "missing"
PROBE = "0" * 32
"""Tenant of blocks that are written to measure a disk."""
_NEAR_S = 60.0
"""Uses within this time count as one: the last block of a prompt leaves first, not the first one, which is older."""


class BadBlockError(Exception):
    """The file is no whole block of this worker. `reason`: missing, truncated, foreign, corrupt, or an errno's name."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def identity_of(*parts: str | bytes | int) -> bytes:
    """16 bytes over everything that decides the bytes of a block with a given key."""
    state = blake3(b"diptych disk identity v1")
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode()
        state.update(len(raw).to_bytes(4, "little"))
        state.update(raw)
    return state.digest(16)


def why(error: OSError) -> str:
    """The errno's name."""
    return errno.errorcode.get(error.errno or 0, "EIO")


# ---- names ----


def name_of(block: DiskBlock) -> str:
    return f"{block.key.hex()}-{block.index}"


def unfinished_name(block: DiskBlock) -> str:
    return f".{block.key.hex()}"


def block_named(name: str, tenant: str) -> DiskBlock | None:
    """None: it is no block's name."""
    found = _NAME.fullmatch(name)
    return None if found is None else DiskBlock(bytes.fromhex(found[1]), tenant, int(found[2]))


def is_ours(name: str) -> bool:
    """Of a block, whole or unfinished."""
    return bool(_NAME.fullmatch(name) or _UNFINISHED.fullmatch(name))


def last_leaves_first(found: Iterable[tuple[float, DiskBlock]]) -> tuple[DiskBlock, ...]:
    """Blocks in the order of their uses. Args: found: time of its last use in seconds, and a block."""
    ordered = sorted(found, key=lambda one: (-(one[0] // _NEAR_S), one[1].index))
    return tuple(block for _, block in ordered)


def one_of_each_key(blocks: Iterable[DiskBlock]) -> tuple[tuple[DiskBlock, ...], tuple[DiskBlock, ...]]:
    """The first one of every key, and the others: the same key under another index, or of another tenant."""
    first: dict[bytes, DiskBlock] = {}
    others = []
    for block in blocks:
        if first.setdefault(block.key, block) is not block:
            others.append(block)
    return tuple(first.values()), tuple(others)


# ---- content ----


def head_of(identity: bytes, key: bytes, pieces: Sequence[memoryview]) -> bytes:
    """HEAD_BYTES. Args: pieces: of the block."""
    head = bytearray(_HEAD.pack(_MAGIC, identity, key, sum(map(len, pieces)), bytes(16)))
    head[-16:] = _checksum(memoryview(head), pieces)
    return bytes(head)


def check_size(num_bytes: int, block_bytes: int) -> None:
    """Args: num_bytes: of the file. Raises: BadBlockError: the file is too short, or too long."""
    if num_bytes != HEAD_BYTES + block_bytes:
        raise BadBlockError("truncated")


def check_content(head: memoryview, pieces: Sequence[memoryview], identity: bytes, key: bytes) -> None:
    """Raises: BadBlockError: this is not the block with this key of this identity."""
    magic, its_identity, its_key, num_bytes, checksum = _HEAD.unpack_from(head)
    if (magic, its_identity, its_key, num_bytes) != (_MAGIC, identity, key, sum(map(len, pieces))):
        raise BadBlockError("foreign")
    if _checksum(head, pieces) != checksum:
        raise BadBlockError("corrupt")


def _checksum(head: memoryview, pieces: Sequence[memoryview]) -> bytes:
    """Over the head without its checksum, and the block."""
    state = xxhash.xxh3_128(head[:-16])
    for piece in pieces:
        state.update(piece)
    return state.digest()
