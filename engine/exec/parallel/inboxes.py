"""Rows from each rank of a host to all others through memory that they share: some microseconds, where sockets take a hundred.

    flags   one number for each rank: how many exchanges it has written
    slots   two for each rank, used in turn: who writes the next but one has seen that all have read this one

A rank that waits asks again at once for a moment, and then sleeps, longer and longer.
"""

from __future__ import annotations

import os
import platform
import time

import torch
from torch import Tensor

from diptych.common.shared_memory import SharedArea, attached

SLOT_BYTES = 1 << 20
"""Of an exchange, at most."""
_LINE = 8
"""64-bit numbers of a cache line: one flag in each."""
_POLLS = 200
_SHORT_S, _LONG_S = 5e-5, 2e-2
_CLOSED = -1


def can_share() -> bool:
    """What a rank writes others see in the same order; on processors of other kinds that would take barriers."""
    return platform.system() == "Linux" and platform.machine() in ("x86_64", "AMD64")


class Inboxes:
    """Of one rank.

    Args:
        where: another rank's `address`; empty: this is the first one, which allocates the memory.
        deadline_s: of an exchange.
    Raises: OSError: the memory of the first rank cannot be mapped here.
    """

    def __init__(self, rank: int, size: int, *, where: str, deadline_s: float) -> None:
        header = 8 * _LINE * size
        if where:
            self._area = attached(os.open(where, os.O_RDWR | os.O_CLOEXEC))
        else:
            self._area = SharedArea(header + 2 * size * SLOT_BYTES)
        self._flags = memoryview(self._area.memory)[:header].cast("q")
        slots = torch.frombuffer(self._area.memory, dtype=torch.uint8, offset=header)
        self._slots = slots.view(2, size, SLOT_BYTES)
        self._rank, self._deadline_s, self._count = rank, deadline_s, 0

    @property
    def address(self) -> str:
        """Where other processes of this user find the memory, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._area.descriptor}"

    def exchange(self, own: Tensor, out: Tensor) -> None:
        """own: [bytes] uint8, of the same number on every rank; out: [size, bytes], what each rank gave. Raises: RuntimeError
        when one does not write within the deadline, or has closed."""
        self._count += 1
        slots, num_bytes = self._slots[self._count % 2], own.numel()
        slots[self._rank, :num_bytes].copy_(own)
        self._flags[_LINE * self._rank] = self._count
        for rank in range(len(out)):
            self._wait(rank)
        out.copy_(slots[:, :num_bytes])

    def _wait(self, rank: int) -> None:
        polls, began = 0, 0.0
        while (written := self._flags[_LINE * rank]) < self._count:
            if written == _CLOSED:
                raise RuntimeError(f"tensor-parallel rank {rank} has closed")
            polls += 1
            if polls < _POLLS:
                time.sleep(0)
                continue
            now = time.monotonic()
            began = began or now
            if now - began > self._deadline_s:
                raise RuntimeError(f"tensor-parallel rank {rank} wrote nothing for {self._deadline_s:g} s")
            time.sleep(min(_LONG_S, max(_SHORT_S, (now - began) / 20)))

    def close(self) -> None:
        """Idempotent."""
        self._flags[_LINE * self._rank] = _CLOSED
