"""Bodies of the routes that load and unload adapters, as vLLM has them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


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
