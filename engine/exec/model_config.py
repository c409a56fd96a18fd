"""Parse the config.json of a Hugging Face folder into what the decoder needs. Pure: no files, no torch.

What we do not build is refused by name here: a field that changes the computation is never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diptych.common.errors import ConfigError

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
"""Of hidden_act; what kernels call them."""
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """kind: "default" | "linear" | "llama3"; the fields after `factor` belong to llama3."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """
    sliding_windows: for each layer the number of tokens a query sees (itself included), or None for all.
    activation: of the gate: silu, gelu or gelu_tanh.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    activation: str = "silu"

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def _integer(raw: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = raw.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(field, value, "must be a positive integer")
    return value


def _number(raw: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = raw.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(field, value, "must be a positive number")
    return float(value)


def _flag(raw: Mapping[str, Any], field: str) -> bool:
    value = raw.get(field, False)
    if not isinstance(value, bool):
        raise ConfigError(field, value, "must be true or false")
    return value


def _rope(raw: Mapping[str, Any], max_position: int) -> RopeConfig:
    """transformers 5 writes `rope_parameters` with the theta inside; before, `rope_theta` stood beside `rope_scaling`."""
    name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    given = raw.get(name) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(name, given, "must be an object")
    both = {"rope_theta": raw.get("rope_theta"), **given}
    kind = given.get("rope_type", given.get("type", "default"))
    theta = _number(both, "rope_theta", 10_000.0)
    if given.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) not in (1, None):
        raise ConfigError("partial_rotary_factor", given.get("partial_rotary_factor"), "only 1.0 is supported")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, _number(given, "factor"))
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            _number(given, "factor"),
            _number(given, "low_freq_factor"),
            _number(given, "high_freq_factor"),
            _integer(given, "original_max_position_embeddings", max_position),
        )
    raise ConfigError(f"{name}.rope_type", kind, "supported: default, linear, llama3")


def _windows(raw: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        # transformers' default where the field is absent; null switches it off.
        if "sliding_window" in raw and raw["sliding_window"] is None:
            return (None,) * num_layers
        return (_integer(raw, "sliding_window", 4096),) * num_layers
    if not _flag(raw, "use_sliding_window") or ("sliding_window" in raw and raw["sliding_window"] is None):
        return (None,) * num_layers
    window = _integer(raw, "sliding_window", 4096)
    kinds = raw.get("layer_types")
    if kinds is None:
        full = raw.get("max_window_layers", 28)
        return tuple(window if i >= full else None for i in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ConfigError(
            "layer_types", kinds, f"must name full_attention or sliding_attention for {num_layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Args: raw: the decoded config.json.

    Raises: ConfigError naming the field, for an architecture, activation, rope kind or quantization that is not built, and
        for missing or impossible sizes.
    """
    architectures = raw.get("architectures") or []
    architecture = architectures[0] if len(architectures) == 1 else None
    if architecture not in ARCHITECTURES:
        raise ConfigError("architectures", architectures, f"supported: {', '.join(ARCHITECTURES)}")
    if raw.get("quantization_config"):
        raise ConfigError("quantization_config", raw["quantization_config"], "quantized weights are not supported")
    activation = raw.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ConfigError("hidden_act", activation, f"supported: {', '.join(ACTIVATIONS)}")
    num_heads = _integer(raw, "num_attention_heads")
    num_kv_heads = _integer(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError("num_key_value_heads", num_kv_heads, f"must divide num_attention_heads={num_heads}")
    hidden_size = _integer(raw, "hidden_size")
    qwen3, qwen2 = architecture == "Qwen3ForCausalLM", architecture == "Qwen2ForCausalLM"
    head_dim = _integer(raw, "head_dim", 128 if qwen3 else hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigError("head_dim", head_dim, "must be even")
    # Only these two families read the switch; Qwen2 always has a bias on q, k and v, Mistral never.
    attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and _flag(raw, "attention_bias")
    num_layers = _integer(raw, "num_hidden_layers")
    max_position = _integer(raw, "max_position_embeddings", 2048 if architecture == "LlamaForCausalLM" else 32768)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        max_position=max_position,
        rope=_rope(raw, max_position),
        tie_embeddings=_flag(raw, "tie_word_embeddings"),
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and _flag(raw, "mlp_bias"),
        qk_norm=qwen3,
        sliding_windows=_windows(raw, architecture, num_layers),
        activation=ACTIVATIONS[activation],
    )


def eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Ids that end a sequence: generation_config.json's if it names any, else config.json's; one id or a list.

    Raises: ConfigError when an id is not a number of the vocabulary.
    """
    value = (generation or {}).get("eos_token_id")
    value = raw.get("eos_token_id") if value is None else value
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < raw["vocab_size"] for i in ids):
        raise ConfigError("eos_token_id", value, "must be ids below vocab_size")
    return tuple(ids)
