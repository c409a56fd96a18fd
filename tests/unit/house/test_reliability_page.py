"""docs/reliability.md says which test shows the outcome of each fault: every file and test that it names is there, and it names
every file of tests/chaos."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")


def named() -> Iterator[tuple[str, str]]:
    """(file as written, test or "") of every row; a `::test` belongs to the file before it."""
    for row in PAGE.splitlines():
        file = ""
        for text in re.findall(r"`([^`]+)`", row):
            before, _, test = text.partition("::")
            if before.endswith(".py") or (test and not before):
                file = before or file
                yield file, test


def path_of(file: str) -> Path:
    return ROOT / "tests" / file if "/" in file else ROOT / "tests" / "chaos" / file


def test_every_test_that_it_names_is_there() -> None:
    found = list(named())
    assert len(found) > 80, "the search finds nothing"
    for file, test in found:
        assert path_of(file).is_file(), file
        assert not test or f"def {test}(" in path_of(file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_it_names_every_file_of_faults() -> None:
    files = {path.name for path in (ROOT / "tests" / "chaos").glob("test_*.py")} - {"test_fault_proxy.py"}
    assert files == {file for file, _ in named() if "/" not in file}
