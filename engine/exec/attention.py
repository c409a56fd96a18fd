"""One step's layout: which token lies in which row, where its KV goes, and what each sequence attends to.

Rows: the sequences with one new token first, longest context first, then the chunks:

    row   0 1 2 3 4 5 | 6 7 8 9 10 | 11 12 ...
          decode      | chunk A    | chunk B

Decode rows are cut into runs whose gathered KV stays in the cache (and whose lengths are alike, since they are sorted);
each run is one call for all its sequences. Everything here is built once a step, for each KV group, and serves all layers
of it. Of a window group only blocks that the step's first token of a sequence sees are gathered, whatever the table holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diptych.common.errors import InternalError
from diptych.common.kv_format import KvFormat, KvGroup
from diptych.engine.exec.kv_pool import GroupPool, KvPool
from diptych.engine.exec.layers.attention import Attention
from diptych.engine.exec.methods.base import PLAIN_ROWS, StepRows
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.messages import ScheduledSeq
from diptych.kernels.dispatch import attention_ops
from diptych.kernels.paged_attention import Scratch, block_rows, chunk_mask, decode_mask, token_slots

ATTENTION_VERSION = "torch-sdpa-2"
"""Of a CPU; changes whenever the numbers may change beyond rounding, those of a linear layer, too. With 2, codes with
scales of groups meet rows in fixed point."""
TRITON_ATTENTION_VERSION = "triton-1"
"""Of the Triton path."""
INVARIANT_ATTENTION_VERSION = "triton-invariant-1"
"""Of its batch-invariant kernels: changes with any order of a sum, of a linear layer, too."""


def attention_version(device_type: str, *, batch_invariant: bool = False) -> str:
    """What a worker on "cpu" or "cuda" computes attention with: both workers of a pair must agree. The CPU's kernels are
    batch-invariant in any case."""
    if device_type != "cuda":
        return ATTENTION_VERSION
    return INVARIANT_ATTENTION_VERSION if batch_invariant else TRITON_ATTENTION_VERSION


CPU_RUN_BYTES = 4 << 20
"""Gathered K and V of one run; about what the last-level cache holds beside the weights."""
GPU_RUN_BYTES = 1 << 30
MIN_RUN_SEQS = 4

Masks = dict[int | None, Tensor | None]
"""By sliding window. None as the mask: plain causal."""


@dataclass(slots=True)
class DecodeRun:
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
class GroupBatch:
    """The step in one KV group.

    Args:
        slots, v_slots: [num_rows] int64.
        fresh_blocks: to be zeroed before the step, see BatchBuilder; [n] int64, or None.
    """

    slots: Tensor
    v_slots: Tensor
    runs: list[DecodeRun]
    chunks: list[Chunk]
    fresh_blocks: Tensor | None


@dataclass(slots=True)
class StepBatch:
    """All tensors are on the model's device.

    Args:
        order: sequence index of each group of rows, in row order.
        token_ids, positions: [num_rows] int64.
        sample_rows: rows whose logits are wanted; sample_seqs: the sequence index of each.
        rows: what methods of linear layers ask of the rows.
    """

    order: list[int]
    token_ids: Tensor
    positions: Tensor
    groups: list[GroupBatch]
    sample_rows: list[int]
    sample_seqs: list[int]
    rows: StepRows


def row_adapters(seqs: Sequence[ScheduledSeq]) -> list[int] | None:
    """The adapter of each row, -1: none; None: no row has one. Args: seqs: in the order of their rows."""
    if all(seq.adapter < 0 for seq in seqs):
        return None
    return [seq.adapter for seq in seqs for _ in seq.token_ids]


def check_step(seqs: Sequence[ScheduledSeq], pool: KvPool, max_model_len: int) -> None:
    """Raises: InternalError when a sequence breaks the scheduler's promises."""
    for seq in seqs:
        end = seq.start + len(seq.token_ids)
        if not seq.token_ids or seq.start < 0 or end > max_model_len:
            raise InternalError(f"{seq.attempt}: tokens [{seq.start}, {end}) of at most {max_model_len}")
        check_tables(seq, pool.kv)
        for group, table in zip(pool.groups, seq.block_tables, strict=True):
            if min(table) < 0 or max(table) >= group.num_blocks:
                raise InternalError(f"{seq.attempt}: a block id is outside the pool of {group.num_blocks}")


def check_tables(seq: ScheduledSeq, kv: KvFormat) -> None:
    """Raises: InternalError when a table does not cover what the sequence's tokens of this step read and write."""
    end = seq.start + len(seq.token_ids)
    if not len(seq.block_tables) == len(seq.first_blocks) == len(kv.groups):
        raise InternalError(f"{seq.attempt}: {len(seq.block_tables)} block tables for {len(kv.groups)} KV groups")
    for group, table, first in zip(kv.groups, seq.block_tables, seq.first_blocks, strict=True):
        if (first + len(table)) * group.block_size < end:
            raise InternalError(f"{seq.attempt}: {first} and {len(table)} blocks do not cover {end} tokens")
        if first and not 0 < first <= group.first_block(seq.start):
            raise InternalError(f"{seq.attempt}: blocks from {first} on are not all that token {seq.start} reads")


def blocks_read(seq: ScheduledSeq, index: int, group: KvGroup) -> tuple[list[int], int]:
    """The table of group number `index` from the first block on that this step may read, and the number of that block."""
    table, given = seq.block_tables[index], seq.first_blocks[index]
    if not group.window:
        return table, 0
    first = group.first_block(seq.start)
    return (table if first == given else table[first - given :]), first


def split_runs(lens: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Cut sequences (longest first) into runs [first, last) whose padded size, longest x count, is at most `max_tokens`;
    a run has at least MIN_RUN_SEQS sequences all the same, where there are that many."""
    runs = []
    first = 0
    while first < len(lens):
        count = max(MIN_RUN_SEQS, max_tokens // lens[first])
        runs.append((first, min(len(lens), first + count)))
        first += count
    return runs


class BatchBuilder:
    """Lays out steps for one model and pool."""

    def __init__(self, description: ModelDescription, pool: KvPool, *, max_model_len: int, dtype: torch.dtype) -> None:
        """dtype: of the computation."""
        self._pool, self._max_model_len = pool, max_model_len
        run_bytes = CPU_RUN_BYTES if pool.device.type == "cpu" else GPU_RUN_BYTES
        self._builders = [
            _GroupBuilder(
                group,
                index,
                windows=[description.windows[layer - pool.kv.layers.start] for layer in group.group.layers],
                run_tokens=max(1, run_bytes // _gathered_bytes(group, pool.kv, dtype)),
                dtype=dtype,
            )
            for index, group in enumerate(pool.groups)
        ]

    def build(self, seqs: Sequence[ScheduledSeq]) -> StepBatch:
        """Raises: InternalError when a sequence breaks the scheduler's promises."""
        check_step(seqs, self._pool, self._max_model_len)
        single = [i for i, seq in enumerate(seqs) if len(seq.token_ids) == 1]
        single.sort(key=lambda i: -seqs[i].start)
        order = single + [i for i, seq in enumerate(seqs) if len(seq.token_ids) > 1]
        token_ids: list[int] = []
        positions: list[int] = []
        sample_rows: list[int] = []
        sample_seqs: list[int] = []
        for i in order:
            seq = seqs[i]
            token_ids += seq.token_ids
            positions += range(seq.start, seq.start + len(seq.token_ids))
            if seq.sample:
                sample_rows += range(len(token_ids) - 1 - seq.num_drafts, len(token_ids))
                sample_seqs += [i] * (1 + seq.num_drafts)
        device = self._pool.device
        at = torch.tensor(positions, dtype=torch.int64, device=device)
        ordered = [seqs[i] for i in order]
        adapters = row_adapters(ordered)
        return StepBatch(
            order=order,
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
            positions=at,
            groups=[builder.build(ordered, len(single), at) for builder in self._builders],
            sample_rows=sample_rows,
            sample_seqs=sample_seqs,
            rows=PLAIN_ROWS if adapters is None else StepRows(torch.tensor(adapters, dtype=torch.int32, device=device)),
        )


def _gathered_bytes(pool: GroupPool, kv: KvFormat, dtype: torch.dtype) -> int:
    """K and V of a token in one layer, as attention reads them."""
    group = pool.group
    read = replace(group, dtype=str(dtype).removeprefix("torch."), scale_dtype="")
    return read.layer_bytes_per_token(kv.shard)


class _GroupBuilder:
    """Lays out steps in one KV group. windows: of its layers, which may be shorter than what the group keeps."""

    def __init__(
        self, pool: GroupPool, index: int, *, windows: Sequence[int | None], run_tokens: int, dtype: torch.dtype
    ) -> None:
        self._pool, self._index, self._run_tokens = pool, index, run_tokens
        self._device, self._dtype = pool.tensor.device, dtype
        self._windows = sorted(set(windows), key=lambda w: w or 0)

    def build(self, seqs: Sequence[ScheduledSeq], num_single: int, positions: Tensor) -> GroupBatch:
        """seqs: in row order, the first `num_single` with one token each."""
        block_size = self._pool.block_size
        tables = [blocks_read(seq, self._index, self._pool.group) for seq in seqs]
        blocks: list[int] = []
        for seq, (table, first) in zip(seqs, tables, strict=True):
            blocks += [table[p // block_size - first] for p in range(seq.start, seq.start + len(seq.token_ids))]
        slots = token_slots(self._tensor(blocks), positions % block_size, self._pool.num_layers, block_size)
        return GroupBatch(
            slots=slots,
            v_slots=slots + block_size,
            runs=self._runs(seqs[:num_single], tables[:num_single]),
            chunks=self._chunks(seqs[num_single:], tables[num_single:], num_single),
            fresh_blocks=self._fresh_tail_blocks(seqs, tables),
        )

    def _fresh_tail_blocks(
        self, seqs: Sequence[ScheduledSeq], tables: Sequence[tuple[list[int], int]]
    ) -> Tensor | None:
        """Blocks whose first slot this step writes but whose last it does not: a former owner's numbers in the slots behind
        are read (masked) from now on and must not be NaN. [n] int64, or None."""
        block_size = self._pool.block_size
        fresh = []
        for seq, (table, first) in zip(seqs, tables, strict=True):
            end = seq.start + len(seq.token_ids)
            if end % block_size and seq.start <= end - end % block_size:
                fresh.append(table[end // block_size - first])
        return self._tensor(fresh) if fresh else None

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _runs(self, seqs: Sequence[ScheduledSeq], tables: Sequence[tuple[list[int], int]]) -> list[DecodeRun]:
        block_size, runs = self._pool.block_size, []
        lens = [seq.start + 1 - first * block_size for seq, (_, first) in zip(seqs, tables, strict=True)]
        for first, last in split_runs(lens, self._run_tokens):
            width = math.ceil(max(lens[first:last]) / block_size)
            padded: list[int] = []
            for length, (table, _) in zip(lens[first:last], tables[first:last], strict=True):
                # Padded with the sequence's own first block: what is masked must not come from another owner. Blocks past
                # its end (reserved for growth) hold a former owner's numbers.
                own = table[: (length - 1) // block_size + 1]
                padded += own + own[:1] * (width - len(own))
            some = self._tensor(lens[first:last])
            masks: Masks = {w: decode_mask(some, width * block_size, w, self._dtype) for w in self._windows}
            runs.append(DecodeRun(first, last, block_rows(self._tensor(padded), self._pool.num_layers), masks))
        return runs

    def _chunks(self, seqs: Sequence[ScheduledSeq], tables: Sequence[tuple[list[int], int]], row: int) -> list[Chunk]:
        """row: the first one's first."""
        block_size, chunks = self._pool.block_size, []
        for seq, (table, first) in zip(seqs, tables, strict=True):
            count = len(seq.token_ids)
            start = seq.start - first * block_size  # within what is gathered
            masks: Masks = {
                window: None
                if seq.start == 0 and (window is None or window >= count)
                else chunk_mask(start, count, window, self._dtype, self._device)
                for window in self._windows
            }
            own = table[: math.ceil((start + count) / block_size)]
            rows = block_rows(self._tensor(own), self._pool.num_layers) if seq.start else None
            chunks.append(Chunk(row, row + count, start + count, rows, masks))
            row += count
        return chunks


class PagedAttention:
    """Writes one layer's new KV into the pool and attends."""

    def __init__(self, layer: Attention, index: int, pool: KvPool, scratch: Scratch) -> None:
        """scratch: may be shared with other layers, which run before or after this one."""
        self._layer, self._scratch = layer, scratch
        self._group, place = pool.places[index]
        own = pool.groups[self._group]
        self._rows, self._slots, self._codec = own.rows(place), own.slots(place), own.codec
        self._ops = attention_ops(pool.device.type)

    def write(self, k: Tensor, v: Tensor, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """k, v: [num_rows, num_kv_heads, head_dim]. Returns: the two as every reader of the pool gets them. This step attends to
        these, too, so that a token's KV is the same to those of its chunk and to later ones."""
        group, codec = batch.groups[self._group], self._codec
        if codec is None:
            self._ops.write_kv(self._slots, group.slots, group.v_slots, k.flatten(1), v.flatten(1))
            return k, v
        keys, values = codec.encode(k), codec.encode(v)
        self._ops.write_kv(self._slots, group.slots, group.v_slots, keys, values)
        if all(chunk.rows is not None for chunk in group.chunks):
            return k, v  # everything is gathered
        return codec.decode(keys, k.dtype), codec.decode(values, v.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch) -> Tensor:
        """q: [num_rows, num_heads, head_dim]; k, v: what `write` returned. Returns: [num_rows, num_heads * head_dim]."""
        layer, group, parts = self._layer, batch.groups[self._group], []
        for run in group.runs:
            some = q[run.first : run.last]
            mask = run.masks[layer.window]
            parts.append(
                self._ops.paged_decode(
                    some,
                    self._rows,
                    run.rows,
                    mask,
                    layer.num_kv_heads,
                    layer.scale,
                    self._scratch,
                    layer.softcap,
                    self._codec,
                )
            )
        for chunk in group.chunks:
            span = slice(chunk.first, chunk.last)
            keys, values = k[span], v[span]
            if chunk.rows is not None:
                keys, values = self._ops.gather_kv(
                    self._rows,
                    chunk.rows,
                    chunk.num_kv_tokens,
                    layer.num_kv_heads,
                    layer.head_dim,
                    self._scratch,
                    self._codec,
                    q.dtype,
                )
            mask = chunk.masks[layer.window]
            parts.append(self._ops.chunk_attention(q[span], keys, values, mask, layer.scale, layer.softcap))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)
