"""Others' sources are here as they were published, with their licences: a change would be lost with the next version."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("kernels/native/xxhash", "router/placement/native/blake3")


@pytest.mark.parametrize("folder", FOLDERS)
def test_vendored_sources_are_unchanged_and_licensed(folder):
    here = ROOT / folder
    sums = dict(reversed(line.split()) for line in (here / "SHA256SUMS").read_text().splitlines())
    assert {path.name for path in here.iterdir()} == {*sums, "SHA256SUMS"}
    assert {name: hashlib.sha256((here / name).read_bytes()).hexdigest() for name in sums} == sums
    assert any(name.startswith("LICENSE") for name in sums)


def test_no_other_folder_is_taken_for_vendored():
    found = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("[!.]*/**/SHA256SUMS")}
    assert found - {name for name in found if name.startswith("build/")} == set(FOLDERS)
