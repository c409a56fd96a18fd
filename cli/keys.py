"""`diptych keys`: API keys of a router."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from diptych.common.paths import run_dir

app = typer.Typer(
    name="keys",
    help="API keys of the router. Start it with --keys-file to require them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_File = Annotated[
    Path | None, typer.Option("--keys-file", metavar="PATH", help="Default: api-keys.json in the run folder.")
]


def keys_file(given: Path | None) -> Path:
    return given or run_dir() / "api-keys.json"


@app.command()
def add(
    tenant: Annotated[str, typer.Argument(help="Tenant whose cache and quota the key uses.")] = "default",
    tokens_per_minute: Annotated[
        int, typer.Option(help="The tenant's quota, prompt and output tokens together; 0: none.")
    ] = 0,
    requests_per_minute: Annotated[int, typer.Option(help="The same, of requests; 0: none.")] = 0,
    note: Annotated[str, typer.Option(help="A note, shown in the list.")] = "",
    weight: Annotated[int, typer.Option(help="The tenant's weight in sharing the pool while requests wait.")] = 1,
    rank: Annotated[int, typer.Option(help="Tenants of a lower rank go first while requests wait.")] = 0,
    max_cache_ttl_s: Annotated[
        int, typer.Option(help="Longest time of the tenant's claims on cached KV; 0: the router's setting.")
    ] = 0,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", help="An adapter that the tenant may use, repeatable; none named: all."),
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="The key may load and unload adapters.")] = False,
    file: _File = None,
) -> None:
    """Create a key and print it. It is shown only once and not stored."""
    from diptych.router.api.auth.keys import add_key

    key, entry = add_key(
        keys_file(file),
        tenant,
        now=time.time(),
        tokens_per_minute=tokens_per_minute,
        requests_per_minute=requests_per_minute,
        note=note,
        weight=weight,
        rank=rank,
        max_cache_ttl_s=max_cache_ttl_s,
        adapters=adapter or (),
        admin=admin,
    )
    print(f"key {entry.id} for tenant {entry.tenant} in {keys_file(file)}", file=sys.stderr)
    print(key)


@app.command("list")
def show(file: _File = None) -> None:
    """One line a key: id, tenant, day, quota, rights, note."""
    from diptych.router.api.auth.keys import load_keys

    for entry in load_keys(keys_file(file)).entries.values():
        day = time.strftime("%Y-%m-%d", time.gmtime(entry.created))
        limits = ((entry.tokens_per_minute, "tokens/min"), (entry.requests_per_minute, "requests/min"))
        quota = ", ".join(f"{limit} {unit}" for limit, unit in limits if limit) or "no quota"
        rights = [
            *(["admin"] if entry.admin else []),
            *([f"adapters {' '.join(entry.adapters)}"] if entry.adapters else []),
        ]
        print("  ".join(filter(None, (entry.id, entry.tenant, day, quota, ", ".join(rights), entry.note))))


@app.command()
def revoke(key_id: Annotated[str, typer.Argument(help="See `diptych keys list`.")], file: _File = None) -> None:
    """Revoke a key; it stops working within a second."""
    from diptych.router.api.auth.keys import revoke_key

    entry = revoke_key(keys_file(file), key_id)
    print(f"key {entry.id} of tenant {entry.tenant} is revoked", file=sys.stderr)
