"""`diptych serve`: router and worker in one process, for one machine and one model.

load model -> worker (decode, computes prompts itself) -> store in memory <- router -> HTTP and gRPC
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from pathlib import Path

import structlog
import uvloop

from diptych.cli.serve.config import ServeConfig
from diptych.cli.temporary import temporary_folder
from diptych.cli.worker_roles import services_of
from diptych.common.clock import MonotonicClock
from diptych.common.collector import keep_collecting, set_collector
from diptych.common.observe.logging import setup_logging
from diptych.common.secret import create_secret
from diptych.common.store.memory import MemoryStore
from diptych.common.tls import load_server_tls
from diptych.router import server as router
from diptych.router.api.auth.keys import load_keys
from diptych.router.server import RouterAddresses
from diptych.worker.model import load_model, warmed_up_on
from diptych.worker.process import exit_at_once, make_transfer, switch_interval_s
from diptych.worker.runtime import WorkerRuntime

log = structlog.get_logger(__name__)


def run_serve(config: ServeConfig, model: Path, name: str) -> int:
    """Serve until a signal. Returns: 143 after SIGTERM, 130 after SIGINT. Raises: ConfigError; for files of the API before
    the model is loaded."""
    if config.keys_file is not None:
        load_keys(config.keys_file)
    if config.tls_cert is not None and config.tls_key is not None:
        load_server_tls(config.tls_cert, config.tls_key)
    setup_logging(role="serve")
    with temporary_folder("diptych-serve-") as folder:
        own = Path(folder) / "secret"
        create_secret(own)
        secret = Path(config.secret_file) if config.nnodes > 1 else own
        code: int = uvloop.run(_serve(config, model, name, secret, Path(folder)))
    return code


async def _serve(config: ServeConfig, model: Path, name: str, secret: Path, folder: Path) -> int:
    """Args: folder: of this process alone."""
    sys.setswitchinterval(switch_interval_s(config.device))
    stop, hurry = asyncio.Event(), asyncio.Event()
    received: list[int] = []

    def on_signal(number: int) -> None:
        (hurry if received else stop).set()
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    router_config, worker_config = config.parts(model=str(model), name=name, secret_file=str(secret))
    loading = asyncio.create_task(
        asyncio.to_thread(load_model, worker_config, warmed_up_on(asyncio.get_running_loop()))
    )
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not loading.done():
        # The loading thread cannot be stopped, and an orderly end would wait for it.
        shutil.rmtree(folder, ignore_errors=True)
        exit_at_once(128 + received[0])
    loaded = loading.result()
    set_collector()
    store = MemoryStore(MonotonicClock())
    runtime = WorkerRuntime(worker_config, loaded, make_transfer=make_transfer, make_services=services_of, store=store)

    def announce(addresses: RouterAddresses) -> None:
        set_collector()
        scheme = "http" if config.tls_cert is None else "https"
        print(f"serving {name} on {scheme}://{addresses.http}/v1 and gRPC {addresses.grpc}", flush=True)

    async def stop_with_the_worker() -> None:
        await runtime.ended.wait()
        log.error("the worker ended: the server stops")
        stop.set()

    watching = asyncio.create_task(stop_with_the_worker(), name="watch-the-worker")
    collecting = asyncio.create_task(keep_collecting(), name="garbage collector")
    try:
        await runtime.start()
        if not stop.is_set():
            await router.serve(router_config, stop, hurry, on_started=announce, store=store)
    finally:
        watching.cancel()
        collecting.cancel()
        await runtime.close()
    log.info("stopped")
    return 128 + received[0] if received else 1
