"""C sources, compiled once for this machine. The library's file name is made of the sources, the compiler and the CPU."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from diptych.common import child
from diptych.common.errors import ConfigError

LANES_VARIABLE = "DIPTYCH_NATIVE_LANES"
# Flags that limit an x86-64 compiler to registers of this many floats. Where registers are narrower, a vector spans
# several of them.
_INSTRUCTIONS = {4: ("-mno-avx",), 8: ("-mno-avx512f",), 16: ()}
ALL_LANES = tuple(_INSTRUCTIONS)
COMPILE_TIMEOUT_S = 300.0


class NativeError(Exception):
    """The compiled library is not available; the message says why."""


def find_compiler(environment: dict[str, str] | None = None) -> str:
    """$CC, else the first of cc, gcc and clang that is installed. Raises: NativeError."""
    wanted = (os.environ if environment is None else environment).get("CC")
    for name in (wanted,) if wanted else ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise NativeError(f"CC={wanted} is not installed" if wanted else "no C compiler (cc, gcc or clang) is installed")


def wanted_lanes(environment: dict[str, str] | None = None) -> int | None:
    """Floats per vector in $DIPTYCH_NATIVE_LANES, for tests of other machines. None: as many as a register here holds.
    Raises: ConfigError."""
    text = (os.environ if environment is None else environment).get(LANES_VARIABLE, "")
    if not text:
        return None
    if text not in map(str, ALL_LANES):
        raise ConfigError(LANES_VARIABLE, text, f"must be one of {', '.join(map(str, ALL_LANES))}, or not set")
    return int(text)


@cache
def register_lanes() -> int:
    """Floats of this CPU's widest register: what is compiled where no width is asked for."""
    features = _cpu_features().split()
    return 16 if "avx512f" in features else 8 if "avx2" in features else 4


def _width_flags(lanes: int | None) -> tuple[str, ...]:
    if lanes in (None, register_lanes()):  # one library for both
        return ()
    return (f"-DLANES={lanes}", *(_INSTRUCTIONS[lanes] if platform.machine() == "x86_64" else ()))


def _check_owner(path: Path) -> None:
    """Check that only this user or root can write to the folder, since a library is loaded from it. Raises:
    NativeError."""
    facts = path.stat()
    if facts.st_uid not in (os.geteuid(), 0):
        raise NativeError(
            f"{path} belongs to user {facts.st_uid}: libraries are loaded only from a folder owned by this user"
        )
    if facts.st_mode & 0o022:
        raise NativeError(f"{path} is writable by others (mode {facts.st_mode & 0o7777:o}): chmod go-w {path}")


def _cpu_features() -> str:
    """CPU features that -march=native depends on; machines that differ may share a cache folder."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    model = next((line for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()} {model} {features}"


@dataclass(frozen=True, slots=True)
class CSources:
    """C sources of one library.

    Args:
        name: prefix of the library's file name.
        files: in `folder`; the last one is compiled and includes the others.
        flags: compiler flags.
    """

    name: str
    folder: Path
    files: tuple[str, ...]
    flags: tuple[str, ...]

    def library_path(self, target_folder: Path, compiler: str, lanes: int | None = None) -> Path:
        digest = hashlib.blake2b(digest_size=12)
        for name in self.files:
            digest.update((self.folder / name).read_bytes())
        for part in (*self.flags, *_width_flags(lanes), os.path.realpath(compiler), _cpu_features()):
            digest.update(part.encode() + b"\0")
        return target_folder / f"{self.name}-{digest.hexdigest()}.so"

    def build(self, target_folder: Path, compiler: str | None = None, lanes: int | None = None) -> Path:
        """The compiled library in `target_folder`; compiled if it does not exist.

        Args:
            lanes: floats per vector: 4, 8 or 16; None: as many as a register here holds.
        Raises: NativeError when there is no compiler, it fails, the folder cannot be written, or others can write to
            it.
        """
        compiler = compiler or find_compiler()
        target = self.library_path(target_folder, compiler, lanes)
        if target.exists():
            _check_owner(target_folder)
            _check_owner(target)
            return target
        try:
            target_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(target_folder)
            # Of processes that start together, one compiles and the others wait. The system releases a dead owner's
            # lock, and the owner stops a compiler that hangs.
            with (target_folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not target.exists():
                    self._compile(target_folder, compiler, _width_flags(lanes), target)
        except OSError as error:
            raise NativeError(f"cannot write to {target_folder}: {error.strerror}") from None
        return target

    def _compile(self, target_folder: Path, compiler: str, width: tuple[str, ...], target: Path) -> None:
        try:
            # Written under another name, then renamed, so that a half-written library is never loaded.
            handle, name = tempfile.mkstemp(suffix=".so", dir=target_folder)
            os.close(handle)
        except OSError as error:
            raise NativeError(f"cannot write to {target_folder}: {error.strerror}") from None
        sources = [str(self.folder / file) for file in self.files if file.endswith(".c")]
        try:
            done = subprocess.run(
                child.with_death_signal([compiler, *self.flags, *width, *sources, "-o", name, "-lm"]),
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


def functions_of(path: Path, kind: type[ctypes.CDLL]) -> Callable[..., Any]:
    """Load a library. Returns: `function(name, *argument types, returns=type)`, which gives its diptych_<name>.

    Args:
        kind: ctypes.CDLL releases the interpreter lock while a function runs, ctypes.PyDLL keeps it.
    Raises: NativeError when the file cannot be loaded.
    """
    try:
        library = kind(str(path))
    except OSError as error:
        raise NativeError(f"cannot load {path}: {error}") from None

    def function(name: str, *arguments: Any, returns: Any = None) -> Any:
        found = getattr(library, f"diptych_{name}")
        found.argtypes, found.restype = arguments, returns
        return found

    return function
