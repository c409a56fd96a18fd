"""How many tokens' KV fits where: the arithmetic, from any Hugging Face config. Pure: no files, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diptych.common.errors import ConfigError
from diptych.common.kv_format import (
    SAME_DTYPE,
    KvFormat,
    KvGroup,
    KvKind,
    Shard,
    dtype_bytes,
    kv_elements,
    windowed_format,
)
from diptych.common.kv_groups import most_blocks_held
from diptych.engine.exec.layers.linear import PLAIN, Linear
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.models.registry import describe
from diptych.engine.exec.parallel.division import DividedSizes, sizes_of
from diptych.engine.exec.parallel.place import WHOLE_PLACE, RankPlace, local_description

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_MLP = ("intermediate_size", "ffn_dim", "n_inner")
_VOCABULARY = ("vocab_size",)
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
    if group.quantized:
        count = len(group.dims) * group.num_layers * group.heads_per_rank(shard)
        scales = f"{count:,} scales x {dtype_bytes(group.scale_dtype)} bytes ({group.scale_dtype})"
        factors[-1] += f" + {scales}"
    size = group.bytes_per_token(shard)
    kept = f", of the last {group.window:,} tokens" if group.window else ""
    name = f"{group.name}: " if named else ""
    return f"{name}{' x '.join(factors)} = {size:,} bytes = {kibibytes(size)} per token{kept}"


def cache_of(
    config: Mapping[str, Any], dtype: str = "", block_size: int = 16, kv_cache_dtype: str = SAME_DTYPE
) -> CacheOf:
    """The cache of a decoder with attention in every layer, whatever its architecture is called. Layers of a family that is
    served have its windows; those of any other count as seeing every token.

    Args:
        config: a config.json; a multimodal one's text_config counts.
        dtype: of the computation; empty: the config's own, or float32.
        kv_cache_dtype: of KV_CACHE_DTYPES.
    Raises: ConfigError naming the field that is missing or makes no sense.
    """
    config = _text_config(config)
    dtype, scale_dtype = kv_elements(kv_cache_dtype, compute_dtype(config, dtype))
    layers = _number(config, _LAYERS)
    context = _first(config, _CONTEXT)
    max_position = _checked(_CONTEXT[0], context) if context is not None else None
    if config.get("kv_lora_rank"):  # multi-head latent attention: one latent and one rotated key for all heads
        latent = _number(config, ("kv_lora_rank",)) + _number(config, ("qk_rope_head_dim",))
        group = KvGroup(KvKind.LATENT, tuple(range(layers)), 1, (latent,), dtype, block_size, scale_dtype=scale_dtype)
        return CacheOf(KvFormat((group,)), max_position)
    heads = _number(config, _HEADS)
    kv_heads = _kv_heads(config, heads)
    head_dim = config.get("head_dim")
    if head_dim is None:
        hidden = _number(config, _HIDDEN)
        if hidden % heads:
            raise ConfigError("hidden_size", hidden, f"does not divide among {heads} heads, and head_dim is not given")
        head_dim = hidden // heads
    head_dim = _checked("head_dim", head_dim)
    kv = windowed_format(
        _windows(config, layers), kv_heads, head_dim, block_size=block_size, dtype=dtype, scale_dtype=scale_dtype
    )
    return CacheOf(kv, max_position)


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    multi_query = config.get("multi_query") is True and not config.get("new_decoder_architecture")
    return 1 if multi_query else _number(config, _KV_HEADS, heads)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def compute_dtype(config: Mapping[str, Any], dtype: str = "") -> str:
    """Args: dtype: empty: the config's own, or float32. Raises: ConfigError for one that is not known."""
    config = _text_config(config)
    dtype = dtype or str(config.get("torch_dtype") or config.get("dtype") or "float32").removeprefix("torch.")
    dtype_bytes(dtype)
    return dtype


def _described(config: Mapping[str, Any]) -> ModelDescription | None:
    """As if its weights were not quantized. None: it is not served, or not all of a config."""
    try:
        return describe({key: value for key, value in config.items() if key != "quantization_config"})
    except ConfigError:
        return None


def _windows(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """Of each layer, 0: every token. How weights are quantized changes nothing of it."""
    model = _described(config)
    return [0] * num_layers if model is None else [window or 0 for window in model.windows]


def divided_sizes(config: Mapping[str, Any]) -> DividedSizes:
    """What the ranks of a worker divide. Of a model that is not served, what its config says. Raises: ConfigError."""
    config = _text_config(config)
    model = _described(config)
    if model is not None:
        return sizes_of(describe(config) if config.get("quantization_config") else model)
    heads = _number(config, _HEADS)
    kv_heads = heads if config.get("kv_lora_rank") else _kv_heads(config, heads)
    mlp, vocabulary = _first(config, _MLP), _first(config, _VOCABULARY)
    return DividedSizes(
        _number(config, _LAYERS),
        heads,
        kv_heads,
        () if mlp is None else (_checked(_MLP[0], mlp),),
        0 if vocabulary is None else _checked(_VOCABULARY[0], vocabulary),
    )


def weight_sizes(config: Mapping[str, Any], dtype: str, place: RankPlace = WHOLE_PLACE) -> WeightSizes | None:
    """Of a rank, where weights that are not quantized are kept in `dtype`. None: the model is not served.
    Raises: ConfigError for a rank whose part cannot be cut out, and naming what is not served of quantized weights."""
    model = _described(config)
    if model is None:
        return None
    method, size = model.method, dtype_bytes(dtype)
    if config.get("quantization_config"):
        model = describe(config)
        method = model.method
    local = local_description(model, place)
    linears = [linear for block in local.blocks for linear in block.linears]
    shared = model.head.tied and place.first_stage and place.last_stage
    return WeightSizes(
        layers=sum(_bytes_of(linear, size) for linear in linears),
        head=_bytes_of(local.head.linear, size) if place.last_stage else 0,
        embedding=size * local.head.linear.outputs * model.hidden_size if place.first_stage and not shared else 0,
        method=method,
    )


def _bytes_of(linear: Linear, element_bytes: int) -> int:
    if linear.method == PLAIN:
        return linear.num_weights * element_bytes
    # Here and not above: methods import torch.
    from diptych.engine.exec.methods.registry import METHODS

    return METHODS[linear.method].num_bytes(linear, element_bytes)


def capacity_line(kv: KvFormat, group_blocks: Sequence[int]) -> str:
    """One line for the log: `KV: 18,432 blocks x 16 tokens = 294,912 tokens, 45 KiB per token`, and the blocks of further
    groups. Args: group_blocks: of each group's pool."""
    line = ""
    for group, count in zip(kv.groups, group_blocks, strict=True):
        if line:
            line += f"; {group.name}: {count:,} blocks, {kibibytes(group.bytes_per_token(kv.shard))} per token"
            continue
        name = "" if len(kv.groups) == 1 else f" of {group.name}"
        tokens = count * group.block_size
        size = kibibytes(group.bytes_per_token(kv.shard))
        line = f"KV: {count:,} blocks{name} x {group.block_size} tokens = {tokens:,} tokens, {size} per token"
    return line


def held_lines(kv: KvFormat, num_tokens: int, chunk: int) -> list[str]:
    """What a sequence of so many tokens holds, and at most while its prompt is computed in chunks of `chunk` tokens; for a
    format with windows."""
    peak = sum(most_blocks_held(group, num_tokens, chunk) * group.block_bytes(kv.shard) for group in kv.groups)
    held, full = kv.bytes_held(num_tokens), num_tokens * kv.bytes_per_token
    return [
        f"a sequence of {num_tokens:,} tokens holds {mebibytes(held)} while it decodes, {held / full:.0%} of what it would "
        "without windows",
        f"and at most {mebibytes(peak)} while its prompt is computed in chunks of {chunk:,} tokens",
    ]


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes of a model's weights in the form that its kernels read; norms are left out. embedding: 0 where the head is
    the same memory; beside a packed head a tied embedding is there once more, for looking up. adapters: slots for them.
    method: of the linear layers, see ModelDescription.method."""

    layers: int
    head: int
    embedding: int
    adapters: int = 0
    method: str = PLAIN

    @property
    def total(self) -> int:
        return self.layers + self.head + self.embedding + self.adapters

    def line(self) -> str:
        """One line for the log: `weights: 405 MiB of layers + 108 MiB of output head + 108 MiB of embedding = 621
        MiB`."""
        parts = (
            (self.layers, "layers"),
            (self.head, "output head"),
            (self.embedding, "embedding"),
            (self.adapters, "slots for adapters"),
        )
        terms = [f"{mebibytes(size)} of {what}" for size, what in parts if size]
        return f"weights: {' + '.join(terms)} = {mebibytes(self.total)}"


def mebibytes(size_bytes: int) -> str:
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
