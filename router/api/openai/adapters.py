"""Bodies of the routes that load and unload adapters, as vLLM has them, and of those that route between versions.

They change what answers, so a field that nothing here reads is refused: a misspelt `canary_share` would be 0.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from diptych.common.store.adapters import AdapterEntry, AdapterVersion


class _OfAdapter(BaseModel):
    """Body of a request about one adapter."""

    model_config = ConfigDict(strict=True, extra="forbid")

    lora_name: str = ""


class LoadLoraAdapterRequest(_OfAdapter):
    """Body of POST /v1/load_lora_adapter; see LoadRequest."""

    lora_path: str = ""
    model: str = ""
    load_inplace: bool = False
    canary_share: float = 0.0
    is_3d_lora_weight: bool = False
    """vLLM's; the files say it."""


class UnloadLoraAdapterRequest(_OfAdapter):
    """Body of POST /v1/unload_lora_adapter. lora_int_id: vLLM's, without effect: there are no such numbers here."""

    lora_int_id: int | None = None


class CanaryLoraAdapterRequest(_OfAdapter):
    """Body of POST /v1/canary_lora_adapter. version: 0: the present canary."""

    version: int = 0
    canary_share: float


class PromoteLoraAdapterRequest(_OfAdapter):
    """Body of POST /v1/promote_lora_adapter."""


class RollbackLoraAdapterRequest(_OfAdapter):
    """Body of POST /v1/rollback_lora_adapter. version: 0: without the canary, or the one before."""

    version: int = 0


def shown_adapter(entry: AdapterEntry) -> dict[str, Any]:
    """An entry of the registry in an answer."""
    return {
        "object": "lora_adapter",
        "name": entry.name,
        "model": entry.model,
        "stable": entry.stable,
        "canary": entry.canary,
        "canary_share": entry.canary_share,
        "previous": entry.previous,
        "versions": [_shown_version(version) for version in entry.versions],
    }


def _shown_version(version: AdapterVersion) -> dict[str, Any]:
    return {
        "number": version.number,
        "id": version.adapter_id,
        "folder": version.folder,
        "rank": version.rank,
        "num_bytes": version.num_bytes,
        "created": version.created,
        "other_base": version.other_base,
    }
