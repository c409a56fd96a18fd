"""Which path UCX took between two GPUs, by the rate of a large payload: UCX itself does not report it."""

from __future__ import annotations

DIRECT, STAGED = "ucx-gpu:direct", "ucx-gpu:staged"
SLOW_BYTES_PER_S = 10e9
"""Below this rate the payload went through host memory."""


def path_of(bytes_per_s: float) -> str:
    return DIRECT if bytes_per_s >= SLOW_BYTES_PER_S else STAGED
