"""The transports that can move KV, by name.

Every module of `kvtransfer/transports` calls `register` with its `TransportSpec`. A package that is installed beside this one
adds a transport by an entry point of group `diptych.transports`, whose object is a `TransportSpec`. No other module branches
on the name of a transport.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from diptych.common.errors import ConfigError

if TYPE_CHECKING:
    from diptych.kvtransfer.fabric.self_test import SelfTest
    from diptych.kvtransfer.fabric.transport import Transport
    from diptych.kvtransfer.gpu.memory import GpuMemory
    from diptych.kvtransfer.slabs.layout import Ring, RingSpec, SlabQuotas

GROUP = "diptych.transports"
AUTO = "auto"
"""Takes the first transport that works here, in the order of `TransportSpec.auto_rank`."""
_GPUS = Path("/proc/driver/nvidia/gpus")
"""One entry for each GPU of the host, including those that this process cannot use."""

Make = Callable[[str, str], "Transport"]
"""(worker_id, incarnation) -> a new transport."""


@dataclass(frozen=True, slots=True)
class TransportSite:
    """Where a transport runs.

    Args:
        host: address of ours to bind to and to advertise.
        ring: sizes of the staging ring.
        memory: GPU memory for the ring; None: the ring is in host memory.
        require_path: peers on another path are refused; empty: every path is accepted.
    """

    host: str
    ring: RingSpec
    memory: GpuMemory | None = None
    require_path: str = ""


def _host_self_test(make: Make, site: TransportSite) -> SelfTest:
    from diptych.kvtransfer.fabric.self_test import run_self_test

    return run_self_test(make, site.ring.slab_bytes)


def host_ring(site: TransportSite, quotas: SlabQuotas) -> Ring:
    """An arena in host memory."""
    from diptych.kvtransfer.slabs.layout import Ring

    return Ring(site.ring)


def gpu_ring(site: TransportSite, quotas: SlabQuotas) -> Ring:
    """An arena whose payloads lie in `site.memory`. Raises: TransferError when there is no room."""
    from diptych.kvtransfer.gpu.ring import GpuRing

    assert site.memory is not None
    return GpuRing(site.ring, *site.memory.allocate(site.ring.total_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSpec:
    """What the rest of a worker needs to know about a transport.

    Args:
        name: the value of `--transport`, and `KvAddress.transport`.
        summary: one line for --help.
        make: a new transport. Raises: ConfigError when what it needs is not installed, TransferError.
        self_test: measures it on this machine before the worker serves. Raises: TransferError.
        make_ring: the arena of slabs, with these parts. Raises: TransferError.
        device: where the KV pool must be, for example "cuda"; empty: anywhere.
        gpu_slabs: how many slabs of an arena with these parts take GPU memory.
        auto_rank: `auto` tries lower ranks first; None: never.
        auto_min_gpus: `auto` leaves it out on hosts with fewer GPUs.
        shares_a_gpu: preferred where all workers of the cluster are on one GPU.
        in_process: peers are in one process; not for a cluster of processes.
    """

    name: str
    summary: str
    make: Callable[[str, str, TransportSite], Transport]
    self_test: Callable[[Make, TransportSite], SelfTest] = _host_self_test
    make_ring: Callable[[TransportSite, SlabQuotas], Ring] = host_ring
    device: str = ""
    gpu_slabs: Callable[[SlabQuotas], int] = lambda quotas: 0
    auto_rank: int | None = None
    auto_min_gpus: int = 0
    shares_a_gpu: bool = False
    in_process: bool = False

    @property
    def why_not_encrypted(self) -> str:
        """Why `--kv-encryption` cannot be used with it; empty: it can."""
        if self.make_ring is host_ring:
            return ""
        able = ", ".join(
            spec.name for spec in transports().values() if spec.make_ring is host_ring and not spec.in_process
        )
        return f"transport {self.name} moves slabs between GPUs' memory, where nothing encrypts them; these can: {able}"


_specs: dict[str, TransportSpec] = {}


def register(spec: TransportSpec) -> TransportSpec:
    """Make `spec` selectable by its name. Raises: ValueError when another transport has the name."""
    if spec.name == AUTO or _specs.setdefault(spec.name, spec) != spec:
        raise ValueError(f"two transports are called {spec.name!r}")
    return spec


def unregister(name: str) -> None:
    """For tests."""
    _specs.pop(name, None)


@cache
def _load() -> None:
    package = importlib.import_module("diptych.kvtransfer.transports")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    for point in entry_points(group=GROUP):
        register(point.load())


def transports() -> dict[str, TransportSpec]:
    """All of them by name, those that `auto` tries first in front."""
    _load()
    never = 1 + max((spec.auto_rank or 0 for spec in _specs.values()), default=0)
    order = sorted(_specs.values(), key=lambda s: (never if s.auto_rank is None else s.auto_rank, s.name))
    return {spec.name: spec for spec in order}


def in_gpu_memory() -> frozenset[str]:
    """Those whose slabs lie in GPU memory."""
    return frozenset(spec.name for spec in transports().values() if spec.make_ring is not host_ring)


def names(*, in_process: bool = True) -> tuple[str, ...]:
    """Values of `--transport`. Args: in_process: include those that connect workers of one process only."""
    return (AUTO, *(spec.name for spec in transports().values() if in_process or not spec.in_process))


def check(name: str, device: str, *, in_process: bool = True) -> None:
    """Raises: ConfigError when there is no such transport, or when it cannot serve a KV pool on `device`."""
    known = names(in_process=in_process)
    if name not in known:
        raise ConfigError("transport", name, f"must be one of {', '.join(known)}")
    spec = transports().get(name)
    if spec is not None and spec.device not in ("", device):
        raise ConfigError("transport", name, f"needs a KV pool on {spec.device}: this one is on {device}")


def candidates(name: str, device: str) -> tuple[TransportSpec, ...]:
    """The transports that are tried in turn for `--transport name`."""
    if name != AUTO:
        return (transports()[name],)
    num_gpus = len(list(_GPUS.glob("*")))
    return tuple(
        spec
        for spec in transports().values()
        if spec.auto_rank is not None and spec.device in ("", device) and spec.auto_min_gpus <= num_gpus
    )


def transport_for_a_shared_gpu() -> str:
    """The transport of workers that are all on one GPU."""
    return next((spec.name for spec in transports().values() if spec.shares_a_gpu), AUTO)
