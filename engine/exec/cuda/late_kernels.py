"""A kernel that Triton compiles after readiness: a request waits for it, 0.1 to 2 s, or milliseconds where the disk has it."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)
LATE = "a kernel was compiled after readiness"


def warn_of_late_kernels() -> None:
    """From now on each kernel that this process compiles, or loads from Triton's cache, is logged with its name and signature."""
    from triton import knobs

    knobs.runtime.jit_post_compile_hook = _warn


def _warn(*, repr: str, **_: Any) -> None:
    log.warning("%s: %s", LATE, repr)
