"""`diptych cache`: the files of KV blocks that workers keep (--disk-kv-dir), or those in a store (--kv-store)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from diptych.cli.router_access import SECRET_FILE, state_here
from diptych.common.errors import ConfigError

app = typer.Typer(
    name="cache",
    help="Files of KV blocks that workers keep below --disk-kv-dir.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_FOLDER = typer.Option(
    "--disk-kv-dir",
    envvar="DIPTYCH_DISK_KV_DIR",
    metavar="PATH",
    help="As the workers have it.",
    show_default=False,
)


@app.command("list")
def show(disk_kv_dir: Annotated[Path, _FOLDER]) -> None:
    """One line for each tenant of each worker: worker, model, tenant (both as hashes), blocks, bytes, last use."""
    from diptych.kvtransfer.disk.block_folder import tenants_in

    _require(disk_kv_dir)
    for part in tenants_in(disk_kv_dir):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(part.last_used))
        print(
            f"{part.worker}  {part.identity[:12]}  {part.tenant[:12]}  {part.num_blocks} blocks  {part.num_bytes} bytes  {used}"
        )


@app.command()
def purge(
    disk_kv_dir: Annotated[Path | None, _FOLDER] = None,
    kv_store: Annotated[
        str, typer.Option(envvar="DIPTYCH_KV_STORE", metavar="URL", help="Instead of it: as the workers have it.")
    ] = "",
    tenant: Annotated[
        str | None, typer.Option(help="Of this one only, as `diptych keys` names it; needs the cluster secret.")
    ] = None,
    secret_file: SECRET_FILE = "",
) -> None:
    """Remove the blocks of all tenants, or of one, from files or from a store. Workers may run: they compute again
    what they miss.

    KV in the memory of running workers stays until it is evicted. A tenant without blocks is an error: its name may be
    wrong."""
    from diptych.common.secret import load_secret, tenant_folder, tenant_of, tenant_salt

    if (disk_kv_dir is None) == (not kv_store):
        raise ConfigError("disk_kv_dir", str(disk_kv_dir or ""), "set this one or kv_store, and not both")
    if disk_kv_dir is not None:
        _require(disk_kv_dir)
    folder = None
    if tenant is not None:
        state = state_here() if not secret_file else None
        path = secret_file or (state.secret_file if state is not None else "")
        if not path:
            raise ConfigError(
                "secret_file", "", "must be set: a tenant's folder is named by a hash with the cluster secret"
            )
        folder = tenant_folder(tenant_of(tenant_salt(load_secret(Path(path)), tenant)))
    removed = _purge_folder(disk_kv_dir, folder) if disk_kv_dir is not None else _purge_store(kv_store, folder)
    if removed is None and tenant is not None:
        raise ConfigError("tenant", tenant, f"has no blocks in {disk_kv_dir or kv_store}")
    print(f"removed {removed or '0 blocks'}")


def _purge_folder(root: Path, folder: str | None) -> str | None:
    """Returns: what was removed; None: nothing."""
    from diptych.kvtransfer.disk import block_folder

    try:
        files, size = block_folder.purge(root, folder)
    except OSError as error:
        raise ConfigError("disk_kv_dir", str(error.filename or root), f"cannot be purged: {error.strerror}") from None
    return f"{files} blocks, {size} bytes" if files else None


def _purge_store(url: str, folder: str | None) -> str | None:
    """As _purge_folder."""
    from diptych.kvtransfer.disk import mooncake

    count = mooncake.purge(url, folder)
    return f"{count} blocks" if count else None


def _require(folder: Path) -> None:
    """Raises: ConfigError when there is no such folder: a purge of another one would say that nothing was there."""
    if not folder.is_dir():
        raise ConfigError("disk_kv_dir", str(folder), "is no folder")
