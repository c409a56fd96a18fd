"""Programmatic dependent launch (Hopper and later): a kernel starts while the one before it still runs.

A kernel of a decode step takes 2 to 60 microseconds, of which filling and draining the GPU is some 3. So each of them reads what
no kernel of the step writes (weights, positions, tables), waits until its predecessor has finished and its writes are visible
(`gdc_wait`), and then allows its successor to start (`gdc_launch_dependents`). Not earlier: successors of successors would take
the multiprocessors' room before there is work for them. The rules that keep this right:

- every program of every kernel waits, before it reads what another kernel wrote, before it writes anything, and before it
  returns; so a kernel's end still means the end of all before it;
- a kernel launched the ordinary way waits for all of it.

One kernel waits at its end only: lora_shrink, right behind a projection that reads the same x. Every program of the projection
has waited for what made x before lora_shrink can start.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

ENABLED = True
"""Tests switch it off, to compare."""
MAX_ROWS = 128
"""Kernels of larger steps fill the GPU by themselves, and lose a little by it: measured, see docs/measurements/gpu-kernels.md."""


@triton.jit
def begin(PDL: tl.constexpr):
    """Before a kernel's first read of what another one wrote."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(at):
    """Lines of 128 bytes into the L2: of weights, before `begin`. at: pointers."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@cache
def _supported(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def use_pdl(device: torch.device, rows: int) -> bool:
    """rows: of the step."""
    return ENABLED and rows <= MAX_ROWS and device.type == "cuda" and _supported(device.index)
