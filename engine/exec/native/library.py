"""The compiled kernels' libraries, or why they cannot be had here."""

from __future__ import annotations

import logging
import sys
from functools import cache

import torch

from diptych.common.paths import cache_dir
from diptych.kernels.native.api import Library
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
    if dtype != torch.float32:
        raise NativeError(f"they compute in float32, not {str(dtype).removeprefix('torch.')}")
    if sys.platform == "win32":
        raise NativeError("not on Windows")
    return _load(find_compiler(), lanes)
