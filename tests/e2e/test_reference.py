"""The committed reference ids are still what transformers computes; and it can load our model from wherever it is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.multiproc


def run(arguments: list[str], cwd: Path, timeout_s: float = 180.0, **env: str) -> str:
    environment = os.environ | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"} | env
    result = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_three_golden_prompts_computed_again_from_the_repository_root():
    output = run([str(ROOT / "tests" / "golden" / "generate.py"), "--check", "3"], cwd=ROOT)
    assert output.count(": same") == 3


LOAD = """
from transformers import AutoModelForCausalLM, AutoTokenizer
from diptych.cli.models.store import default_model_path
import diptych
model = AutoModelForCausalLM.from_pretrained(default_model_path())
assert AutoTokenizer.from_pretrained(default_model_path()).encode("12") is not None
print(diptych.__path__[0], model.config.num_hidden_layers)
"""


def test_model_loads_from_the_root_with_the_package_importable(cluster):
    assert run(["-c", LOAD], cwd=ROOT).split()[-1] == "30"


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
