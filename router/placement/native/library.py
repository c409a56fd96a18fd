"""Functions and structs of the compiled library. The structs hold addresses: their owner must keep the arrays alive."""

from __future__ import annotations

import ctypes
import platform
from array import array
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import structlog

from diptych.common.block_identity import IdentityHeader
from diptych.common.compiled import CSources, NativeError, find_compiler, functions_of, wanted_lanes
from diptych.common.errors import ConfigError
from diptych.common.paths import cache_dir

log = structlog.get_logger(__name__)

_X86 = platform.machine() in ("x86_64", "AMD64")
# Keys are made one compression after the other: of BLAKE3's forms with SIMD only the one that speeds up a single
# compression helps (the one with AVX-512 by another 4%).
_BLAKE3 = ("blake3.c", "blake3_dispatch.c", "blake3_portable.c", *(("blake3_sse41.c",) if _X86 else ()))
_WITHOUT = ("SSE2", "AVX2", "AVX512", *(() if _X86 else ("SSE41",)))
SOURCES = CSources(
    "lookup",
    Path(__file__).parent,
    ("keys.h", "blake3/blake3.h", "blake3/blake3_impl.h", *(f"blake3/{name}" for name in _BLAKE3), "lookup.c"),
    (
        *("-O3", "-march=native", "-shared", "-fPIC", "-fvisibility=hidden", "-DBLAKE3_USE_NEON=0"),
        *(f"-DBLAKE3_NO_{name}" for name in _WITHOUT),
    ),
)
MAX_WORDS = 16
"""Words of 64 workers each, in one lookup."""
MAX_COLUMNS = 64 * MAX_WORDS


class CTable(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        *((name, c_void_p) for name in ("tags", "stamps", "masks")),
        *((name, c_int64) for name in ("tiers", "words", "num_buckets", "round")),
    ]


class CGroup(ctypes.Structure):
    _fields_: ClassVar[Any] = [("at", c_void_p), ("columns", c_void_p), ("count", c_int64), ("block_size", c_int64)]


class Library:
    """Raises: NativeError when the file cannot be loaded."""

    def __init__(self, path: Path) -> None:
        # Keeps the interpreter lock: a call takes microseconds.
        function = functions_of(path, ctypes.PyDLL)
        self.keys = function("keys", c_char_p, c_char_p, c_int64, c_void_p, c_int64, c_int64, c_void_p)
        self.unpack_into = function("unpack", c_char_p, c_int64, c_int64, c_void_p, returns=c_int64)
        self.hits = function(
            "hits",
            POINTER(CTable),
            POINTER(CGroup),
            c_void_p,
            *[c_int64] * 3,
            *[c_void_p] * 4,
            c_int64,
            returns=c_int64,
        )

    def unpack(self, packed: bytes, count: int) -> tuple[Sequence[int], int]:
        """See router.packed_ids.unpack."""
        ids = array("I", bytes(4 * count))
        most = self.unpack_into(packed, len(packed), count, ids.buffer_info()[0])
        if most < 0:
            raise ValueError("these are no packed token ids")
        return ids, most

    def block_keys(self, header: IdentityHeader, token_ids: Sequence[int]) -> Any:
        """As common.block_identity.block_keys: [blocks, 2], the two halves of each key."""
        tokens = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids)
        blocks = len(tokens) // header.block_size
        keys = np.empty((blocks, 2), np.uint64)
        opening = header.opening
        self.keys(header.key, opening, len(opening), tokens.buffer_info()[0], blocks, header.block_size, address(keys))
        return keys


def address(values: Any) -> int:
    """Address of a contiguous array's data."""
    found: int = values.__array_interface__["data"][0]
    return found


@cache
def _load(compiler: str, lanes: int | None) -> Library:
    """Load the library; compiling it the first time takes a second of one core. Raises: NativeError."""
    return Library(SOURCES.build(cache_dir() / "native", compiler, lanes))


def choose_library(wanted: str) -> Library | None:
    """The library, or None for numpy, with which a decision takes about twice as long (logged). `wanted`: "native",
    "numpy", or "auto": native if available. Raises: ConfigError when "native" is requested and not available."""
    if wanted == "numpy":
        return None
    lanes = wanted_lanes()
    try:
        return _load(find_compiler(), lanes)
    except NativeError as error:
        if wanted == "native":
            raise ConfigError("placement_backend", wanted, f"is not available: {error}") from None
        log.warning("using the numpy lookup of prompts, which takes about twice as long", why=str(error))
        return None
