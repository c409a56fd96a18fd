"""Reads config.json field by field. A value that the code does not compute is refused by the field's name; a field that no
family reads is, too: see config_keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.common.errors import ConfigError
from diptych.engine.exec.layers.rope import Rope

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
"""transformers' names -> those of layers.mlp."""
_LARGEST = 1e300
"""Of a number; a larger integer has no float."""
_MOST_LAYERS = 10_000
"""They are described one by one before the tensors are looked at; the deepest models have some hundred."""
_FULL, _SLIDING = "full_attention", "sliding_attention"

Config = Mapping[str, Any]


def integer(raw: Config, field: str, default: int | None = None) -> int:
    """Raises: ConfigError unless it is a positive integer; null counts as absent."""
    value = raw.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(field, value, "must be a positive integer")
    return value


def num_layers(raw: Config) -> int:
    """Raises: ConfigError."""
    value = integer(raw, "num_hidden_layers")
    if value > _MOST_LAYERS:
        raise ConfigError("num_hidden_layers", value, f"at most {_MOST_LAYERS} are supported")
    return value


def number(raw: Config, field: str, default: float | None = None) -> float:
    """Raises: ConfigError unless it is a positive number; null counts as absent."""
    value = raw.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _LARGEST:
        raise ConfigError(field, value, "must be a positive number")
    return float(value)


def optional_number(raw: Config, field: str, default: float | None) -> float | None:
    """The default counts where the field is absent; null switches it off. Raises: ConfigError unless positive."""
    return None if raw.get(field, default) is None else number(raw, field, default)


def flag(raw: Config, field: str, default: bool = False) -> bool:
    """Raises: ConfigError unless it is true or false."""
    value = raw.get(field, default)
    if not isinstance(value, bool):
        raise ConfigError(field, value, "must be true or false")
    return value


def only(raw: Config, field: str, value: object) -> None:
    """Raises: ConfigError unless the field is absent, null or `value`: nothing else is built."""
    given = raw.get(field)
    if given is not None and given != value:
        raise ConfigError(field, given, f"only {value} is supported")


def activation(raw: Config, field: str = "hidden_act", default: str = "silu") -> str:
    """Returns: one of layers.mlp.ACTIVATIONS. Raises: ConfigError."""
    value = raw.get(field, default)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise ConfigError(field, value, f"supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def heads(raw: Config, default_head_dim: int | None = None) -> tuple[int, int, int]:
    """Returns: query heads, KV heads, head_dim. Raises: ConfigError where they do not fit together.

    Args:
        default_head_dim: None: the hidden size divided by the heads.
    """
    num_heads = integer(raw, "num_attention_heads")
    num_kv_heads = integer(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError("num_key_value_heads", num_kv_heads, f"must divide num_attention_heads={num_heads}")
    head_dim = integer(raw, "head_dim", default_head_dim or integer(raw, "hidden_size") // num_heads)
    if head_dim % 2:
        raise ConfigError("head_dim", head_dim, "must be even")
    return num_heads, num_kv_heads, head_dim


def rope(raw: Config, max_position: int, default_theta: float = 10_000.0) -> Rope:
    """transformers 5 writes `rope_parameters` with the theta inside; before, `rope_theta` stood beside `rope_scaling`.

    Raises: ConfigError for a rope_type or a partial rotation that is not built.
    """
    only(raw, "partial_rotary_factor", 1)
    name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    return rope_of(raw.get(name) or {}, name, number(raw, "rope_theta", default_theta), max_position)


def rope_of(given: Any, name: str, default_theta: float, max_position: int) -> Rope:
    """Args: given: the object that holds rope_type and its numbers; name: what it is called. Raises: ConfigError."""
    if not isinstance(given, Mapping):
        raise ConfigError(name, given, "must be an object")
    only(given, "partial_rotary_factor", 1)
    theta = number(given, "rope_theta", default_theta)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, number(given, "factor"))
    if kind == "llama3":
        return Rope(
            theta,
            kind,
            number(given, "factor"),
            number(given, "low_freq_factor"),
            number(given, "high_freq_factor"),
            integer(given, "original_max_position_embeddings", max_position),
        )
    raise ConfigError(f"{name}.rope_type", kind, "supported: default, linear, llama3")


def sliding_layers(raw: Config, default: tuple[bool, ...]) -> tuple[bool, ...]:
    """For each layer whether it attends to a window. Args: default: where there is no layer_types. Raises: ConfigError."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return default
    if (
        not isinstance(kinds, list)
        or len(kinds) != len(default)
        or any(kind not in (_FULL, _SLIDING) for kind in kinds)
    ):
        raise ConfigError("layer_types", kinds, f"must name {_FULL} or {_SLIDING} for {len(default)} layers")
    return tuple(kind == _SLIDING for kind in kinds)


def window(raw: Config) -> int | None:
    """sliding_window: transformers' default where it is absent; null: there is none. Raises: ConfigError."""
    return None if raw.get("sliding_window", 4096) is None else integer(raw, "sliding_window", 4096)


def upper_windows(raw: Config, num_layers: int) -> tuple[int | None, ...]:
    """For each layer its window, None: all tokens. With use_sliding_window, the layers from max_window_layers on have one,
    or those that layer_types names. Raises: ConfigError."""
    _, full = (
        raw.get("sliding_window"),
        raw.get("max_window_layers", 28),
    )  # read: known also where they count for nothing
    size = window(raw) if flag(raw, "use_sliding_window") else None
    if size is None:
        if any(sliding_layers(raw, (False,) * num_layers)):
            raise ConfigError("layer_types", raw["layer_types"], f"names {_SLIDING}, and no layer has a window")
        return (None,) * num_layers
    if isinstance(full, bool) or not isinstance(full, int) or full < 0:
        raise ConfigError("max_window_layers", full, "must be an integer of 0 or more")
    return tuple(size if one else None for one in sliding_layers(raw, tuple(i >= full for i in range(num_layers))))


def eos_token_ids(raw: Config, generation: Config | None) -> tuple[int, ...]:
    """Ids that end a sequence: generation_config.json's if it names any, else config.json's; one id or a list.

    Raises: ConfigError when an id is not a number of the vocabulary.
    """
    value = (generation or {}).get("eos_token_id")
    value = raw.get("eos_token_id") if value is None else value
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < raw["vocab_size"] for i in ids):
        raise ConfigError("eos_token_id", value, "must be ids below vocab_size")
    return tuple(ids)
