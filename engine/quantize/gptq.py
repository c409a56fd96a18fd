"""GPTQ: int4 codes chosen one input after another, where each error is made up for by the inputs that are left.

Frantar, Ashkboos, Hoefler, Alistarh: "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
(arXiv 2210.17323), equations 2 and 3 with the Cholesky form of section 3.3. With H = X^T X of the layer's inputs X and U the
upper Cholesky factor of H^-1, rounding input j to q leaves the error

    e = (w_j - q) / U_jj        and every later input k becomes   w_k - e U_jk

which keeps the layer's output on X as near as it can be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.engine.quantize.rounding import Groups, as_groups, int4_codes, int4_grid, int4_values

_BLOCK = 128
"""Inputs whose errors are passed on within the block first: the rest gets them in one product. Groups divide it."""
_DAMPING = 0.01
"""Of the mean diagonal of H, added to it."""
_MOST_DAMPING = 10.0


@dataclass(frozen=True, slots=True)
class Int4Rule:
    """
    Args:
        group_size: inputs that share a scale; divides 128 and the layer's inputs.
        act_order: inputs with the largest activations are rounded first, while the most others can make up for them. Scales
            then come from the weights as they were. Groups are the same in both cases, so the stored layout is too.
        dtype: of the stored scales.
    """

    group_size: int
    symmetric: bool = True
    act_order: bool = True
    dtype: torch.dtype = torch.float32


def inverse_factor(hessian: Tensor) -> Tensor:
    """U, upper triangular, with U^T U = (H + damping)^-1. An input that never was anything but 0 gets 1 on H's diagonal.

    hessian: [inputs, inputs], symmetric, positive semidefinite. Returns: [inputs, inputs] float64.
    Raises: ValueError where no damping makes it invertible, as with NaN.
    """
    wide = hessian.double()
    diagonal = wide.diagonal()
    dead = diagonal == 0
    mean, damping = float(diagonal.mean()) or 1.0, _DAMPING
    while damping <= _MOST_DAMPING:
        damped = wide + torch.diag(dead.double() + damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
        damping *= 10
    raise ValueError("the activations of the calibration give no usable matrix")


def gptq(weight: Tensor, hessian: Tensor, rule: Int4Rule) -> Groups:
    """Codes of one layer.

    Args:
        weight: [outputs, inputs] float32.
        hessian: [inputs, inputs]: X^T X over the calibration's rows X, by any factor.
    Raises: ValueError as inverse_factor.
    """
    outputs, inputs = weight.shape
    size, importance = rule.group_size, hessian.diagonal().float().clamp(min=1e-12)
    order = torch.arange(inputs, device=weight.device)
    scales = torch.empty(outputs, inputs // size, device=weight.device)
    zeros = torch.empty_like(scales)

    def set_grid(group: int, columns: Tensor, part: Tensor) -> None:
        scales[:, group], zeros[:, group] = int4_grid(
            part, importance[columns], symmetric=rule.symmetric, dtype=rule.dtype
        )

    if rule.act_order:
        for group, columns in enumerate(order.view(-1, size)):
            set_grid(group, columns, weight[:, columns])
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    left, groups = weight[:, order].clone(), (order // size).tolist()
    upper = inverse_factor(hessian[order][:, order]).float()
    codes = torch.empty_like(left)
    for first in range(0, inputs, _BLOCK):
        last = min(first + _BLOCK, inputs)
        errors = torch.empty(outputs, last - first, device=weight.device)
        for j in range(first, last):
            if not rule.act_order and j % size == 0:
                set_grid(j // size, order[j : j + size], left[:, j : j + size])
            group = groups[j]
            codes[:, j] = int4_codes(left[:, j : j + 1], scales[:, group], zeros[:, group])[:, 0]
            meant = int4_values(codes[:, j : j + 1], scales[:, group], zeros[:, group])[:, 0]
            error = (left[:, j] - meant) / upper[j, j]
            left[:, j + 1 : last] -= error[:, None] * upper[j, j + 1 : last]
            errors[:, j - first] = error
        left[:, last:] -= errors @ upper[first:last, last:]
    back = torch.empty_like(codes)
    back[:, order] = codes
    return as_groups(back, scales, zeros, rule.dtype)
