"""The ranks of a worker: how many, on which devices, and what their processes are started with.

A worker of one rank computes in its own process. Of more, each is a process that the worker starts and watches
(engine/ranks/executor.py); the worker's own process then has no GPU, and KV goes through host memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diptych.common import child
from diptych.common.degrees import Degrees
from diptych.common.errors import ConfigError
from diptych.engine.ranks.starting import RankSpec
from diptych.worker.degrees import device_numbers
from diptych.worker.visible_gpus import Gpu

FACTORY = "diptych.engine.exec.parallel.rank_runner:make"


def gpus_of_ranks(gpus: Sequence[Gpu], devices: str, num_ranks: int) -> tuple[Gpu, ...]:
    """The GPU of each rank, in the order of the ranks.

    Args:
        gpus: those that CUDA shows, in its order.
        devices: positions in `gpus`, one for each rank, the same one twice if two ranks share it; empty: the first ones.
    Raises: ConfigError when there are too few.
    """
    numbers = device_numbers("devices", devices) or tuple(range(num_ranks))
    for number in numbers:
        if number >= len(gpus):
            if devices:
                raise ConfigError("devices", devices, f"there are {len(gpus)} GPUs: 0 to {len(gpus) - 1}")
            rule = f"{num_ranks} ranks need {num_ranks} GPUs, and there are {len(gpus)}; --devices may name one twice"
            raise ConfigError("tensor_parallel_size", num_ranks, rule)
    return tuple(gpus[number] for number in numbers)


def check_transport(name: str, device: str, num_ranks: int) -> None:
    """Raises: ConfigError when there is no such transport, or it cannot serve workers with so many ranks on `device`."""
    from diptych.kvtransfer.fabric import registry

    spec = registry.transports().get(name)
    if num_ranks > 1 and spec is not None and spec.device:
        able = ", ".join(one.name for one in registry.transports().values() if not (one.device or one.in_process))
        rule = f"KV of several ranks goes through host memory, and this one moves it between GPUs; these can: {able}"
        raise ConfigError("transport", name, rule)
    registry.check(name, device, in_process=False)


def threads_of_a_rank(threads: int, num_ranks: int) -> int:
    """The worker's threads divided among its ranks, at least one each."""
    return max(1, threads // num_ranks)


def rank_specs(
    degrees: Degrees,
    arguments: Mapping[str, Any],
    threads: int,
    gpus: Sequence[Gpu] = (),
    utilization: float = 0.0,
    *,
    here: range | None = None,
    more: Mapping[str, str] | None = None,
) -> list[RankSpec]:
    """How the processes of this host's ranks are started, in their order.

    Args:
        arguments: of every rank's runner.
        threads: of each rank.
        gpus: one for each rank; each rank sees those of all of them. Empty: they compute on the CPU.
        utilization: share of a GPU's memory for the worker; ranks that share a GPU divide it. 0.0: the pool has its size.
        here: the ranks of this host; None: all.
        more: variables of their environment.
    """
    here = range(degrees.num_ranks) if here is None else here
    env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **(more or {})}
    seen = list(dict.fromkeys(gpu.visible for gpu in gpus))
    if gpus:
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(seen), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    specs = []
    for index, rank in enumerate(here):
        about: dict[str, Any] = {
            "rank": rank,
            "tensor_parallel": degrees.tensor_parallel,
            "pipeline": degrees.pipeline,
            "num_threads": threads,
        }
        if gpus:
            about["device_index"] = seen.index(gpus[index].visible)
            if utilization:
                about["gpu_memory_utilization"] = utilization / gpus.count(gpus[index])
        specs.append(RankSpec(FACTORY, {**arguments, **about}, child.environment(**env)))
    return specs


@contextmanager
def meeting_point() -> Iterator[str]:
    """The rendezvous of the ranks of one host: a file in this process's memory, which other processes of this user can open.
    It is gone with this process, however that ends; and before, where the ranks do not start. Until then NCCL looks into it.
    Raises: ConfigError where there are no such files."""
    try:
        descriptor = os.memfd_create("diptych-ranks", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        raise ConfigError("tensor_parallel_size", "several ranks", f"need files in memory: {error}") from None
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}").as_uri()
    except BaseException:
        os.close(descriptor)
        raise
