"""Defaults of unset worker settings, from the device, its memory, and the KV size of a token. Pure.

A GPU computes a thousand tokens in the time of a few, and transfers KV best in few large messages. On a CPU short steps
keep other requests responsive, and slabs are ordinary memory. Given settings are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from diptych.common.kv_format import KvFormat, kv_elements
from diptych.engine.capacity import kibibytes
from diptych.engine.config import EngineConfig
from diptych.kvtransfer.fabric.registry import transports
from diptych.kvtransfer.slabs.layout import SlabQuotas
from diptych.worker.config import AUTO, MOST, WorkerConfig
from diptych.worker.role_spec import ROLES

_ENGINE = EngineConfig(num_blocks=1)
CPU: Mapping[str, Any] = {
    "dtype": "float32",
    "transport": "ucx",
    "max_num_seqs": _ENGINE.max_num_seqs,
    "max_num_batched_tokens": _ENGINE.max_num_batched_tokens,
    "max_step_time_s": _ENGINE.max_step_time_s,
    "mixed_step_time_s": _ENGINE.mixed_step_time_s,
    "slab_bytes": 4 << 20,
    "num_slabs": 8,
    "num_second_slabs": 8,
}
SLABS_OF_A_RANK = 4
"""At least: each rank's KV of a range is in a slab of its own."""
GPU_SEQS = 256
GPU_BATCHED_TOKENS = 4096
GPU_MIXED_TOKENS = 512
"""The most of a CUDA graph with chunks: see engine.exec.cuda.chunk_graphs."""
GPU_SLABS = 16
GPU_SECOND_SLABS = 2
GPU_SLAB_TOKENS = 2048
"""Half of a step: the first half of a long chunk is sent while the second is packed."""
_RING_SHARE = 0.08
"""Share of the GPU's memory for slabs."""
_SLAB_UNIT = 2 << 20
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The device of a worker. `total_bytes`: of its memory, 0 on a CPU. `uuid`: of a GPU."""

    kind: str = "cpu"
    name: str = "the CPU"
    total_bytes: int = 0
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the model. `dtype`: the checkpoint's. `kv`: format of its cache, in any dtype."""

    dtype: str
    kv: KvFormat


def settled(config: WorkerConfig, device: DeviceFacts, model: ModelFacts | None) -> tuple[WorkerConfig, list[str]]:
    """The settings with all defaults, and a line with value and reason for each default.

    Args:
        model: may be None on a CPU, where no default depends on it.
    """
    if device.kind == "cpu":
        found = {name: (value, "on a CPU") for name, value in CPU.items()}
        least = SLABS_OF_A_RANK * config.degrees.num_ranks
        if least > CPU["num_slabs"]:
            found |= dict.fromkeys(("num_slabs", "num_second_slabs"), (least, f"{SLABS_OF_A_RANK} for each rank"))
    else:
        assert model is not None
        found = _on_gpu(config, device, model)
    chosen = {name: pair for name, pair in found.items() if is_open(config, name)}
    lines = [f"{name}={value}: {reason}" for name, (value, reason) in chosen.items()]
    return replace(config, **{name: value for name, (value, _) in chosen.items()}), lines


def slab_quotas(config: WorkerConfig) -> SlabQuotas:
    """The parts of the arena of a worker that begins with config.role."""
    often, seldom = config.num_slabs, config.num_second_slabs
    return SlabQuotas(often, seldom) if ROLES[config.role].publishes else SlabQuotas(seldom, often)


def is_open(config: WorkerConfig, name: str) -> bool:
    """Whether it is unset. (0 seconds means no bound, and the transport "auto" is a setting.)"""
    value = getattr(config, name)
    if name.endswith("_time_s"):
        return value is None
    return bool(value == AUTO) if name == "dtype" else not value


def _on_gpu(config: WorkerConfig, device: DeviceFacts, model: ModelFacts) -> dict[str, tuple[Any, str]]:
    dtype = model.dtype if is_open(config, "dtype") else config.dtype
    num_ranks = config.degrees.num_ranks
    per_token = -(-model.kv.with_dtype(*kv_elements(config.kv_cache_dtype, dtype)).bytes_per_token // num_ranks)
    slab_bytes, why_bytes = config.slab_bytes, ""
    spec = transports().get(config.transport)
    if spec is not None and spec.in_process:
        slab_bytes, why_bytes = slab_bytes or CPU["slab_bytes"], "nothing leaves the process"
    if not slab_bytes:
        slab_bytes, why_bytes = _slab(per_token, device, config.num_slabs or GPU_SLABS)
    fit = max(2, int(device.total_bytes * _RING_SHARE) // slab_bytes)
    num_slabs, why_seldom = min(GPU_SLABS, fit), "they take GPU memory"
    num_second_slabs = GPU_SECOND_SLABS
    if num_ranks > 1:
        num_slabs, num_second_slabs = num_ranks * num_slabs, num_ranks * GPU_SECOND_SLABS
        why_seldom = f"{GPU_SECOND_SLABS} for each rank"
    return {
        "dtype": (dtype, "the checkpoint's own"),
        "transport": ("auto", "CUDA IPC within a host, by self-test; else the best that works"),
        "max_num_seqs": (GPU_SEQS, f"on {device.name}"),
        "max_num_batched_tokens": (GPU_BATCHED_TOKENS, f"on {device.name}"),
        "max_step_time_s": (0.0, "a GPU's steps are bounded by their tokens"),
        "mixed_step_time_s": (0.0, "a GPU's steps are bounded by their tokens"),
        "max_mixed_prefill_tokens": (GPU_MIXED_TOKENS, "such a step is one CUDA graph"),
        "slab_bytes": (slab_bytes, why_bytes),
        "num_second_slabs": (num_second_slabs, why_seldom),
        "num_slabs": (num_slabs, f"{num_slabs * slab_bytes / 2**30:.1f} GiB of staging for ranges under way"),
    }


def _slab(per_token: int, device: DeviceFacts, num_slabs: int) -> tuple[int, str]:
    """Size for the KV of GPU_SLAB_TOKENS, or of as many as leave memory for a few slabs; and the reason."""
    tokens = GPU_SLAB_TOKENS
    most = min(MOST["slab_bytes"], int(device.total_bytes * _RING_SHARE) // min(4, num_slabs))
    while tokens > 16 and _rounded(tokens * per_token) > most:
        tokens //= 2
    size = _rounded(tokens * per_token)
    return size, f"{tokens:,} tokens of {kibibytes(per_token)} of KV each, in {size / _MIB:,.0f} MiB"


def _rounded(size_bytes: int) -> int:
    """Including header, trailer and rounding to whole blocks."""
    return (size_bytes // _SLAB_UNIT + 1) * _SLAB_UNIT
