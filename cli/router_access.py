"""How commands reach a running cluster: flags, then the environment, then the state of the cluster of this folder.

The API key is never a flag (other users of the machine can see flags): it comes from DIPTYCH_API_KEY.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.common.errors import ConfigError

if TYPE_CHECKING:
    from diptych.cli.up.run_folder import ClusterState
    from diptych.cli.worker_access import WorkerAccess

TLS_CA = Annotated[
    Path | None,
    typer.Option(
        envvar="DIPTYCH_TLS_CA",
        metavar="PATH",
        help="PEM file of the authorities to trust; the router uses TLS. Default: as the cluster of this folder.",
    ),
]
TLS_SERVER_NAME = Annotated[
    str,
    typer.Option(
        envvar="DIPTYCH_TLS_SERVER_NAME",
        metavar="TEXT",
        help="Name that the router's certificate must hold, if it is not the address's host.",
    ),
]


def _cluster_file(part: str, text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        f"--cluster-{part}", envvar=f"DIPTYCH_CLUSTER_{part.upper()}", metavar="PATH", help=text
    )
    return option


CLUSTER_CA = Annotated[str, _cluster_file("ca", "PEM file of the authority of a cluster with mTLS.")]
CLUSTER_CERT = Annotated[str, _cluster_file("cert", "Certificate of that authority, presented to the workers.")]
CLUSTER_KEY = Annotated[
    str, _cluster_file("key", "Its private key. Default of the three: those of the cluster of this folder.")
]
CLUSTER_TLS_NAME = Annotated[
    str,
    typer.Option(
        envvar="DIPTYCH_CLUSTER_TLS_NAME",
        metavar="TEXT",
        help="Name that the workers' certificates must hold, if it is not their address's host.",
    ),
]
SECRET_FILE = Annotated[
    str,
    typer.Option(
        envvar="DIPTYCH_SECRET_FILE",
        metavar="PATH",
        help="The cluster secret, which workers without mTLS ask for. Default: that of the cluster of this folder.",
    ),
]


@dataclass(frozen=True, slots=True)
class RouterAccess:
    """How to reach a router.

    Args:
        address: host:port of the router's gRPC server.
        tls_ca: None: no TLS.
        server_name: empty: the address's host.
    """

    address: str
    tls_ca: Path | None = None
    server_name: str = ""

    def tls(self) -> Any:
        """diptych.client.Tls, or None. Raises: ConfigError when the file cannot be used."""
        import ssl

        from diptych.client import Tls

        if self.tls_ca is None:
            return None
        try:
            ssl.create_default_context(cafile=str(self.tls_ca))  # gRPC says of a bad file that nobody answers
        except OSError as error:
            raise ConfigError("tls_ca", str(self.tls_ca), f"cannot be used: {error}") from None
        return Tls(ca_file=str(self.tls_ca), server_name=self.server_name)


def state_here() -> ClusterState | None:
    """The state of the cluster that runs from this folder."""
    from diptych.cli.up.run_folder import RunFolder
    from diptych.common.paths import run_dir

    return RunFolder(run_dir()).read_state()


def print_default(flag: str, address: str) -> None:
    """Print which address a command uses by default."""
    from diptych.common.paths import run_dir

    reported = f"no cluster runs from {run_dir()}: using the default address {address} (--{flag} names another)"
    print(reported, file=sys.stderr)


def router_access(address: str = "", tls_ca: Path | None = None, server_name: str = "") -> RouterAccess:
    """A given address is used with the other given values; without one, the cluster of this folder, else the default
    port."""
    from diptych.client.wire import DEFAULT_ADDRESS

    if address:
        return RouterAccess(address, tls_ca, server_name)
    state = state_here()
    if state is None:
        print_default("address", DEFAULT_ADDRESS)
        return RouterAccess(DEFAULT_ADDRESS, tls_ca, server_name)
    if tls_ca is None and state.tls_cert:
        tls_ca = Path(state.tls_cert)  # trusted as it is, whatever signed it
    return RouterAccess(state.grpc_address, tls_ca, server_name)


def worker_access(ca: str, cert: str, key: str, name: str, *, secret_file: str, here: bool) -> WorkerAccess:
    """Certificate and secret for calls to workers: the given files, else those of the cluster of this folder.

    Args:
        here: the workers belong to that cluster; others accept neither.
    Raises: ConfigError when only some files of the certificate are given, or one is invalid.
    """
    from diptych.cli.worker_access import WorkerAccess
    from diptych.common.secret import load_secret
    from diptych.common.tls import load_cluster_tls

    state = state_here() if here else None
    if state is not None and not (ca or cert or key):
        ca, cert, key = state.cluster_ca, state.cluster_cert, state.cluster_key
    if state is not None and not secret_file:
        secret_file = state.secret_file
    tls = load_cluster_tls(ca, cert, key, name)
    return WorkerAccess(tls, load_secret(Path(secret_file)) if secret_file and tls is None else b"")
