"""A folder for temporary files, or a sentence why there is none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from diptych.common.errors import ConfigError


@contextmanager
def temporary_folder(prefix: str) -> Iterator[str]:
    """Raises: ConfigError where none can be made."""
    try:
        made = tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        rule = f"must name a folder that can be written: {error.strerror or error}"
        raise ConfigError("TMPDIR", os.environ.get("TMPDIR", ""), rule) from None
    with made as folder:
        yield folder
