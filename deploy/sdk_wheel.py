"""Make the wheel `diptych-client`: the gRPC SDK, and only those modules of the package that it imports.

    python deploy/sdk_wheel.py [FOLDER]        default: dist/

The wheel of the whole package also contains the server's code. Both contain the same files under the same names, so an
environment can have only one of them.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "diptych"
NAME = "diptych-client"

PROJECT = """[build-system]
requires = ["setuptools>=80"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "Client of a Diptych cluster: large language models over gRPC"
license = "Apache-2.0"
requires-python = "{python}"
dependencies = {dependencies}

[tool.setuptools.packages.find]
where = ["src"]

[tool.setuptools.package-data]
"*" = ["py.typed", "*.pyi"]
"""


def file_of(module: str) -> Path | None:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    found = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return found if found.is_file() else None


def imported(module: str, seen: dict[str, Path]) -> None:
    """Add the module, its packages, and all modules of this project that it imports, anywhere in its text."""
    path = file_of(module)
    if module in seen or path is None:
        return
    seen[module] = path
    imported(module.rpartition(".")[0], seen)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.partition(".")[0] == "diptych":
                imported(name, seen)


def make_tree(target: Path) -> None:
    """The files of the wheel, with a separate pyproject.toml."""
    modules: dict[str, Path] = {}
    for path in sorted((PACKAGE / "client").glob("*.py")):
        imported("diptych.client" + ("" if path.stem == "__init__" else f".{path.stem}"), modules)
    for path in modules.values():
        for source in (path, path.with_suffix(".pyi")):
            if source.is_file():
                there = target / "src" / "diptych" / source.relative_to(PACKAGE)
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, there)
    shutil.copyfile(PACKAGE / "py.typed", target / "src" / "diptych" / "py.typed")
    shutil.copyfile(ROOT / "LICENSE", target / "LICENSE")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dependencies = "[" + ", ".join(f'"{one}"' for one in project["dependencies"]) + "]"
    text = PROJECT.format(
        name=NAME, version=project["version"], python=project["requires-python"], dependencies=dependencies
    )
    (target / "pyproject.toml").write_text(text, encoding="utf-8")


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist")
    with tempfile.TemporaryDirectory(prefix="diptych-sdk-") as tree:
        make_tree(Path(tree))
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        done = subprocess.run([*command, "--wheel-dir", str(folder), tree], check=False)
    if done.returncode == 0:
        made = max(folder.glob(re.sub("[-_.]+", "_", NAME) + "-*.whl"), key=lambda path: path.stat().st_mtime)
        print(f"{made} ({made.stat().st_size / 1000:.0f} kB)")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
