"""SmoothQuant: large inputs of a layer are made smaller and its weights larger, channel by channel.

Xiao et al.: "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models" (arXiv 2211.10438),
equation 4: s_j = max|X_j|^a / max|W_j|^(1 - a). What comes before the layer is divided by s, the layer's weights are
multiplied by it. Every s here is a power of two: the plain model's numbers stay the same to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

STRENGTH = 0.5
"""The paper's a: 0 leaves activations as they are, 1 moves all of their range into the weights."""
_MOST_POWER = 12


def smoothing_factors(largest_inputs: Tensor, weight: Tensor, strength: float = STRENGTH) -> Tensor:
    """
    Args:
        largest_inputs: [inputs], the largest magnitude of each over the calibration.
        weight: [outputs, inputs].
    Returns: [inputs] float32, powers of two; 1 for an input or a column that is 0 everywhere.
    """
    of_weights = weight.abs().amax(0).float()
    alive = (largest_inputs > 0) & (of_weights > 0)
    powers = strength * largest_inputs.float().log2() - (1 - strength) * of_weights.log2()
    powers = torch.where(alive, powers, torch.zeros_like(powers)).round().clamp(-_MOST_POWER, _MOST_POWER)
    return ((powers.to(torch.int32) + 127) << 23).view(torch.float32)  # a library's exp2 need not be exact
