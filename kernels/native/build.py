"""Compile the decoder's C sources for the machine at hand, once; see common.compiled. It takes a few seconds of one core."""

from __future__ import annotations

from pathlib import Path

from diptych.common.compiled import CSources, NativeError, find_compiler, functions_of, wanted_lanes

__all__ = ["CSources", "NativeError", "build", "find_compiler", "functions_of", "library_path", "wanted_lanes"]

SOURCES = CSources(
    "decoder",
    Path(__file__).parent,
    (
        "vectors.h",
        "threads.h",
        "matmul.h",
        "bfloat.h",
        "kv_codes.h",
        "attention.h",
        "attention_tile.h",
        "int8.h",
        "narrow.h",
        "grouped.h",
        "bf16.h",
        "lora.h",
        "pack.h",
        "decoder.c",
    ),
    ("-O2", "-march=native", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-pthread"),
)


def library_path(folder: Path, compiler: str, lanes: int | None = None) -> Path:
    return SOURCES.library_path(folder, compiler, lanes)


def build(folder: Path, compiler: str | None = None, lanes: int | None = None) -> Path:
    """The compiled library in `folder`, made now if it is not there yet.

    Args:
        lanes: floats of a vector: 4, 8 or 16; None: as many as a register here holds.
    Raises: NativeError when there is no compiler, it fails, or the folder cannot be written.
    """
    return SOURCES.build(folder, compiler, lanes)
