"""Compile the C sources for the machine at hand, once: the result is kept in a folder of the caller's, under a name made of
the sources, the compiler and the CPU."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = ("vectors.h", "threads.h", "matmul.h", "attention.h", "decoder.c")
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-pthread")
COMPILE_TIMEOUT_S = 300.0
"""It takes some ten seconds of one core."""


class NativeError(Exception):
    """The compiled kernels cannot be had here; says why."""


def find_compiler(environment: dict[str, str] | None = None) -> str:
    """$CC, else the first of cc, gcc and clang that is installed. Raises: NativeError."""
    wanted = (os.environ if environment is None else environment).get("CC")
    for name in (wanted,) if wanted else ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise NativeError(f"CC={wanted} is not installed" if wanted else "no C compiler (cc, gcc or clang) is installed")


def _cpu_features() -> str:
    """What -march=native depends on: a folder may be shared by machines that differ."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    model = next((line for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()} {model} {features}"


def library_path(folder: Path, compiler: str) -> Path:
    digest = hashlib.blake2b(digest_size=12)
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    for part in (*FLAGS, os.path.realpath(compiler), _cpu_features()):
        digest.update(part.encode() + b"\0")
    return folder / f"decoder-{digest.hexdigest()}.so"


def build(folder: Path, compiler: str | None = None) -> Path:
    """The compiled library in `folder`, made now if it is not there yet.

    Raises: NativeError when there is no compiler, it fails, or the folder cannot be written.
    """
    compiler = compiler or find_compiler()
    target = library_path(folder, compiler)
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Workers that start together: one compiles, the others wait for it. The system lets go of a dead owner's lock, and a
        # compiler that hangs is stopped by its owner.
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(folder, compiler, target)
    except OSError as error:
        raise NativeError(f"cannot write to {folder}: {error.strerror}") from None
    return target


def _compile(folder: Path, compiler: str, target: Path) -> None:
    source = Path(__file__).parent / "decoder.c"
    try:
        # Beside the target under another name, then renamed: nobody ever loads half a library.
        handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
    except OSError as error:
        raise NativeError(f"cannot write to {folder}: {error.strerror}") from None
    try:
        done = subprocess.run(
            [compiler, *FLAGS, str(source), "-o", name, "-lm"],
            capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            said = " ".join(done.stderr.split())[:400]
            raise NativeError(f"{compiler} failed with status {done.returncode}: {said}")
        os.replace(name, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{compiler} could not be run: {error}") from None
    finally:
        Path(name).unlink(missing_ok=True)
