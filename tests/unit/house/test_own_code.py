"""Tests are of the checkout that they lie in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_15_code_of_another_checkout_is_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "common", tmp_path / "diptych" / "common")
    (tmp_path / "diptych" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", __file__],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 4
    assert f"these are the tests of {ROOT}, and diptych comes from {tmp_path}" in done.stderr
