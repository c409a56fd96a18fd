"""The commands `diptych doctor` and `diptych top`. Heavy imports happen inside."""

from __future__ import annotations

from typing import Annotated

import typer

from diptych.cli.router_access import TLS_CA

_URL = typer.Option(metavar="URL", help="Of a router's HTTP server; default: the cluster here.")


def register(app: typer.Typer) -> None:
    """Add both commands."""

    @app.command()
    def doctor(
        url: Annotated[str, _URL] = "",
        sample_s: Annotated[float, typer.Option(min=0.0, max=600.0, help="Watch the workers for so long.")] = 3.0,
        json_out: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
        tls_ca: TLS_CA = None,
    ) -> None:
        """Find out what slows a cluster down, each finding with a next step. Exit code 1 when something is bad."""
        from diptych.cli.doctor import run_doctor

        raise typer.Exit(run_doctor(url, sample_s=sample_s, json_out=json_out, tls_ca=tls_ca))

    @app.command()
    def top(
        url: Annotated[str, _URL] = "",
        every_s: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Pause between two looks.")] = 1.0,
        count: Annotated[int, typer.Option(min=0, help="Look so many times; 0: until Ctrl-C.")] = 0,
        tls_ca: TLS_CA = None,
    ) -> None:
        """Watch the cluster live; in a pipe, one line for each look."""
        from diptych.cli.top import run_top

        raise typer.Exit(run_top(url, every_s=every_s, count=count, tls_ca=tls_ca))
