"""A worker of several ranks in one process, without a model: each rank has a pool of its own with its layers and heads, and every
token that is drawn depends on each byte of all of them. The tokens are the same for every degree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from diptych.common.compat import Compat, identified
from diptych.common.kv_format import KV_SCALE_DTYPE, ORDERS, KvFormat, windowed_format
from diptych.common.kv_groups import PoolDemand
from diptych.common.kv_parts import GroupPart, group_parts, split
from diptych.engine.executor import LocalExecutor
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import BlockCopy, ScheduledSeq
from diptych.engine.runner import RunnerCapabilities
from diptych.kvtransfer.slabs import kv_codes

if TYPE_CHECKING:
    from diptych.worker.model import LoadedModel

LAYERS = 4
Bytes = npt.NDArray[np.uint8]


def sharded_model(
    tensor_parallel: int = 1,
    pipeline: int = 1,
    *,
    heads: int = 4,
    hnd: bool = False,
    quantized: bool = False,
    windows: Sequence[int] = (0,) * LAYERS,
    block_size: int = 16,
    num_host_blocks: int = 0,
    **facts: Any,
) -> LoadedModel:
    """Elements of two bytes, or codes with scales. Args: windows: of each layer, 0: it sees every token. facts: others than those
    of the default `Compat`."""
    kv = windowed_format(
        windows, heads, 4 if quantized else 2, block_size=block_size, dtype="int8" if quantized else "float16",
        order="block-major-hnd" if hnd else "block-major", scale_dtype=KV_SCALE_DTYPE if quantized else "",
    )  # fmt: skip
    parts = split(kv, tensor_parallel=tensor_parallel, pipeline=pipeline)
    from diptych.worker.model import LoadedModel

    runner = FakeRanks(kv, parts, 64, num_host_blocks)
    compat = Compat(
        model="fake", model_revision="model-1", tokenizer_revision="tokenizer-1", kv=kv, compute_dtype="float16",
        attention_version="fake-1", sampler_version="fake-1", backend="fake",
        kv_parts=parts if len(parts) > 1 else (),
    )  # fmt: skip
    identity, compat = identified(replace(compat, **facts), bytes(32))
    return LoadedModel(runner, compat, identity, None, executor=RanksTogether(runner))


class FakeRanks(FakeRunner):
    """KV of a token is [layers, K and V, heads, width] bytes of the whole model. Its groups may have windows; all have the same
    heads. demand: bounds the pools of window groups."""

    def __init__(
        self,
        kv: KvFormat,
        parts: Sequence[KvFormat],
        num_blocks: int,
        num_host_blocks: int = 0,
        demand: PoolDemand | None = None,
        **settings: Any,
    ) -> None:
        windows = {layer: group.window for group in kv.groups for layer in group.layers}
        super().__init__(
            num_blocks, kv.block_size, num_layers=kv.num_layers, num_host_blocks=num_host_blocks, demand=demand,
            windows=[windows[layer] for layer in kv.layers] if any(windows.values()) else (), **settings,
        )  # fmt: skip
        self._whole, self._parts = kv, parts
        [self._heads], [self._quantized] = (
            {group.heads for group in kv.groups},
            {group.quantized for group in kv.groups},
        )
        self._width = kv.groups[0].layer_bytes_per_token(kv.shard) // (2 * self._heads)
        self.kv_bytes_per_token = sum(part.bytes_per_token for part in parts)
        self.held = {(one.part, one.own): one for one in group_parts(kv, parts)}
        self._pools, self._hosts = (
            {key: np.zeros((counts[one.group], *self._shape(one)), np.uint8) for key, one in self.held.items()}
            for counts in (self.group_blocks, (num_host_blocks,) * len(kv.groups))
        )

    def _shape(self, one: GroupPart) -> tuple[int, ...]:
        return one.num_layers, 2, self.block_size, self._parts[one.part].shard.heads_per_rank(self._heads), self._width

    @property
    def capabilities(self) -> RunnerCapabilities:
        several, windows = len(self._parts) > 1, not self._whole.has_one_full_group
        return replace(
            super().capabilities,
            kv=self._whole if windows or not several else None,
            rank_sizes=tuple((part.num_layers, part.bytes_per_token) for part in self._parts) if several else (),
            parts=tuple(self._parts) if windows and several else (),
            reports_layers=all(part.num_layers == LAYERS for part in self._parts),
            grammars=not several,
        )

    def of(self, one: GroupPart) -> tuple[slice, slice]:
        """Its layers, counted within the model's group, and its heads."""
        part = self._parts[one.part]
        first = self._whole.groups[one.group].layers.index(part.groups[one.own].layers[0])
        heads = part.shard.heads(self._heads)
        return slice(first, first + one.num_layers), slice(heads.start, heads.stop)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            tiers = {"device": self._pools, "host": self._hosts}
            source, target = (tiers[tier] for tier in copy.kind.tiers)
            for key, one in self.held.items():
                if one.group == copy.group:
                    target[key][copy.dst] = source[key][copy.src]
        if self._provenance is not None:
            self._provenance.copied(copies)

    def pack_part(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        out: memoryview,
        layers: range | None,
        part: int,
        group: int = 0,
    ) -> int:
        """Args: group: of the rank."""
        slots = self._slots(self._pools[part, group], block_ids, num_tokens, layers)
        data = b"".join(self._outside(some).tobytes() for some in slots)
        out[: len(data)] = data
        return int(xxhash.xxh3_64_intdigest(data))

    def unpack_part(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        src: memoryview,
        layers: range | None,
        part: int,
        group: int = 0,
    ) -> None:
        """Args: group: of the rank."""
        data, at = np.frombuffer(src, np.uint8), 0
        if not self.held[part, group].group:
            self.note_overwritten(block_ids)
        for slots in self._slots(self._pools[part, group], block_ids, num_tokens, layers):
            some = data[at : at + slots.size]
            if self._quantized:
                heads, width = slots.shape[3:]
                slots[...] = kv_codes.records_of(some.reshape(*slots.shape[:3], heads * width), heads, width - 4)
            elif ORDERS[self._whole.order] == "HND":
                slots.swapaxes(2, 3)[...] = some.reshape(slots.swapaxes(2, 3).shape)
            else:
                slots[...] = some.reshape(slots.shape)
            at += slots.size

    def _slots(self, pool: Bytes, block_ids: Sequence[int], num_tokens: int, layers: range | None) -> list[Bytes]:
        """Of each block [layers, K and V, slots that are used, heads, width], a view."""
        size = self.block_size
        some = slice(None) if layers is None else slice(layers.start, layers.stop)
        return [pool[block_ids[at // size], some, :, : min(size, num_tokens - at)] for at in range(0, num_tokens, size)]

    def _outside(self, slots: Bytes) -> Bytes:
        """As they are in a slab."""
        if self._quantized:
            return kv_codes.slots_of(slots)
        return slots.swapaxes(2, 3) if ORDERS[self._whole.order] == "HND" else slots

    def _place(self, seq: ScheduledSeq, position: int, group: int) -> tuple[int, int]:
        """Its block in the model's group, and the slot there."""
        block, slot = divmod(position, self.block_size)
        index = block - seq.first_blocks[group]
        assert index >= 0, f"{seq.attempt}: block {block} of KV group {group} is behind the window"
        return seq.block_tables[group][index], slot

    def _token(self, seq: ScheduledSeq, position: int, group: int = 0) -> Bytes:
        """All of its KV in a group, gathered from the ranks; those that hold the same must agree."""
        number, slot = self._place(seq, position, group)
        num_layers = self._whole.groups[group].num_layers
        whole = np.zeros((num_layers, 2, self._heads, self._width), np.uint8)
        there = np.zeros((num_layers, self._heads), np.bool_)
        for key, one in self.held.items():
            if one.group != group:
                continue
            layers, heads = self.of(one)
            mine, known = self._pools[key][number, :, :, slot], there[layers, heads]
            same = (whole[layers, :, heads] == mine).all(axis=(1, 3))
            assert same[known].all(), f"{seq.attempt}: ranks hold other KV of one head at token {position}"
            whole[layers, :, heads], there[layers, heads] = mine, True
        assert there.all(), f"{seq.attempt}: nobody has some heads of KV group {group}"
        return whole

    def _write(self, seqs: Sequence[ScheduledSeq], should_abort: Callable[[], bool] | None) -> None:
        by_group = [list(group.layers) for group in self._whole.groups]
        for seq in seqs:
            before = self._token(seq, seq.start - 1).tobytes() if seq.start else b""
            for position, token in enumerate(seq.token_ids, seq.start):
                kv = self._computed(before, token, position)
                for key, one in self.held.items():
                    number, slot = self._place(seq, position, one.group)
                    layers, heads = self.of(one)
                    self._pools[key][number, :, :, slot] = kv[by_group[one.group]][layers, :, heads]
                before = kv[by_group[0]].tobytes()
        for layer in range(1, self.num_layers):  # no chunk sends layers before they are there
            self.on_layers(layer)
        self.computed_tokens += sum(len(seq.token_ids) for seq in seqs)

    def _computed(self, before: bytes, token: int, position: int) -> Bytes:
        """Every byte is another function of the tokens up to this one."""
        shape = self.num_layers, 2, self._heads, self._width
        known = before + token.to_bytes(4, "little") + position.to_bytes(4, "little")
        seed = xxhash.xxh3_64_intdigest(known) & 0xFFFFFFFF
        numbers = (np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
        found: Bytes = (numbers >> np.uint64(40)).astype(np.uint8).reshape(shape)
        return found

    def _seen(self, seq: ScheduledSeq, num_tokens: int) -> int:
        digest = xxhash.xxh3_64()
        for index, group in enumerate(self._whole.groups):
            for position in range(group.first_needed(num_tokens - 1), num_tokens):
                digest.update(self._token(seq, position, index).tobytes())
        return digest.intdigest()


class RanksTogether(LocalExecutor):
    """All ranks are in this process, and each has its part."""

    runner: FakeRanks

    def __init__(self, runner: FakeRanks) -> None:
        super().__init__(runner)  # type: ignore[arg-type]

    def pack(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        out: Any,
        layers: range | None = None,
        group: int = 0,
        part: int = 0,
    ) -> int:
        return self.runner.pack_part(block_ids, num_tokens, out, layers, part, group)

    def unpack(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        src: Any,
        layers: range | None = None,
        group: int = 0,
        part: int = 0,
    ) -> None:
        self.runner.unpack_part(block_ids, num_tokens, src, layers, part, group)
