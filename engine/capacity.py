"""How many tokens' KV fits where: the arithmetic, from any Hugging Face config. Pure: no files, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diptych.common.errors import ConfigError
from diptych.common.kv_format import KvFormat, KvGroup, KvKind, Shard, dtype_bytes, full_format

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class CacheOf:
    """The cache of a model. `max_position`: its longest context, where the configuration says."""

    kv: KvFormat
    max_position: int | None

    @property
    def dtype(self) -> str:
        return "+".join(self.kv.dtypes)

    @property
    def bytes_per_token(self) -> int:
        return self.kv.bytes_per_token

    def arithmetic(self) -> list[str]:
        """How the bytes of a token come about, one line for each group."""
        return [_arithmetic(group, self.kv.shard, named=len(self.kv.groups) > 1) for group in self.kv.groups]


def _arithmetic(group: KvGroup, shard: Shard, *, named: bool) -> str:
    if group.kind is KvKind.LATENT:
        factors = [f"{group.num_layers} layers", f"{group.dims[0]} latent and rope dim"]
    else:
        factors = [
            f"{len(group.dims)} (K and V)", f"{group.num_layers} layers", f"{group.heads_per_rank(shard)} KV heads",
            f"{group.dims[0]} head dim",
        ]  # fmt: skip
    factors.append(f"{dtype_bytes(group.dtype)} bytes ({group.dtype})")
    size = group.bytes_per_token(shard)
    kept = f", of the last {group.window:,} tokens" if group.window else ""
    name = f"{group.name}: " if named else ""
    return f"{name}{' x '.join(factors)} = {size:,} bytes = {kibibytes(size)} per token{kept}"


def cache_of(config: Mapping[str, Any], dtype: str = "", block_size: int = 16) -> CacheOf:
    """The cache of a decoder with attention in every layer, whatever its architecture is called.

    Args:
        config: a config.json; a multimodal one's text_config counts.
        dtype: of the cache; empty: the config's own, or float32.
    Raises: ConfigError naming the field that is missing or makes no sense.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = {**config, **inner}
    own = str(config.get("torch_dtype") or config.get("dtype") or "float32").removeprefix("torch.")
    dtype = dtype or own
    dtype_bytes(dtype)
    layers = _number(config, _LAYERS)
    context = _first(config, _CONTEXT)
    max_position = _checked(_CONTEXT[0], context) if context is not None else None
    if config.get("kv_lora_rank"):  # multi-head latent attention: one latent and one rotated key for all heads
        latent = _number(config, ("kv_lora_rank",)) + _number(config, ("qk_rope_head_dim",))
        group = KvGroup(KvKind.LATENT, tuple(range(layers)), 1, (latent,), dtype, block_size)
        return CacheOf(KvFormat((group,)), max_position)
    heads = _number(config, _HEADS)
    kv_heads = 1 if config.get("multi_query") is True and not config.get("new_decoder_architecture") else None
    kv_heads = kv_heads or _number(config, _KV_HEADS, heads)
    head_dim = config.get("head_dim")
    if head_dim is None:
        hidden = _number(config, _HIDDEN)
        if hidden % heads:
            raise ConfigError("hidden_size", hidden, f"does not divide among {heads} heads, and head_dim is not given")
        head_dim = hidden // heads
    head_dim = _checked("head_dim", head_dim)
    return CacheOf(full_format(layers, kv_heads, head_dim, block_size=block_size, dtype=dtype), max_position)


def capacity_line(num_blocks: int, block_size: int, bytes_per_token: int) -> str:
    """One line for the log: `KV: 18,432 blocks x 16 tokens = 294,912 tokens, 45 KiB per token`."""
    tokens = num_blocks * block_size
    return (
        f"KV: {num_blocks:,} blocks x {block_size} tokens = {tokens:,} tokens, {kibibytes(bytes_per_token)} per token"
    )


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes of a model's weights in the form that its kernels read; norms are left out. embedding: 0 where the head is
    the same memory; beside a packed head a tied embedding is there once more, for looking up."""

    layers: int
    head: int
    embedding: int

    def line(self) -> str:
        """One line for the log: `weights: 405 MiB of layers + 108 MiB of output head + 108 MiB of embedding = 621
        MiB`."""
        parts = ((self.layers, "layers"), (self.head, "output head"), (self.embedding, "embedding"))
        terms = [f"{_mebibytes(size)} of {what}" for size, what in parts if size]
        return f"weights: {' + '.join(terms)} = {_mebibytes(self.layers + self.head + self.embedding)}"


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.0f} MiB"


def kibibytes(size_bytes: int) -> str:
    return f"{size_bytes / 1024:,.2f}".rstrip("0").rstrip(".") + " KiB"


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _number(config: Mapping[str, Any], names: tuple[str, ...], default: int | None = None) -> int:
    value = _first(config, names)
    if value is None and default is not None:
        return default
    return _checked(names[0], value)


def _checked(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(name, value, "must be a positive integer")
    return value
