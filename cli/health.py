"""`diptych health ADDRESS`: one health check of one server."""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request

from diptych.common.errors import ConfigError
from diptych.common.tls import load_cluster_tls


def why_unhealthy(address: str, *, timeout_s: float) -> str:
    """Why the server at `address` does not serve; empty: it does.

    Args:
        address: host:port of a gRPC server, checked by grpc.health.v1. It uses the certificate of DIPTYCH_CLUSTER_CA,
            _CERT and _KEY if set, and expects the name DIPTYCH_CLUSTER_TLS_NAME. Or an http:// or https:// URL that
            must answer 200; if the router's DIPTYCH_TLS_CERT is set, exactly this certificate is expected, whatever its
            name.
    Raises: ConfigError for another form of address.
    """
    if address.startswith(("http://", "https://")):
        return _check_http(address, timeout_s)
    if "/" in address or ":" not in address:
        raise ConfigError("address", address, "must be host:port, or an http:// or https:// URL")
    return _check_grpc(address, timeout_s)


def _check_http(url: str, timeout_s: float) -> str:
    # no proxy: the server is local to the cluster
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https://"):
        handlers.append(urllib.request.HTTPSHandler(context=_context(os.environ.get("DIPTYCH_TLS_CERT", ""))))
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            return "" if answer.status == 200 else f"HTTP {answer.status}"
    except urllib.error.HTTPError as error:
        with error:
            return f"HTTP {error.code}: {error.read(500).decode(errors='replace')}"
    except urllib.error.URLError as error:
        return getattr(error.reason, "strerror", None) or str(error.reason)
    except (OSError, ValueError) as error:
        return str(error)


def _context(own_cert: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=own_cert or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("tls_cert", own_cert, f"cannot be used: {error}") from None
    if own_cert:
        context.check_hostname = False  # pinned
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _check_grpc(address: str, timeout_s: float) -> str:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    ca, cert, key, name = (os.environ.get(f"DIPTYCH_CLUSTER_{part}", "") for part in ("CA", "CERT", "KEY", "TLS_NAME"))
    tls = load_cluster_tls(ca, cert, key, name)
    options: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0)]
    if tls is not None and tls.name:
        options.append(("grpc.ssl_target_name_override", tls.name))
    with (
        grpc.insecure_channel(address, options=options)
        if tls is None
        else grpc.secure_channel(address, grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert), options=options)
    ) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    status: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if status == "SERVING" else status


def run_health(address: str, timeout_s: float) -> int:
    """Exit code 0 when it serves, 1 with the reason on stderr when it does not."""
    why = why_unhealthy(address, timeout_s=timeout_s)
    if why:
        print(f"{address}: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":  # without the imports of other commands: health checks run every few seconds
    sys.exit(run_health(sys.argv[1], 3.0))
