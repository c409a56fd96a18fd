"""Values of commands whose flags are function parameters, from the same four sources as settings (command line >
environment > file > default). -v prints the merged values on stderr before the command runs.

Flag `--max-tokens` of `diptych chat` is DIPTYCH_CHAT_MAX_TOKENS in the environment, and `max-tokens` in the file given
by --config (or DIPTYCH_CHAT_CONFIG). An unknown key is an error in both.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from diptych.cli.settings import merge as settings
from diptych.cli.settings.options import VERBOSE
from diptych.common.errors import ConfigError


def add_layers(app: typer.Typer, commands: Collection[str] | None = None, *, group: str = "") -> None:
    """Add --config and environment variables to commands of `app`. `commands`: None: all commands. `group`: the command
    that `app` is, if it is one: part of the variables' names."""
    for info in app.registered_commands:
        name = info.name or info.callback.__name__.replace("_", "-")  # type: ignore[union-attr]
        if info.callback is None or (commands is not None and name not in commands):
            continue
        info.callback = _with_sources(f"{group} {name}".strip(), info.callback, variable_prefix(name, group))
        info.context_settings = {**(info.context_settings or {}), "auto_envvar_prefix": variable_prefix(name, group)}


def variable_prefix(command: str, group: str = "") -> str:
    """Prefix of the command's variables, without the last underscore."""
    return settings.ENV_PREFIX + "_".join(filter(None, (group, command))).replace("-", "_").upper()


def _with_sources(name: str, callback: Callable[..., Any], variables: str) -> Callable[..., Any]:
    hints = typing.get_type_hints(callback, include_extras=True)
    signature = inspect.signature(callback)
    parameters = [
        parameter.replace(annotation=hints.get(parameter.name, parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    option = typer.Option(
        "--config",
        metavar="PATH",
        callback=_read_layers,
        is_eager=True,
        expose_value=False,
        help=f"YAML or TOML file with values; flags and variables ({variables}_ and the flag's name) override it.",
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    wants_verbose = getattr(callback, "prints_settings", False)
    config = inspect.Parameter("config", kind, default=None, annotation=Annotated[str | None, option])
    verbose_flag = inspect.Parameter("verbose", kind, default=False, annotation=Annotated[bool, VERBOSE])

    @functools.wraps(callback)
    def command(**values: Any) -> Any:
        values.pop("config", None)
        verbose = values.pop("verbose", False)
        try:
            for key, value in values.items():
                settings.check_number(key, value)
                if isinstance(value, str):
                    settings.check_text(key, value)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        if wants_verbose:
            return callback(**values, verbose=verbose)
        if verbose:
            print(f"{name}: {settings.describe_values(values)}", file=sys.stderr)
        return callback(**values)

    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=kind) for parameter in parameters] + [config, verbose_flag]
    )
    command.__annotations__ = {
        parameter.name: parameter.annotation for parameter in [*parameters, config, verbose_flag]
    }
    return command


def _read_layers(ctx: typer.Context, value: str | None) -> str | None:
    """An eager option: the file's values are set before any other option is read. Raises: Exit with code 2 on an
    unknown key."""
    try:
        _check_variables(ctx)
        if value is not None:
            ctx.default_map = {key: _as_typed(key, given) for key, given in _read_file(ctx, Path(value)).items()}
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    return value


def _known(ctx: typer.Context) -> set[str]:
    return {parameter.name for parameter in ctx.command.params if parameter.name} - {"config", "help", "verbose"}


def _check_variables(ctx: typer.Context) -> None:
    prefix, known = f"{ctx.auto_envvar_prefix}_", _known(ctx) | {"config"}
    for variable in sorted(os.environ):
        if variable.startswith(prefix) and variable.removeprefix(prefix).lower() not in known:
            raise ConfigError(variable, os.environ[variable], "unknown setting in the environment")


def _read_file(ctx: typer.Context, path: Path) -> dict[str, Any]:
    file, known = settings.read_file(path), _known(ctx)
    for key, given in file.items():
        if key not in known:
            raise ConfigError(key, given, f"unknown setting in the config file; known: {', '.join(sorted(known))}")
    return file


def _as_typed(key: str, value: Any) -> Any:
    """The value as on a command line, so that the same checks apply. Raises: ConfigError for a table."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, dict):
        raise ConfigError(key, value, "must be a plain value")
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
