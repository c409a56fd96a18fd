"""A kernel that Triton compiles after readiness: a request waits for it, 0.1 to 2 s, or milliseconds where the disk has it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)
LATE = "a kernel was compiled after readiness"


def warn_of_late_kernels() -> None:
    """From now on each kernel that this process compiles, or loads from Triton's cache, is logged with its name and signature."""
    from triton import knobs

    knobs.runtime.jit_post_compile_hook = _warn


def _warn(*, repr: str, compile: Mapping[str, Any], **_: Any) -> None:
    """compile: what Triton specialized for: types, and which integers are 1 or multiples of 16."""
    log.warning("%s: %s %s %s", LATE, repr.partition("[")[0], compile.get("signature"), compile.get("configs"))
