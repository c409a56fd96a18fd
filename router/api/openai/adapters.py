"""Bodies of the routes that load and unload adapters, as vLLM has them, and of those that route between versions."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from diptych.common.store.adapters import AdapterEntry, AdapterVersion


class LoadLoraAdapterRequest(BaseModel):
    """Body of POST /v1/load_lora_adapter; see LoadRequest."""

    model_config = ConfigDict(strict=True, extra="ignore")

    lora_name: str = ""
    lora_path: str = ""
    model: str = ""
    load_inplace: bool = False
    canary_share: float = 0.0


class UnloadLoraAdapterRequest(BaseModel):
    """Body of POST /v1/unload_lora_adapter."""

    model_config = ConfigDict(strict=True, extra="ignore")

    lora_name: str = ""


class CanaryLoraAdapterRequest(BaseModel):
    """Body of POST /v1/canary_lora_adapter. version: 0: the present canary."""

    model_config = ConfigDict(strict=True, extra="ignore")

    lora_name: str = ""
    version: int = 0
    canary_share: float = 0.0


class PromoteLoraAdapterRequest(BaseModel):
    """Body of POST /v1/promote_lora_adapter."""

    model_config = ConfigDict(strict=True, extra="ignore")

    lora_name: str = ""


class RollbackLoraAdapterRequest(BaseModel):
    """Body of POST /v1/rollback_lora_adapter. version: 0: without the canary, or the one before."""

    model_config = ConfigDict(strict=True, extra="ignore")

    lora_name: str = ""
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
