"""Programmatic dependent launch (Hopper and later): a kernel starts while the one before it still runs.

A kernel of a decode step takes 2 to 60 microseconds, of which filling and draining the GPU is some 3. So each of them first
allows its successor to start (`gdc_launch_dependents`), and then waits until its predecessor has finished and its writes are
visible (`gdc_wait`). The rules that keep this right:

- every program of every kernel waits, before it reads what another kernel wrote, before it writes anything, and before it
  returns; so a kernel's end still means the end of all before it;
- a kernel launched the ordinary way waits for all of it.
"""

from __future__ import annotations

from functools import cache

import torch

ENABLED = True
"""Tests switch it off, to compare."""


@cache
def _supported(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def use_pdl(device: torch.device) -> bool:
    return ENABLED and device.type == "cuda" and _supported(device.index)
