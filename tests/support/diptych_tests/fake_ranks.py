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
from diptych.common.kv_format import KV_SCALE_DTYPE, ORDERS, KvFormat, full_format
from diptych.common.kv_parts import split
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
    block_size: int = 16,
    num_host_blocks: int = 0,
    **facts: Any,
) -> LoadedModel:
    """Elements of two bytes, or codes with scales. Args: facts: others than those of the default `Compat`."""
    kv = full_format(
        LAYERS, heads, 4 if quantized else 2, block_size=block_size, dtype="int8" if quantized else "float16",
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
    """KV of a token is [layers, K and V, heads, width] bytes of the whole model."""

    def __init__(
        self, kv: KvFormat, parts: Sequence[KvFormat], num_blocks: int, num_host_blocks: int = 0, **settings: Any
    ) -> None:
        group = kv.only_group
        super().__init__(
            num_blocks, group.block_size, num_layers=group.num_layers, num_host_blocks=num_host_blocks, **settings
        )
        self._whole, self._parts = kv, parts
        self._width = group.layer_bytes_per_token(kv.shard) // (2 * group.heads)
        self.kv_bytes_per_token = sum(part.bytes_per_token for part in parts)
        self._pools, self._hosts = (
            [
                np.zeros((count, *self._shape(part, group.block_size)), np.uint8)
                for part in parts
            ]
            for count in (self.num_blocks, num_host_blocks)
        )  # fmt: skip

    def _shape(self, part: KvFormat, num_slots: int) -> tuple[int, ...]:
        group = part.only_group
        return group.num_layers, 2, num_slots, group.heads_per_rank(part.shard), self._width

    @property
    def capabilities(self) -> RunnerCapabilities:
        several = len(self._parts) > 1
        return replace(
            super().capabilities,
            kv=None if several else self._whole,
            rank_sizes=tuple((part.num_layers, part.bytes_per_token) for part in self._parts) if several else (),
            reports_layers=all(part.num_layers == LAYERS for part in self._parts),
            grammars=not several,
        )

    def of(self, part: int) -> tuple[slice, slice]:
        """Layers and heads of the rank."""
        kv = self._parts[part]
        layers, heads = kv.layers, kv.shard.heads(kv.only_group.heads)
        return slice(layers.start, layers.stop), slice(heads.start, heads.stop)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            tiers = {"device": self._pools, "host": self._hosts}
            source, target = (tiers[tier] for tier in copy.kind.tiers)
            for there, here in zip(source, target, strict=True):
                here[copy.dst] = there[copy.src]
        if self._provenance is not None:
            self._provenance.copied(copies)

    def pack_part(
        self, block_ids: Sequence[int], num_tokens: int, out: memoryview, layers: range | None, part: int
    ) -> int:
        data = b"".join(self._outside(slots).tobytes() for slots in self._slots(block_ids, num_tokens, layers, part))
        out[: len(data)] = data
        return int(xxhash.xxh3_64_intdigest(data))

    def unpack_part(
        self, block_ids: Sequence[int], num_tokens: int, src: memoryview, layers: range | None, part: int
    ) -> None:
        data, at = np.frombuffer(src, np.uint8), 0
        if self._provenance is not None:
            self._provenance.forget(block_ids)
        for slots in self._slots(block_ids, num_tokens, layers, part):
            some = data[at : at + slots.size]
            if self._whole.only_group.quantized:
                heads, width = slots.shape[3:]
                slots[...] = kv_codes.records_of(some.reshape(*slots.shape[:3], heads * width), heads, width - 4)
            elif ORDERS[self._whole.order] == "HND":
                slots.swapaxes(2, 3)[...] = some.reshape(slots.swapaxes(2, 3).shape)
            else:
                slots[...] = some.reshape(slots.shape)
            at += slots.size

    def _slots(self, block_ids: Sequence[int], num_tokens: int, layers: range | None, part: int) -> list[Bytes]:
        """Of each block [layers, K and V, slots that are used, heads, width], a view."""
        pool, size = self._pools[part], self.block_size
        some = slice(None) if layers is None else slice(layers.start, layers.stop)
        return [pool[block_ids[at // size], some, :, : min(size, num_tokens - at)] for at in range(0, num_tokens, size)]

    def _outside(self, slots: Bytes) -> Bytes:
        """As they are in a slab."""
        if self._whole.only_group.quantized:
            return kv_codes.slots_of(slots)
        return slots.swapaxes(2, 3) if ORDERS[self._whole.order] == "HND" else slots

    def _token(self, seq: ScheduledSeq, position: int) -> Bytes:
        """All of its KV, gathered from the ranks; those that hold the same must agree."""
        block, slot = divmod(position, self.block_size)
        number = seq.block_tables[0][block]
        group = self._whole.only_group
        whole = np.zeros((group.num_layers, 2, group.heads, self._width), np.uint8)
        there = np.zeros((group.num_layers, group.heads), np.bool_)
        for part, pool in enumerate(self._pools):
            layers, heads = self.of(part)
            mine, known = pool[number, :, :, slot], there[layers, heads]
            same = (whole[layers, :, heads] == mine).all(axis=(1, 3))
            assert same[known].all(), f"{seq.attempt}: ranks hold other KV of one head at token {position}"
            whole[layers, :, heads], there[layers, heads] = mine, True
        return whole

    def _write(self, seqs: Sequence[ScheduledSeq], should_abort: Callable[[], bool] | None) -> None:
        for seq in seqs:
            before = self._token(seq, seq.start - 1).tobytes() if seq.start else b""
            for position, token in enumerate(seq.token_ids, seq.start):
                kv = self._computed(before, token, position)
                block, slot = divmod(position, self.block_size)
                for part, pool in enumerate(self._pools):
                    layers, heads = self.of(part)
                    pool[seq.block_tables[0][block], :, :, slot] = kv[layers, :, heads]
                before = kv.tobytes()
        for layer in range(1, self.num_layers):  # no chunk sends layers before they are there
            self.on_layers(layer)
        self.computed_tokens += sum(len(seq.token_ids) for seq in seqs)

    def _computed(self, before: bytes, token: int, position: int) -> Bytes:
        """Every byte is another function of the tokens up to this one."""
        group = self._whole.only_group
        shape = group.num_layers, 2, group.heads, self._width
        known = before + token.to_bytes(4, "little") + position.to_bytes(4, "little")
        seed = xxhash.xxh3_64_intdigest(known) & 0xFFFFFFFF
        numbers = (np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
        found: Bytes = (numbers >> np.uint64(40)).astype(np.uint8).reshape(shape)
        return found

    def _seen(self, seq: ScheduledSeq, num_tokens: int) -> int:
        digest = xxhash.xxh3_64()
        for position in range(num_tokens):
            digest.update(self._token(seq, position).tobytes())
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
        return self.runner.pack_part(block_ids, num_tokens, out, layers, part)

    def unpack(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        src: Any,
        layers: range | None = None,
        group: int = 0,
        part: int = 0,
    ) -> None:
        self.runner.unpack_part(block_ids, num_tokens, src, layers, part)
