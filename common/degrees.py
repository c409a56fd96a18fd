"""How many ranks a worker has, and which of them samples. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MOST_RANKS = 64
"""Of one worker."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Rank `stage * tensor_parallel + i` has the layers of its pipeline stage, and of them the part of tensor-parallel rank i."""

    tensor_parallel: int = 1
    pipeline: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline

    @property
    def sampler(self) -> int:
        """The rank whose result is the step's: the first one of the last stage."""
        return (self.pipeline - 1) * self.tensor_parallel

    @property
    def short(self) -> str:
        """For tables: "2x3" has 3 stages of 2 ranks."""
        return f"{self.tensor_parallel}x{self.pipeline}"

    def __str__(self) -> str:
        return f"tensor parallel {self.tensor_parallel}, pipeline {self.pipeline}"
