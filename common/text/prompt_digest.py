"""A digest of the tokens that a range of KV was computed from; decode compares it with the tokens that it requested.

The digest of block i covers the digest of block i - 1 and the tokens of block i. So the last digest covers every token
and its position.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from blake3 import blake3

DIGEST_BYTES = 16
_DOMAIN = b"diptych computed tokens v1"


def block_digest(before: bytes, token_ids: Sequence[int]) -> bytes:
    """DIGEST_BYTES bytes. `before`: the digest of the previous block; empty for the first. `token_ids`: those of this
    block, each below 2**32."""
    return blake3(b"".join((_DOMAIN, before, array("I", token_ids).tobytes()))).digest(DIGEST_BYTES)


def prompt_digest(token_ids: Sequence[int], block_size: int) -> bytes:
    """The digest of all tokens, where the last block may be partial; empty without tokens. O(len(token_ids))."""
    digest = b""
    for first in range(0, len(token_ids), block_size):
        digest = block_digest(digest, token_ids[first : first + block_size])
    return digest
