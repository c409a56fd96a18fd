"""The prompt of a request, passed from the router to the engine beside its SamplingParams."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

ADAPTER = "adapter"
"""The field's name among those that workers announce."""
ADAPTER_FOLDER = "adapter_folder"
"""The same: an adapter is named by its id, and the worker loads it from this folder where it lacks it."""
CHOICE = "choice"
"""The same: the number of the choice that an attempt continues."""
RESUME = "resume"
"""The same: a decode worker keeps attempts whose stream broke, and takes Command.resume."""


class Prompt(msgspec.Struct, frozen=True):
    """Everything besides the model that determines the KV of a prompt.

    Args:
        token_ids: at least one id, all below the vocabulary size.
        cache_salt: of the identities of its blocks, derived from the tenant.
        adapter: name of a LoRA adapter; "": none.
        media: identities of its image, audio and video tokens.

    No API sets an adapter or media yet. An adapter travels to the runner; the router and the engine reject one that they do
    not know (InvalidRequestError, from block_identity.header_of_request). Media have no field in messages, and are rejected.
    """

    token_ids: Sequence[int]
    cache_salt: bytes = b""
    adapter: str = ""
    media: tuple[bytes, ...] = ()


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
