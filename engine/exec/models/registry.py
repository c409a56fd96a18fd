"""Architecture -> family. A new family is one file beside this one and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.common.errors import ConfigError
from diptych.engine.exec.models import gemma2, gemma3, llama, mistral, qwen2, qwen3
from diptych.engine.exec.models.config_keys import WITHOUT_EFFECT, TrackedConfig
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.models.family import Family, Gguf

FAMILIES: tuple[Family, ...] = (
    gemma2.FAMILY,
    gemma3.FAMILY,
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
)
_BY_ARCHITECTURE = {architecture: family for family in FAMILIES for architecture in family.architectures}
ARCHITECTURES = tuple(_BY_ARCHITECTURE)


def family_of(raw: Mapping[str, Any]) -> Family:
    """Args: raw: the decoded config.json. Raises: ConfigError with the known architectures for another."""
    architectures = raw.get("architectures")
    one = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    family = _BY_ARCHITECTURE.get(one) if isinstance(one, str) else None
    if family is None:
        raise ConfigError("architectures", architectures, f"supported: {', '.join(ARCHITECTURES)}")
    return family


def gguf_family(architecture: Any) -> tuple[Family, Gguf]:
    """Args: architecture: general.architecture of a GGUF file. Raises: ConfigError with the known ones for another."""
    for family in FAMILIES:
        if family.gguf is not None and family.gguf.architecture == architecture:
            return family, family.gguf
    known = ", ".join(family.gguf.architecture for family in FAMILIES if family.gguf is not None)
    raise ConfigError("general.architecture", architecture, f"supported: {known}")


def describe(raw: Mapping[str, Any]) -> ModelDescription:
    """Args: raw: the decoded config.json.

    Raises: ConfigError naming the field, for an architecture, activation, rope kind or quantization that is not built, for
        missing or impossible sizes, and for a key that nothing reads (config_keys).
    """
    config = TrackedConfig(raw)
    family = family_of(config)
    description, quantization = family.describe(config), config.get("quantization_config")
    if quantization:
        # Here and not above: formats import torch.
        from diptych.engine.exec.formats.registry import quantization_of

        found = quantization_of(quantization)
        description = description.with_linears(found.declare, head=found.head)
    config.refuse_unread(WITHOUT_EFFECT.union(family.without_effect), description.architecture)
    return description
