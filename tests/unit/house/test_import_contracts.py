"""The import contracts see the packages through their symlinks: a forbidden import must be found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LINT = Path(sys.executable).with_name("lint-imports")
VIOLATIONS = [
    ("common/ids.py", "import diptych.rpc.v1.types_pb2", "common imports no other package"),
    ("common/ids.py", "import torch", "the pure packages and the router never import torch"),
    ("decode/__init__.py", "import diptych.prefill", "prefill and decode do not know each other"),
]


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONSAFEPATH": "1"}
    command = [str(LINT), "--no-cache", str(tree / "pyproject.toml")]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=300)


def test_tree_keeps_its_contracts(tree: Path):
    result = lint(tree)
    assert result.returncode == 0, result.stdout[-3000:]


def test_violations_are_found(tree: Path):
    for file, line, _ in VIOLATIONS:
        path = tree / file
        path.write_text(f"{path.read_text()}\n{line}\n")
    result = lint(tree)
    assert result.returncode != 0
    said = " ".join(result.stdout.split())
    assert [contract for _, _, contract in VIOLATIONS if f"{contract} BROKEN" not in said] == []
