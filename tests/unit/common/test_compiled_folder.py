"""A compiled library is loaded only from a folder that belongs to the user and that others cannot write to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diptych.common.compiled import CSources, NativeError

COMPILER = "/bin/true"  # never run: the library is there, or the folder is refused before


@pytest.fixture
def sources(tmp_path: Path) -> CSources:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "one.c").write_text("int diptych_one(void) { return 1; }")
    return CSources("one", tmp_path / "code", ("one.c",), ())


def library(sources: CSources, folder: Path) -> Path:
    path = sources.library_path(folder, COMPILER)
    path.write_bytes(b"")
    path.chmod(0o600)
    return path


def test_a_folder_of_ones_own_is_taken(sources: CSources, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(0o700)
    expected = library(sources, folder)
    assert sources.build(folder, COMPILER) == expected


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_can_write_is_refused(sources: CSources, tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    for _ in ("with a compiler to run", "with a library that lies there"):
        with pytest.raises(NativeError, match=f"writable by others .mode {mode:o}.: chmod go-w {folder}"):
            sources.build(folder, COMPILER)
        library(sources, folder)


def test_a_library_that_others_can_write_is_refused(sources: CSources, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(0o700)
    library(sources, folder).chmod(0o666)
    with pytest.raises(NativeError, match="writable by others"):
        sources.build(folder, COMPILER)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_a_folder_of_another_user_is_refused(sources: CSources, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(0o700)
    os.chown(folder, 65534, 65534)
    with pytest.raises(NativeError, match="belongs to user 65534"):
        sources.build(folder, COMPILER)


def test_a_folder_that_is_made_is_for_its_user_alone(sources: CSources, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    with pytest.raises(NativeError, match="failed|could not"):
        sources.build(folder, "/bin/false")
    assert folder.stat().st_mode & 0o777 == 0o700
