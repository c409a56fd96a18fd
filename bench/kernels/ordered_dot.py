"""A matrix product for Triton's interpreter as a chain of the GPU's instructions sums it: in ascending order of k, element by
element. Numpy's own order depends on the shapes, so without this no test on a CPU could compare bits of two launches."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np
from triton.runtime import interpreter


def ordered_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """Replaces InterpreterBuilder.create_dot."""
    total = d.data.copy()
    for k in range(a.data.shape[1]):
        total += a.data[:, k, None].astype(np.float32) * b.data[k].astype(np.float32)
    return interpreter.TensorHandle(total, d.dtype.scalar)


def replaced() -> tuple[type, str, object]:
    """Owner, attribute and value, for a test's patch."""
    return interpreter.InterpreterBuilder, "create_dot", ordered_dot
