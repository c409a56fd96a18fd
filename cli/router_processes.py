"""`diptych router --router-processes N`: the parent of N routers behind one address.

    hold the ports -> a private folder for sockets -> start N processes -> supervise -> SIGTERM to all

The parent serves no requests. It holds both ports without listening, so that no other program takes them while a process
is started again, and keeps the idempotency keys of all (router/processes/siblings.py). A process that ends before all
have served once ends the start; later it is started again, with a growing delay, while the others go on. All end with
the parent, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import structlog

from diptych.cli.temporary import temporary_folder
from diptych.cli.up.processes import require_free_port
from diptych.cli.up.supervisor import ChildSpec, Supervisor, exit_reason
from diptych.common.addresses import host_port
from diptych.common.clock import MonotonicClock
from diptych.common.errors import ConfigError
from diptych.common.observe.logging import setup_logging
from diptych.router.config import CLOSE_S, DRAIN_S, RouterConfig
from diptych.router.processes.child import environment_of
from diptych.router.processes.siblings import process_socket, serve_parent
from diptych.router.requests.idempotency import IdempotencyKeys

POLL_S = 0.05
KILL_AFTER_S = DRAIN_S + CLOSE_S + 5.0
"""A process that has not ended so long after SIGTERM is killed."""

log = structlog.get_logger(__name__)


def run_router_processes(config: RouterConfig) -> int:
    """Serve until SIGTERM or SIGINT, then let all processes drain. Returns: the exit code, 128 + the signal's number; that
    of a process that ended during the start.

    Raises: ConfigError when a port is taken.
    """
    setup_logging(role="router", process="parent")
    with temporary_folder("diptych-router-") as folder, held_ports(config) as (http_port, grpc_port):
        config = replace(config, http_port=http_port, grpc_port=grpc_port)
        return asyncio.run(_Parent(config, Path(folder)).run())


@contextlib.contextmanager
def held_ports(config: RouterConfig) -> Iterator[tuple[int, int]]:
    """Both ports, bound and not listened on. Raises: ConfigError."""
    with (
        _held_port("http_port", config.host, config.http_port) as http,
        _held_port("grpc_port", config.host, config.grpc_port) as grpc,
    ):
        yield http, grpc


@contextlib.contextmanager
def _held_port(field: str, host: str, port: int) -> Iterator[int]:
    require_free_port(field, host, port)  # SO_REUSEPORT would share the port with another router
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # A router of one process before us shared it with nobody: its connections in TIME_WAIT would keep us out.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(address)
        except OSError as error:
            raise ConfigError(field, host_port(host, port), f"cannot be listened on: {error}") from None
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # from now on nobody else gets it
        yield held.getsockname()[1]


class _Parent:
    def __init__(self, config: RouterConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._supervisor = Supervisor(os.environ, cwd=Path.cwd())
        self._received: list[int] = []
        self._signalled = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for wanted in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(wanted, self._on_signal, wanted)
        server = await serve_parent(self._folder, IdempotencyKeys(MonotonicClock()))
        try:
            for number in range(self._config.router_processes):
                self._supervisor.start(self._spec(number))
            failed = await self._until_served()
            if failed is None and not self._received:
                log.info(
                    "router processes serve",
                    http=host_port(self._config.host, self._config.http_port),
                    grpc=host_port(self._config.host, self._config.grpc_port),
                    processes=self._config.router_processes,
                )
                await self._supervise()
            await self._stop(next(iter(self._received), signal.SIGTERM))
            return 128 + self._received[0] if failed is None else failed
        finally:
            await server.stop(None)

    def _on_signal(self, number: int) -> None:
        """The first drains all processes; a further one is passed on to end their drain."""
        self._received.append(number)
        self._signalled.set()
        if len(self._received) > 1:
            self._signal_all(number)

    def _signal_all(self, number: int) -> None:
        for child in self._supervisor.children.values():
            if child.process.poll() is None:
                child.process.send_signal(number)

    def _spec(self, number: int) -> ChildSpec:
        def command() -> list[str]:
            process_socket(self._folder, number).unlink(missing_ok=True)
            module = "diptych.router.processes.child"
            return [sys.executable, "-P", "-m", module, str(self._folder), str(number)]

        return ChildSpec(f"process {number}", "router", command, None, 0, environment_of(settings_of_one(self._config)))

    async def _until_served(self) -> int | None:
        """Until all serve, or a signal. Returns: the exit code of a process that ended before."""
        sockets = [process_socket(self._folder, number) for number in range(self._config.router_processes)]
        while not self._received and not all(path.exists() for path in sockets):
            for child in self._supervisor.dead():
                code = child.process.returncode
                log.error("a router process ended at the start", child=child.spec.name, why=exit_reason(code))
                return code if code > 0 else 1
            await self._pause()
        return None

    async def _supervise(self) -> None:
        while not self._received:
            for notice in self._supervisor.poll(time.monotonic()):
                if notice.exit_code is None:
                    log.info("started again", child=notice.child, pid=notice.pid)
                else:
                    why = exit_reason(notice.exit_code)
                    log.error("a router process ended", child=notice.child, why=why, again_in_s=notice.delay_s)
            await self._pause()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._signalled.wait()

    async def _stop(self, number: int) -> None:
        self._signal_all(number)
        until = time.monotonic() + KILL_AFTER_S
        children = [child.process for child in self._supervisor.children.values()]
        while any(process.poll() is None for process in children):
            if time.monotonic() > until:
                self._signal_all(signal.SIGKILL)
            await asyncio.sleep(POLL_S)


def settings_of_one(config: RouterConfig) -> RouterConfig:
    """The settings of each process: its part of the prompts that a tenant's workers get ahead."""
    return replace(config, turn_window_s=config.turn_window_s / config.router_processes)
