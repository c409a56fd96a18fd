"""Commands whose flags are the fields of a settings dataclass: one definition of name, type, default and help."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from diptych.cli.settings import merge as settings
from diptych.cli.stderr import write_line
from diptych.common.errors import ConfigError

CONFIG_FILE = typer.Option(
    "--config",
    help="YAML or TOML file with settings; flags and variables (--http-port: DIPTYCH_HTTP_PORT) override it.",
)

VERBOSE = typer.Option("--verbose", "-v", help="Print the merged settings, passwords masked, on stderr first.")


def field_help(cls: type) -> dict[str, str]:
    """The texts of the class docstring's Args section by field name."""
    found: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        start = re.match(r"\s*([a-z_][a-z_0-9, ]*): (.*)", line)
        if start:
            name = start.group(1)
            found.update(dict.fromkeys(re.split(r",\s*", name), start.group(2).strip()))
        elif name and line.strip():
            for one in re.split(r",\s*", name):
                found[one] = f"{found[one]} {line.strip()}"
        else:
            name = ""
    return found


def not_built() -> None:
    raise AssertionError("only the selected command is built")


def build_only(app: typer.Typer, name: str) -> None:
    """Of commands other than `name` only name and help remain, and of groups if it is none of them: to describe every flag of all
    takes longer than to run one. Nothing changes where there is no `name`."""
    groups = {_name_of(info): info for info in app.registered_groups}
    commands = {_name_of(info): info for info in app.registered_commands}
    if name not in groups and name not in commands:
        return
    for other, command in commands.items():
        if other != name:
            command.help = command.help or inspect.getdoc(command.callback)
            command.name, command.callback = other, not_built
    if name in groups:
        return
    app.registered_groups.clear()
    for other, group in groups.items():
        app.command(other, help=group.typer_instance.info.help if group.typer_instance else "")(not_built)


def _name_of(info: Any) -> str:
    """Of a command, or of a group."""
    group = getattr(info, "typer_instance", None)
    return str(info.name or (group.info.name if group else info.callback.__name__.replace("_", "-")))


def add_settings_command(
    app: typer.Typer,
    name: str,
    cls: type,
    run: Callable[..., int],
    *,
    known: Callable[[], Sequence[type]],
    help: str,
    flags: Mapping[str, Any] | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> None:
    """Add command `name`: merge settings for `cls` (-v prints them), call run(config, **flags), exit with its result.

    Args:
        known: gives all settings classes; a DIPTYCH_* variable that is a field of none is an error.
        flags: further boolean options, by parameter name, that are not settings.
        fixed: fields set by the command itself.
    """
    fixed = dict(fixed or {})
    extra = dict(flags or {})
    fields = [field for field in dataclasses.fields(cls) if field.name not in fixed]

    def command(**values: Any) -> None:
        config_path = values.pop("config", None) or os.environ.get("DIPTYCH_CONFIG")
        verbose = values.pop("verbose", False)
        more = {key: values.pop(key) for key in extra}
        values = {name: listed(value) for name, value in values.items()}
        elsewhere = frozenset(field.name for other in known() for field in dataclasses.fields(other))
        try:
            file = settings.read_file(Path(config_path)) if config_path else {}
            config: Any = settings.merge(cls, values | fixed, environ=os.environ, file=file, known_elsewhere=elsewhere)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        if verbose and not more.get("detach"):  # the background process prints them
            write_line(_settings_text(name, config))
        raise typer.Exit(run(config, **more))

    texts = field_help(cls)
    hints = typing.get_type_hints(cls)
    parameters = [_parameter(field, hints[field.name], texts.get(field.name, "")) for field in fields]
    parameters.append(_keyword("config", Annotated[Path | None, CONFIG_FILE], None))
    parameters.append(_keyword("verbose", Annotated[bool, VERBOSE], False))
    parameters += [_keyword(key, annotation, False) for key, annotation in extra.items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, help=help)(command)


def listed(value: Any) -> Any:
    """All values of a flag that may be given several times, each with commas; None: it was not given. Others as they are."""
    if not isinstance(value, (list, tuple)):
        return value
    return [part for one in value for part in settings.split_list(one)] or None


def _settings_text(name: str, config: Any) -> str:
    from diptych.common.observe.logging import writes_json

    if name != "up" and writes_json():  # `up` prints for people; stderr of the others is their log
        return settings.log_line(name, config)
    return f"{name}: {settings.describe(config)}"


def _parameter(field: dataclasses.Field[Any], hint: Any, text: str) -> inspect.Parameter:
    flag = "--" + field.name.replace("_", "-")
    if field.default not in (None, "", (), dataclasses.MISSING):
        text = f"{text} [default: {field.default}]".lstrip()
    if hint is bool:
        option = typer.Option(f"{flag}/--no-{flag[2:]}", help=text)
        return _keyword(field.name, Annotated[bool | None, option], None)
    if typing.get_origin(hint) is tuple:
        option = typer.Option(flag, help=text, metavar="TEXT")
        return _keyword(field.name, Annotated[list[str] | None, option], None)
    arms = [arm for arm in typing.get_args(hint) if arm is not type(None)] or [hint]
    metavar = {int: "N", float: "X", Path: "PATH"}.get(arms[0], "TEXT")
    option = typer.Option(flag, help=text, metavar=metavar)
    return _keyword(field.name, Annotated[str | None, option], None)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
