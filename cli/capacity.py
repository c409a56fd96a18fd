"""`diptych capacity`: KV size of a token, number of tokens that fit, and break-even of swapping against recomputing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diptych.common.degrees import Degrees
from diptych.common.errors import ConfigError
from diptych.common.kv_format import SAME_DTYPE
from diptych.common.kv_groups import PoolDemand
from diptych.common.kv_parts import split
from diptych.common.model_files import read_json_object
from diptych.engine.capacity import (
    CacheOf,
    cache_of,
    capacity_line,
    compute_dtype,
    divided_sizes,
    held_lines,
    kibibytes,
    weight_sizes,
)
from diptych.engine.exec.layers.linear import PLAIN
from diptych.engine.exec.parallel.place import RankPlace
from diptych.engine.sched.lifecycle.swap_cost import Rates, break_even_copy_bytes_per_s, break_even_tokens
from diptych.worker.defaults import CPU
from diptych.worker.degrees import check_degrees

_GIB = 1 << 30
_MIB = 1 << 20
_SERVED_DTYPE = CPU["dtype"]


def ranks_report(
    config: Mapping[str, Any], cache: CacheOf, degrees: Degrees, *, dtype: str, memory_gib: float = 0.0
) -> list[str]:
    """What each rank holds, and all together.

    Args:
        dtype: of the weights.
        memory_gib: for the KV of each rank.
    Raises: ConfigError when the model cannot be divided in this way.
    """
    divided_sizes(config).check(degrees)
    kv = cache.kv
    parts = split(kv, tensor_parallel=degrees.tensor_parallel, pipeline=degrees.pipeline)
    sizes = [part.bytes_per_token for part in parts]
    lines = [f"{degrees.num_ranks} ranks ({degrees}):"]
    places = [RankPlace(rank, degrees.tensor_parallel, degrees.pipeline) for rank in range(degrees.num_ranks)]
    weights = [found for place in places if (found := weight_sizes(config, dtype, place)) is not None]
    if weights:
        totals = [found.total for found in weights]
        lines.append(
            f"  weights in {_forms(dtype, weights[0].method)}: {_of_each(totals, _size)}, {_size(sum(totals))} in all"
        )
    more = ": KV heads are replicated" if sum(sizes) > cache.bytes_per_token else ""
    lines.append(f"  KV of a token: {_of_each(sizes, kibibytes)}, {kibibytes(sum(sizes))} in all{more}")
    if memory_gib:
        demand = PoolDemand(CPU["max_num_seqs"], CPU["max_num_batched_tokens"])
        blocks = min(demand.most_blocks(kv, int(memory_gib * _GIB), (part,)) for part in parts)
        tokens = blocks * kv.groups[0].block_size
        lines.append(f"  {memory_gib:g} GiB for KV on each rank hold {tokens:,} tokens ({blocks:,} blocks)")
    return lines


def _forms(dtype: str, method: str) -> str:
    """Of weights: `bfloat16`, or `int4 and bfloat16`. Args: method: see WeightSizes."""
    return dtype if method == PLAIN else f"{method} and {dtype}"


def _weights_line(config: Mapping[str, Any], dtype: str) -> str:
    """Empty: the model is not served. A checkpoint whose form is not served is named with what is not."""
    try:
        weights = weight_sizes(config, dtype)
    except ConfigError as error:
        return f"weights: not counted, since no worker serves them: {error}"
    return "" if weights is None else f"in {_forms(dtype, weights.method)}, {weights.line()}"


def _of_each(sizes: Sequence[int], shown: Callable[[int], str]) -> str:
    least, most = min(sizes), max(sizes)
    return f"{shown(most)} a rank" if least == most else f"{shown(least)} to {shown(most)} a rank"


def capacity_report(cache: CacheOf, *, block_size: int, memory_gib: float = 0.0) -> list[str]:
    """Raises: ConfigError for invalid settings."""
    if block_size < 1:
        raise ConfigError("block_size", block_size, "must be at least 1")
    if not 0.0 <= memory_gib < math.inf:
        raise ConfigError("memory_gib", memory_gib, "must be 0 or more")
    kv, demand = cache.kv, PoolDemand(CPU["max_num_seqs"], CPU["max_num_batched_tokens"])
    windows = any(group.window for group in kv.groups)
    lines = [*cache.arithmetic(), f"a block of {block_size} tokens: {kibibytes(cache.bytes_per_token * block_size)}"]
    if cache.max_position is not None:
        size = kv.bytes_held(cache.max_position) if windows else cache.max_position * cache.bytes_per_token
        lines.append(f"a whole context of {cache.max_position:,} tokens: {_size(size)}")
        if windows:
            lines += held_lines(kv, min(8192, cache.max_position), demand.max_num_batched_tokens)
    if memory_gib:
        num_blocks = demand.most_blocks(kv, int(memory_gib * _GIB))
        lines.append(f"{memory_gib:g} GiB hold: {capacity_line(kv, demand.group_blocks(kv, num_blocks))}")
        if windows:
            lines.append(f"(window blocks for {demand.max_num_seqs} sequences, --max-num-seqs)")
        if cache.max_position is not None:
            lines.append(f"that is {num_blocks * block_size / cache.max_position:,.1f} whole contexts")
    return lines


def break_even_report(cache: CacheOf, *, prefill_tokens_per_s: float, copy_gib_per_s: float) -> list[str]:
    """Raises: ConfigError for invalid rates."""
    for name, value in (("prefill_rate", prefill_tokens_per_s), ("copy_rate", copy_gib_per_s)):
        if not 0.0 < value < math.inf:
            raise ConfigError(name, value, "must be a positive number")
    rates = Rates(prefill_tokens_per_s, copy_gib_per_s * _GIB, cache.bytes_per_token)
    least = _size(break_even_copy_bytes_per_s(rates), digits=3)
    tokens = break_even_tokens(rates)
    lines = [
        "a preempted request, recomputed or swapped out and in:",
        f"  2 x {kibibytes(cache.bytes_per_token)} x {prefill_tokens_per_s:,.0f} tokens/s = {least}/s: "
        "a slower link never pays",
    ]
    if math.isinf(tokens):
        lines.append(f"  at {copy_gib_per_s:g} GiB/s: always recompute")
    else:
        lines.append(f"  at {copy_gib_per_s:g} GiB/s: swap from {math.ceil(tokens):,} computed tokens on")
    return lines


def _size(size_bytes: float, digits: int = 2) -> str:
    unit, name = (_GIB, "GiB") if size_bytes >= _GIB else (_MIB, "MiB") if size_bytes >= _MIB else (1024, "KiB")
    return f"{size_bytes / unit:,.{digits}f} {name}"


def run_capacity(
    model: str,
    *,
    dtype: str = "",
    kv_cache_dtype: str = SAME_DTYPE,
    block_size: int = 16,
    memory_gib: float = 0.0,
    prefill_rate: float = 0.0,
    copy_rate: float = 0.0,
    tensor_parallel: int = 1,
    pipeline: int = 1,
) -> int:
    """Print the report.

    Args:
        model: a config.json, a folder, or a value that `diptych model` accepts.
        dtype: of the computation; empty: the config's, and the report says where `diptych up` would use another.
        kv_cache_dtype: of the cache: `dtype`, or a quantized one.
        tensor_parallel, pipeline: of a worker with several ranks, whose sizes are reported, too.
    Raises: ConfigError.
    """
    path = Path(model)
    if not path.exists():
        from diptych.cli.models.store import resolve_model
        from diptych.cli.progress import progress_on

        with progress_on() as progress:
            path = resolve_model(model, progress)
    config = read_json_object(path / "config.json" if path.is_dir() else path)
    cache = cache_of(config, dtype, block_size, kv_cache_dtype)
    lines = capacity_report(cache, block_size=block_size, memory_gib=memory_gib)
    computed_in = compute_dtype(config, dtype)
    if line := _weights_line(config, computed_in):
        lines.append(line)
    if not dtype and kv_cache_dtype == SAME_DTYPE and cache.dtype != _SERVED_DTYPE:
        lines.insert(
            0,
            f"in the config's {cache.dtype}; `diptych up` serves {_SERVED_DTYPE} on a CPU unless --dtype says otherwise",
        )
    check_degrees(tensor_parallel, pipeline)
    degrees = Degrees(tensor_parallel, pipeline)
    if degrees.num_ranks > 1:
        lines += ranks_report(config, cache, degrees, dtype=computed_in, memory_gib=memory_gib)
    if prefill_rate or copy_rate:
        lines += break_even_report(cache, prefill_tokens_per_s=prefill_rate, copy_gib_per_s=copy_rate)
    print("\n".join(lines))
    return 0
