"""The ranks' sums, which the compiled kernels want in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float

import torch
from torch import Tensor

from diptych.kernels.native.api import REDUCE


class Reduction:
    """`function` is what Model.reduce holds; keep this object as long as the model.

    A call from C cannot raise. What `all_reduce` raises is kept, C returns at once, and `check` raises it.
    """

    def __init__(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """Args: all_reduce: [rows, columns] of this rank -> the sum of all ranks, of the same shape; in place or not."""
        self._all_reduce = all_reduce
        self._error: BaseException | None = None
        self.function = REDUCE(self._reduce)

    def _reduce(self, address: int, rows: int, columns: int) -> int:
        """See REDUCE."""
        try:
            memory = (c_float * (rows * columns)).from_address(address)
            part = torch.frombuffer(memory, dtype=torch.float32).view(rows, columns)
            total = self._all_reduce(part)
            if total.data_ptr() != address:
                part.copy_(total.view(rows, columns))
        except BaseException as error:  # an interrupt, too, belongs to the code that runs the step
            self._error = error
            return 1
        return 0

    def check(self, failed: int) -> None:
        """Args: failed: what the kernels returned. Raises: what `all_reduce` raised."""
        if failed:
            error, self._error = self._error, None
            assert error is not None, "only a reduction fails"
            raise error
