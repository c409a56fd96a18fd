"""The process around a worker: settings in, signals, exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, NoReturn, cast

import structlog
import uvloop

from diptych.common.collector import keep_collecting, set_collector
from diptych.common.limits import raise_open_files
from diptych.common.observe.logging import setup_logging
from diptych.common.observe.tracing import tracing
from diptych.common.secret import derive_key, load_secret
from diptych.common.store.interface import Store
from diptych.common.tls import load_client_tls, load_cluster_tls, load_redis_tls
from diptych.engine.runner import ModelRunner
from diptych.kvtransfer.api import Transfer
from diptych.kvtransfer.build import build_transfer
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.slabs.layout import layout_hash
from diptych.kvtransfer.wrappers.encryption import PURPOSE, check_mode
from diptych.kvtransfer.wrappers.faults import FaultSpec
from diptych.worker.config import WorkerConfig
from diptych.worker.defaults import slab_quotas
from diptych.worker.disk_tier import check_store
from diptych.worker.model import identity_key, load_model, warmed_up_on
from diptych.worker.ranks import check_transport
from diptych.worker.runtime import MakeServices, WorkerRuntime
from diptych.worker.step_gate import hold_steps

log = structlog.get_logger(__name__)


def switch_interval_s(device: str) -> float:
    """How long a thread may keep the interpreter lock. Python's 5 ms are longer than a whole hand-off. Where a GPU computes,
    each of a step's hundreds of launches gives the lock up, and waits so long for it while the event loop is busy."""
    return 0.00005 if device == "cuda" else 0.0005


class Signals:
    """SIGTERM and SIGINT, counted."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.once = asyncio.Event()
        self.twice = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.first is not None:
            self.twice.set()
        self.first = self.first or number
        self.once.set()


def run_process(config: WorkerConfig, make_services: MakeServices) -> NoReturn:
    """Run one worker until a signal. Exits with 143 after SIGTERM, 130 after SIGINT, 1 when the worker ended by itself.

    Raises: ConfigError for an invalid setting.
    """
    if config.transport:
        check_transport(config.transport, config.device, config.degrees.num_ranks)
        check_mode(config.kv_encryption, config.transport)
    check_store(config)
    _check_files(config)
    setup_logging(worker=config.effective_worker_id, role=config.role)
    raise_open_files()
    if tracing.configure(config.role, config.effective_worker_id):
        log.info("traces are exported")
    uvloop.run(_serve_and_exit(config, make_services))
    raise AssertionError("the process has ended")


def _check_files(config: WorkerConfig) -> None:
    """What needs no weights is refused before they are read, which may take minutes. Raises: ConfigError."""
    identity_key(config)
    load_cluster_tls(config.cluster_ca, config.cluster_cert, config.cluster_key, config.cluster_tls_name)
    load_redis_tls(config.redis_ca, config.redis_cert, config.redis_key)
    if config.client_tls_cert and config.client_tls_key:
        load_client_tls(config.client_tls_cert, config.client_tls_key)


async def _serve_and_exit(config: WorkerConfig, make_services: MakeServices) -> NoReturn:
    """Exits on the running loop: closing it would wait for every pending DNS lookup, and an unresolvable store leaves
    many."""
    code = await serve(config, make_services)
    await asyncio.to_thread(tracing.close)
    # Everything is closed; an orderly teardown of the libraries would take seconds.
    exit_at_once(code)


def exit_at_once(code: int) -> NoReturn:
    """Without an orderly teardown."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


async def serve(config: WorkerConfig, make_services: MakeServices) -> int:
    """As run_process, on a running loop."""
    signals = Signals()
    sys.setswitchinterval(switch_interval_s(config.device))
    loading = asyncio.create_task(asyncio.to_thread(load_model, config, warmed_up_on(asyncio.get_running_loop())))
    await _first(loading, signals.once.wait())
    if not loading.done():
        # The loading thread cannot be stopped and needs no cleanup.
        exit_at_once(_exit_code(signals))
    model = loading.result()
    set_collector()  # the store may be awaited for hours from here on
    if config.fault_step_gates:
        hold_steps(
            model.executor or cast(ModelRunner, model.runner),
            Path(config.fault_step_gates) / config.effective_worker_id,
        )
    runtime = WorkerRuntime(
        config, model, make_transfer=make_transfer, make_services=make_services, store=_store(config)
    )
    starting = asyncio.create_task(runtime.start())
    await _first(starting, signals.once.wait())
    if not starting.done():
        # The worker is not registered yet, so there is nothing to drain; it may be waiting for an unavailable store.
        exit_at_once(_exit_code(signals))
    starting.result()
    set_collector()
    collecting = asyncio.create_task(keep_collecting(), name="garbage collector")
    log.info("ready", address=runtime.address, transport=runtime.transfer.path, incarnation=runtime.incarnation)
    await _first(signals.once.wait(), runtime.ended.wait())
    if signals.first is not None:
        log.info("stopping", signal=signals.first.name)
        await _first(runtime.drain(), signals.twice.wait())  # a second signal ends the drain
    await runtime.close()
    collecting.cancel()
    log.info("stopped")
    return _exit_code(signals)


def _exit_code(signals: Signals) -> int:
    return 1 if signals.first is None else 128 + signals.first


async def _first(*things: Awaitable[Any]) -> None:
    """Wait until the first of them is done; unfinished coroutines are cancelled, tasks are not."""
    tasks = [asyncio.ensure_future(thing) for thing in things]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, thing in zip(tasks, things, strict=True):
        if not task.done() and task is not thing:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def make_transfer(runtime: WorkerRuntime) -> Transfer:
    """The KV transport of the settings, after its self-test (off the event loop)."""
    config = runtime.config
    faults = FaultSpec(corrupt_every=config.fault_corrupt_every) if config.fault_corrupt_every else None
    settings = config.options(
        TransferConfig,
        device=config.kv_device,
        host=config.effective_kv_host,
        quotas=slab_quotas(config),
        lease_s=config.slab_lease_s,
        faults=faults,
    )
    loop = asyncio.get_running_loop()
    return await asyncio.to_thread(
        lambda: build_transfer(
            settings,
            worker_id=runtime.worker_id,
            incarnation=runtime.incarnation,
            layout_hash=layout_hash(runtime.compat),
            loop=loop,
            num_layers=runtime.compat.kv.num_layers,
            encryption_key=derive_key(load_secret(Path(config.secret_file)), PURPOSE),
        )
    )


def _store(config: WorkerConfig) -> Store | None:
    if not config.redis_url:
        return None
    # Only where one is used: the client takes a quarter of the time in which a worker's modules are imported.
    from diptych.common.store.redis_store import RedisStore

    tls = load_redis_tls(config.redis_ca, config.redis_cert, config.redis_key)
    return RedisStore(config.redis_url, cluster=config.cluster, tls=tls)
