"""`make audit`: it says what pip-audit found, and never calls it clean where nothing was looked up."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from diptych_tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(".ci/audit.py")


def says(text: str, code: int, *, stderr: bool = False) -> list[str]:
    stream = "stderr" if stderr else "stdout"
    return [sys.executable, "-c", f"import sys; print({text!r}, file=sys.{stream}); sys.exit({code})"]


CLEAN = {"name": "a", "version": "1", "vulns": []}
BAD = {"name": "jinja2", "version": "2.4", "vulns": [{"id": "PYSEC-2019-217", "fix_versions": ["2.10.1"]}]}
SKIPPED = {"name": "b", "skip_reason": "Dependency not found on PyPI and could not be audited: b (1)"}
"""What pip-audit says of each package where its source answers with "no such page": and then it exits with 0."""


def listed(*packages: object) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (says(listed(CLEAN, CLEAN), 0), 0, "0 known vulnerabilities in 2 of 2"),
        (says(listed(CLEAN, BAD), 1), 1, "jinja2 2.4: PYSEC-2019-217, fixed in ['2.10.1']"),
        (says(listed(BAD, SKIPPED), 1), 1, "not looked up: b"),
        (says(listed(CLEAN, SKIPPED), 0), 2, "not looked up: b"),
        (says(listed(SKIPPED, SKIPPED), 0), 2, "NOTHING WAS AUDITED: its source knows none of 2 packages"),
        (says(listed(), 0), 2, "NOTHING WAS AUDITED"),
        (says("requests.exceptions.ConnectionError: cannot resolve", 1, stderr=True), 2, "cannot resolve"),
        (says("No module named pip_audit", 1, stderr=True), 2, "No module named pip_audit"),
        (says("", 0), 2, "NOTHING WAS AUDITED"),
        (["/nowhere/pip-audit"], 2, "NOTHING WAS AUDITED"),
    ],
    ids=[
        "clean",
        "found",
        "found and skipped",
        "skipped",
        "all skipped",
        "empty",
        "no source",
        "none",
        "silent",
        "cannot run",
    ],
)
def test_what_it_says(
    script: ModuleType, capsys: pytest.CaptureFixture[str], command: list[str], code: int, words: str
) -> None:
    assert script.audit(command) == code
    said = capsys.readouterr()
    assert words in said.out + said.err


def test_every_package_is_pinned_to_one_version() -> None:
    """What is audited is what is installed."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert len(pins) > 100
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+(\s*;.*)?", line)] == []


def test_ci_does_not_depend_on_it() -> None:
    assert "audit" not in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^audit: .*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
