"""The one way to a Transfer: pick the transport, prove it, start its thread."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from diptych.common.errors import ConfigError, TransferError
from diptych.kvtransfer.api import Transfer
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.fabric.registry import AUTO, TransportSite, TransportSpec, candidates
from diptych.kvtransfer.fabric.self_test import SelfTest
from diptych.kvtransfer.fabric.transport import Transport
from diptych.kvtransfer.gpu.memory import GpuMemory
from diptych.kvtransfer.slabs.layout import RingSpec, SlabQuotas
from diptych.kvtransfer.thread import TransferThread
from diptych.kvtransfer.wrappers.ciphers import OFF
from diptych.kvtransfer.wrappers.encryption import check_mode, encrypted
from diptych.kvtransfer.wrappers.faults import FaultyTransport

log = logging.getLogger(__name__)


def build_transfer(
    config: TransferConfig,
    *,
    worker_id: str,
    incarnation: str,
    publishes: bool = False,
    reads: bool = False,
    layout_hash: int,
    loop: asyncio.AbstractEventLoop,
    num_layers: int = 0,
    encryption_key: bytes = b"",
) -> Transfer:
    """Self-test, then start the transfer thread. Takes a fraction of a second; call it before serving.

    Args:
        publishes, reads: which parts of the arena get slabs, where config.quotas is not set.
        layout_hash: layout.layout_hash(compat); a handle with another one is refused on both sides.
        loop: where answers are delivered.
        num_layers: named in handles of whole ranges: all layers of the model.
        encryption_key: of encryption.PURPOSE, for config.kv_encryption.
    Raises: ConfigError: the transport cannot be used, or the self-test found another path than required.
    """
    quotas = config.quotas_of(publishes=publishes, reads=reads)
    if config.kv_encryption != OFF and not encryption_key:
        raise ConfigError("secret_file", "", "is needed: keys of kv_encryption are derived from the cluster secret")
    spec, found, site = _choose(config, quotas, encryption_key)
    if config.require_transport and found.path != config.require_transport:
        raise ConfigError("require_transport", config.require_transport, f"the self-test found {found.path}")
    try:
        transport = spec.make(worker_id, incarnation, replace(site, require_path=config.require_transport))
    except TransferError as error:
        raise ConfigError("transport", config.transport, str(error)) from error
    try:
        ring = spec.make_ring(site, quotas)
    except TransferError as error:
        transport.close()
        raise ConfigError("num_slabs", config.num_slabs, f"slabs of {config.slab_bytes} bytes: {error}") from error
    log.info(
        "kv transfer: %s at %.2f GB/s, %.0f us a message, encryption %s",
        found.path,
        found.bytes_per_s / 1e9,
        found.message_s * 1e6,
        config.kv_encryption,
    )
    if config.faults is not None:
        log.warning("kv transfer misbehaves on purpose: %s", config.faults)
        transport = FaultyTransport(transport, config.faults)
    transport = encrypted(
        transport, config.kv_encryption, secret=encryption_key, worker_id=worker_id, incarnation=incarnation
    )
    return TransferThread(
        transport,
        config,
        worker_id=worker_id,
        incarnation=incarnation,
        quotas=quotas,
        layout_hash=layout_hash,
        num_layers=num_layers,
        bytes_per_s=found.bytes_per_s,
        message_s=found.message_s,
        path=found.path,
        loop=loop,
        ring=ring,
    )


def _choose(config: TransferConfig, quotas: SlabQuotas, key: bytes) -> tuple[TransportSpec, SelfTest, TransportSite]:
    """The transport that was asked for; with "auto" the first that works, the others named in the log. The self-test is of what
    the worker will use: encrypted, if it will be.

    Raises: ConfigError: none works.
    """
    reasons = []
    ring = RingSpec(quotas.total, config.slab_bytes)
    for spec in candidates(config.transport, config.device):
        try:
            site = TransportSite(config.host, ring, _gpu_memory(spec.name) if spec.device == "cuda" else None)
            check_mode(config.kv_encryption, spec.name)

            def make(
                worker_id: str, incarnation: str, spec: TransportSpec = spec, site: TransportSite = site
            ) -> Transport:
                inner = spec.make(worker_id, incarnation, site)
                return encrypted(inner, config.kv_encryption, secret=key, worker_id=worker_id, incarnation=incarnation)

            found = spec.self_test(make, site)
        except (ConfigError, TransferError) as error:
            reasons.append(f"{spec.name}: {error}")
            continue
        if config.transport == AUTO:
            log.warning("kv transfer: auto took %s%s", found.path, f"; {'; '.join(reasons)}" if reasons else "")
        return spec, found, site
    raise ConfigError("transport", config.transport, "; ".join(reasons) or "none can be used here")


def _gpu_memory(transport: str) -> GpuMemory:
    """On the device that this process computes on. Raises: ConfigError."""
    import torch

    from diptych.kvtransfer.gpu.rate import read_rate

    if not torch.cuda.is_available():
        raise ConfigError("transport", transport, "no CUDA device is usable here")
    return GpuMemory(torch.cuda.current_device(), read_rate)
