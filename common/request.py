"""The prompt of a request: the one value that travels from the router to the engine, beside its SamplingParams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Prompt:
    """What, besides the model, decides the KV of a prompt. Never changed once made; it is not frozen because making one
    would take three times as long.

    Args:
        token_ids: at least one id, all below the vocabulary size.
        cache_salt: of the identities of its blocks, derived from the tenant.
        adapter: name of a LoRA adapter; "": none.
        media: what its image, audio and video tokens stand for.

    No API gives an adapter or media yet: the wire has no field for them and an engine refuses them (InvalidRequestError).
    """

    token_ids: Sequence[int]
    cache_salt: bytes = b""
    adapter: str = ""
    media: tuple[bytes, ...] = ()
