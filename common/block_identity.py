"""Identity of a KV block; router and workers share this implementation.

The key at a token position is a 16-byte digest: keyed blake3 over a header and all tokens before that position. A
block's key is the key at its end, so workers with blocks of 16 and 32 tokens have equal keys at every multiple of 32.

The header holds everything besides the tokens that determines the *values* of the KV: content of the weights, their
method, dtype of the computation, dtype and scales of the KV, version of the numerics, tokenizer, adapter, tenant salt.
Each part is length-prefixed, so two different headers never share an encoding. The memory layout of the KV (block size,
order of dimensions, shard) is not part of it: it is in the layout digest of a handle.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from blake3 import blake3

from diptych.common.errors import InvalidRequestError
from diptych.common.request import Prompt, is_adapter_id

KEY_BYTES = 16
IDENTITY_FACTS = ("model_revision", "kv_rule", "method", "compute_dtype", "attention_version", "backend")
"""Fields of a worker's lease from which its keys are computed."""
GOLDEN = "block_identity_golden"
"""The fact that is computed from the others and the cluster secret: see golden_key."""
_DOMAIN = b"diptych kv block v2"
GOLDEN_TOKENS = 512
"""Position of the golden key."""


@dataclass(frozen=True, slots=True)
class IdentityHeader:
    """Everything besides the tokens that determines the content of a KV block.

    Args:
        key: 32 bytes, derived from the cluster secret.
        model_revision: fingerprint of the content of weights and configuration.
        kv_rule: dtype, scales and windows of the KV by layer (`KvFormat.value_rule`).
        block_size: tokens between two keys; not part of the identity.
        adapter: id of the adapter, which is a hash of its content (common/request.py); empty: none.
        salt: derived from the tenant by the router.
        method: of the weights: plain, or the quantization method.
        compute_dtype: of weights and activations.
        attention_version, backend: kernels that compute the layers, and their version.
    """

    key: bytes = field(repr=False)
    model_revision: str
    tokenizer_revision: str
    kv_rule: str
    block_size: int
    adapter: str = ""
    salt: bytes = b""
    method: str = "plain"
    compute_dtype: str = ""
    attention_version: str = ""
    backend: str = ""
    _hash: int = field(init=False, repr=False, compare=False)
    """Cached: headers are hashed several times a request."""

    def __post_init__(self) -> None:
        if len(self.key) != 32:
            raise ValueError(f"key has {len(self.key)} bytes, not 32")
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size}: must be at least 1")
        object.__setattr__(self, "_hash", hash((self.key, self._values, self.block_size, self.salt)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def opening(self) -> bytes:
        """The bytes that are hashed before the tokens."""
        return _opening(self)

    @property
    def _values(self) -> tuple[str, ...]:
        return (
            self.model_revision, self.method, self.compute_dtype, self.kv_rule, self.attention_version, self.backend,
            self.adapter,
            self.tokenizer_revision,
        )  # fmt: skip


def header_of_request(header: IdentityHeader, prompt: Prompt) -> IdentityHeader:
    """The header of one request's blocks. Routers and workers name blocks by this function only, so that nothing of a
    prompt is left out at one of them.

    Args: header: the worker's.
    Raises: InvalidRequestError for an adapter that is no id, and for media: blocks of such prompts must not be taken for those of
        the same tokens without them.
    """
    if prompt.media:
        raise InvalidRequestError("blocks of a prompt with media have no identity yet", param="media")
    if prompt.adapter and not is_adapter_id(prompt.adapter):
        raise InvalidRequestError(f"{prompt.adapter!r} is no adapter's id", param="adapter")
    return _of_request(header, prompt.cache_salt, prompt.adapter)


@lru_cache(8192)
def _of_request(header: IdentityHeader, salt: bytes, adapter: str) -> IdentityHeader:
    if (salt, adapter) == (header.salt, header.adapter):
        return header
    return replace(header, salt=salt, adapter=adapter)


@lru_cache(8192)
def _opening(header: IdentityHeader) -> bytes:
    parts = (_DOMAIN, *(value.encode() for value in header._values), header.salt)
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
    """The key after tokens 0 .. GOLDEN_TOKENS-1 without a salt: compared when a worker joins. The same for every block size."""
    return block_keys(replace(header, salt=b"", block_size=GOLDEN_TOKENS), range(GOLDEN_TOKENS))[-1]


def identity_facts(header: IdentityHeader) -> dict[str, str]:
    """The header's fields in a worker's lease; `identity_of` is the inverse."""
    return {
        "model_revision": header.model_revision,
        "tokenizer_revision": header.tokenizer_revision,
        "kv_rule": header.kv_rule,
        "method": header.method,
        "compute_dtype": header.compute_dtype,
        "attention_version": header.attention_version,
        "backend": header.backend,
        "block_size": str(header.block_size),
        GOLDEN: golden_key(header).hex(),
    }


def identity_of(
    key: bytes, compat_facts: Mapping[str, str], *, block_size: int, tokenizer_revision: str = ""
) -> IdentityHeader | None:
    """The header of a worker from its facts (`compat.as_strings`); None if one is missing. `tokenizer_revision`:
    replaces the worker's."""
    if not all(name in compat_facts for name in IDENTITY_FACTS):
        return None
    return IdentityHeader(
        key=key,
        model_revision=compat_facts["model_revision"],
        tokenizer_revision=tokenizer_revision or compat_facts.get("tokenizer_revision", ""),
        kv_rule=compat_facts["kv_rule"],
        block_size=block_size,
        method=compat_facts["method"],
        compute_dtype=compat_facts["compute_dtype"],
        attention_version=compat_facts["attention_version"],
        backend=compat_facts["backend"],
    )
