"""`diptych move REQUEST`: an operator moves a running request to another decode worker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from diptych.cli.router_access import SECRET_FILE, TLS_CA, TLS_SERVER_NAME, RouterAccess, router_access, state_here
from diptych.common.errors import ConfigError

_TIMEOUT_S = 30.0


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def move(
        request_id: Annotated[
            str,
            typer.Argument(metavar="REQUEST", help="Request id from an answer, a header or the log; or its label."),
        ],
        to: Annotated[str, typer.Option(help="Id of the decode worker; default: the router chooses.")] = "",
        address: Annotated[
            str, typer.Option(help="host:port of the gRPC server of the router that has it; default: the cluster here.")
        ] = "",
        tls_ca: TLS_CA = None,
        tls_server_name: TLS_SERVER_NAME = "",
        secret_file: SECRET_FILE = "",
    ) -> None:
        """Move a running request to another decode worker. Its stream goes on, and loses nothing."""
        if not address and state_here() is None:
            from diptych.common.paths import run_dir

            rule = f"no cluster runs from {run_dir()}: name the router that has the request (--address)"
            raise ConfigError("address", "", rule)
        access = router_access(address, tls_ca, tls_server_name)
        moved = ask(access, _secret(secret_file, here=not address), request_id, to)
        print(f"{request_id} was on {moved.before}, and goes on at {moved.after} after {moved.num_tokens} tokens")


def _secret(secret_file: str, *, here: bool) -> bytes:
    """The cluster secret: of the file, else of the cluster of this folder. Raises: ConfigError."""
    from diptych.common.secret import load_secret

    state = state_here() if here and not secret_file else None
    if state is not None:
        secret_file = state.secret_file
    if not secret_file:
        raise ConfigError("secret_file", "", "must be set: only who has the cluster secret may move requests")
    return load_secret(Path(secret_file))


def ask(access: RouterAccess, secret: bytes, request_id: str, to: str) -> Any:
    """The router's MoveResponse. Raises: DiptychError, ConfigError."""
    import grpc

    from diptych.client import wire
    from diptych.rpc.operator import METADATA, SERVICE, operator_key, proof_of
    from diptych.rpc.v1 import router_pb2

    body = router_pb2.MoveRequest(request_id=request_id, to=to).SerializeToString()
    if (tls := access.tls()) is None:
        channel = grpc.insecure_channel(access.address, options=wire.options())
    else:
        channel = grpc.secure_channel(access.address, tls.credentials(), options=wire.tls_options(tls))
    with channel:
        call = channel.unary_unary(
            f"/{SERVICE}/Move",
            request_serializer=lambda message: message,
            response_deserializer=router_pb2.MoveResponse.FromString,
        )
        proof = (METADATA, proof_of(operator_key(secret), "Move", body))
        try:
            return call(body, timeout=_TIMEOUT_S, metadata=(proof,))
        except grpc.RpcError as error:
            raise wire.typed(error, access.address) from None
