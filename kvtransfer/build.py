"""The one way to a Transfer: pick the transport, prove it, start its thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from diptych.common.errors import ConfigError, TransferError
from diptych.kvtransfer.api import Transfer
from diptych.kvtransfer.config import AUTO_ORDER, TransferConfig
from diptych.kvtransfer.faults import FaultyTransport
from diptych.kvtransfer.inproc import InprocTransport
from diptych.kvtransfer.self_test import SelfTest, run_self_test
from diptych.kvtransfer.thread import TransferThread
from diptych.kvtransfer.transport import Transport

log = logging.getLogger(__name__)
ROLES = ("prefill", "decode")


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
    make, found = _choose(config)
    if config.require_transport and found.path != config.require_transport:
        raise ConfigError("require_transport", config.require_transport, f"the self-test found {found.path}")
    try:
        transport = make(worker_id, incarnation)
    except TransferError as error:
        raise ConfigError("transport", config.transport, str(error)) from error
    log.info("kv transfer: %s at %.2f GB/s", found.path, found.bytes_per_s / 1e9)
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
        loop=loop,
    )


Factory = Callable[[str, str], Transport]


def _choose(config: TransferConfig) -> tuple[Factory, SelfTest]:
    """The transport that was asked for; with "auto" the first that works, the others named in the log.

    Raises: ConfigError: none works.
    """
    reasons = []
    for name in AUTO_ORDER if config.transport == "auto" else (config.transport,):
        make = _factory(name, config.host)
        try:
            found = run_self_test(make, config.slab_bytes)
        except (ConfigError, TransferError) as error:
            reasons.append(f"{name}: {error}")
            continue
        if config.transport == "auto":
            log.warning("kv transfer: auto took %s%s", found.path, f"; {'; '.join(reasons)}" if reasons else "")
        return make, found
    raise ConfigError("transport", config.transport, "; ".join(reasons))


def _factory(name: str, host: str) -> Factory:
    if name == "inproc":
        return InprocTransport
    # Imported here: UCX reads its environment when it is loaded, and inproc needs none of it.
    if name == "nixl":
        from diptych.kvtransfer.nixl import NixlTransport

        return lambda worker_id, incarnation: NixlTransport(worker_id, incarnation, host=host)
    from diptych.kvtransfer.ucx import UcxTransport

    return lambda worker_id, incarnation: UcxTransport(worker_id, incarnation, host=host)
