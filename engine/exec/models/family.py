"""What a family of models has to say; each models/<family>.py ends with one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diptych.engine.exec.models.description import ModelDescription

Field = Callable[..., Any]
"""(name, default) -> a field of a GGUF file's metadata, without the architecture in front: "attention.head_count"."""


def unchanged(name: str, weight: Any, config: Mapping[str, Any]) -> Any:
    """The restorer of families whose tensors are the checkpoint's."""
    return weight


@dataclass(frozen=True, slots=True)
class Gguf:
    """How GGUF files hold the family. Their names of tensors come from the table of the package `gguf`.

    Args:
        architecture: general.architecture, and the key of that table.
        model_type: in config.json.
        config: fields of config.json that are the family's own.
        restore: (name in the checkpoint, weight as an array, config.json) -> the checkpoint's weight.
    """

    architecture: str
    model_type: str
    config: Callable[[Field], Mapping[str, Any]]
    restore: Callable[[str, Any, Mapping[str, Any]], Any] = unchanged


@dataclass(frozen=True, slots=True)
class Family:
    """
    Args:
        architectures: names in config.json.
        describe: config.json, decoded -> description. Raises: ConfigError naming the field.
        gguf: None: there is no converter.
        without_effect: keys of its config.json that `describe` need not read, besides config_keys.WITHOUT_EFFECT.
    """

    architectures: tuple[str, ...]
    describe: Callable[[Mapping[str, Any]], ModelDescription]
    gguf: Gguf | None = None
    without_effect: tuple[str, ...] = ()
