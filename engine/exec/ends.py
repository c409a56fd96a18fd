"""What every back end does alike at a model's two ends."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from diptych.engine.exec.layers.embedding import Embedding
from diptych.engine.exec.parallel.vocabulary import VocabularyPart


def embed(token_ids: Tensor, weight: Tensor, layer: Embedding, part: VocabularyPart | None) -> Tensor:
    """token_ids: [rows], any integer dtype. part: of the weight that this rank has; None: all. Returns: [rows, hidden_size], a
    new tensor. No sync."""
    x = embedding(token_ids, weight) if part is None else part.look_up(token_ids, weight)
    return x if layer.scale == 1.0 else x.mul_(_rounded(layer.scale, x.dtype))


def _rounded(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=dtype).item()


def cap(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logits / softcap), in place; None: as they are."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def wanted_rows(sample_rows: list[int], x: Tensor) -> Tensor | None:
    """Behind the last attention only the rows whose logits are wanted matter, in the order wanted.

    Args:
        x: [rows, hidden_size].
    Returns: their indices, int64 on x's device; None: all, in order.
    """
    if sample_rows == list(range(x.shape[0])):
        return None
    return torch.tensor(sample_rows, device=x.device)
