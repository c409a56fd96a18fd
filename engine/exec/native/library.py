"""The compiled kernels' libraries, or why they cannot be had here."""

from __future__ import annotations

import logging
import sys
import time
from functools import cache

import torch

from diptych.common.paths import cache_dir
from diptych.kernels.native.api import HugePages, Library, WeightFormat, Weights
from diptych.kernels.native.build import NativeError, build, find_compiler, wanted_lanes
from diptych.kernels.native.kv_move import SOURCES, KvMoves

_log = logging.getLogger(__name__)


@cache
def _load(compiler: str, lanes: int | None) -> Library:
    return Library(build(cache_dir() / "native", compiler, lanes))


@cache
def _load_moves(compiler: str, lanes: int | None) -> KvMoves:
    return KvMoves(SOURCES.build(cache_dir() / "native", compiler, lanes))


def choose_moves() -> KvMoves | None:
    """What packs and unpacks blocks on the CPU, or None for numpy, which the log says."""
    lanes = wanted_lanes()
    try:
        return _load_moves(find_compiler(), lanes)
    except NativeError as error:
        _log.warning("KV is packed and unpacked by numpy, which takes about twice as long: %s", error)
        return None


def load_library(dtype: torch.dtype) -> Library:
    """The compiled kernels. Raises: NativeError with the reason why they cannot be used; ConfigError for a bad setting."""
    lanes = wanted_lanes()
    if dtype not in DTYPES:
        raise NativeError(f"they compute in {' and '.join(map(_name, DTYPES))}, not {_name(dtype)}")
    if sys.platform == "win32":
        raise NativeError("not on Windows")
    library = _load(find_compiler(), lanes)
    if dtype == torch.bfloat16:
        _choose_tiles(library)
    return library


DTYPES = (torch.float32, torch.bfloat16)
"""That the kernels compute in."""
_PROBE = (1, 64)
"""Rows of the products by which tiles are chosen: a token, and a part of a prompt."""
_PROBE_SIZE = 512
_PROBE_TURNS = 3


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _choose_tiles(library: Library) -> None:
    """Whether AMX's tiles or vectors are used is only a question of time, a few milliseconds of which answer it: a virtual
    machine may have tiles that are slow. Their results are the same bits."""
    if not library.use_tiles(True):
        _log.info("bfloat16 by vectors: this machine has no AMX tiles")
        return
    size, pages = _PROBE_SIZE, HugePages()
    packed = library.pack(WeightFormat.BF16, torch.ones(size, size, dtype=torch.bfloat16), pages)
    weights = Weights(packed=packed.data_ptr(), format=WeightFormat.BF16, outputs=size)
    best = {True: float("inf"), False: float("inf")}
    for _ in range(_PROBE_TURNS):
        for tiles in best:
            library.use_tiles(tiles)
            began = time.perf_counter()
            for rows in _PROBE:
                library.linear(torch.ones(rows, size), weights, size, 1)
            best[tiles] = min(best[tiles], time.perf_counter() - began)
    tiles = library.use_tiles(best[True] < best[False])
    times = ", ".join(f"{name} {best[kind] * 1e6:.0f} us" for name, kind in (("AMX tiles", True), ("vectors", False)))
    _log.info("bfloat16 by %s: %s", "AMX tiles" if tiles else "vectors", times)
