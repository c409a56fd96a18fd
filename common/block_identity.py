"""Identity of a KV block; router and workers share this implementation.

The key of block i is a 16-byte digest: keyed blake3 over a header and all tokens up to the end of block i. The header
holds everything besides the tokens that determines the KV: domain tag, model revision, tokenizer and template revision,
KV dtype, block size, adapter, tenant salt. Each is length-prefixed, so two different headers never collide.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from blake3 import blake3

KEY_BYTES = 16
_DOMAIN = b"diptych kv block v1"


@dataclass(frozen=True, slots=True)
class IdentityHeader:
    """Everything besides the tokens that determines the content of a KV block.

    `key` is 32 bytes, derived from the cluster secret; `salt` is derived from the tenant by the router.
    """

    key: bytes
    model_revision: str
    tokenizer_revision: str
    kv_dtype: str
    block_size: int
    adapter: str = ""
    salt: bytes = b""
    _hash: int = field(init=False, repr=False, compare=False)
    """Cached: headers are hashed several times a request."""

    def __post_init__(self) -> None:
        if len(self.key) != 32:
            raise ValueError(f"key has {len(self.key)} bytes, not 32")
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size}: must be at least 1")
        names = (self.model_revision, self.tokenizer_revision, self.kv_dtype, self.adapter)
        object.__setattr__(self, "_hash", hash((self.key, *names, self.block_size, self.salt)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def opening(self) -> bytes:
        """The bytes that are hashed before the tokens."""
        return _opening(self)

    def with_salt(self, salt: bytes) -> IdentityHeader:
        if salt == self.salt:
            return self
        return IdentityHeader(
            self.key, self.model_revision, self.tokenizer_revision, self.kv_dtype, self.block_size, self.adapter, salt
        )


@lru_cache(8192)
def _opening(header: IdentityHeader) -> bytes:
    parts = (
        _DOMAIN,
        header.model_revision.encode(),
        header.tokenizer_revision.encode(),
        header.kv_dtype.encode(),
        header.block_size.to_bytes(4, "little"),
        header.adapter.encode(),
        header.salt,
    )
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


@lru_cache(1024)
def _header_hash(header: IdentityHeader) -> Any:
    """The hash state after the header; copy it before use."""
    return blake3(_opening(header), key=header.key)


class BlockHasher:
    """Running hash of one request's tokens, appended in order. Each full block adds a key."""

    def __init__(self, header: IdentityHeader) -> None:
        self._block_size = header.block_size
        self._state = _header_hash(header).copy()
        self._partial = array("I")
        self.keys: list[bytes] = []
        """Keys of all full blocks so far, KEY_BYTES each."""

    @property
    def num_tokens(self) -> int:
        return len(self.keys) * self._block_size + len(self._partial)

    def update(self, token_ids: Sequence[int]) -> None:
        """Append tokens (each below 2**32). O(len(token_ids))."""
        self._partial.extend(token_ids)
        size = self._block_size
        full = len(self._partial) // size
        if not full:
            return
        raw = memoryview(self._partial.tobytes())
        step = size * self._partial.itemsize
        feed, digest, append = self._state.update, self._state.digest, self.keys.append
        for start in range(0, full * step, step):
            feed(raw[start : start + step])
            append(digest(KEY_BYTES))
        del self._partial[: full * size]


def block_keys(header: IdentityHeader, token_ids: Sequence[int]) -> list[bytes]:
    """Keys of all full blocks of `token_ids`, in order."""
    hasher = BlockHasher(header)
    hasher.update(token_ids)
    return hasher.keys


def golden_key(header: IdentityHeader) -> bytes:
    """The key of the tokens 0 .. 2*block_size-1 without a salt; compared when a worker joins."""
    return block_keys(header.with_salt(b""), range(2 * header.block_size))[-1]
