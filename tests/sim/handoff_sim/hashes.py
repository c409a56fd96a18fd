"""Sets of strings have an order that this process's hash seed decides; a schedule must be what its own seed says, and no more."""

from __future__ import annotations

import os
import sys


def fix_hashes() -> None:
    """Start this script again with hashes that are always the same, unless it was."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})  # noqa: S606
