"""Lines on stderr that a full disk must not turn into the end of the process."""

from __future__ import annotations

import io
import os
import sys


def write_line(text: str) -> bool:
    """Write past the buffer of sys.stderr, which would keep the line and fail with it again at exit. Returns: whether the line
    was written."""
    try:
        os.write(sys.stderr.fileno(), f"{text}\n".encode("utf-8", "backslashreplace"))
    except io.UnsupportedOperation:  # replaced by something without a file
        print(text, file=sys.stderr)
    except OSError:
        return False
    return True
