"""Block tables that stay on the device: a sequence keeps its row from step to step, and only new entries are sent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from diptych.common.errors import InternalError
from diptych.engine.exec.cuda.upload import Upload
from diptych.engine.messages import ScheduledSeq

NUM_ROWS = 1024
"""Sequences of one step at most. Rows of sequences that have ended are taken over, the longest unused first."""

_Key = tuple[str, int]


class BlockTables:
    """tensor: [NUM_ROWS, blocks of the longest sequence] int32, at one address for ever: graphs read it."""

    def __init__(self, max_blocks: int, pool_blocks: int, device: torch.device, num_rows: int = NUM_ROWS) -> None:
        self._pool_blocks = pool_blocks
        # Rows begin at multiples of 16 bytes (see Upload).
        self._width = -(-max_blocks // 4) * 4
        self.tensor = torch.zeros((num_rows, self._width), dtype=torch.int32, device=device)
        self._known: OrderedDict[_Key, tuple[int, list[int]]] = OrderedDict()
        self._free = list(range(num_rows - 1, -1, -1))
        self._upload = Upload(device)

    def rows(self, seqs: Sequence[ScheduledSeq], num_blocks: Sequence[int]) -> list[int]:
        """Make the device's tables right for this step.

        Args:
            num_blocks: leading blocks of each table that the step may read.
        Returns: row of each sequence.
        Raises: InternalError for more sequences than rows, for a sequence that comes twice, and for a block outside the pool.
        """
        if len(seqs) > self.tensor.shape[0]:
            raise InternalError(f"{len(seqs)} sequences in one step; at most {self.tensor.shape[0]}")
        rows: list[int] = []
        at: list[int] = []
        blocks: list[int] = []
        for seq, count in zip(seqs, num_blocks, strict=True):
            key = (seq.attempt, seq.choice)
            row, known = self._known.pop(key) if key in self._known else (self._take_row(), [])
            self._known[key] = (row, known)  # the last one used
            rows.append(row)
            table = seq.block_tables[0][:count]
            if known == table:
                continue
            same = len(known) if known == table[: len(known)] else 0
            at += range(row * self._width + same, row * self._width + count)
            new = table[same:]
            if min(new) < 0 or max(new) >= self._pool_blocks:
                raise InternalError(f"{seq.attempt}: a block id is outside the pool of {self._pool_blocks}")
            blocks += new
            known[:] = table
        if len(set(rows)) != len(rows):
            raise InternalError("a sequence comes twice in one step")
        if at:
            where, what = self._upload.send((at, blocks))
            self.tensor.view(-1).index_copy_(0, where.long(), what)
        return rows

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        _, (row, _) = self._known.popitem(last=False)
        return row
