"""Embedding and head of a rank: rows of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import embedding

from diptych.engine.exec.parallel.communicator import Communicator


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """first: the token id of the first row that this rank has."""

    first: int
    communicator: Communicator

    def look_up(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """token_ids: [rows]; weight: [this rank's rows, hidden_size]. Returns: [rows, hidden_size] of every token: one rank has
        its row, the others add zeros, so that the sum is exact. No sync."""
        places = token_ids - self.first
        others = (places < 0) | (places >= weight.shape[0])
        x = embedding(places.masked_fill(others, 0), weight).masked_fill(others.unsqueeze(1), 0)
        return self.communicator.all_reduce(x)
