"""Limits of the operating system that a process may raise for itself."""

from __future__ import annotations

import resource


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard limit: the usual 1,024 is less than the streams of a busy router."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
