"""Name -> method. A new method is one file beside this one and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from diptych.common.errors import ConfigError
from diptych.engine.exec.layers.linear import Linear
from diptych.engine.exec.methods.base import LinearMethod
from diptych.engine.exec.methods.plain import PlainMethod

METHODS: dict[str, LinearMethod] = {method.name: method for method in (PlainMethod(),)}

_LEFT_OUT = "modules_to_not_convert"


def declared_by(config: Any) -> Callable[[Linear], Linear]:
    """What makes a plain linear layer the one that the checkpoint holds.

    Args: config: quantization_config of config.json, a TrackedConfig: a key that neither this nor the method reads is refused.
    Raises: ConfigError naming the field: a method that is not known, with the known ones; by the result also settings that
        the method cannot do.
    """
    if not isinstance(config, Mapping):
        raise ConfigError("quantization_config", config, "must be an object")
    named, known = config.get("quant_method"), {name: m for m in METHODS.values() for name in m.quant_methods}
    method = known.get(named) if isinstance(named, str) else None
    if method is None:
        supported = ", ".join(sorted(known)) or "none, only weights that are not quantized"
        raise ConfigError("quantization_config.quant_method", named, f"supported: {supported}")
    for key in method.without_effect:
        config.get(key)  # counts as read
    left_out = config.get(_LEFT_OUT) or ()
    if not isinstance(left_out, (list, tuple)) or not all(isinstance(name, str) for name in left_out):
        raise ConfigError(f"quantization_config.{_LEFT_OUT}", left_out, "must be a list of names")

    def declare(layer: Linear) -> Linear:
        names = [part.name for part in layer.parts]
        plain = [name for name in names if any(_is_within(name, one) for one in left_out)]
        if plain and plain != names:
            reason = f"{', '.join(names)} are one layer here: leaves out {', '.join(plain)} only"
            raise ConfigError(f"quantization_config.{_LEFT_OUT}", list(left_out), reason)
        return layer if plain else method.declare(layer, config)

    return declare


def _is_within(name: str, module: str) -> bool:
    """Whether the layer `name` is the module, or a part of it; `module` may be the end of a module's name."""
    return f".{module}." in f".{name}."
