"""The prompt of a request, passed from the router to the engine beside its SamplingParams."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

ADAPTER = "adapter"
"""The field's name among those that workers announce."""
ADAPTER_FOLDER = "adapter_folder"
"""The same: an adapter is named by its id, and the worker loads it from this folder where it lacks it."""
ADAPTER_ID_LENGTH = 32
"""Hexadecimal digits."""
CHOICE = "choice"
"""The same: the number of the choice that an attempt continues."""
RESUME = "resume"
"""The same: a decode worker keeps attempts whose stream broke, and takes Command.resume."""
IDEMPOTENCY = "idempotency"
"""The same: a decode worker finds what it keeps by the hash of an idempotency key (Decode.Find)."""


class Prompt(msgspec.Struct, frozen=True):
    """Everything besides the model that determines the KV of a prompt.

    Args:
        token_ids: at least one id, all below the vocabulary size.
        cache_salt: of the identities of its blocks, derived from the tenant.
        adapter: id of a LoRA adapter, a hash of its content (common/adapters/peft.py); "": none. Names of adapters are known
            to the router only.
        media: identities of its image, audio and video tokens.

    No API sets media yet: they have no field in messages, and are rejected.
    """

    token_ids: Sequence[int]
    cache_salt: bytes = b""
    adapter: str = ""
    media: tuple[bytes, ...] = ()


def is_adapter_id(value: str) -> bool:
    return len(value) == ADAPTER_ID_LENGTH and not value.strip("0123456789abcdef")


MAX_CACHE_TTL_S = 86_400.0 * 365
MAX_CACHE_PRIORITY = 100
DEFAULT_CACHE_PRIORITY = 50
SESSION_BYTES = 16


class CacheClaim(msgspec.Struct, frozen=True):
    """What a request asks of the caches that hold its KV: to keep it rather than other KV. A worker that needs the room evicts
    it all the same (docs/decisions/retention.md).

    Args:
        ttl_s: seconds after the end of the request; above 0.
        priority: 0 to MAX_CACHE_PRIORITY; of two claims the lower is evicted first.
        session: SESSION_BYTES that name tenant and session; empty: none.
        rank: of the tenant, for metrics.
    """

    ttl_s: float
    priority: int = DEFAULT_CACHE_PRIORITY
    session: bytes = b""
    rank: int = 0
