"""The format of a worker's KV cache: dtypes, heads, dimensions, blocks and bytes are defined only here.

A `KvFormat` has one `KvGroup` for each kind of layer. Layers of one group have the same shape and keep the same tokens:

    full        every token
    window      the last `window` tokens
    latent      every token, one vector for all heads (multi-head latent attention)
    recurrent   no tokens: one state, which exists at checkpoints only

The KV of a token is `[parts, heads, dim]` in each layer, where the parts are K and V. A block holds `block_size` tokens
of all layers of its group. A quantized group has its scales inside the block, one for each part, token and KV head, so
that any slice, reordering or shard of the block includes them. They lie behind the codes of their slot:

    slot    [head 0 codes][head 1 codes] ... [scale 0][scale 1] ...       one part of one token in one layer

An element is code x scale. A scale is the largest magnitude among the head's elements, divided by the largest code.

With tensor parallelism each rank holds the heads of its `Shard`. Latent and recurrent groups are replicated.

Sizes are in bytes and of one rank, unless noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from blake3 import blake3

from diptych.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Dtype:
    """
    Args:
        computes: also supported for weights and activations.
        largest_code, mantissa_bits: of what a quantized cache's codes are; mantissa_bits 0: integers.
    """

    name: str
    size_bytes: int
    computes: bool = False
    largest_code: float = 0.0
    mantissa_bits: int = 0


DTYPES: Mapping[str, Dtype] = {
    dtype.name: dtype
    for dtype in (
        Dtype("float32", 4, computes=True),
        Dtype("float16", 2, computes=True),
        Dtype("bfloat16", 2, computes=True),
        Dtype("float8_e4m3fn", 1, largest_code=448.0, mantissa_bits=3),
        Dtype("float8_e5m2", 1, largest_code=57344.0, mantissa_bits=2),
        Dtype("int8", 1, largest_code=127.0),
    )
}
COMPUTE_DTYPES = tuple(dtype.name for dtype in DTYPES.values() if dtype.computes)

SAME_DTYPE = "auto"
"""KV in the dtype of the computation."""
QUANTIZED_KV: Mapping[str, str] = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "int8": "int8"}
"""Quantized caches by the name that the setting `kv_cache_dtype` has for them: dtype of the codes."""
KV_SCALE_DTYPE = "float32"
KV_CACHE_DTYPES = (SAME_DTYPE, *QUANTIZED_KV)


def dtype_bytes(name: str, field: str = "dtype") -> int:
    """Bytes of one element. Raises: ConfigError that names `field`."""
    if name not in DTYPES:
        raise ConfigError(field, name, f"must be one of {', '.join(DTYPES)}")
    return DTYPES[name].size_bytes


class KvKind(StrEnum):
    FULL = "full"
    WINDOW = "window"
    LATENT = "latent"
    RECURRENT = "recurrent"


ORDERS: Mapping[str, str] = {"block-major": "NHD", "block-major-hnd": "HND"}
"""Order of the dimensions of a block: slots (N), then heads (H), or heads first."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of `degree` tensor-parallel ranks. Raises: ConfigError."""

    rank: int = 0
    degree: int = 1

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise ConfigError("tensor_parallel_size", self.degree, "must be at least 1")
        if not 0 <= self.rank < self.degree:
            raise ConfigError("rank", self.rank, f"must be in [0, {self.degree})")

    def units(self, count: int, field: str, *, shared: bool = False) -> range:
        """The units of this rank, of `count`: rows of a weight, query heads.

        Args: shared: with more ranks than units, several ranks hold the same one.
        Raises: ConfigError naming `field` where the ranks' shares would differ.
        """
        if count % self.degree and not (shared and self.degree % count == 0):
            raise ConfigError(field, count, f"cannot be divided among {self.degree} ranks")
        first = self.rank * count // self.degree
        return range(first, first + max(1, count // self.degree))

    def heads(self, num_heads: int) -> range:
        """The KV heads of this rank, of `num_heads` of the model: in its KV pool, and in its weights. Raises: ConfigError."""
        return self.units(num_heads, "num_kv_heads", shared=True)

    def heads_per_rank(self, num_heads: int) -> int:
        """Raises: ConfigError."""
        return len(self.heads(num_heads))


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers with one KV shape. Raises: ConfigError.

    Args:
        layers: their indexes in the model, rising.
        heads: KV heads of the model; 1 in a latent group.
        dims: elements of a head in each part: (128, 128) for K and V of 128; (576,) for one latent vector with its rotated
            key; in a recurrent group, elements of each part of the state.
        dtype: of the elements. scale_dtype: of the scales of a quantized group; empty: it has none.
        block_size: tokens of a block.
        window: tokens that a query can see, its own included; of a window group only.
        part_dtypes: of each part of a recurrent state, where they differ from `dtype`.
    """

    kind: KvKind
    layers: tuple[int, ...]
    heads: int
    dims: tuple[int, ...]
    dtype: str
    block_size: int
    window: int = 0
    scale_dtype: str = ""
    part_dtypes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ConfigError("layers", self.layers, "must be rising layer indexes, at least one")
        for name, value in (("num_kv_heads", self.heads), ("block_size", self.block_size)):
            if value < 1:
                raise ConfigError(name, value, "must be at least 1")
        if not self.dims or min(self.dims) < 1:
            raise ConfigError("head_dim", self.dims, "must be at least 1")
        dtype_bytes(self.dtype, "kv_dtype")
        if self.scale_dtype:
            dtype_bytes(self.scale_dtype, "kv_scale_dtype")
        if (self.kind is KvKind.WINDOW) != (self.window > 0):
            raise ConfigError("window", self.window, "must be above 0 in a window group, and 0 in any other")
        if self.kind in (KvKind.LATENT, KvKind.RECURRENT) and self.heads != 1:
            raise ConfigError("num_kv_heads", self.heads, f"must be 1 in a {self.kind} group")
        if self.part_dtypes:
            if self.kind is not KvKind.RECURRENT or len(self.part_dtypes) != len(self.dims):
                raise ConfigError("part_dtypes", self.part_dtypes, "must be one for each part of a recurrent state")
            for name in self.part_dtypes:
                dtype_bytes(name, "part_dtypes")

    @property
    def name(self) -> str:
        """Unique within a format: `full`, `window-512`."""
        return f"{self.kind}-{self.window}" if self.window else str(self.kind)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def quantized(self) -> bool:
        """Whether its elements are codes, with a scale for each part, token and KV head."""
        return bool(self.scale_dtype)

    @property
    def replicated(self) -> bool:
        """Whether every tensor-parallel rank holds all of it."""
        return self.kind in (KvKind.LATENT, KvKind.RECURRENT)

    def heads_per_rank(self, shard: Shard) -> int:
        return self.heads if self.replicated else shard.heads_per_rank(self.heads)

    def layer_bytes_per_token(self, shard: Shard) -> int:
        """One layer's KV of one token with its scales; 0 in a recurrent group."""
        if self.kind is KvKind.RECURRENT:
            return 0
        scales = len(self.dims) * dtype_bytes(self.scale_dtype) if self.scale_dtype else 0
        return self.heads_per_rank(shard) * (sum(self.dims) * dtype_bytes(self.dtype) + scales)

    def scales_offset(self, shard: Shard) -> int:
        """Where the scales begin in a slot, which is one part of one token in one layer: behind the codes of all heads."""
        return self.heads_per_rank(shard) * self.dims[0] * dtype_bytes(self.dtype)

    def slot_bytes(self, shard: Shard) -> int:
        """A slot: elements of all heads, then a scale for each. Of groups whose parts have the same size."""
        return self.layer_bytes_per_token(shard) // len(self.dims)

    def bytes_per_token(self, shard: Shard) -> int:
        """All layers' KV of one token with its scales; 0 in a recurrent group."""
        return self.num_layers * self.layer_bytes_per_token(shard)

    @property
    def state_bytes(self) -> int:
        """One checkpoint of a recurrent group, all layers; 0 in any other."""
        if self.kind is not KvKind.RECURRENT:
            return 0
        dtypes = self.part_dtypes or (self.dtype,) * len(self.dims)
        return self.num_layers * sum(dim * dtype_bytes(name) for dim, name in zip(self.dims, dtypes, strict=True))

    def block_bytes(self, shard: Shard) -> int:
        return self.state_bytes or self.block_size * self.bytes_per_token(shard)

    # ---- which tokens are kept ----

    def first_needed(self, num_tokens: int) -> int:
        """The first token whose KV is read by the token at position `num_tokens`."""
        if self.kind is KvKind.RECURRENT:
            return num_tokens
        return max(0, num_tokens + 1 - self.window) if self.window else 0

    def first_block(self, num_tokens: int) -> int:
        """The first block that is kept once `num_tokens` tokens were computed; earlier ones are behind the window."""
        return self.first_needed(num_tokens) // self.block_size

    def blocks_held(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` computed tokens keeps."""
        if self.kind is KvKind.RECURRENT:
            return 1 if num_tokens else 0
        return -(-num_tokens // self.block_size) - min(self.first_block(num_tokens), -(-num_tokens // self.block_size))


def kv_group(
    layers: int | Sequence[int],
    heads: int,
    head_dim: int,
    *,
    block_size: int,
    dtype: str,
    window: int = 0,
    scale_dtype: str = "",
) -> KvGroup:
    """A group of ordinary attention layers: full, or with a window. `layers`: their number, or their indexes."""
    indexes = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
    kind = KvKind.WINDOW if window else KvKind.FULL
    return KvGroup(kind, indexes, heads, (head_dim, head_dim), dtype, block_size, window, scale_dtype)


@dataclass(frozen=True, slots=True)
class KvFormat:
    """Raises: ConfigError. `groups`: together every layer that has KV, of the model or of one pipeline stage, each once.
    `order`: of the dimensions of a block, a key of ORDERS."""

    groups: tuple[KvGroup, ...]
    shard: Shard = Shard()
    order: str = "block-major"

    def __post_init__(self) -> None:
        layers = [layer for group in self.groups for layer in group.layers]
        if not layers or sorted(layers) != list(range(min(layers), min(layers) + len(layers))):
            raise ConfigError("layers", sorted(layers), "each layer must be in one group")
        if len({group.name for group in self.groups}) != len(self.groups):
            raise ConfigError("groups", [group.name for group in self.groups], "two groups have one name")
        if self.order not in ORDERS:
            raise ConfigError("kv_layout", self.order, f"must be one of {', '.join(ORDERS)}")
        for group in self.groups:
            if not group.replicated:
                self.shard.heads(group.heads)  # raises where they cannot be divided

    # ---- one group ----

    @property
    def only_group(self) -> KvGroup:
        """The group of a format that has one. Raises: ConfigError."""
        if len(self.groups) != 1:
            raise ConfigError("groups", [group.name for group in self.groups], "one group is expected")
        return self.groups[0]

    @property
    def has_one_full_group(self) -> bool:
        return len(self.groups) == 1 and self.groups[0].kind is KvKind.FULL

    def group(self, name: str) -> KvGroup:
        """Raises: KeyError."""
        return next((group for group in self.groups if group.name == name), None) or _no_group(name)

    # ---- sizes ----

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.groups)

    @property
    def layers(self) -> range:
        """Of the model: all of them, or those of a pipeline stage."""
        first = min(group.layers[0] for group in self.groups)
        return range(first, first + self.num_layers)

    @property
    def block_size(self) -> int:
        """Tokens of a block; of the smallest, where groups differ."""
        return min(group.block_size for group in self.groups)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """dtypes of the elements, each once, in the order of the groups."""
        return tuple(dict.fromkeys(group.dtype for group in self.groups))

    @property
    def bytes_per_token(self) -> int:
        """KV that computing one token writes, all layers."""
        return sum(group.bytes_per_token(self.shard) for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """One block of every group."""
        return sum(group.block_bytes(self.shard) for group in self.groups)

    def bytes_held(self, num_tokens: int) -> int:
        """Bytes of a sequence, in whole blocks, once `num_tokens` tokens were computed."""
        return sum(group.blocks_held(num_tokens) * group.block_bytes(self.shard) for group in self.groups)

    def transfer_bytes(self, first_token: int, end: int) -> int:
        """Bytes of a hand-off of tokens [first_token, end) of a prompt that ends at `end`; of a window group only what
        the next token reads."""
        return sum(
            group.state_bytes
            + max(0, end - max(first_token, group.first_needed(end))) * group.bytes_per_token(self.shard)
            for group in self.groups
        )

    @property
    def charge(self) -> TransferCharge:
        return TransferCharge(
            sum(group.bytes_per_token(self.shard) for group in self.groups if not group.window),
            sum(group.state_bytes for group in self.groups),
            tuple((group.window, group.bytes_per_token(self.shard)) for group in self.groups if group.window),
        )

    # ---- identity and description ----

    def with_dtype(self, dtype: str, scale_dtype: str = "") -> KvFormat:
        """The same with elements of another dtype, and with scales or without."""
        return replace(
            self, groups=tuple(replace(group, dtype=dtype, scale_dtype=scale_dtype) for group in self.groups)
        )

    @property
    def value_rule(self) -> str:
        """The parts of the format that affect the values of KV in any layout: dtype and scales of each layer's KV,
        windows."""
        rules = {}
        for group in self.groups:
            parts = f"/{'+'.join(group.part_dtypes)}" if group.part_dtypes else ""
            scale = f"/{group.scale_dtype}-per-token-head" if group.scale_dtype else ""
            rules.update(dict.fromkeys(group.layers, f"{group.name}:{group.dtype}{scale}{parts}"))
        runs: list[tuple[str, int]] = []
        for layer in self.layers:
            rule = rules[layer]
            if runs and runs[-1][0] == rule:
                runs[-1] = (rule, runs[-1][1] + 1)
            else:
                runs.append((rule, 1))
        return ",".join(f"{count}x{rule}" for rule, count in runs)

    def facts(self) -> dict[str, str]:
        """Facts by name, for comparisons and for the store. With several groups, names are prefixed with the group's."""
        out = {"kv_layout": self.order, "tensor_parallel_size": str(self.shard.degree)}
        for group in self.groups:
            prefix = "" if self.has_one_full_group else f"{group.name}."
            own = {
                "num_layers": str(group.num_layers),
                "num_kv_heads": str(group.heads),
                "head_dim": "+".join(map(str, dict.fromkeys(group.dims) if not group.replicated else group.dims)),
                "block_size": str(group.block_size),
                "kv_dtype": group.dtype,
            }
            if group.layers != tuple(range(group.num_layers)):
                own["layers"] = ",".join(map(str, group.layers))
            if group.scale_dtype:
                own["kv_scale_dtype"] = group.scale_dtype
            if group.part_dtypes:
                own["part_dtypes"] = "+".join(group.part_dtypes)
            out.update({prefix + name: value for name, value in own.items()})
        return out

    def layout_digest(self, *parts: str | int) -> int:
        """64 bits over everything that determines the byte layout of KV: every field, and `parts`."""
        state = blake3(b"diptych kv layout v2")
        fields: list[object] = [*parts, self.order, self.shard.rank, self.shard.degree]
        for group in self.groups:
            fields += (
                str(group.kind), group.layers, group.heads, group.dims, group.dtype, group.block_size, group.window,
                group.scale_dtype, group.part_dtypes,
            )  # fmt: skip
        for field in fields:
            raw = str(field).encode()
            state.update(len(raw).to_bytes(4, "little"))
            state.update(raw)
        return int.from_bytes(state.digest(8), "little")

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.facts().items())


@dataclass(frozen=True, slots=True)
class TransferCharge:
    """Bytes of a hand-off, without the format, for a router, which has only the worker's lease.

    Args:
        bytes_per_token: of groups that keep every token.
        state_bytes: of recurrent groups.
        windows: (window, bytes per token) of each window group.
    """

    bytes_per_token: int
    state_bytes: int = 0
    windows: tuple[tuple[int, int], ...] = ()

    def bytes(self, num_tokens: int) -> int:
        """Bytes of the last `num_tokens` tokens of a prompt."""
        seen = sum(min(num_tokens, window - 1) * size for window, size in self.windows)
        return num_tokens * self.bytes_per_token + self.state_bytes + seen


def full_format(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    block_size: int,
    dtype: str,
    order: str = "block-major",
    shard: Shard = Shard(),
    scale_dtype: str = "",
) -> KvFormat:
    """The format of a model whose layers all attend to every token."""
    group = kv_group(num_layers, num_kv_heads, head_dim, block_size=block_size, dtype=dtype, scale_dtype=scale_dtype)
    return KvFormat((group,), shard, order)


def windowed_format(
    windows: Iterable[int],
    num_kv_heads: int,
    head_dim: int,
    *,
    block_size: int,
    dtype: str,
    order: str = "block-major",
    shard: Shard = Shard(),
    scale_dtype: str = "",
) -> KvFormat:
    """The format of a model whose layers differ only in their window. `windows`: of each layer, 0: full attention."""
    layers: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        layers.setdefault(window, []).append(layer)
    groups = (
        kv_group(
            layers[window],
            num_kv_heads,
            head_dim,
            block_size=block_size,
            dtype=dtype,
            window=window,
            scale_dtype=scale_dtype,
        )
        for window in sorted(layers)
    )
    return KvFormat(tuple(groups), shard, order)


def kv_elements(kv_cache_dtype: str, dtype: str) -> tuple[str, str]:
    """dtype of a cache's elements, and that of its scales, or "".

    Args:
        kv_cache_dtype: one of KV_CACHE_DTYPES. dtype: of the computation.
    Raises: ConfigError.
    """
    if kv_cache_dtype == SAME_DTYPE:
        return dtype, ""
    if kv_cache_dtype not in QUANTIZED_KV:
        raise ConfigError("kv_cache_dtype", kv_cache_dtype, f"must be one of {', '.join(KV_CACHE_DTYPES)}")
    return QUANTIZED_KV[kv_cache_dtype], KV_SCALE_DTYPE


def _no_group(name: str) -> Any:
    raise KeyError(name)
