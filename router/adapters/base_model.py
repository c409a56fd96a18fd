"""Whether an adapter was trained for the model that is served, by names. Pure.

An adapter of another model with the same shapes loads, and answers nonsense. Its configuration names its base model, but as a
repository or as a folder of the machine that trained it. So a difference is a reason for a warning, and for no more.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePath

MAX_NAME_CHARS = 256


def names_of(model: str, folder: str) -> frozenset[str]:
    """Names by which a served model may be called: that of requests, and each part of its folder's path, also as a cache of
    repositories calls it (models--OWNER--NAME)."""
    parts = {part.rpartition("--")[2] for part in PurePath(folder).parts}
    return frozenset(_plain(name) for name in {model, *parts})


def other_base(base_model: str, names: Collection[str]) -> str:
    """The base model that an adapter names, if it is none of `names` (see names_of); else "". An adapter that names none may
    be of any model."""
    shown = base_model[:MAX_NAME_CHARS]
    return shown if shown.isprintable() and _plain(shown) not in {"", *names} else ""


def _plain(name: str) -> str:
    """Without owner or folder, in lower case."""
    return name.rstrip("/").rpartition("/")[2].lower()
