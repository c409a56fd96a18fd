"""A matrix product for Triton's interpreter as a chain of the GPU's instructions sums it: in ascending order of k, element by
element. Numpy's own order depends on the shapes, so without this no test on a CPU could compare bits of two launches."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _numbers(x, dtype):
    """E4M3 is stored as its bits. dtype: of the sums."""
    data = x.data
    if x.dtype.scalar.is_fp8():
        data = interpreter._convert_float(data, x.dtype.scalar, tl.float16, None).view(np.float16)
    return data.astype(dtype)


def ordered_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """Replaces InterpreterBuilder.create_dot."""
    total = d.data.copy()
    left, right = _numbers(a, total.dtype), _numbers(b, total.dtype)
    for k in range(left.shape[1]):
        total += left[:, k, None] * right[k]
    return interpreter.TensorHandle(total, d.dtype.scalar)


def replaced() -> tuple[type, str, object]:
    """Owner, attribute and value, for a test's patch."""
    return interpreter.InterpreterBuilder, "create_dot", ordered_dot
