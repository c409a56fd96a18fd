"""docs/faults-fixed.md says which test would have found each fault: the tests that it names are there, and the items of the first
list of faults (sections 2 to 6) have a row each."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ROWS = [line.strip("|").split(" | ") for line in (ROOT / "docs" / "faults-fixed.md").read_text("utf-8").splitlines()]
ITEMS = {2: 9, 3: 4, 4: 17, 5: 9, 6: 4}
"""Section -> number of its items."""
TEST = re.compile(r"(?:\w+/)*test_\w+(?:\.py)?|(?:\w+/)*\w+\.py")


@cache
def sources() -> dict[str, list[str]]:
    """File name -> texts of the files of that name."""
    found = defaultdict(list)
    for path in (ROOT / "tests").rglob("*.py"):
        found[path.name].append(path.read_text(encoding="utf-8"))
    return dict(found)


def defined(name: str, texts: list[str]) -> bool:
    """`name`: of a test function, with `*` at its end of several; `...` stands for the beginning of the name before."""
    begins = name.endswith("*")
    wanted = re.escape(name.rstrip("*").removeprefix("..."))
    start = r"def \w*" if name.startswith("...") else "def "
    return any(re.search(rf"{start}{wanted}{'' if begins else r'[(]'}", text) for text in texts)


def missing(cell: str) -> list[str]:
    """Of the tests that a cell names, those that are not there. A `::test` belongs to the file before it."""
    found: list[str] = []
    texts: list[str] = []
    for words in re.findall(r"`([^`]+)`", cell):
        file, _, test = words.partition("::")
        if file.startswith("..."):
            file, test = "", file
        if TEST.fullmatch(file) and file.endswith(".py"):
            texts = sources().get(Path(file).name, [])
            found += [] if texts else [words]
        elif file.rstrip("*").startswith("test_"):
            texts, test = [text for some in sources().values() for text in some], file
        if test and texts and not defined(test, texts):
            found.append(words)
    return found


def test_15_every_test_that_it_names_is_there() -> None:
    rows = [row for row in ROWS if len(row) > 3]
    assert len(rows) > 200, "the search finds nothing"
    assert not [(row[0], left) for row in rows if (left := missing(row[-1]))]


def test_15_every_item_has_a_row() -> None:
    rows = {row[0].strip() for row in ROWS}
    assert not {f"{section}.{item}" for section, count in ITEMS.items() for item in range(1, count + 1)} - rows


def test_what_is_not_there_is_found() -> None:
    here = "test_faults_page.py"
    assert (
        missing(f"`{here}::test_15_every_item_has_a_row`, `::test_15_every_*`, `...item_has_a_row`, `make soak`") == []
    )
    for wrong in (
        "`test_of_nothing.py`",
        f"`{here}::test_15_every`",
        f"`{here}`, `::test_16_*`",
        "`test_of_no_kind_at_all`",
    ):
        assert missing(wrong), wrong
