"""Print what the named extras of this project need, one requirement a line: a layer of its own in the image.

python deploy/requirements.py pyproject.toml cli router worker
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path


def main(pyproject: str, *extras: str) -> None:
    project = tomllib.loads(Path(pyproject).read_text(encoding="utf-8"))["project"]
    print("\n".join(sorted({*project["dependencies"], *needs(project["optional-dependencies"], extras)})))


def needs(optional: dict[str, list[str]], extras: Sequence[str]) -> set[str]:
    """Of these extras, and of those that they name in turn."""
    found: set[str] = set()
    for line in (line for extra in extras for line in optional[extra]):
        inner = re.fullmatch(r"diptych\[(.+)\]", line)
        found |= needs(optional, inner[1].split(",")) if inner else {line}
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
