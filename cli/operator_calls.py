"""Calls of operators to a router: to diptych.rpc.v1.Operations, with a proof that the caller has the cluster secret; some
calls also to diptych.rpc.v1.Router, with an admin's API key."""

from __future__ import annotations

import os
from collections.abc import Sequence
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


def call_admin(
    method: str,
    message: Any,
    answer: Any,
    address: str,
    tls_ca: Path | None,
    tls_server_name: str,
    secret_file: str,
    *,
    timeout_s: float = TIMEOUT_S,
    open_to_all: bool = False,
) -> Any:
    """As `call_operator`, of a method that both services have: without a secret the key in DIPTYCH_API_KEY proves who calls.

    Args:
        open_to_all: a router without keys answers this method to anybody.
    Raises: ConfigError where there is neither a secret nor a key; DiptychError.
    """
    state = None if address else state_here()
    if secret_file or (state is not None and state.secret_file):
        return call_operator(
            method, message, answer, address, tls_ca, tls_server_name, secret_file, timeout_s=timeout_s
        )
    if not os.environ.get("DIPTYCH_API_KEY") and not open_to_all:
        rule = (
            "must be set to an admin's API key, which `diptych keys add NAME --admin` makes; "
            "or --secret-file must name the cluster secret (`diptych serve` has none)"
        )
        raise ConfigError("DIPTYCH_API_KEY", "", rule)
    return ask_with_key(router_access(address, tls_ca, tls_server_name), method, message, answer, timeout_s=timeout_s)


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
    from diptych.rpc.operator import METADATA, SERVICE, operator_key, proof_of

    body = message.SerializeToString()
    proof = (METADATA, proof_of(operator_key(secret), method, body))
    return _call(access, f"/{SERVICE}/{method}", body, answer, (proof,), timeout_s)


def ask_with_key(access: RouterAccess, method: str, message: Any, answer: Any, *, timeout_s: float = TIMEOUT_S) -> Any:
    """One call of the clients' service, with the key in DIPTYCH_API_KEY if it is set. Raises: DiptychError, ConfigError."""
    from diptych.client import wire

    return _call(access, wire.SERVICE + method, message.SerializeToString(), answer, wire.metadata(None), timeout_s)


def _call(
    access: RouterAccess, path: str, body: bytes, answer: Any, metadata: Sequence[tuple[str, str]], timeout_s: float
) -> Any:
    import grpc

    from diptych.client import wire

    if (tls := access.tls()) is None:
        channel = grpc.insecure_channel(access.address, options=wire.options())
    else:
        channel = grpc.secure_channel(access.address, tls.credentials(), options=wire.tls_options(tls))
    with channel:
        call = channel.unary_unary(
            path,
            request_serializer=lambda message: message,
            response_deserializer=answer.FromString,
        )
        try:
            return call(body, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise wire.typed(error, access.address) from None
