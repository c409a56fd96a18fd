"""A folder for temporary files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from diptych.common.errors import ConfigError


@contextmanager
def temporary_folder(prefix: str) -> Iterator[str]:
    """Raises: ConfigError when none can be created."""
    try:
        made = tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        rule = f"must name a writable folder: {error.strerror or error}"
        raise ConfigError("TMPDIR", os.environ.get("TMPDIR", ""), rule) from None
    with made as folder:
        yield folder
