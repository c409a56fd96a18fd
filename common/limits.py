"""Limits of the operating system that a process may raise for itself."""

from __future__ import annotations

import resource


def raise_open_files() -> None:
    """As many open files as the hard limit allows: a soft limit of 1,024 is less than the streams of a busy router."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
