"""One step's layout for the compiled kernels: rows in the order of the sequences, attention cut into tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diptych.engine.exec.attention import blocks_read, check_step, row_adapters
from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.native.lora import teams_of
from diptych.engine.messages import ScheduledSeq

Ints = np.ndarray


@dataclass(slots=True)
class NativeBatch:
    """
    Args:
        order: sequence indices in row order: 0, 1, 2, ...
        token_ids, positions: [num_rows] int64.
        tiles: [num_tiles, 4] int64: first row, rows, position of the first row, where its block table begins in the blocks of
            each group.
        blocks: of each KV group: the block tables from token 0 on; what lies before the window is 0, and not read.
        slots: of each KV group: [num_rows] int64, where its first layer's K of the row's token goes.
        max_len: tokens of the longest sequence.
        sample_rows: rows whose logits are wanted; sample_seqs: the sequence index of each.
        adapters: [num_rows] int32, the slot of each row's adapter, -1: none; None: no row has one.
        teams: of the rows that have one, see teams_of; None: there are none.
    """

    order: list[int]
    token_ids: Ints
    positions: Ints
    tiles: Ints
    blocks: list[Ints]
    slots: list[Ints]
    max_len: int
    sample_rows: list[int]
    sample_seqs: list[int]
    decode_only: bool
    adapters: Ints | None
    teams: Ints | None


class NativeBatchBuilder:
    """Lays out steps for one model and pool. tile_rows: rows of one sequence that attend together."""

    def __init__(self, pool: KvPool, *, tile_rows: int, max_model_len: int) -> None:
        self._pool, self._tile_rows, self._max_model_len = pool, tile_rows, max_model_len

    def build(self, seqs: Sequence[ScheduledSeq]) -> NativeBatch:
        """Raises: InternalError when a sequence breaks the scheduler's promises."""
        check_step(seqs, self._pool, self._max_model_len)
        size, step = self._pool.block_size, self._tile_rows
        token_ids: list[int] = []
        sample_rows: list[int] = []
        sample_seqs: list[int] = []
        for i, seq in enumerate(seqs):
            token_ids += seq.token_ids
            if seq.sample:
                sample_rows += range(len(token_ids) - 1 - seq.num_drafts, len(token_ids))
                sample_seqs += [i] * (1 + seq.num_drafts)
        counts = np.array([len(seq.token_ids) for seq in seqs], dtype=np.int64)
        starts = np.array([seq.start for seq in seqs], dtype=np.int64)
        first_rows = np.cumsum(counts) - counts
        positions = _ramps(counts) + np.repeat(starts, counts)
        sizes = -(-(starts + counts) // size)
        tables = np.cumsum(sizes) - sizes
        entries = np.repeat(tables, counts) + positions // size
        blocks = [self._blocks(seqs, index, sizes) for index in range(len(self._pool.groups))]
        tiles_of = -(-counts // step)
        rows = row_adapters(seqs)
        adapters = None if rows is None else np.array(rows, dtype=np.int32)
        offset = _ramps(tiles_of) * step  # of the tile's first row within its sequence
        tiles = np.empty((len(offset), 4), dtype=np.int64)
        tiles[:, 0] = np.repeat(first_rows, tiles_of) + offset
        tiles[:, 1] = np.minimum(step, np.repeat(counts, tiles_of) - offset)
        tiles[:, 2] = np.repeat(starts, tiles_of) + offset
        tiles[:, 3] = np.repeat(tables, tiles_of)
        return NativeBatch(
            order=list(range(len(seqs))),
            token_ids=np.array(token_ids, dtype=np.int64),
            positions=positions,
            tiles=tiles,
            blocks=blocks,
            slots=[
                table[entries] * (2 * group.num_layers * size) + positions % size
                for table, group in zip(blocks, self._pool.groups, strict=True)
            ],
            max_len=int((starts + counts).max()),
            sample_rows=sample_rows,
            sample_seqs=sample_seqs,
            decode_only=len(token_ids) == len(seqs),
            adapters=adapters,
            teams=None if adapters is None else teams_of(adapters),
        )

    def _blocks(self, seqs: Sequence[ScheduledSeq], index: int, sizes: Ints) -> Ints:
        """The tables of a group, one after the other. sizes: blocks of each, from token 0 on."""
        blocks: list[int] = []
        for seq, size in zip(seqs, sizes.tolist(), strict=True):
            table, first = blocks_read(seq, index, self._pool.kv.groups[index])
            if first:
                blocks += [0] * first
            blocks += table[: size - first]
        return np.array(blocks, dtype=np.int64)


def _ramps(counts: Ints) -> Ints:
    """0 .. count - 1 for each count, one after the other: [2, 3] -> 0 1 0 1 2."""
    ends = np.cumsum(counts)
    ramps: Ints = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    return ramps
