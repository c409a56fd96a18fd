"""`diptych adapters`: the LoRA adapters of a running cluster or server. Who calls has the cluster secret, as for
`diptych move`, or an admin's API key."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from diptych.cli.operator_calls import call_admin
from diptych.cli.router_access import SECRET_FILE, TLS_CA, TLS_SERVER_NAME
from diptych.common.errors import ConfigError, DiptychError
from diptych.common.store.adapters import lost_versions, other_base_models

app = typer.Typer(
    name="adapters",
    help="LoRA adapters: names, versions, and which version answers. Workers need --enable-lora and --lora-dir. Changes "
    "need the cluster secret, or an admin's key in DIPTYCH_API_KEY.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_ADDRESS = Annotated[str, typer.Option(help="host:port of a router's gRPC server; default: the cluster here.")]
_NAME = Annotated[str, typer.Argument(metavar="NAME", help="Name of the adapter, as requests name it.")]
_LOAD_TIMEOUT_S = 60.0
HEADER = "name  model  version  answers  id  rank  size  day  folder"


@app.command("list")
def show(
    address: _ADDRESS = "", tls_ca: TLS_CA = None, tls_server_name: TLS_SERVER_NAME = "", secret_file: SECRET_FILE = ""
) -> None:
    """One line a version, below a header."""
    from diptych.rpc.v1 import router_pb2

    question, kind = router_pb2.ListAdaptersRequest(), router_pb2.ListAdaptersResponse
    answer = call_admin("ListAdapters", question, kind, address, tls_ca, tls_server_name, secret_file, open_to_all=True)
    if answer.adapters:
        print(HEADER)
    for adapter in answer.adapters:
        print("\n".join(lines_of(adapter)))
    for adapter in answer.adapters:
        _warn(_of_another_model(adapter), f"{adapter.name}: ")


@app.command()
def load(
    name: _NAME,
    folder: Annotated[str, typer.Argument(help="Folder of its files, as the workers open it.")],
    model: Annotated[str, typer.Option(help="Name of the base model; default: the only one.")] = "",
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Replace the version that answers, of a name that exists.")
    ] = False,
    canary_share: Annotated[
        float,
        typer.Option(help="The new version answers this share of the requests, 0 to 1; the stable one the others."),
    ] = 0.0,
    address: _ADDRESS = "",
    tls_ca: TLS_CA = None,
    tls_server_name: TLS_SERVER_NAME = "",
    secret_file: SECRET_FILE = "",
) -> None:
    """Load an adapter at all workers, and serve it under a name."""
    from diptych.rpc.v1 import router_pb2

    if not folder:
        raise ConfigError("FOLDER", folder, "must be the folder of an adapter")
    path = str(Path(folder).absolute())
    request = router_pb2.AddAdapterRequest(
        name=name, folder=path, model=model, in_place=in_place, canary_share=canary_share
    )
    adapter = _change("AddAdapter", request, address, tls_ca, tls_server_name, secret_file)
    _warn(lost_versions((one.number, one.id, one.folder) for one in adapter.versions))
    _warn(_of_another_model(adapter))


def _warn(text: str, of: str = "") -> None:
    if text:
        typer.echo(f"warning: {of}{text}", err=True)


def _of_another_model(adapter: Any) -> str:
    """Of a router.proto Adapter."""
    return other_base_models(adapter.model, ((one.number, one.other_base) for one in adapter.versions))


@app.command()
def unload(
    name: _NAME,
    address: _ADDRESS = "",
    tls_ca: TLS_CA = None,
    tls_server_name: TLS_SERVER_NAME = "",
    secret_file: SECRET_FILE = "",
) -> None:
    """Serve an adapter no longer. Answers that run end well."""
    from diptych.rpc.v1 import router_pb2

    question, kind = router_pb2.RemoveAdapterRequest(name=name), router_pb2.Adapter
    with in_the_commands_words():
        gone = call_admin("RemoveAdapter", question, kind, address, tls_ca, tls_server_name, secret_file)
    print(f"{gone.name} is unloaded; it had version {gone.stable}")


@app.command()
def canary(
    name: _NAME,
    version: Annotated[int, typer.Argument(min=0, help="Number of a version in `diptych adapters list`.")],
    share: Annotated[float, typer.Argument(min=0.0, max=1.0, help="Of the requests, 0 to 1; 0 ends the canary.")],
    address: _ADDRESS = "",
    tls_ca: TLS_CA = None,
    tls_server_name: TLS_SERVER_NAME = "",
    secret_file: SECRET_FILE = "",
) -> None:
    """Have a version answer a share of the requests."""
    from diptych.rpc.v1 import router_pb2

    change = router_pb2.AdapterCanary(version=version, share=share)
    request = router_pb2.RouteAdapterRequest(name=name, canary=change)
    with in_the_commands_words({"version": "VERSION"}):
        _change("RouteAdapter", request, address, tls_ca, tls_server_name, secret_file)


@app.command()
def promote(
    name: _NAME,
    address: _ADDRESS = "",
    tls_ca: TLS_CA = None,
    tls_server_name: TLS_SERVER_NAME = "",
    secret_file: SECRET_FILE = "",
) -> None:
    """The canary answers all requests."""
    from diptych.rpc.v1 import router_pb2

    request = router_pb2.RouteAdapterRequest(name=name, promote=router_pb2.AdapterPromotion())
    _change("RouteAdapter", request, address, tls_ca, tls_server_name, secret_file)


@app.command()
def rollback(
    name: _NAME,
    to: Annotated[
        int, typer.Option(min=0, help="Number of the version; default: without the canary, or the one before.")
    ] = 0,
    address: _ADDRESS = "",
    tls_ca: TLS_CA = None,
    tls_server_name: TLS_SERVER_NAME = "",
    secret_file: SECRET_FILE = "",
) -> None:
    """End the canary; without one, return to the version before. Nothing is loaded."""
    from diptych.rpc.v1 import router_pb2

    change = router_pb2.AdapterRollback(version=to)
    request = router_pb2.RouteAdapterRequest(name=name, roll_back=change)
    with in_the_commands_words({"version": "--to"}):
        _change("RouteAdapter", request, address, tls_ca, tls_server_name, secret_file)


_FLAGS = {
    "lora_name": "NAME", "lora_path": "FOLDER", "canary_share": "--canary-share", "model": "--model",
    "load_inplace": "--in-place",
}  # fmt: skip


@contextmanager
def in_the_commands_words(more: Mapping[str, str] | None = None) -> Iterator[None]:
    """An error that begins with a field of the API begins with the argument or the flag instead. `more`: further ones."""
    try:
        yield
    except DiptychError as error:
        names = _FLAGS | dict(more or {})
        error.message = re.sub(r"^\w+(?=:| must )", lambda found: names.get(found[0], found[0]), error.message)
        raise


def _change(
    method: str, request: Any, address: str, tls_ca: Path | None, tls_server_name: str, secret_file: str
) -> Any:
    """Returns: the router.proto Adapter."""
    from diptych.rpc.v1 import router_pb2

    kind, timeout_s = router_pb2.Adapter, _LOAD_TIMEOUT_S
    with in_the_commands_words():
        adapter = call_admin(method, request, kind, address, tls_ca, tls_server_name, secret_file, timeout_s=timeout_s)
    print("\n".join(lines_of(adapter)))
    return adapter


def lines_of(adapter: Any) -> list[str]:
    """A router.proto Adapter as text, a line a version."""
    lines = []
    for version in adapter.versions:
        share = 0.0
        if version.number == adapter.stable:
            share = 1.0 - (adapter.canary_share if adapter.canary else 0.0)
        elif version.number == adapter.canary:
            share = adapter.canary_share
        kind = {adapter.stable: "stable", adapter.canary: "canary", adapter.previous: "previous"}
        state = f"{kind.get(version.number, 'kept')} {share:.0%}" if share else kind.get(version.number, "kept")
        day = time.strftime("%Y-%m-%d", time.gmtime(version.created))
        size = f"{version.num_bytes / 1e6:.1f} MB"
        name = f"{adapter.name}  {adapter.model}"
        lines.append(
            f"{name}  {version.number}  {state}  {version.id}  rank {version.rank}  {size}  {day}  {version.folder}"
        )
    return lines
