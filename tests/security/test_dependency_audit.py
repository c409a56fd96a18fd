"""`make audit`: it says what pip-audit found, and never calls it clean where nothing was looked up."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from datetime import UTC, datetime, timedelta
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


def record(number: int = 1, name: str = "Jinja2", **changes: object) -> dict[str, object]:
    events = [{"introduced": "0"}, {"fixed": "2.10.1"}, {"introduced": "3.0"}, {"last_affected": "3.1"}]
    affected = {
        "package": {"ecosystem": "PyPI", "name": name},
        "ranges": [{"type": "GIT", "events": [{"introduced": "0"}]}, {"type": "ECOSYSTEM", "events": events}],
        "versions": ["2.4", "not a version", "9.9"],
    }
    return {"id": f"PYSEC-{number}", "modified": "2026-11-20T00:00:00Z", "affected": [affected]} | changes


NOW = datetime(2026, 11, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("version", "fixed"),
    [
        ("2.4", True), ("2.10", True), ("2.10.1", False), ("2.11", False), ("3.0", True), ("3.1", True), ("3.1.1", False),
        ("9.9", True),
    ],
)  # fmt: skip
def test_19_a_record_is_about_these_versions(script: ModuleType, version: str, fixed: bool) -> None:
    assert (script.fixes(record(), "jinja2", version) is not None) == fixed
    assert script.fixes(record(withdrawn="2026-11-21"), "jinja2", version) is None
    assert script.fixes(record(), "other", version) is None


@pytest.mark.parametrize("form", ["zip", "json", "pypa"])
def test_19_a_database_that_lies_here(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str
) -> None:
    """No network: all three forms find the same, and one that is old is never called clean."""
    several = [record(), record(2, "b"), record(3, withdrawn="2026-11-21")]
    path = tmp_path / "all"
    if form == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for one in several:
                archive.writestr(f"{one['id']}.json", json.dumps(one))
    for one in several if form != "zip" else ():
        folder = path / "vulns" / one["affected"][0]["package"]["name"].lower() if form == "pypa" else path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{one['id']}.{'yaml' if form == 'pypa' else 'json'}").write_text(json.dumps(one), encoding="utf-8")
    assert script.pins("# x\nJinja2==2.4 ; python_version > '3'\nb_c==1\n") == {"jinja2": "2.4", "b-c": "1"}
    assert script.audit_by_database(path, {"jinja2": "2.4"}, NOW) == 1
    assert "jinja2 2.4: PYSEC-1, fixed in ['2.10.1']" in capsys.readouterr().out
    assert script.audit_by_database(path, {"jinja2": "3.2"}, NOW) == 0
    assert "0 known vulnerabilities in 1 pinned packages" in capsys.readouterr().out
    assert script.audit_by_database(path, {"jinja2": "3.2"}, NOW + timedelta(days=30)) == 2
    assert "40 days old" in capsys.readouterr().err
    if form == "pypa":  # any package's advisory shows how old a database is
        (path / "vulns" / "other").mkdir()
        (path / "vulns" / "other" / "PYSEC-9.yaml").write_text("id: PYSEC-9\nmodified: '2026-12-29T00:00:00Z'\n")
        assert script.audit_by_database(path, {"jinja2": "3.2"}, NOW + timedelta(days=30)) == 0


@pytest.mark.parametrize("what", ["nothing", "an empty folder", "no zip", "no record"])
def test_19_a_database_that_is_none_is_not_called_clean(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, what: str
) -> None:
    path = tmp_path / "database"
    if what == "no zip":
        path.write_text("x", encoding="utf-8")
    elif what != "nothing":
        path.mkdir()
    if what == "no record":
        (path / "a.json").write_text("[1]", encoding="utf-8")
    assert script.audit_by_database(path, {"jinja2": "2.4"}, NOW) == 2
    assert "NOTHING WAS AUDITED" in capsys.readouterr().err


def test_every_package_is_pinned_to_one_version() -> None:
    """What is audited is what is installed."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert len(pins) > 100
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+(\s*;.*)?", line)] == []


def test_ci_does_not_depend_on_it() -> None:
    assert "audit" not in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^audit: .*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
