"""How a step is cut for a pipeline: into micro-batches of whole sequences that follow each other through the stages. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def cut_step(rows: Sequence[int], count: int) -> list[range]:
    """Indices of the sequences of each micro-batch, in their order, with about as many rows in each.

    While a stage computes one of them, the next stage computes the one before: with as many as stages, none of them waits longer
    than it must.

    Args: rows: of each sequence, at least 1. count: of micro-batches; fewer where sequences are fewer or uneven.
    """
    total, before = sum(rows), 0
    place_of = []
    for number in rows:
        place_of.append((2 * before + number) * count // (2 * total))  # by the middle of its rows
        before += number
    bounds = [i for i in range(len(rows)) if i == 0 or place_of[i] != place_of[i - 1]]
    return [range(first, last) for first, last in zip(bounds, [*bounds[1:], len(rows)], strict=True)]
