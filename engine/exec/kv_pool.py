"""The KV pool: one tensor [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], so that one block of all layers is
one contiguous piece on the wire. The host tier is a second one of the same shape in (pinned) host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from diptych.common.kv_format import KvFormat, full_format
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.native.library import choose_moves
from diptych.engine.messages import BlockCopy, CopyKind, DeviceRange, Payload
from diptych.engine.runner import CopyHandle
from diptych.kernels import kv_pack
from diptych.kernels.native.api import HugePages
from diptych.kernels.paged_attention import layer_rows, layer_slots


def kv_format_of(model: ModelDescription, *, block_size: int, dtype: str = "float32") -> KvFormat:
    """Of a model whose layers all keep every token: layers with a window read the last tokens of what the pool holds."""
    return full_format(
        model.num_layers, model.num_kv_heads, model.head_dim, block_size=block_size, dtype=dtype, order="block-major"
    )


class BlockMover(Protocol):
    """A faster way to pack and unpack: see engine.exec.cuda.blocks."""

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


class KvPool:
    """Zeroed at the start, so that no slot ever holds NaN that nobody computed."""

    def __init__(
        self,
        num_blocks: int,
        kv: KvFormat,
        *,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        group = kv.only_group
        num_layers, block_size = group.num_layers, group.block_size
        dtype: torch.dtype = getattr(torch, group.dtype)
        parts, heads = len(group.dims), group.heads_per_rank(kv.shard)
        shape = (num_blocks, num_layers, parts, block_size, heads, group.dims[0])
        self.tensor: Tensor = _zeros(shape, num_blocks * kv.block_bytes, dtype, device)
        self.host: Tensor = torch.empty(
            (num_host_blocks, *shape[1:]), dtype=dtype, pin_memory=device.type == "cuda" and num_host_blocks > 0
        )
        self.num_blocks, self.num_layers, self.block_size = num_blocks, num_layers, block_size
        self.kv = kv
        self.bytes_per_token = kv.bytes_per_token
        self.rows = [layer_rows(self.tensor, layer) for layer in range(num_layers)]
        self.slots = [layer_slots(self.tensor, layer) for layer in range(num_layers)]
        self._bytes = kv_pack.pool_bytes(self.tensor)
        self._moves = choose_moves() if device.type == "cpu" else None
        self.mover: BlockMover | None = None
        """Set by the Triton path, whose attention reads no slot that the sequence does not own."""

    def clear(self, block_ids: Tensor) -> None:
        """Zero whole blocks. [num_blocks] int64."""
        self.tensor.index_fill_(0, block_ids, 0)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See ModelRunner.copy_blocks."""
        pool, host = self.tensor, self.host
        ends = {
            CopyKind.FORK: (pool, pool),
            CopyKind.TO_HOST: (pool, host),
            CopyKind.FROM_HOST: (host, pool),
        }
        for copy in copies:
            source, target = ends[copy.kind]
            target[copy.dst].copy_(source[copy.src], non_blocking=True)  # in the order of the one stream
        if copies and pool.device.type == "cuda":
            torch.cuda.current_stream(pool.device).synchronize()

    def pack(self, block_ids: Sequence[int], num_tokens: int, out: Payload, layers: range | None = None) -> int:
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
        return self._bytes if layers is None else self._bytes[:, 2 * layers.start : 2 * layers.stop]

    def unpack(
        self, block_ids: Sequence[int], num_tokens: int, src: Payload, layers: range | None = None
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
            rest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return None
