"""Whether the compiled kernels can serve a model here, and the library."""

from __future__ import annotations

import logging
import sys
from functools import cache

import torch

from diptych.common.errors import ConfigError
from diptych.common.paths import cache_dir
from diptych.engine.exec.model_config import ModelConfig
from diptych.kernels.dispatch import NATIVE
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


def choose_library(config: ModelConfig, dtype: torch.dtype, wanted: str | None) -> Library | None:
    """The library, or None for plain torch. Which one it was, the log says: torch takes about twice as long.

    Args:
        wanted: "native", or None: native where it can be had.
    Raises: ConfigError when "native" is wanted and cannot be had.
    """
    lanes = wanted_lanes()
    try:
        if dtype != torch.float32:
            raise NativeError(f"they compute in float32, not {str(dtype).removeprefix('torch.')}")
        if sys.platform == "win32":
            raise NativeError("not on Windows")
        library = _load(find_compiler(), lanes)
        misfit = library.misfit(
            hidden=config.hidden_size,
            ffn=config.intermediate_size,
            head_dim=config.head_dim,
            activation=config.activation,
        )
        if misfit is not None:
            raise NativeError(misfit)
        return library
    except NativeError as error:
        if wanted == NATIVE:
            raise ConfigError("backend", wanted, f"the compiled CPU kernels cannot be used: {error}") from None
        _log.warning("the compiled CPU kernels cannot be used, plain torch is about half as fast: %s", error)
        return None
