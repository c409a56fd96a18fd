"""How a step is cut for a pipeline: into micro-batches that follow each other through the stages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_PIECE = 32
"""Rows of a piece of a prompt."""
LEAST_ROWS = {"cpu": 64, "cuda": 256}
"""Of a micro-batch, by device. With fewer rows a stage takes as long, since it reads all of its weights: a step in two halves
would then take 1.5 times as long as it does whole, through two stages one after the other."""
_PER_STAGE = 4
"""Micro-batches of the longest steps: the more there are, the less the first and the last stage wait."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, end) of a sequence's share of the step. index: of the sequence."""

    index: int
    first: int
    end: int


def micro_batches_of(rows: int, stages: int, device: str) -> int:
    """How many a step of so many rows is cut into. Args: device: a key of LEAST_ROWS."""
    return 1 if stages == 1 else max(1, min(_PER_STAGE * stages, rows // LEAST_ROWS[device]))


def cut_step(rows: Sequence[int], count: int, whole: Sequence[bool] = ()) -> list[list[Piece]]:
    """The pieces of each micro-batch, in the order of the sequences, with about as many rows in each.

    While a stage computes one of them, the next stage computes the one before. A prompt may be cut: its first tokens are computed
    before the rest, layer by layer, as in chunks of two steps.

    Args:
        rows: of each sequence, at least 1.
        count: of micro-batches; fewer where sequences are few or uneven.
        whole: by sequence, it is not cut; empty: none is.
    """
    total, before = sum(rows), 0
    cuts = [number * total // count for number in range(1, count)]
    parts: list[list[Piece]] = [[] for _ in range(count)]
    for index, size in enumerate(rows):
        bounds = [0]
        if not (whole and whole[index]):
            for cut in cuts:
                if cut - before - bounds[-1] >= _LEAST_PIECE and before + size - cut >= _LEAST_PIECE:
                    bounds.append(cut - before)
        for first, end in zip(bounds, [*bounds[1:], size], strict=True):
            middle = 2 * before + first + end
            parts[middle * count // (2 * total)].append(Piece(index, first, end))
        before += size
    return [part for part in parts if part]
