"""One step's numbers on their way to the device: written into pinned memory, copied once, without a sync."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGN = 4
"""Sections begin at multiples of 16 bytes: Triton compiles a kernel again for a pointer that is less aligned."""

Section = Sequence[int] | np.ndarray


class Upload:
    """A pinned buffer and its twin on the device. `send` overwrites what the last `send` returned."""

    def __init__(self, device: torch.device, capacity: int = 1 << 14) -> None:
        self._device = device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._grow(capacity)

    @property
    def device_words(self) -> Tensor:
        """[capacity] int32: what graphs read."""
        return self._there

    def _grow(self, capacity: int) -> None:
        self._here = torch.zeros(capacity, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._words = self._here.numpy()
        self._there = torch.zeros(capacity, dtype=torch.int32, device=self._device)

    def send(self, sections: Sequence[Section]) -> list[Tensor]:
        """Copy int32 sections to the device. Returns: a view of each, valid until the next send."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy out of the pinned memory; long done
        starts, total = [], 0
        for section in sections:
            starts.append(total)
            total += -(-len(section) // ALIGN) * ALIGN
        if total > self._here.shape[0]:
            self._grow(2 * total)
        for start, section in zip(starts, sections, strict=True):
            self._words[start : start + len(section)] = section
        self._there[:total].copy_(self._here[:total], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return [self._there[a : a + len(s)] for a, s in zip(starts, sections, strict=True)]


def float_bits(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """fp32 bits as int32, for a section that the device reads with .view(torch.float32)."""
    return np.array(values, dtype=np.float32).view(np.int32)
