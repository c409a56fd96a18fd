"""The router process: one event loop (uvloop) with the frontend, the gRPC server and the HTTP server.

bind both ports -> Frontend.start -> serve -> SIGTERM or SIGINT -> health NOT_SERVING -> no new requests, running ones
have DRAIN_S to end -> Frontend.close
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import structlog
import uvicorn
import uvloop
from grpc_reflection.v1alpha import reflection as grpc_reflection

from diptych.common.addresses import host_port, is_loopback
from diptych.common.collector import keep_collecting, set_collector
from diptych.common.errors import ConfigError
from diptych.common.limits import raise_open_files
from diptych.common.observe.logging import setup_logging
from diptych.common.observe.metrics import Metrics
from diptych.common.observe.tracing import tracing
from diptych.common.secret import load_secret
from diptych.common.store.interface import Store
from diptych.common.tls import ServerTls, load_server_tls
from diptych.router.api.auth.authenticator import Authenticator
from diptych.router.api.auth.limits import MeteredRouterApi, TenantQuotas
from diptych.router.api.grpc.key_interceptor import KeyInterceptor
from diptych.router.api.grpc.operations import MoveRequest, OperationsService
from diptych.router.api.grpc.service import SERVICE, RouterService
from diptych.router.api.http.app import create_app, guarded
from diptych.router.api.http.guard import MAX_HEADER_BYTES
from diptych.router.api.http.options import HttpOptions
from diptych.router.api.http.protocol import HttpProtocol
from diptych.router.api.interface import RouterApi
from diptych.router.api.json_body import Bodies
from diptych.router.config import CLOSE_S, DRAIN_S, RouterConfig
from diptych.router.fairness.budgets import SharedQuotas
from diptych.router.frontend import Frontend
from diptych.router.observe import access_log
from diptych.router.observe.metrics import RouterMetrics
from diptych.router.observe.status_page import Status
from diptych.router.processes.siblings import Siblings
from diptych.rpc.channels import bind, new_server
from diptych.rpc.health import Health
from diptych.rpc.operator import operator_key

HEALTH_INTERVAL_S = 0.25
READY_INTERVAL_S = 0.02

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RouterAddresses:
    """Addresses of the two servers, with the ports actually bound."""

    http: str
    grpc: str


def run_router(config: RouterConfig, siblings: Siblings | None = None) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns: the exit code, 128 + the signal's number.

    Args:
        siblings: the other processes of this router; None: it is one process.
    Raises: ConfigError when a port is taken or the model cannot be read.
    """
    setup_logging(role="router", **({} if siblings is None else {"process": siblings.number}))
    if tracing.configure("router"):
        log.info("traces are exported")
    try:
        code: int = uvloop.run(_run(config, siblings))
    finally:
        tracing.close()
    return code


async def _run(config: RouterConfig, siblings: Siblings | None) -> int:
    stop, hurry = asyncio.Event(), asyncio.Event()
    received: list[int] = []
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        (hurry if received else stop).set()
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)

    collecting: list[asyncio.Task[None]] = []

    def announce(addresses: RouterAddresses) -> None:
        set_collector()
        collecting.append(asyncio.create_task(keep_collecting(), name="garbage collector"))
        log.info("router serves", http=addresses.http, grpc=addresses.grpc)

    await serve(config, stop, hurry, on_started=announce, siblings=siblings)
    for task in collecting:
        task.cancel()
    log.info("router stopped")
    return 128 + received[0]


async def serve(
    config: RouterConfig,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    *,
    on_started: Callable[[RouterAddresses], None] = lambda _: None,
    store: Store | None = None,
    siblings: Siblings | None = None,
) -> None:
    """Run the frontend and its servers until `stop` is set, then drain; `hurry` ends the drain.

    Args:
        store: None: the Redis of the settings.
        siblings: the other processes of this router. The ports are then bound last, once requests could be served: the
            kernel gives each process that listens its part of the connections.
    Raises: ConfigError; the error that ended one of the servers before `stop`.
    """
    raise_open_files()
    access_log.switch(config.access_log)
    keys = None if config.keys_file is None else Authenticator(config.keys_file, now=time.monotonic)
    tls = None
    if config.tls_cert is not None and config.tls_key is not None:
        tls = load_server_tls(config.tls_cert, config.tls_key)
    if not is_loopback(config.host) and (keys is None or tls is None):
        log.warning("other machines can reach this router", keys=keys is not None, tls=tls is not None)
    servers: ApiServers | None = None
    bound = partial(
        ApiServers,
        config.host,
        config.http_port,
        config.grpc_port,
        keys=keys,
        tls=tls,
        open_metrics=config.open_metrics,
        reflection=config.serves_reflection,
        options=config.http,
        siblings=siblings,
        operator_key=operator_key(load_secret(Path(config.secret_file))) if config.secret_file else b"",
    )
    if siblings is None:
        servers = bound()
    else:
        siblings.connect()
    frontend = Frontend(config, store=store, siblings=siblings)
    try:
        await frontend.start()
        if keys is not None:
            frontend.use_shares(keys.share)
            frontend.use_cache_limits(keys.cache_ttl)
            frontend.use_adapter_limits(keys.may_use_adapter)
        if servers is None:
            await _until_ready(frontend, stop, config.worker_settle_s)
            servers = bound()
        addresses = await servers.start(
            frontend, frontend.metrics, frontend.status, frontend.budgets, frontend.move_request
        )
        if siblings is not None:
            await siblings.serve(frontend)
        on_started(addresses)
        await servers.until(stop)
    finally:
        await (frontend.close() if servers is None else drain(servers, frontend.close, hurry))
        if siblings is not None:
            await siblings.close()


async def _until_ready(frontend: Frontend, stop: asyncio.Event, within_s: float) -> None:
    """Wait until requests could be served, at most as long as they would wait for a worker."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while not frontend.ready()[0] and not stop.is_set():  # noqa: ASYNC110 - readiness is polled
                await asyncio.sleep(READY_INTERVAL_S)


async def drain(
    servers: ApiServers, close: Callable[[], Awaitable[None]], hurry: asyncio.Event, drain_s: float = DRAIN_S
) -> None:
    """Let running requests end for `drain_s` seconds. Then the frontend is closed, which ends the rest with a typed
    error, and the servers have CLOSE_S to deliver it: an answer is never cut silently."""
    stopping = asyncio.create_task(servers.stop(drain_s + CLOSE_S))
    hurrying = asyncio.create_task(hurry.wait())
    await asyncio.wait({stopping, hurrying}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    await close()
    await stopping


class ApiServers:
    """The HTTP and gRPC servers of one frontend. The constructor binds the ports.

    Args:
        keys: None: no keys are required.
        tls: None: no TLS.
        open_metrics: /metrics and /ready need no key.
        reflection: the gRPC server describes its methods and messages.
        options: HTTP settings.
        siblings: the other processes of this router, which listen on the same ports; None: the ports are its own.
        operator_key: proves operators' calls, see rpc/operator.py; empty: there is no service for them.
    Raises: ConfigError naming the port that cannot be bound.
    """

    def __init__(
        self,
        host: str,
        http_port: int,
        grpc_port: int,
        *,
        keys: Authenticator | None = None,
        tls: ServerTls | None = None,
        open_metrics: bool = False,
        reflection: bool = False,
        options: HttpOptions | None = None,
        siblings: Siblings | None = None,
        operator_key: bytes = b"",
    ) -> None:
        self._operator_key = operator_key
        self._siblings = siblings
        self._reflection = reflection
        self._host = host
        self._options = options or HttpOptions()
        self._keys = keys
        self._open_metrics = open_metrics
        self._tls = tls
        shared = siblings is not None
        self._socket = listen(host, http_port, reuse_port=shared)
        try:
            interceptors = () if keys is None else (KeyInterceptor(keys),)
            self._grpc: grpc.aio.Server = new_server(interceptors, reuse_port=shared)
            credentials = None if tls is None else grpc.ssl_server_credentials([(tls.key, tls.cert)])
            self._grpc_port = bind(self._grpc, host, grpc_port, credentials)
        except BaseException:
            self._socket.close()
            raise
        self._bodies = Bodies()
        self._health = Health((SERVICE,))
        self._http: _HttpServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(
        self,
        router_api: RouterApi,
        metrics: Metrics,
        status: Status | None = None,
        budgets: Callable[[Callable[[str], int], str], SharedQuotas] | None = None,
        move_request: MoveRequest | None = None,
    ) -> RouterAddresses:
        """Open both servers. Health follows `router_api.ready()`; /metrics shows `metrics`, the status page `status`.
        `budgets`: makes quotas shared between routers; without it they are local. `move_request`: for operators."""
        metered: MeteredRouterApi | None = None
        shared: list[SharedQuotas] = []
        if self._keys is not None:
            own: list[TenantQuotas] = []
            for limit, unit in ((self._keys.quota, "tokens"), (self._keys.request_quota, "requests")):
                if budgets is not None:
                    shared.append(budgets(limit, unit))
                else:
                    own.append(TenantQuotas(limit, now=time.monotonic, unit=unit))
            tokens, requests = shared or own
            refused = metrics.refused if isinstance(metrics, RouterMetrics) else lambda reason, tenant: None
            router_api = metered = MeteredRouterApi(router_api, tokens, refused, requests=requests)
        parsing = metrics.parsing if isinstance(metrics, RouterMetrics) else nullcontext
        self._grpc.add_generic_rpc_handlers((RouterService(router_api, self._bodies, parsing).handler(),))
        if self._operator_key and move_request is not None:
            operations = OperationsService(self._operator_key, move_request, router_api.adapters)
            self._grpc.add_generic_rpc_handlers((operations.handler(),))
        await self._health.install(self._grpc)
        if self._reflection:
            names = (SERVICE, "grpc.health.v1.Health", grpc_reflection.SERVICE_NAME)
            grpc_reflection.enable_server_reflection(names, self._grpc)
        await self._grpc.start()
        options = self._options
        refuse = options.unknown_fields == "refuse"
        app = create_app(
            router_api,
            metrics,
            metered,
            status,
            self._bodies,
            refuse_unknown_fields=refuse,
            event_ids=options.event_ids,
            parsing=parsing,
            siblings=self._siblings,
        )
        self._http = _HttpServer(
            uvicorn.Config(
                guarded(app, self._keys, open_metrics=self._open_metrics, cors_origins=options.cors_origins),
                loop="none",
                http=cast(Any, partial(HttpProtocol, head_timeout_s=options.head_timeout_s)),
                timeout_keep_alive=cast(int, options.idle_timeout_s),  # it accepts any number
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                ssl_certfile=None if self._tls is None else self._tls.cert_file,
                ssl_keyfile=None if self._tls is None else str(self._tls.key_file),
            )
        )
        self._tasks = [
            asyncio.create_task(self._http.serve(sockets=[self._socket])),
            asyncio.create_task(self._follow_readiness(router_api)),
        ]
        self._tasks += [asyncio.create_task(quotas.run(), name=f"budgets of {quotas.unit}") for quotas in shared]
        http_port = self._socket.getsockname()[1]
        return RouterAddresses(host_port(self._host, http_port), host_port(self._host, self._grpc_port))

    async def until(self, stop: asyncio.Event) -> None:
        """Wait for `stop`. Raises: the error that ended one of the servers before."""
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait({stopping, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()
                raise RuntimeError("a server of the router ended unexpectedly")
        finally:
            stopping.cancel()

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests at once, give running ones `grace_s` seconds. Idempotent."""
        http, readiness = (self._tasks[:1], self._tasks[1:])
        for task in readiness:
            task.cancel()
        await self._health.leave()
        if self._http is not None:
            self._http.config.timeout_graceful_shutdown = max(1, int(grace_s))
            self._http.should_exit = True
        await asyncio.gather(self._grpc.stop(grace_s), *http, *readiness, return_exceptions=True)
        self._bodies.close()
        self._socket.close()

    async def _follow_readiness(self, router_api: RouterApi) -> None:
        while True:
            await self._health.set(router_api.ready()[0])
            await asyncio.sleep(HEALTH_INTERVAL_S)


class _HttpServer(uvicorn.Server):
    """Signals are handled by the process, not by one of its servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A listening socket. `reuse_port`: others with it may listen there, too, and take their part.

    Raises: ConfigError when the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError("host", host, f"cannot be listened on: {error}") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(reuse_port))
        found.bind(address)
        found.listen(2048)
        found.setblocking(False)
    except OSError as error:
        found.close()
        raise ConfigError("http_port", host_port(host, port), f"cannot be listened on: {error}") from None
    return found
