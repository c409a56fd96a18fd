"""The committed reference ids are still what transformers computes; and the wheel has all that loads our model."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.cli.models.store import default_model_path

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.multiproc


def run(arguments: list[str], cwd: Path, timeout_s: float = 180.0, **env: str) -> str:
    environment = os.environ | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"} | env
    result = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_three_golden_prompts_computed_again(capsys: pytest.CaptureFixture[str]):
    """In this process: importing transformers takes as long as two of the prompts."""
    spec = importlib.util.spec_from_file_location("golden_generate", ROOT / "tests" / "golden" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.check(default_model_path(), ["3"]) == 0
    assert capsys.readouterr().out.count(": same") == 3


LOAD = """
import json
from diptych.cli.models.store import default_model_path
from diptych.common.text.tokenizer import ModelTokenizer
from diptych.engine.exec.models.registry import describe
import diptych
assert ModelTokenizer(default_model_path()).encode("12")
config = json.loads((default_model_path() / "config.json").read_text())
print(diptych.__path__[0], describe(config).num_layers)
"""


def test_wheel_holds_all_rooms_and_loads_the_model_outside_the_repository(tree: Path, tmp_path: Path):
    wheels, site, elsewhere = tmp_path / "wheels", tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(
        ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(tree)],
        cwd=elsewhere,
    )
    (wheel,) = wheels.glob("diptych-*.whl")
    run(["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)], cwd=elsewhere)
    assert [
        path.name for path in site.iterdir() if path.is_dir() and not path.name.endswith("-info") and path.name != "bin"
    ] == ["diptych"]
    expected = {
        str(path.relative_to(tree))
        for room in (tree / "src" / "diptych").iterdir()
        if room.is_symlink() and room.name != "bench"  # of a checkout, not of the wheel
        for path in (tree / room.name).rglob("*")
        if path.suffix in (".py", ".pyi", ".lua")
    }
    missing = sorted(name for name in expected if not (site / "diptych" / name).is_file())
    assert not missing, missing
    assert not (site / "diptych" / "bench").exists()
    assert (site / "diptych" / "py.typed").is_file()
    where, layers = run(["-c", LOAD], cwd=elsewhere, PYTHONPATH=str(site)).split()
    assert Path(where) == site / "diptych"
    assert layers == "30"
