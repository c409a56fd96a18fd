"""What a family of models has to say; each models/<family>.py ends with one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diptych.engine.exec.models.description import ModelDescription


@dataclass(frozen=True, slots=True)
class Family:
    """
    Args:
        architectures: names in config.json.
        describe: config.json, decoded -> description. Raises: ConfigError naming the field.
    """

    architectures: tuple[str, ...]
    describe: Callable[[Mapping[str, Any]], ModelDescription]
