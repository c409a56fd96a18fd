"""The C sources compile without a warning at every width of vectors. Users compile at their first start, without -Werror."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from diptych.common.compiled import ALL_LANES, _width_flags

ROOT = Path(__file__).resolve().parent.parent
WARNINGS = ("-Wall", "-Wextra", "-Wno-psabi", "-Werror", "-march=native", "-O2", "-pthread")
SKIPPED = {".venv", ".git", "build"}


def main() -> int:
    compilers = [path for path in map(shutil.which, ("gcc", "clang")) if path is not None]
    if not compilers:
        print("C: no compiler is installed: nothing was checked")
        return 0
    # Folders with SHA256SUMS hold others' sources, unchanged.
    sources = [
        path
        for path in sorted(ROOT.rglob("*.c"))
        if not SKIPPED & set(path.relative_to(ROOT).parts) and not (path.parent / "SHA256SUMS").exists()
    ]
    if not sources:
        print("error: no C source was found", file=sys.stderr)
        return 1
    failed = 0
    for compiler in compilers:
        for source in sources:
            for lanes in (None, *ALL_LANES):
                # Some warnings arise only in optimization: the width of this machine is compiled, the others are only
                # parsed.
                how = ("-c", "-o", "/dev/null") if lanes is None else ("-fsyntax-only",)
                command = [compiler, *WARNINGS, *how, *_width_flags(lanes), str(source)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=120)
                if done.returncode:
                    failed += 1
                    print(
                        f"{source.relative_to(ROOT)}, {lanes or 'native'} lanes, {compiler}:\n{done.stderr}",
                        file=sys.stderr,
                    )
    if not failed:
        print(f"C: {len(sources)} sources without a warning at {len(ALL_LANES)} widths")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
