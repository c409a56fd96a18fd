"""Channels and servers of grpc.aio, with the same options in the whole cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grpc

from diptych.common.addresses import host_port
from diptych.common.errors import ConfigError
from diptych.common.observe.tracing import TRACEPARENT
from diptych.common.tls import ClusterTls
from diptych.rpc.call_token import with_token

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
CONNECT_MS = 1_500
"""For one attempt to connect, until the peer's first frame. A lost first packet is sent again after a second, and on a busy
machine each side may wait for a core; below the deadline of a handshake between workers."""

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def channel_options() -> list[tuple[str, int]]:
    """Options between the cluster's processes: a separate socket for each channel (a shared one would mix two
    incarnations of a peer), quick reconnects, and keepalive to detect half-open connections."""
    return [
        *_COMMON,
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # despite its name
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
    ]


def server_options(*, reuse_port: bool = False) -> list[tuple[str, int]]:
    """so_reuseport is off, except for the processes of one router: a port in use must be an error, instead of taking half
    of the connections."""
    return [
        *_COMMON,
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.max_metadata_size", 32 * 1024),
    ]


def open_channel(address: str, tls: ClusterTls | None = None, token: str = "") -> grpc.aio.Channel:
    """A channel to a process of the cluster.

    Args:
        address: host:port.
        tls: mTLS: the peer must present a certificate of the cluster's authority that names its host (or `tls.name`);
            None: no TLS, for loopback and private networks.
        token: for the worker at this address, see call_token.py; not sent with mTLS.
    """
    return _open(grpc.aio, address, tls, token)


@contextlib.contextmanager
def closed_is_an_error() -> Iterator[None]:
    """Around a call on a channel that others may close. grpc.aio raises CancelledError where the channel is closed while the
    call runs, and UsageError where it was closed before; this raises UsageError in both cases. A cancellation of the task
    itself passes."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise grpc.aio.UsageError("the channel was closed during the call") from None


def open_sync_channel(address: str, tls: ClusterTls | None = None, token: str = "") -> grpc.Channel:
    """As open_channel, for code without an event loop."""
    return _open(grpc, address, tls, token)


def _open(kind: Any, address: str, tls: ClusterTls | None, token: str) -> Any:
    if tls is not None:
        options = [*channel_options(), *name_option(tls)]
        return kind.secure_channel(address, cluster_credentials(tls), options=options)
    channel = kind.insecure_channel(address, options=channel_options())
    return with_token(channel, token) if token else channel


def cluster_credentials(tls: ClusterTls) -> grpc.ChannelCredentials:
    """Credentials of a client within the cluster."""
    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)


def name_option(tls: ClusterTls) -> list[tuple[str, str]]:
    """Channel option with the name that the peer's certificate must hold, if it is not the address's host."""
    return [("grpc.ssl_target_name_override", tls.name)] if tls.name else []


def cluster_server_credentials(tls: ClusterTls | None) -> grpc.ServerCredentials | None:
    """Clients must present a certificate of the cluster's authority. None: no TLS."""
    if tls is None:
        return None
    return grpc.ssl_server_credentials([(tls.key, tls.cert)], tls.ca, require_client_auth=True)


def trace_context(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The W3C trace context of a call's metadata, or ""."""
    for name, value in metadata or ():
        if name == TRACEPARENT and isinstance(value, str):
            return value
    return ""


def new_server(interceptors: Sequence[grpc.aio.ServerInterceptor] = (), *, reuse_port: bool = False) -> grpc.aio.Server:
    return grpc.aio.server(options=server_options(reuse_port=reuse_port), interceptors=tuple(interceptors))


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
    """Listen on host:port (0: any free port), with TLS if there are credentials. Returns the port. Raises: ConfigError
    when the port cannot be bound."""
    where = host_port(host, port)
    try:
        bound: int = (
            server.add_insecure_port(where) if credentials is None else server.add_secure_port(where, credentials)
        )
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise ConfigError("port", where, "cannot be listened on: is another process using it?")
    return bound
