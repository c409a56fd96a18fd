"""What tokens a stretch of KV was computed from, as one digest: decode compares it with what it asked for.

The digest of block i is that of block i - 1's digest and the tokens of block i, so that the last one tells of every token, its
place, and of the blocks that it was computed behind.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from blake3 import blake3

DIGEST_BYTES = 16
_DOMAIN = b"diptych computed tokens v1"


def block_digest(before: bytes, token_ids: Sequence[int]) -> bytes:
    """DIGEST_BYTES. `before`: the digest of the block before it, empty for the first; `token_ids`: those of this block, each
    below 2**32."""
    return blake3(b"".join((_DOMAIN, before, array("I", token_ids).tobytes()))).digest(DIGEST_BYTES)


def prompt_digest(token_ids: Sequence[int], block_size: int) -> bytes:
    """Of all tokens, the last block maybe not full; empty without tokens. O(len(token_ids))."""
    digest = b""
    for first in range(0, len(token_ids), block_size):
        digest = block_digest(digest, token_ids[first : first + block_size])
    return digest
