"""The commands `diptych doctor`, `top`, `restart` and `role`. Heavy imports happen inside."""

from __future__ import annotations

from typing import Annotated

import typer

from diptych.cli.router_access import (
    CLUSTER_CA,
    CLUSTER_CERT,
    CLUSTER_KEY,
    CLUSTER_TLS_NAME,
    SECRET_FILE,
    TLS_CA,
    TLS_SERVER_NAME,
)

_URL = typer.Option(metavar="URL", help="URL of a router's HTTP server; default: the cluster of this folder.")


def register(app: typer.Typer) -> None:
    """Add the commands."""

    @app.command()
    def doctor(
        url: Annotated[str, _URL] = "",
        sample_s: Annotated[float, typer.Option(min=0.0, max=600.0, help="Seconds to observe the workers.")] = 3.0,
        json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
        tls_ca: TLS_CA = None,
        tls_server_name: TLS_SERVER_NAME = "",
        cluster_ca: CLUSTER_CA = "",
        cluster_cert: CLUSTER_CERT = "",
        cluster_key: CLUSTER_KEY = "",
        cluster_tls_name: CLUSTER_TLS_NAME = "",
        secret_file: SECRET_FILE = "",
    ) -> None:
        """Find out what slows a cluster down. Each finding has a next step. Exit code 1 when a finding is bad."""
        from diptych.cli.doctor.command import run_doctor
        from diptych.cli.router_access import worker_access
        from diptych.cli.status_client import StatusClient

        files = (cluster_ca, cluster_cert, cluster_key, cluster_tls_name)
        access = worker_access(*files, secret_file=secret_file, here=not url)
        client = StatusClient(url, tls_ca=tls_ca, server_name=tls_server_name)
        raise typer.Exit(run_doctor(client, sample_s=sample_s, json_out=json, access=access))

    @app.command()
    def top(
        url: Annotated[str, _URL] = "",
        every_s: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between two samples.")] = 1.0,
        count: Annotated[int, typer.Option(min=0, help="Number of samples; 0: until Ctrl-C.")] = 0,
        tls_ca: TLS_CA = None,
        tls_server_name: TLS_SERVER_NAME = "",
    ) -> None:
        """Watch the cluster live; in a pipe, one line per sample."""
        from diptych.cli.status_client import StatusClient
        from diptych.cli.top import run_top

        client = StatusClient(url, tls_ca=tls_ca, server_name=tls_server_name)
        raise typer.Exit(run_top(client, every_s=every_s, count=count))

    @app.command()
    def role(
        worker: Annotated[str, typer.Argument(help="Worker id, as in /status.")],
        role: Annotated[str, typer.Argument(help="prefill or decode.")],
        url: Annotated[
            str,
            typer.Option(
                metavar="URL",
                help="URL of a router's HTTP server; needed unless the cluster runs from this folder.",
            ),
        ] = "",
        timeout_s: Annotated[
            float, typer.Option(min=1.0, help="Seconds for the worker's drain and until the router uses it.")
        ] = 120.0,
        force: Annotated[
            bool, typer.Option("--force", help="Also if it is the last ready worker of its pool.")
        ] = False,
        tls_ca: TLS_CA = None,
        tls_server_name: TLS_SERVER_NAME = "",
        cluster_ca: CLUSTER_CA = "",
        cluster_cert: CLUSTER_CERT = "",
        cluster_key: CLUSTER_KEY = "",
        cluster_tls_name: CLUSTER_TLS_NAME = "",
        secret_file: SECRET_FILE = "",
    ) -> None:
        """Make a running worker a prefill or a decode worker. It drains, and serves as the other one. A restart undoes it."""
        from diptych.cli.role import run_role
        from diptych.cli.router_access import worker_access
        from diptych.cli.status_client import StatusClient

        files = (cluster_ca, cluster_cert, cluster_key, cluster_tls_name)
        access = worker_access(*files, secret_file=secret_file, here=not url)
        client = StatusClient(url, tls_ca=tls_ca, server_name=tls_server_name, changes=True)
        raise typer.Exit(run_role(client, worker, role, timeout_s=timeout_s, force=force, access=access))

    @app.command()
    def restart(
        worker: Annotated[str, typer.Argument(help="Worker id, as in /status.")],
        command: Annotated[list[str], typer.Argument(help="The command that restarts it, after `--`.")],
        url: Annotated[str, _URL] = "",
        timeout_s: Annotated[
            float, typer.Option(min=1.0, help="Seconds to wait for the new incarnation after the command ended.")
        ] = 600.0,
        tls_ca: TLS_CA = None,
        tls_server_name: TLS_SERVER_NAME = "",
    ) -> None:
        """Restart a worker by a command, one step of a roll-out. Waits until the router uses its new incarnation."""
        from diptych.cli.restart import run_restart
        from diptych.cli.status_client import StatusClient

        client = StatusClient(url, tls_ca=tls_ca, server_name=tls_server_name)
        raise typer.Exit(run_restart(client, worker, command, timeout_s=timeout_s))
