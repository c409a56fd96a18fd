"""The KV pool: for each KV group one tensor [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] over the
group's layers, so that one block of all its layers is one contiguous piece on the wire.

A tensor for each group, and not one arena with pages: a window group needs another number of blocks than a full one, fixed
when the pool is made, and a page of one layer would cost each kernel a look into a table for every layer and block.

The host tier is a second tensor of the same shape in (pinned) host memory; only a pool with one full group has it.

A quantized group's tensor is bytes, [num_blocks, num_layers, 2, block_size, 1, slot_bytes], with codes and scales in each slot
as common/kv_format.py says. What only moves KV sees slots of bytes in either case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.common.kv_format import (
    SAME_DTYPE,
    KvFormat,
    KvGroup,
    Shard,
    full_format,
    kv_elements,
    windowed_format,
)
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.native.library import choose_moves
from diptych.engine.messages import BlockCopy, DeviceRange, Payload
from diptych.engine.runner import CopyHandle
from diptych.kernels import kv_pack
from diptych.kernels.kv_codes import SlotCodec
from diptych.kernels.native.api import HugePages
from diptych.kernels.native.kv_move import KvMoves
from diptych.kernels.paged_attention import layer_rows, layer_slots


def kv_format_of(
    model: ModelDescription,
    *,
    block_size: int,
    dtype: str = "float32",
    window_groups: bool = False,
    kv_cache_dtype: str = SAME_DTYPE,
) -> KvFormat:
    """
    Args:
        dtype: of the computation.
        window_groups: layers with a window keep the window only; False: every token, of which they read the last ones.
        kv_cache_dtype: one of KV_CACHE_DTYPES.
    Raises: ConfigError.
    """
    heads, head_dim = model.num_kv_heads, model.head_dim
    elements, scales = kv_elements(kv_cache_dtype, dtype)
    if window_groups:
        windows = [window or 0 for window in model.windows]
        return windowed_format(windows, heads, head_dim, block_size=block_size, dtype=elements, scale_dtype=scales)
    return full_format(model.num_layers, heads, head_dim, block_size=block_size, dtype=elements, scale_dtype=scales)


class BlockMover(Protocol):
    """A faster way to pack and unpack one group's blocks: see engine.exec.cuda.blocks."""

    def pack(self, block_ids: Sequence[int], num_tokens: int, out: memoryview) -> int: ...

    def unpack(self, block_ids: Sequence[int], num_tokens: int, src: memoryview) -> None: ...

    def pack_device(self, block_ids: Sequence[int], num_tokens: int, out: DeviceRange) -> int: ...

    def launch_pulls(self) -> None: ...

    def pull(self, block_ids: Sequence[int], num_tokens: int, src: DeviceRange) -> CopyHandle: ...


def _zeros(shape: tuple[int, ...], num_bytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU in huge pages: a step reads blocks from all over the pool."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    fresh = HugePages().take(-(-num_bytes // 4))  # new memory of the system's is zero
    return fresh.view(torch.uint8)[:num_bytes].view(dtype).view(shape)


class GroupPool:
    """The blocks of one group; layers are counted within it. Zeroed at the start, so that no slot ever holds NaN that nobody
    computed."""

    def __init__(
        self, num_blocks: int, group: KvGroup, shard: Shard, device: torch.device, moves: KvMoves | None
    ) -> None:
        dtype: torch.dtype = getattr(torch, group.dtype)
        heads, dim = group.heads_per_rank(shard), group.dims[0]
        self.codec: SlotCodec | None = None
        """None: the elements are stored as they are."""
        if group.quantized:
            self.codec = SlotCodec(heads, dim, dtype, group.slot_bytes(shard))
            dtype, heads, dim = torch.uint8, 1, self.codec.slot_bytes
        shape = (num_blocks, group.num_layers, len(group.dims), group.block_size, heads, dim)
        self.group, self.num_blocks = group, num_blocks
        self.tensor: Tensor = _zeros(shape, num_blocks * group.block_bytes(shard), dtype, device)
        self.num_layers, self.block_size = group.num_layers, group.block_size
        self.bytes = kv_pack.pool_bytes(self.tensor)
        self._moves = moves
        self.mover: BlockMover | None = None
        """Set by the Triton path, whose attention reads no slot that the sequence does not own."""

    def rows(self, layer: int) -> Tensor:
        """See layer_rows."""
        return layer_rows(self.tensor, layer)

    def slots(self, layer: int) -> Tensor:
        """See layer_slots."""
        return layer_slots(self.tensor, layer)

    def clear(self, block_ids: Tensor) -> None:
        """Zero whole blocks. [num_blocks] int64."""
        self.tensor.index_fill_(0, block_ids, 0)

    def pack(self, block_ids: Sequence[int], num_tokens: int, out: Payload, layers: range | None) -> int:
        """See ModelRunner.pack. Raises: ValueError."""
        if isinstance(out, DeviceRange):
            return self._gpu_mover(layers).pack_device(block_ids, num_tokens, out)
        flat = out.cast("B")
        if self.mover is not None and layers is None:
            size = self.mover.pack(block_ids, num_tokens, flat)
        elif self._moves is not None:
            return self._moves.pack(self._rows_of(layers), block_ids, num_tokens, flat)[1]
        else:
            size = kv_pack.pack(self._rows_of(layers), block_ids, num_tokens, flat)
        return xxhash.xxh3_64_intdigest(flat[:size])

    def _gpu_mover(self, layers: range | None) -> BlockMover:
        if self.mover is None:
            raise ValueError("ranges in GPU memory need the triton backend")
        if layers is not None:
            raise ValueError("a range in GPU memory holds all layers")
        return self.mover

    def _rows_of(self, layers: range | None) -> Tensor:
        """[num_blocks, 2 * layers, block_size, bytes of one slot], a view."""
        return self.bytes if layers is None else self.bytes[:, 2 * layers.start : 2 * layers.stop]

    def unpack(
        self, block_ids: Sequence[int], num_tokens: int, src: Payload, layers: range | None
    ) -> CopyHandle | None:
        """See ModelRunner.unpack. Raises: ValueError."""
        if isinstance(src, DeviceRange):
            return self._gpu_mover(layers).pull(block_ids, num_tokens, src)
        if self.mover is not None and layers is None:
            self.mover.unpack(block_ids, num_tokens, src.cast("B"))
            return None
        move = self._moves or kv_pack
        move.unpack(self._rows_of(layers), block_ids, num_tokens, src.cast("B"))
        tail = num_tokens % self.block_size
        if tail:
            # Slots past the tail are read (and masked) until they are written: a NaN that a former owner left there would
            # spoil this sequence. Finite numbers stay as they are.
            rest = self.tensor[block_ids[num_tokens // self.block_size], :, :, tail:]
            if self.codec is not None:
                self.codec.scrub(rest)
            else:
                rest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return None


def check_pool(kv: KvFormat, num_host_blocks: int) -> None:
    """Raises: ConfigError for what no pool has: a host tier of window groups, groups with blocks of several sizes."""
    if num_host_blocks and not kv.has_one_full_group:
        names = ", ".join(group.name for group in kv.groups)
        raise ConfigError("num_host_blocks", num_host_blocks, f"there is no host tier for KV groups {names}")
    if len(sizes := {group.block_size for group in kv.groups}) > 1:
        raise ConfigError("block_size", sorted(sizes), "must be the same in every KV group")


class KvPool:
    """A GroupPool for each group of the format, in its order.

    Args:
        num_blocks: of each group.
        num_host_blocks: of the host tier.
    Raises: ConfigError, see check_pool.
    """

    def __init__(
        self, num_blocks: Sequence[int], kv: KvFormat, *, device: torch.device, num_host_blocks: int = 0
    ) -> None:
        check_pool(kv, num_host_blocks)
        moves = choose_moves() if device.type == "cpu" else None
        self.groups = tuple(
            GroupPool(count, group, kv.shard, device, moves) for count, group in zip(num_blocks, kv.groups, strict=True)
        )
        first = self.groups[0].tensor
        self.host: Tensor = torch.empty(
            (num_host_blocks, *first.shape[1:]),
            dtype=first.dtype,
            pin_memory=device.type == "cuda" and num_host_blocks > 0,
        )
        self.kv, self.device = kv, first.device
        self.block_size, self.num_layers = kv.block_size, kv.num_layers
        self.bytes_per_token = kv.bytes_per_token
        places = {layer: (g, i) for g, group in enumerate(kv.groups) for i, layer in enumerate(group.layers)}
        self.places: list[tuple[int, int]] = [places[layer] for layer in kv.layers]
        """Of each layer, counted within those that the format has: its group, and its index there."""

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Of each group."""
        return tuple(group.num_blocks for group in self.groups)

    @property
    def tensor(self) -> Tensor:
        """Of a pool with one group."""
        [group] = self.groups
        return group.tensor

    def layer(self, index: int) -> Tensor:
        """[num_blocks, 2, block_size, num_kv_heads, head_dim] of a layer of `places`, a view; of a quantized group
        [num_blocks, 2, block_size, 1, slot_bytes]."""
        group, layer = self.places[index]
        return self.groups[group].tensor[:, layer]

    def elements(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Of a layer of `places`: [num_blocks, 2, block_size, num_kv_heads, head_dim], and in a quantized group, whose elements
        these are codes of, [num_blocks, 2, block_size, num_kv_heads] scales. Views."""
        codec, layer = self.groups[self.places[index][0]].codec, self.layer(index)
        if codec is None:
            return layer, None
        slots = layer.squeeze(3)
        return codec.codes_of(slots), codec.scales_of(slots)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See ModelRunner.copy_blocks."""
        for copy in copies:
            tiers = {"device": self.groups[copy.group].tensor, "host": self.host}
            source, target = (tiers[tier] for tier in copy.kind.tiers)
            target[copy.dst].copy_(source[copy.src], non_blocking=True)  # in the order of the one stream
        if copies and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def pack(
        self, block_ids: Sequence[int], num_tokens: int, out: Payload, layers: range | None = None, group: int = 0
    ) -> int:
        """See ModelRunner.pack. Raises: ValueError."""
        return self.groups[group].pack(block_ids, num_tokens, out, layers)

    def unpack(
        self, block_ids: Sequence[int], num_tokens: int, src: Payload, layers: range | None = None, group: int = 0
    ) -> CopyHandle | None:
        """See ModelRunner.unpack. Raises: ValueError."""
        return self.groups[group].unpack(block_ids, num_tokens, src, layers)
