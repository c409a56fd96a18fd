"""Block tables that stay on the device: a sequence keeps its row from step to step, and only new entries are sent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diptych.common.errors import InternalError
from diptych.engine.exec.cuda.upload import Upload
from diptych.engine.messages import ScheduledSeq

NUM_ROWS = 1024
"""Sequences of one step at most. Rows of sequences that have ended are taken over, the longest unused first."""

_Key = tuple[str, int]


@dataclass(slots=True)
class _Known:
    """What the device's table of a sequence and group holds: `blocks`, from entry `first` on."""

    first: int
    blocks: list[int]

    def change_to(self, first: int, blocks: list[int]) -> list[int]:
        """Returns: the last of `blocks`, as many as have to be sent."""
        if first != self.first:
            behind = first - self.first  # the window's blocks before it were freed
            self.blocks = self.blocks[behind:] if 0 < behind < len(self.blocks) else []
            self.first = first
        known = self.blocks
        if known == blocks:
            return []
        same = len(known) if known == blocks[: len(known)] else 0
        known[:] = blocks
        return blocks[same:]


class BlockTables:
    """tensors: of each KV group, [NUM_ROWS, blocks of the longest sequence] int32, at one address for ever: graphs read it.
    Entry i is block i of the sequence; those before its first block are left as they are, and not read."""

    def __init__(
        self, max_blocks: int, pool_blocks: Sequence[int], device: torch.device, num_rows: int = NUM_ROWS
    ) -> None:
        """pool_blocks: blocks of each group's pool."""
        self._pool_blocks = tuple(pool_blocks)
        # Rows begin at multiples of 16 bytes (see Upload).
        self._width = -(-max_blocks // 4) * 4
        self._num_rows = num_rows
        self._all = torch.zeros((len(self._pool_blocks), num_rows, self._width), dtype=torch.int32, device=device)
        self.tensors = tuple(self._all)
        self._known: OrderedDict[_Key, tuple[int, list[_Known]]] = OrderedDict()
        self._free = list(range(num_rows - 1, -1, -1))
        self._upload = Upload(device)

    def rows(self, seqs: Sequence[ScheduledSeq], num_blocks: Sequence[int]) -> list[int]:
        """Make the device's tables right for this step.

        Args:
            num_blocks: leading blocks of each sequence that the step may read.
        Returns: row of each sequence, in each group's table.
        Raises: InternalError for more sequences than rows, for a sequence that comes twice, and for a block outside the pool.
        """
        if len(seqs) > self._num_rows:
            raise InternalError(f"{len(seqs)} sequences in one step; at most {self._num_rows}")
        rows: list[int] = []
        at: list[int] = []
        blocks: list[int] = []
        for seq, count in zip(seqs, num_blocks, strict=True):
            key = (seq.attempt, seq.choice)
            row, groups = self._known.pop(key) if key in self._known else (self._take_row(), self._nothing())
            self._known[key] = (row, groups)  # the last one used
            rows.append(row)
            for group, known in enumerate(groups):
                first = seq.first_blocks[group]
                table = seq.block_tables[group][: count - first]
                new = known.change_to(first, table)
                if not new:
                    continue
                if min(new) < 0 or max(new) >= self._pool_blocks[group]:
                    raise InternalError(f"{seq.attempt}: a block id is outside the pool of {self._pool_blocks[group]}")
                end = (group * self._num_rows + row) * self._width + count
                at += range(end - len(new), end)
                blocks += new
        if len(set(rows)) != len(rows):
            raise InternalError("a sequence comes twice in one step")
        if at:
            where, what = self._upload.send((at, blocks))
            self._all.view(-1).index_copy_(0, where.long(), what)
        return rows

    def _nothing(self) -> list[_Known]:
        return [_Known(0, []) for _ in self._pool_blocks]

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        _, (row, _) = self._known.popitem(last=False)
        return row
