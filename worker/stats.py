"""The answer to GetStats: the engine's numbers by name, the host's facts, and settings that affect throughput."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from diptych.common.compiled import NativeError, find_compiler
from diptych.engine.messages import EngineStats
from diptych.rpc.fields import same_fields
from diptych.rpc.v1 import worker_pb2
from diptych.worker.adapters import ResidentAdapter
from diptych.worker.config import WorkerConfig
from diptych.worker.gpu import GpuNumbers, GpuReading
from diptych.worker.host_facts import HostFacts

SETTINGS = (
    *(
        "device",
        "dtype",
        "kv_cache_dtype",
        "threads",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_step_time_s",
    ),
    *("mixed_step_time_s", "max_mixed_prefill_tokens", "num_host_blocks", "disk_kv_dir", "kv_store", "preemption_mode"),
    *("tensor_parallel_size", "pipeline_parallel_size", "nnodes"),
    *("transport", "slab_bytes", "num_slabs", "enable_prefix_caching"),
    *("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras"),
)


def engine_numbers(stats: EngineStats) -> dict[str, float]:
    """Every numeric field by its name; unknown ones (None) are left out."""
    values = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    adapters = {
        "adapters_in_slots": float(len(stats.adapters.resident)),
        "adapter_installs": float(stats.adapters.installs),
        "adapter_evictions": float(stats.adapters.evictions),
    }
    return numbers | adapters | {f"{tier}_usage": usage for tier, usage in stats.tier_usage}


def settings_of(
    config: WorkerConfig,
    kernels: str = "",
    refused: str = "",
    method: str = "",
    rank_link: str = "",
    rank_gpus: Sequence[str] = (),
) -> dict[str, str]:
    """Settings by name.

    Args:
        kernels, refused: see LoadedModel. The available C compiler is listed beside them, or "".
        method: of the weights, see Compat.
        rank_link, rank_gpus: see LoadedModel; the number of different GPUs is listed.
    """
    try:
        compiler = find_compiler()
    except NativeError:
        compiler = ""
    chosen = {"kernels": kernels, "kernels_refused": refused, "compiler": compiler, "method": method}
    chosen |= {"rank_link": rank_link, "rank_gpus": str(len(set(rank_gpus)))}
    return {name: str(getattr(config, name)) for name in SETTINGS} | chosen


def host_to_proto(host: HostFacts) -> worker_pb2.HostFacts:
    return worker_pb2.HostFacts(**dataclasses.asdict(host))


def adapter_to_proto(adapter: ResidentAdapter) -> worker_pb2.ResidentAdapter:
    return worker_pb2.ResidentAdapter(**same_fields(ResidentAdapter, adapter, but=("base_model",)))


def gpu_to_proto(numbers: GpuNumbers | None) -> worker_pb2.GpuFacts | None:
    """None: there is no fresh reading."""
    if numbers is None:
        return None
    return worker_pb2.GpuFacts(
        **same_fields(GpuNumbers, numbers, but=("reading",)),
        **same_fields(GpuReading, numbers.reading, but=("busy", "memory_clock_hz", "temperature_celsius", "throttled")),
    )
