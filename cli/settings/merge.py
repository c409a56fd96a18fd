"""A command's settings, merged from four sources: command line > environment > file > default.

Settings are the fields of a frozen dataclass. In the environment the field `http_port` is DIPTYCH_HTTP_PORT; in a file
(YAML or TOML) it is `http-port` or `http_port`. An unknown key is an error in every source. A field may name a variable of other
tools (`variable` of its metadata), which comes last.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from diptych.common.errors import ConfigError

ENV_PREFIX = "DIPTYCH_"
# Read by other modules (common/paths.py, logging, compiled, cli/router_access.py): not settings of a command.
ENV_ELSEWHERE = frozenset(
    {
        "DIPTYCH_RUN_DIR",
        "DIPTYCH_LOG_LEVEL",
        "DIPTYCH_LOG_JSON",
        "DIPTYCH_API_KEY",
        "DIPTYCH_CONFIG",
        "DIPTYCH_NATIVE_LANES",
        "DIPTYCH_TLS_CA",
        "DIPTYCH_TLS_SERVER_NAME",
    }
)
COMMAND_PREFIXES = tuple(
    f"DIPTYCH_{command}_" for command in ("CHAT", "EXPLAIN", "WHAT_IF", "DOCTOR", "TOP", "CAPACITY", "BENCH")
)
"""Variables of client commands, which cli/settings/option_sources.py reads: not settings of a server."""
_SECRET_WORDS = ("secret", "password", "token_key", "api_key")
_CLIENTS_KEY = "DIPTYCH_API_KEY"
_PASSWORD = re.compile(r"(?<=password=)[^&#]+", re.IGNORECASE)
"""In a URL's query, as redis-py takes it."""
_MOST = 2**63 - 1
_KINDS: Mapping[type, str] = {int: "an integer", float: "a number", str: "text"}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

Config = TypeVar("Config")


def read_file(path: Path) -> dict[str, Any]:
    """The file's keys, with `-` replaced by `_`. Raises: ConfigError when it cannot be read or is not a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError("config", str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError("config", str(path), "is not UTF-8") from None
    if path.suffix == ".toml":
        try:
            data: Any = tomllib.loads(text)
        except ValueError as error:  # also for a number of thousands of digits
            raise ConfigError("config", str(path), f"is not TOML: {error}") from None
        except RecursionError:
            raise ConfigError("config", str(path), "is nested too deep") from None
    elif path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            _check_given_once(yaml.compose(text, yaml.SafeLoader))
            data = yaml.safe_load(text) or {}
        except ConfigError:
            raise
        except RecursionError:
            raise ConfigError("config", str(path), "is nested too deep") from None
        except Exception as error:  # constructors of YAML tags raise any exception: `!!bool "x"` a KeyError
            raise ConfigError("config", str(path), f"is not YAML: {error}") from None
    else:
        raise ConfigError("config", str(path), "must end in .yaml, .yml or .toml")
    if not isinstance(data, dict):
        raise ConfigError("config", str(path), "must be a mapping of setting to value")
    found: dict[str, Any] = {}
    for key, value in data.items():
        if not isinstance(key, str):
            raise ConfigError("config", str(path), f"has a key that is not text but of type {type(key).__name__}")
        name = key.replace("-", "_")
        if name in found:
            raise ConfigError(name, value, f"is given twice in {path} (- and _ are the same)")
        found[name] = value
    return found


def _check_given_once(tree: Any) -> None:
    """Raises: ConfigError for a duplicate key in a YAML mapping."""
    seen: set[str] = set()
    for key, _ in tree.value if getattr(tree, "id", "") == "mapping" else ():
        if isinstance(key.value, str):
            if key.value in seen:
                raise ConfigError(key.value, "", "is given twice in the config file")
            seen.add(key.value)


@functools.cache
def hints_of(cls: type) -> Mapping[str, Any]:
    """The types of a class's fields, each evaluated once: not to be changed."""
    return typing.get_type_hints(cls)


def merge(
    cls: type[Config],
    command_line: Mapping[str, Any],
    *,
    environ: Mapping[str, str],
    file: Mapping[str, Any] | None = None,
    known_elsewhere: frozenset[str] = frozenset(),
) -> Config:
    """Build `cls` from the four sources.

    Args:
        command_line: flag values by field name; None means not given.
        file: content of the config file.
        known_elsewhere: fields of other commands: allowed in the environment, not used here.
    Raises: ConfigError for an unknown key or a value of the wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = hints_of(cls)  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, value in (file or {}).items():
        if key not in fields:
            raise ConfigError(key, value, f"unknown setting in the config file; known: {', '.join(sorted(fields))}")
        sources[key] = "in the config file"
        values[key] = _from(sources[key], key, value, hints[key])
    for name, text in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or name in ENV_ELSEWHERE or name.startswith(COMMAND_PREFIXES):
            continue
        key = name.removeprefix(ENV_PREFIX).lower()
        if key in fields:
            sources[key] = f"from {name}"
            values[key] = _from(sources[key], key, text, hints[key])
        elif key not in known_elsewhere:
            raise ConfigError(name, _mask(key, text), "unknown setting in the environment")
    for key, value in command_line.items():
        if value is not None:
            sources[key] = f"from --{key.replace('_', '-')}"
            values[key] = _from(sources[key], key, value, hints[key])
    for key, field in fields.items():
        variable = field.metadata.get("variable", "")
        if key in values or variable not in environ or not _applies(field, fields, values):
            continue
        sources[key] = f"from {variable}"
        values[key] = _from(sources[key], key, environ[variable], hints[key])
    for key, value in values.items():
        if isinstance(value, float) and math.isinf(value):
            raise ConfigError(key, value, f"must be a finite number ({sources[key]})")
    try:
        return cls(**values)
    except ConfigError as error:
        if error.field not in sources:
            raise
        raise ConfigError(error.field, error.value, f"{error.rule} ({sources[error.field]})") from None


def _applies(
    field: dataclasses.Field[Any], fields: Mapping[str, dataclasses.Field[Any]], values: Mapping[str, Any]
) -> bool:
    """Whether a variable of other tools, such as MASTER_ADDR, sets the field: where another field is set, if it names one."""
    other = field.metadata.get("with", "")
    return not other or values.get(other, fields[other].default) != fields[other].default


def _from(source: str, key: str, value: Any, hint: Any) -> Any:
    """See convert; an error names the source of the value."""
    try:
        return convert(key, value, hint)
    except ConfigError as error:
        raise ConfigError(key, _mask(key, value), f"{error.rule} ({source})") from None


def convert(key: str, value: Any, hint: Any) -> Any:
    """Bring a value to the field's type. Raises: ConfigError."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        if value is None or value == "":
            return None
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    if isinstance(value, str):
        check_text(key, value)
    if hint is bool:
        text = str(value).lower()
        if text not in _TRUE + _FALSE:
            raise ConfigError(key, value, "must be true or false")
        return text in _TRUE
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, (str, list, tuple)):
            raise ConfigError(key, value, "must be a list")
        items = split_list(value) if isinstance(value, str) and value else value
        return tuple(convert(key, item, typing.get_args(hint)[0]) for item in items)
    if hint is Path:
        if not isinstance(value, (str, Path)):
            raise ConfigError(key, value, "must be a path")
        return Path(value)
    if hint is str and isinstance(value, datetime.date):  # YAML parses a name such as 2024-01-01 as a date
        return str(value)
    if hint in (int, float, str):
        if isinstance(value, bool) or (hint is int and isinstance(value, float)) or not _is_plain(value):
            raise ConfigError(key, value, f"must be {_KINDS[hint]}")
        try:
            made = hint(value)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(key, value, f"must be {_KINDS[hint]}") from None
        check_number(key, made)
        return made
    return value


def split_list(text: str) -> list[str]:
    """The parts between commas; the commas of a JSON object separate nothing."""
    parts, depth, quoted, escaped, start = [], 0, False, False, 0
    for at, char in enumerate(text):
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif depth and char == '"':
            quoted = True
        elif char == "{" and (depth or not text[start:at].strip()):
            depth += 1
        elif char == "}" and depth:
            depth -= 1
        elif char == "," and not depth:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float))


def check_text(key: str, value: str) -> None:
    """Raises: ConfigError for text that no protocol or file system accepts. Invalid UTF-8 on a command line arrives as
    lone surrogates."""
    if "\0" in value:
        raise ConfigError(key, value, "must not hold a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(key, ascii(value), "must be valid UTF-8") from None


def check_number(key: str, value: Any) -> None:
    """Raises: ConfigError for a number that does not fit into 64 bits, or NaN."""
    if isinstance(value, int) and not -_MOST - 1 <= value <= _MOST:
        raise ConfigError(key, value, "must be a number of at most 64 bits")
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(key, value, "must be a number")


def describe(config: Any) -> str:
    """The merged settings in one line, secrets masked."""
    return describe_values({field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def log_line(command: str, config: Any) -> str:
    """The merged settings as a line of a JSON log, secrets masked."""
    merged = {field.name: str(_mask(field.name, getattr(config, field.name))) for field in dataclasses.fields(config)}
    line = {"event": "settings", "level": "info", "command": command, "settings": merged}
    return json.dumps(line | {"timestamp": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")})


def describe_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_mask(name, value)!s}" for name, value in values.items())


def child_environment(cls: type) -> dict[str, str]:
    """This environment without the settings of `cls`, which children get as flags; settings of the children alone stay."""
    own = {field.name for field in dataclasses.fields(cls)} | {"config"}
    return {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith(ENV_PREFIX) and name.removeprefix(ENV_PREFIX).lower() in own) and name != _CLIENTS_KEY
    }


def _mask(name: str, value: Any) -> Any:
    if any(word in name for word in _SECRET_WORDS) and not name.endswith("_file"):
        return "***" if value else value
    return _masked_url(value) if isinstance(value, str) and "://" in value else value


def _masked_url(url: str) -> str:
    """Whatever is before the last @ behind a colon may be a password, also in a URL that no parser accepts."""
    scheme, _, rest = _PASSWORD.sub("***", url).partition("://")
    user, at, where = rest.rpartition("@")
    name, colon, _ = user.partition(":")
    return f"{scheme}://{name}{':***' if colon else ''}{at}{where}"
