"""Calls of operators to a router's service diptych.rpc.v1.Operations, which prove that the caller has the cluster secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diptych.cli.router_access import RouterAccess, router_access, state_here
from diptych.common.errors import ConfigError

TIMEOUT_S = 30.0


def call_operator(
    method: str,
    message: Any,
    answer: Any,
    address: str,
    tls_ca: Path | None,
    tls_server_name: str,
    secret_file: str,
    *,
    timeout_s: float = TIMEOUT_S,
) -> Any:
    """Call a method of the service.

    Args:
        answer: type of its answer.
        address: of the router's gRPC server; "": that of the cluster of this folder.
    Raises: ConfigError where there is no such cluster, or no secret; DiptychError.
    """
    if not address and state_here() is None:
        from diptych.common.paths import run_dir

        raise ConfigError("address", "", f"no cluster runs from {run_dir()}: name a router (--address)")
    access = router_access(address, tls_ca, tls_server_name)
    return ask(access, cluster_secret(secret_file, here=not address), method, message, answer, timeout_s=timeout_s)


def cluster_secret(secret_file: str, *, here: bool) -> bytes:
    """Of the file, else of the cluster of this folder. Raises: ConfigError."""
    from diptych.common.secret import load_secret

    state = state_here() if here and not secret_file else None
    if state is not None:
        secret_file = state.secret_file
    if not secret_file:
        raise ConfigError("secret_file", "", "must be set: only who has the cluster secret may do this")
    return load_secret(Path(secret_file))


def ask(
    access: RouterAccess, secret: bytes, method: str, message: Any, answer: Any, *, timeout_s: float = TIMEOUT_S
) -> Any:
    """One call, with its proof. Raises: DiptychError, ConfigError."""
    import grpc

    from diptych.client import wire
    from diptych.rpc.operator import METADATA, SERVICE, operator_key, proof_of

    body = message.SerializeToString()
    if (tls := access.tls()) is None:
        channel = grpc.insecure_channel(access.address, options=wire.options())
    else:
        channel = grpc.secure_channel(access.address, tls.credentials(), options=wire.tls_options(tls))
    with channel:
        call = channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=lambda message: message,
            response_deserializer=answer.FromString,
        )
        proof = (METADATA, proof_of(operator_key(secret), method, body))
        try:
            return call(body, timeout=timeout_s, metadata=(proof,))
        except grpc.RpcError as error:
            raise wire.typed(error, access.address) from None
