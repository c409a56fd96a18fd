"""The one way to a Transfer: pick the transport, prove it, start its thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from diptych.common.errors import ConfigError, TransferError
from diptych.kvtransfer.api import Transfer
from diptych.kvtransfer.config import AUTO_ORDER, ON_GPU, TransferConfig
from diptych.kvtransfer.faults import FaultyTransport
from diptych.kvtransfer.gpu_memory import DeviceMemory, GpuMemory
from diptych.kvtransfer.gpu_ring import GpuRing
from diptych.kvtransfer.inproc import InprocTransport
from diptych.kvtransfer.ipc import IpcTransport
from diptych.kvtransfer.layout import RingSpec
from diptych.kvtransfer.self_test import SelfTest, run_ipc_self_test, run_self_test
from diptych.kvtransfer.thread import TransferThread
from diptych.kvtransfer.transport import Transport
from diptych.kvtransfer.ucx_gpu_probe import run_ucx_gpu_self_test

log = logging.getLogger(__name__)
ROLES = ("prefill", "decode")
_GPUS = Path("/proc/driver/nvidia/gpus")
"""One entry for each GPU of the host, whatever a process may see."""


def build_transfer(
    config: TransferConfig,
    *,
    worker_id: str,
    incarnation: str,
    role: str,
    layout_hash: int,
    loop: asyncio.AbstractEventLoop,
    num_layers: int = 0,
) -> Transfer:
    """Self-test, then start the transfer thread. Takes a fraction of a second; call it before serving.

    Args:
        role: "prefill" (publishes) or "decode" (reads).
        layout_hash: layout.layout_hash(compat); a handle with another one is refused on both sides.
        loop: where answers are delivered.
        num_layers: what handles say about themselves; 0: all layers of the model.
    Raises: ConfigError: the transport cannot be used, or the self-test found another path than required.
    """
    if role not in ROLES:
        raise ConfigError("role", role, f"must be one of {', '.join(ROLES)}")
    make, found, memory = _choose(config)
    if config.require_transport and found.path != config.require_transport:
        raise ConfigError("require_transport", config.require_transport, f"the self-test found {found.path}")
    try:
        transport = make(worker_id, incarnation, config.require_transport)
    except TransferError as error:
        raise ConfigError("transport", config.transport, str(error)) from error
    log.info(
        "kv transfer: %s at %.2f GB/s, %.0f us a message", found.path, found.bytes_per_s / 1e9, found.message_s * 1e6
    )
    if config.faults is not None:
        log.warning("kv transfer misbehaves on purpose: %s", config.faults)
        transport = FaultyTransport(transport, config.faults)
    return TransferThread(
        transport,
        config,
        worker_id=worker_id,
        incarnation=incarnation,
        role=role,
        layout_hash=layout_hash,
        num_layers=num_layers,
        bytes_per_s=found.bytes_per_s,
        message_s=found.message_s,
        path=found.path,
        loop=loop,
        ring=None if memory is None else _gpu_ring(config, transport.address.transport, role, memory),
    )


def _gpu_ring(config: TransferConfig, name: str, role: str, memory: DeviceMemory) -> GpuRing:
    """Over ipc decode reads into its blocks: it needs no GPU memory for slabs. Raises: ConfigError."""
    if role == "decode" and name == "ipc":
        return GpuRing(config.ring)
    try:
        return GpuRing(config.ring, *memory.allocate(config.ring.total_bytes))
    except TransferError as error:
        raise ConfigError("num_slabs", config.num_slabs, f"slabs of {config.slab_bytes} bytes: {error}") from error


Factory = Callable[[str, str, str], Transport]
"""(worker_id, incarnation, path that every peer must come on or "") -> a new transport."""


def _choose(config: TransferConfig) -> tuple[Factory, SelfTest, DeviceMemory | None]:
    """The transport that was asked for; with "auto" the first that works, the others named in the log.

    Raises: ConfigError: none works.
    """
    reasons = []
    for name in auto_order(config.device) if config.transport == "auto" else (config.transport,):
        memory = None
        try:
            if name == "ipc":
                memory = _gpu_memory()
                make = _ipc_factory(config.host, memory)
                found = run_ipc_self_test(partial(_any_path, make), memory, RingSpec(1, config.slab_bytes))
            elif name == "ucx-gpu":
                memory = _gpu_memory()
                make = _ucx_gpu_factory(config.host, memory)
                found = run_ucx_gpu_self_test(partial(_any_path, make), memory, config.host, config.slab_bytes)
            else:
                make = _factory(name, config.host)
                found = run_self_test(partial(_any_path, make), config.slab_bytes)
        except (ConfigError, TransferError) as error:
            reasons.append(f"{name}: {error}")
            continue
        if config.transport == "auto":
            log.warning("kv transfer: auto took %s%s", found.path, f"; {'; '.join(reasons)}" if reasons else "")
        return make, found, memory
    raise ConfigError("transport", config.transport, "; ".join(reasons))


def auto_order(device: str) -> tuple[str, ...]:
    """What "auto" tries. Workers on GPUs of one host can meet over CUDA IPC; with one GPU here the peer is elsewhere."""
    if device != "cuda":
        return AUTO_ORDER
    return (*ON_GPU, *AUTO_ORDER) if len(list(_GPUS.glob("*"))) > 1 else AUTO_ORDER


def _gpu_memory() -> GpuMemory:
    """On the device that this process computes on. Raises: ConfigError."""
    import torch

    from diptych.kvtransfer.gpu_rate import read_rate

    if not torch.cuda.is_available():
        raise ConfigError("transport", "ipc", "no CUDA device is usable here")
    return GpuMemory(torch.cuda.current_device(), read_rate)


def _ucx_gpu_factory(host: str, memory: DeviceMemory) -> Factory:
    from diptych.kvtransfer.ucx_gpu import UcxGpuTransport

    return lambda worker_id, incarnation, path: UcxGpuTransport(
        worker_id, incarnation, host=host, memory=memory, require_path=path
    )


def _ipc_factory(host: str, memory: DeviceMemory) -> Factory:
    return lambda worker_id, incarnation, path: IpcTransport(worker_id, incarnation, host=host, memory=memory)


def _any_path(make: Factory, worker_id: str, incarnation: str) -> Transport:
    return make(worker_id, incarnation, "")


def _factory(name: str, host: str) -> Factory:
    if name == "inproc":
        return lambda worker_id, incarnation, path: InprocTransport(worker_id, incarnation)
    # Imported here: UCX reads its environment when it is loaded, and inproc needs none of it.
    if name == "nixl":
        from diptych.kvtransfer.nixl import NixlTransport

        return lambda worker_id, incarnation, path: NixlTransport(worker_id, incarnation, host=host, require_path=path)
    from diptych.kvtransfer.ucx import UcxTransport

    # UCX_TLS names the path; by default nothing but TCP is left to choose.
    return lambda worker_id, incarnation, path: UcxTransport(worker_id, incarnation, host=host)
