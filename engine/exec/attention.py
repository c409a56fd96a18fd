"""One step's layout: which token lies in which row, where its KV goes, and what each sequence attends to.

Rows: the sequences with one new token first, longest context first, then the chunks:

    row   0 1 2 3 4 5 | 6 7 8 9 10 | 11 12 ...
          decode      | chunk A    | chunk B

Decode rows are cut into groups whose gathered KV stays in the cache (and whose lengths are alike, since they are sorted);
each group is one call for all its sequences. Everything here is built once a step and serves all layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.common.errors import InternalError
from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.layers.attention import Attention
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.messages import ScheduledSeq
from diptych.kernels.dispatch import attention_ops
from diptych.kernels.paged_attention import Scratch, block_rows, chunk_mask, decode_mask, token_slots

ATTENTION_VERSION = "torch-sdpa-1"
"""Of the torch path; changes whenever the numbers may change beyond rounding."""
TRITON_ATTENTION_VERSION = "triton-1"
"""Of the Triton path."""


def attention_version(device_type: str) -> str:
    """What a worker on "cpu" or "cuda" computes attention with: both workers of a pair must agree."""
    return TRITON_ATTENTION_VERSION if device_type == "cuda" else ATTENTION_VERSION


CPU_GROUP_BYTES = 4 << 20
"""Gathered K and V of one group; about what the last-level cache holds beside the weights."""
GPU_GROUP_BYTES = 1 << 30
MIN_GROUP_SEQS = 4

Masks = dict[int | None, Tensor | None]
"""By sliding window. None as the mask: plain causal."""


@dataclass(slots=True)
class DecodeGroup:
    """Sequences in rows [first, last). rows: block_rows of their padded block table."""

    first: int
    last: int
    rows: Tensor
    masks: Masks


@dataclass(slots=True)
class Chunk:
    """Several tokens of one sequence in rows [first, last). rows: None when the chunk is all there is to attend to."""

    first: int
    last: int
    num_kv_tokens: int
    rows: Tensor | None
    masks: Masks


@dataclass(slots=True)
class StepBatch:
    """All tensors are on the model's device.

    Args:
        order: sequence index of each group of rows, in row order.
        token_ids, positions, slots, v_slots: [num_rows] int64.
        sample_rows: rows whose logits are wanted; sample_seqs: the sequence index of each.
        fresh_blocks: to be zeroed before the step, see BatchBuilder; [n] int64, or None.
    """

    order: list[int]
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    v_slots: Tensor
    groups: list[DecodeGroup]
    chunks: list[Chunk]
    sample_rows: list[int]
    sample_seqs: list[int]
    fresh_blocks: Tensor | None


def check_step(seqs: Sequence[ScheduledSeq], pool: KvPool, max_model_len: int) -> None:
    """Raises: InternalError when a sequence breaks the scheduler's promises."""
    for seq in seqs:
        end = seq.start + len(seq.token_ids)
        if not seq.token_ids or seq.start < 0 or end > max_model_len:
            raise InternalError(f"{seq.attempt}: tokens [{seq.start}, {end}) of at most {max_model_len}")
        if len(seq.block_tables[0]) * pool.block_size < end:
            raise InternalError(f"{seq.attempt}: {len(seq.block_tables[0])} blocks do not cover {end} tokens")
        if min(seq.block_tables[0]) < 0 or max(seq.block_tables[0]) >= pool.num_blocks:
            raise InternalError(f"{seq.attempt}: a block id is outside the pool of {pool.num_blocks}")


def split_groups(lens: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Cut sequences (longest first) into runs [first, last) whose padded size, longest x count, is at most `max_tokens`;
    a run has at least MIN_GROUP_SEQS sequences all the same, where there are that many."""
    runs = []
    first = 0
    while first < len(lens):
        count = max(MIN_GROUP_SEQS, max_tokens // lens[first])
        runs.append((first, min(len(lens), first + count)))
        first += count
    return runs


class BatchBuilder:
    """Lays out steps for one model and pool."""

    def __init__(self, description: ModelDescription, pool: KvPool, *, max_model_len: int) -> None:
        self._pool, self._max_model_len = pool, max_model_len
        self._device, self._dtype = pool.tensor.device, pool.tensor.dtype
        self._windows = sorted(set(description.windows), key=lambda w: w or 0)
        kv_bytes = pool.bytes_per_token // pool.num_layers
        group_bytes = CPU_GROUP_BYTES if self._device.type == "cpu" else GPU_GROUP_BYTES
        self._group_tokens = max(1, group_bytes // kv_bytes)

    def build(self, seqs: Sequence[ScheduledSeq]) -> StepBatch:
        """Raises: InternalError when a sequence breaks the scheduler's promises."""
        check_step(seqs, self._pool, self._max_model_len)
        single = [i for i, seq in enumerate(seqs) if len(seq.token_ids) == 1]
        single.sort(key=lambda i: -seqs[i].start)
        order = single + [i for i, seq in enumerate(seqs) if len(seq.token_ids) > 1]
        block_size = self._pool.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        sample_rows: list[int] = []
        sample_seqs: list[int] = []
        for i in order:
            seq = seqs[i]
            token_ids += seq.token_ids
            span = range(seq.start, seq.start + len(seq.token_ids))
            positions += span
            blocks += [seq.block_tables[0][p // block_size] for p in span]
            if seq.sample:
                sample_rows += range(len(token_ids) - 1 - seq.num_drafts, len(token_ids))
                sample_seqs += [i] * (1 + seq.num_drafts)
        at = self._tensor(positions)
        slots = token_slots(self._tensor(blocks), at % block_size, self._pool.num_layers, block_size)
        return StepBatch(
            order=order,
            token_ids=self._tensor(token_ids),
            positions=at,
            slots=slots,
            v_slots=slots + block_size,
            groups=self._groups([seqs[i] for i in single]),
            chunks=self._chunks([seqs[i] for i in order[len(single) :]], len(single)),
            sample_rows=sample_rows,
            sample_seqs=sample_seqs,
            fresh_blocks=self._fresh_tail_blocks(seqs),
        )

    def _fresh_tail_blocks(self, seqs: Sequence[ScheduledSeq]) -> Tensor | None:
        """Blocks whose first slot this step writes but whose last it does not: a former owner's numbers in the slots behind
        are read (masked) from now on and must not be NaN. [n] int64, or None."""
        block_size = self._pool.block_size
        fresh = []
        for seq in seqs:
            end = seq.start + len(seq.token_ids)
            if end % block_size and seq.start <= end - end % block_size:
                fresh.append(seq.block_tables[0][end // block_size])
        return self._tensor(fresh) if fresh else None

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _groups(self, seqs: list[ScheduledSeq]) -> list[DecodeGroup]:
        block_size, groups = self._pool.block_size, []
        lens = [seq.start + 1 for seq in seqs]
        for first, last in split_groups(lens, self._group_tokens):
            width = math.ceil(lens[first] / block_size)
            table: list[int] = []
            for seq in seqs[first:last]:
                # Padded with the sequence's own first block: what is masked must not come from another owner. Blocks past
                # its end (reserved for growth) hold a former owner's numbers.
                own = seq.block_tables[0][: seq.start // block_size + 1]
                table += own + own[:1] * (width - len(own))
            some = self._tensor(lens[first:last])
            masks: Masks = {w: decode_mask(some, width * block_size, w, self._dtype) for w in self._windows}
            groups.append(DecodeGroup(first, last, block_rows(self._tensor(table), self._pool.num_layers), masks))
        return groups

    def _chunks(self, seqs: list[ScheduledSeq], first: int) -> list[Chunk]:
        block_size, chunks = self._pool.block_size, []
        for seq in seqs:
            count = len(seq.token_ids)
            end = seq.start + count
            masks: Masks = {
                window: None
                if seq.start == 0 and (window is None or window >= count)
                else chunk_mask(seq.start, count, window, self._dtype, self._device)
                for window in self._windows
            }
            table = seq.block_tables[0][: math.ceil(end / block_size)]
            rows = block_rows(self._tensor(table), self._pool.num_layers) if seq.start else None
            chunks.append(Chunk(first, first + count, end, rows, masks))
            first += count
        return chunks


class PagedAttention:
    """Writes one layer's new KV into the pool and attends."""

    def __init__(self, layer: Attention, index: int, pool: KvPool, scratch: Scratch) -> None:
        """scratch: may be shared with other layers, which run before or after this one."""
        self._layer, self._scratch = layer, scratch
        self._rows, self._slots = pool.rows[index], pool.slots[index]
        self._ops = attention_ops(pool.tensor.device.type)

    def write(self, k: Tensor, v: Tensor, batch: StepBatch) -> None:
        """k, v: [num_rows, num_kv_heads, head_dim]."""
        self._ops.write_kv(self._slots, batch.slots, batch.v_slots, k.flatten(1), v.flatten(1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch) -> Tensor:
        """q: [num_rows, num_heads, head_dim]; k, v: as written. Returns: [num_rows, num_heads * head_dim]."""
        layer, parts = self._layer, []
        for group in batch.groups:
            some = q[group.first : group.last]
            mask = group.masks[layer.window]
            parts.append(
                self._ops.paged_decode(
                    some, self._rows, group.rows, mask, layer.num_kv_heads, layer.scale, self._scratch, layer.softcap
                )
            )
        for chunk in batch.chunks:
            span = slice(chunk.first, chunk.last)
            keys, values = k[span], v[span]
            if chunk.rows is not None:
                keys, values = self._ops.gather_kv(
                    self._rows, chunk.rows, chunk.num_kv_tokens, layer.num_kv_heads, layer.head_dim, self._scratch
                )
            mask = chunk.masks[layer.window]
            parts.append(self._ops.chunk_attention(q[span], keys, values, mask, layer.scale, layer.softcap))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)
