"""Print the requirements of the named extras of this project, one per line, for a separate layer of the image.

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
    """Requirements of these extras, and of the extras that they include."""
    found: set[str] = set()
    for line in (line for extra in extras for line in optional[extra]):
        inner = re.fullmatch(r"diptych\[(.+)\]", line)
        found |= needs(optional, inner[1].split(",")) if inner else {line}
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
