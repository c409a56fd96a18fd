"""Print what the named extras of this project need, one requirement a line: a layer of its own in the image.

python deploy/requirements.py pyproject.toml cli router worker
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(pyproject: str, *extras: str) -> None:
    project = tomllib.loads(Path(pyproject).read_text(encoding="utf-8"))["project"]
    found = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    print("\n".join(sorted({line for line in found if not line.startswith("diptych[")})))


if __name__ == "__main__":
    main(*sys.argv[1:])
