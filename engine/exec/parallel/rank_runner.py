"""Makes the runner of one rank in its own process: what RankSpec.factory names."""

from __future__ import annotations

import torch

from diptych.common.errors import ConfigError
from diptych.common.kv_format import SAME_DTYPE
from diptych.common.kv_groups import PoolDemand
from diptych.engine.exec.cuda.sizing import PoolBudget
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.exec.parallel.communicator import Communicator, HostCommunicator
from diptych.engine.exec.parallel.place import RankPlace
from diptych.engine.progress import progress


def make(
    *,
    model: str,
    rank: int,
    rendezvous: str,
    tensor_parallel: int = 1,
    pipeline: int = 1,
    deadline_s: float = 120.0,
    host: str = "",
    stage_on_one_host: bool = False,
    device: str = "cpu",
    device_index: int = 0,
    dtype: str = "float32",
    num_blocks: int = 0,
    block_size: int = 16,
    max_model_len: int | None = None,
    num_threads: int | None = None,
    num_host_blocks: int = 0,
    backend: str | None = None,
    gpu_memory_utilization: float | None = None,
    reserve_bytes: int = 0,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    window_groups: bool = False,
    batch_invariant: bool = False,
    kv_cache_dtype: str = SAME_DTYPE,
    max_loras: int = 0,
    max_lora_rank: int = 16,
) -> TorchModelRunner:
    """All arguments are JSON; every rank gets the same ones but `rank`, `device_index` and `host`.

    Args:
        model: a local Hugging Face folder.
        rank, tensor_parallel, pipeline: see RankPlace.
        rendezvous, host, stage_on_one_host, deadline_s: see HostCommunicator; the deadline is that of each operation between
            ranks. A stage waits as long as the stage before computes: it is above the longest step.
        device_index: of the GPU that computes, among those that this process sees. It sees those of the other ranks, too.
        gpu_memory_utilization, reserve_bytes: see PoolBudget, on a GPU whose pool is sized by its memory; None: num_blocks.
        max_num_batched_tokens: see PoolBudget.
        window_groups: layers with a window keep that window only, in KV groups, see PoolDemand; False: every token.
        others: see TorchModelRunner.load.
    Raises: ConfigError naming the field; RunnerLost when the other ranks do not come.
    """
    place = RankPlace(rank, tensor_parallel, pipeline)
    if device == "cuda":
        _check_index(device_index)
        torch.cuda.set_device(device_index)
    demand = None
    step_tokens = max_num_batched_tokens or PoolDemand().max_num_batched_tokens
    if window_groups:
        demand = PoolDemand(max_num_seqs or PoolDemand().max_num_seqs, step_tokens)
    budget = None
    if gpu_memory_utilization is not None:
        budget = PoolBudget(gpu_memory_utilization, step_tokens, reserve_bytes)
    return TorchModelRunner.load(
        model,
        device=device,
        dtype=dtype,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        num_threads=num_threads,
        num_host_blocks=num_host_blocks,
        backend=backend,
        budget=budget,
        demand=demand,
        batch_invariant=batch_invariant,
        kv_cache_dtype=kv_cache_dtype,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        place=place,
        communicator=connect(
            place,
            device=device,
            rendezvous=rendezvous,
            deadline_s=deadline_s,
            host=host,
            stage_on_one_host=stage_on_one_host,
        ),
    )


def connect(
    place: RankPlace,
    *,
    device: str,
    rendezvous: str,
    deadline_s: float,
    host: str = "",
    stage_on_one_host: bool = False,
) -> Communicator | None:
    """To the other ranks, over what fits the device; None: there are none. Raises: ConfigError; RunnerLost."""
    if place.num_ranks == 1:
        return None
    host_ranks = HostCommunicator(
        place, rendezvous=rendezvous, deadline_s=deadline_s, host=host, stage_on_one_host=stage_on_one_host
    )
    host_ranks.on_progress = progress
    if device != "cuda":
        return host_ranks
    # Here and not above: nothing on the CPU's path imports Triton.
    from diptych.engine.exec.cuda.communicator import CudaCommunicator

    gpu_ranks = CudaCommunicator(host_ranks, deadline_s=deadline_s)
    gpu_ranks.on_progress = progress
    return gpu_ranks


def _check_index(index: int) -> None:
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise ConfigError("devices", index, f"this process sees {count} GPUs, counted from 0")
