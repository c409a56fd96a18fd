"""Every committed result is listed in a manifest with its command and the page that quotes it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = sorted({path.parent for path in ROOT.glob("*/results/README.md")} | {ROOT / "bench" / "results"})


def rows(folder: Path) -> list[tuple[str, list[str]]]:
    """File or folder, and the pages that quote it."""
    found = []
    for line in (folder / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0] not in ("file", "---"):
            found += [(name, re.split(r",\s*", cells[2])) for name in re.split(r",\s*", cells[0])]
    return found


def committed(folder: Path) -> set[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "."]
    names = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.split()
    return {name.partition("/")[0] + ("/" if "/" in name else "") for name in names if (folder / name).exists()}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_the_manifest_is_the_folder(folder: Path) -> None:
    assert {name for name, _ in rows(folder)} == committed(folder) - {"README.md", ".gitkeep"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_the_pages_quote_them(folder: Path) -> None:
    for name, pages in rows(folder):
        stem = re.sub(r"-\d{8}.*", "", name).rstrip("/")
        for page in pages:
            text = (ROOT / page).read_text(encoding="utf-8")
            families = [stem, *(stem[:end] for end in (m.start() + 1 for m in re.finditer("-", stem)) if end > 7)]
            assert any(part in text for part in families), f"{page} does not quote {name}"
