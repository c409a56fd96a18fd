"""How a step is cut for a pipeline: into micro-batches that follow each other through the stages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_ROWS = 32
"""Of a piece of a prompt: with fewer, products of matrices are slower by the row."""
_ROWS, _PER_STAGE = 256, 4
"""A step of many rows has a micro-batch for each _ROWS of them, up to _PER_STAGE for each stage: the first and the last stage
then wait for a smaller part of the step."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, end) of a sequence's share of the step. index: of the sequence."""

    index: int
    first: int
    end: int


def micro_batches_of(rows: int, stages: int) -> int:
    """How many a step of so many rows is cut into: at least one for each stage."""
    return 1 if stages == 1 else max(stages, min(_PER_STAGE * stages, rows // _ROWS))


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
                if cut - before - bounds[-1] >= _LEAST_ROWS and before + size - cut >= _LEAST_ROWS:
                    bounds.append(cut - before)
        for first, end in zip(bounds, [*bounds[1:], size], strict=True):
            middle = 2 * before + first + end
            parts[middle * count // (2 * total)].append(Piece(index, first, end))
        before += size
    return [part for part in parts if part]
