"""Bench commands: positional arguments, and the flags of one or more settings dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from diptych.cli.settings import merge as settings
from diptych.cli.settings.options import _keyword, _parameter, field_help, listed
from diptych.common.errors import ConfigError


def add_bench_command(
    app: typer.Typer,
    name: str,
    classes: Mapping[str, type],
    run: Callable[..., int],
    *,
    help: str,
    arguments: Mapping[str, tuple[Any, Any]] | None = None,
    defaults: Mapping[str, Any] | None = None,
    hidden: Sequence[str] = (),
    fixed: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> None:
    """Add command `name`: build one object of each settings class from the flags, call run(**objects, **arguments).

    Args:
        classes: keyword of `run` -> settings class.
        arguments: keyword of `run` -> (annotation, default).
        defaults: override the classes' defaults.
        hidden: fields without a flag.
        fixed: fields derived from the arguments.
    """
    defaults, arguments = dict(defaults or {}), dict(arguments or {})
    parameters = [_keyword(key, annotation, default) for key, (annotation, default) in arguments.items()]
    # typer treats a parameter without default as positional
    parameters = [p.replace(default=inspect.Parameter.empty) if p.default is ... else p for p in parameters]
    for cls in classes.values():
        texts, hints = field_help(cls), typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name in hidden:
                continue
            parameters.append(_flag(field, hints[field.name], texts.get(field.name, ""), defaults))

    def command(*, verbose: bool = False, **values: Any) -> None:
        given = {key: values.pop(key) for key in arguments}
        values = {key: listed(value) for key, value in values.items()}
        try:
            chosen = defaults | dict(fixed(given) if fixed else {})
            built = {key: _build(cls, values, chosen) for key, cls in classes.items()}
            reported = settings.describe_values({key: value for key, value in given.items() if value not in (None, "")})
            if verbose:
                described = ", ".join(filter(None, (reported, *map(settings.describe, built.values()))))
                print(f"bench {name}: {described}", file=sys.stderr)
            code = run(**built, **given)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        raise typer.Exit(code)

    command.prints_settings = True  # type: ignore[attr-defined]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, help=help)(command)


def _flag(field: dataclasses.Field[Any], hint: Any, text: str, defaults: Mapping[str, Any]) -> inspect.Parameter:
    if field.name not in defaults:
        return _parameter(field, hint, text)
    copied = dataclasses.field(default=defaults[field.name])
    copied.name = field.name
    return _parameter(copied, hint, text)


def _build(cls: type, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
    """Raises: ConfigError."""
    names = {field.name for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    chosen = {name: value for name, value in defaults.items() if name in names}
    chosen |= {
        name: settings.convert(name, value, hints[name])
        for name, value in values.items()
        if name in names and value is not None
    }
    return cls(**chosen)
