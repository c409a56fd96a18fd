"""`diptych move REQUEST`: an operator moves a running request to another decode worker."""

from __future__ import annotations

from typing import Annotated

import typer

from diptych.cli.operator_calls import call_operator
from diptych.cli.router_access import SECRET_FILE, TLS_CA, TLS_SERVER_NAME


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
        from diptych.rpc.v1 import router_pb2

        request, kind = router_pb2.MoveRequest(request_id=request_id, to=to), router_pb2.MoveResponse
        moved = call_operator("Move", request, kind, address, tls_ca, tls_server_name, secret_file)
        print(f"{request_id} was on {moved.before}, and goes on at {moved.after} after {moved.num_tokens} tokens")
