"""Locations of files: caches in the XDG cache folder, a cluster's run-time files in `.run/` of the checkout."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "diptych"


def run_dir() -> Path:
    """`$DIPTYCH_RUN_DIR`, or `.run` in the current folder."""
    return Path(os.environ.get("DIPTYCH_RUN_DIR") or ".run").absolute()
