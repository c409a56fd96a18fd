"""Facts compared in the handshake: they must match before KV may be transferred between two workers."""

from __future__ import annotations

from dataclasses import dataclass, fields

PROTOCOL_VERSION = 2
"""2: FirstTokens carries a digest of the prompt that was computed, and is rejected without it."""


@dataclass(frozen=True, slots=True)
class Compat:
    """See proto Compat. `attention_version` and `sampler_version` change whenever results may change."""

    model: str
    model_revision: str
    tokenizer_revision: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: str
    kv_layout: str
    attention_version: str
    sampler_version: str
    block_identity_golden: bytes
    tensor_parallel_size: int = 1
    protocol_version: int = PROTOCOL_VERSION

    @property
    def kv_bytes_per_token(self) -> int:
        size = {"float32": 4, "float16": 2, "bfloat16": 2}[self.kv_dtype]
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * size


CONVERTIBLE = frozenset({"block_size", "kv_dtype", "kv_layout", "block_identity_golden"})
"""Fields that may differ where decode converts KV (`allow_kv_conversion`). The golden block identity follows from two.
"""


CONVERTS = "kv_conversion"
"""Field of the store's row: the worker accepts KV of other layouts."""


def differences(mine: Compat, theirs: Compat, *, converting: bool = False) -> list[str]:
    """Fields that differ, each as "field: mine X, theirs Y". An empty list: KV may be transferred.

    Args:
        converting: ignore fields that decode can convert.
    """
    out = []
    for field in fields(Compat):
        a, b = getattr(mine, field.name), getattr(theirs, field.name)
        if a != b and not (converting and field.name in CONVERTIBLE):
            show = (lambda v: v.hex()) if isinstance(a, bytes) else repr
            out.append(f"{field.name}: mine {show(a)}, theirs {show(b)}")
    return out


def as_strings(compat: Compat) -> dict[str, str]:
    """The form in the store: every field by name, bytes as hexadecimal digits."""
    out = {}
    for field in fields(Compat):
        value = getattr(compat, field.name)
        out[field.name] = value.hex() if isinstance(value, bytes) else str(value)
    return out
