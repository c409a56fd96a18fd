"""The prompt of a request, passed from the router to the engine beside its SamplingParams."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

ADAPTER = "adapter"
"""The field's name among those that workers announce."""
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
