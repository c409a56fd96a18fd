"""One step's layout for the Triton path. Rows: decoding sequences, then the chunks, each in the order given; where some have
adapters, decoding sequences by adapter, so that rows which read the same weights lie together.

row   0 1 2 3 4 5 | 6 7 8 9 10 | 11 12 ...
      decode      | chunk A    | chunk B

A sequence with drafts has one decode row for its last known token and one for each guess. Each attends to the KV of the rows
before it, which a layer stores before it attends. So a row's numbers are those of plain decoding, and CUDA graphs serve it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from diptych.common.errors import InternalError
from diptych.common.kv_format import KvFormat
from diptych.engine.exec.attention import check_tables, row_adapters
from diptych.engine.exec.methods.base import StepRows
from diptych.engine.messages import ScheduledSeq


@dataclass(slots=True)
class CudaBatch:
    """What the host knows of a step; `order`, `sample_rows` and `sample_seqs` as in StepBatch.

    Args:
        slots: of each KV group: block * block_size + offset of each row's token.
        num_decode: leading rows, each of one token.
        decode_counts: of each decoding sequence, its rows.
        counts, starts: new tokens and computed tokens before them, of each chunk.
        adapters: of each row, see row_adapters.
    """

    order: list[int]
    token_ids: list[int]
    positions: list[int]
    slots: list[list[int]]
    num_decode: int
    decode_counts: list[int]
    counts: list[int]
    starts: list[int]
    sample_rows: list[int]
    sample_seqs: list[int]
    adapters: list[int] | None

    def row_tables(self, tables: Sequence[int]) -> list[int]:
        """Block table of each decode row, then of each chunk. Args: tables: of each sequence, in `order`."""
        if self.num_decode == len(self.decode_counts):
            return list(tables)
        counts = [*self.decode_counts, *([1] * len(self.counts))]
        return [table for table, count in zip(tables, counts, strict=True) for _ in range(count)]

    def chunk_words(self, tables: Sequence[int], first: int) -> list[int]:
        """Four numbers of each chunk: see paged_prefill. Args: tables: block table of each chunk. first: row of the first."""
        words: list[int] = []
        for new, start, table in zip(self.counts, self.starts, tables, strict=True):
            words += (first, new, start, table)
            first += new
        return words

    @property
    def all_rows_sampled(self) -> bool:
        return self.sample_rows == list(range(len(self.token_ids)))


@dataclass(slots=True)
class StepTensors:
    """The same on the device, all int32.

    Args:
        token_ids, positions: [num_rows]. slots: the same, of each KV group; a padded row has slot -1.
        decode_lens, decode_rows: [num_decode]: tokens including the new one (0: a padded row), row of the block tables.
        chunks, tiles: see paged_prefill; None: no chunks.
        sample_rows: [num_samples]; None: all rows, in order.
        splits: of the context, in decode attention.
        rows: what methods of linear layers ask of the rows.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Sequence[Tensor]
    decode_lens: Tensor
    decode_rows: Tensor
    chunks: Tensor | None
    tiles: Tensor | None
    sample_rows: Tensor | None
    splits: int
    rows: StepRows


def lay_out(seqs: Sequence[ScheduledSeq], kv: KvFormat, max_model_len: int) -> CudaBatch:
    """Raises: InternalError when a sequence breaks the scheduler's promises (block ids: see BlockTables)."""
    for seq in seqs:
        end = seq.start + len(seq.token_ids)
        if not seq.token_ids or seq.start < 0 or end > max_model_len:
            raise InternalError(f"{seq.attempt}: tokens [{seq.start}, {end}) of at most {max_model_len}")
        check_tables(seq, kv)
    single = [i for i, seq in enumerate(seqs) if len(seq.token_ids) == 1 + seq.num_drafts]
    single.sort(key=lambda i: seqs[i].adapter)  # stable
    several = [i for i, seq in enumerate(seqs) if len(seq.token_ids) > 1 + seq.num_drafts]
    ordered = [seqs[i] for i in (*single, *several)]
    batch = CudaBatch([*single, *several], [], [], [], 0, [], [], [], [], [], row_adapters(ordered))
    for i in single:
        seq = seqs[i]
        for at, token in enumerate(seq.token_ids, seq.start):
            batch.token_ids.append(token)
            batch.positions.append(at)
            if seq.sample:
                batch.sample_rows.append(len(batch.token_ids) - 1)
                batch.sample_seqs.append(i)
        batch.decode_counts.append(len(seq.token_ids))
    batch.num_decode = len(batch.token_ids)
    for i in several:
        seq = seqs[i]
        batch.token_ids += seq.token_ids
        batch.positions += range(seq.start, seq.start + len(seq.token_ids))
        batch.counts.append(len(seq.token_ids))
        batch.starts.append(seq.start)
        if seq.sample:
            batch.sample_rows.append(len(batch.token_ids) - 1)
            batch.sample_seqs.append(i)
    batch.slots = [_slots(ordered, index, group.block_size) for index, group in enumerate(kv.groups)]
    return batch


def _slots(seqs: Sequence[ScheduledSeq], group: int, block_size: int) -> list[int]:
    """Of each row, in the order of `seqs`."""
    slots = []
    for seq in seqs:
        table, first = seq.block_tables[group], seq.first_blocks[group]
        for at in range(seq.start, seq.start + len(seq.token_ids)):
            slots.append(table[at // block_size - first] * block_size + at % block_size)
    return slots
