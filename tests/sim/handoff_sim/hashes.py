"""Fixes the iteration order of sets of strings, which depends on the process's hash seed; a schedule must depend on its
own seed only."""

from __future__ import annotations

import os
import sys


def fix_hashes() -> None:
    """Start this script again with hashes that are always the same, unless it was."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})  # noqa: S606
