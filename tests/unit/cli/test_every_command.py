"""Every command that has settings: command line > environment > file > default, the merged result on stderr with -v, unknown
keys refused by name."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner, Result

from diptych.cli import capacity, chat, explain, main, move, top
from diptych.cli.bench import command as bench
from diptych.cli.bench import run as bench_run
from diptych.cli.doctor import command as doctor
from diptych.cli.serve.config import ServeConfig
from diptych.cli.settings.options import add_settings_command
from diptych.common.errors import DiptychError

SERVERS = ("up", "serve", "router", "prefill", "decode")
NODE = ["--master-addr", "127.0.0.1", "--node-rank", "1", "--secret-file", "s"]
OTHERS: list[tuple[str, list[str], str, tuple[str, str, str]]] = [
    ("chat", [], "max_tokens", ("3", "4", "5")),
    ("explain", ["some-id"], "address", ("a:1", "b:2", "c:3")),
    ("move", ["some-id", "--secret-file", "s"], "address", ("a:1", "b:2", "c:3")),
    ("what-if", ["--prompt", "a"], "max_tokens", ("3", "4", "5")),
    ("doctor", [], "sample_s", ("0.5", "0.25", "2.0")),
    ("top", [], "every_s", ("0.5", "0.25", "2.0")),
    ("capacity", ["folder"], "memory_gib", ("0.5", "0.25", "2.0")),
    ("bench serve", [], "num_requests", ("3", "4", "5")),
    ("bench compare", ["http://a", "http://b"], "input_len", ("3", "4", "5")),
    ("bench sweep", [], "input_len", ("3", "4", "5")),
    ("bench replay", ["trace"], "num_requests", ("3", "4", "5")),
    ("bench startup", [], "repeats", ("2", "3", "4")),
]


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands end where their work would begin."""

    def instead(*args: Any, **more: Any) -> int:
        return 0

    def asked(*args: Any) -> Any:
        raise DiptychError("asked")

    monkeypatch.setattr(chat, "run_chat", instead)
    monkeypatch.setattr(doctor, "run_doctor", instead)
    monkeypatch.setattr(top, "run_top", instead)
    monkeypatch.setattr(capacity, "run_capacity", instead)
    monkeypatch.setattr(explain, "_call", asked)
    monkeypatch.setattr(move, "call_operator", asked)
    monkeypatch.setattr(bench_run, "serve", instead)
    monkeypatch.setattr(bench_run, "sweep", instead)
    monkeypatch.setattr("diptych.bench.cli.startup.run_startup", instead)

    def add(app: Any, name: str, cls: type, run: Any, **more: Any) -> None:
        add_settings_command(app, name, cls, instead, **more)

    monkeypatch.setattr(main, "add_settings_command", add)


def run(command: str, *arguments: str) -> Result:
    names = command.split()
    app = bench.build_app(names[-1]) if names[0] == "bench" else main.build_app(names[0])
    return CliRunner().invoke(app, [names[-1], *arguments])


def said(result: Result, key: str) -> str:
    """The key's value in the line that a command with -v begins with."""
    line = result.stderr.splitlines()[0]
    if line.startswith("{"):
        return str(json.loads(line)["settings"][key])
    return dict(part.split("=", 1) for part in line.partition(": ")[2].split(", ") if "=" in part)[key]


ALL = [
    *((name, list[str](), "max_model_len", ("256", "512", "1024")) for name in SERVERS),
    ("rank", NODE, "threads", ("2", "3", "4")),
    *OTHERS,
]
WITH_CLASS = (*SERVERS, "rank")
"""Whose settings are a class, by variables without the command's name."""


@pytest.mark.parametrize(("command", "needed", "key", "values"), ALL, ids=[case[0] for case in ALL])
def test_four_places_in_their_order(
    command: str,
    needed: list[str],
    key: str,
    values: tuple[str, str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_file, in_environment, in_flag = values
    own = command in WITH_CLASS
    prefix = "DIPTYCH_" if own else f"DIPTYCH_{command.replace(' ', '_').replace('-', '_').upper()}_"
    file = tmp_path / "settings.toml"
    file.write_text(f'{key.replace("_", "-")} = "{in_file}"\n')
    default = said(run(command, "-v", *needed), key)
    assert default not in values
    monkeypatch.setenv(f"{prefix}CONFIG", str(file))
    assert said(run(command, "-v", *needed), key) == in_file
    monkeypatch.delenv(f"{prefix}CONFIG")
    with_file = [*needed, "--config", str(file)]
    assert said(run(command, "-v", *with_file), key) == in_file
    monkeypatch.setenv(prefix + key.upper(), in_environment)
    assert said(run(command, "-v", *with_file), key) == in_environment
    flag = f"--{key.replace('_', '-')}"
    assert said(run(command, "-v", *with_file, flag, in_flag), key) == in_flag


@pytest.mark.parametrize(("command", "needed"), [case[:2] for case in ALL], ids=[case[0] for case in ALL])
def test_unknown_keys_are_refused_by_name(
    command: str, needed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max-tokesn: 3\n")
    refused = run(command, *needed, "--config", str(file))
    assert refused.exit_code == 2
    assert "max_tokesn" in refused.stderr
    assert "unknown setting in the config file; known: " in refused.stderr
    assert run(command, *needed, "--max-tokesn", "3").exit_code == 2
    prefix = "" if command in WITH_CLASS else command.replace(" ", "_").replace("-", "_").upper() + "_"
    monkeypatch.setenv(f"DIPTYCH_{prefix}MAX_TOKESN", "3")
    refused = run(command, *needed)
    assert refused.exit_code == 2
    assert f"DIPTYCH_{prefix}MAX_TOKESN" in refused.stderr


@pytest.mark.parametrize(("command", "needed"), [case[:2] for case in ALL], ids=[case[0] for case in ALL])
def test_settings_are_printed_with_v_only(command: str, needed: list[str]) -> None:
    """They stood before every answer of `explain`."""
    assert "=" not in run(command, *needed).stderr
    for flag in ("-v", "--verbose"):
        first = run(command, *needed, flag).stderr.splitlines()[0]
        if command in WITH_CLASS and command != "up":  # a line of its log like every other
            assert json.loads(first).items() >= {"event": "settings", "command": command}.items()
        else:
            assert first.startswith(f"{command}: ")
            assert "=" in first


@pytest.mark.parametrize("command", SERVERS)
def test_secrets_are_not_printed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if command == "serve":
        return  # it has no Redis
    monkeypatch.setenv("DIPTYCH_REDIS_URL", "redis://me:hush@127.0.0.1:1/0")
    result = run(command, "-v")
    assert result.exit_code == 0, result.stderr
    assert "redis://me:***@" in result.stderr
    assert "hush" not in result.stderr


@pytest.mark.parametrize("command", SERVERS)
def test_servers_that_others_can_reach_want_keys_and_tls(command: str, tmp_path: Path) -> None:
    """Workers require cluster certificates."""
    for host in ("0.0.0.0", "::", "10.0.0.1", "host.example"):
        refused = run(command, "--host", host)
        assert refused.exit_code == 2, (command, host)
        assert "host=" in refused.stderr
        assert "insecure" in refused.stderr
        assert run(command, "--host", host, "--insecure").exit_code == 0
    cluster = [f"--cluster-{name}={tmp_path / name}" for name in ("ca", "cert", "key")]
    clients = [f"--{name}={tmp_path / name}" for name in ("keys-file", "tls-cert", "tls-key")]
    needed = cluster if command in ("prefill", "decode") else clients
    assert run(command, "--host", "0.0.0.0", *needed).exit_code == 0
    for missing in range(
        len(needed) if needed is clients else 0
    ):  # a worker reports what is missing when it reads the rest
        assert run(command, "--host", "0.0.0.0", *needed[:missing], *needed[missing + 1 :]).exit_code == 2
    assert run(command, "--host", "127.0.0.1").exit_code == run(command, "--host", "localhost").exit_code == 0


def options_of(command: str) -> list[tuple[str, type]]:
    """Numeric flags."""
    names = command.split()
    app = bench.build_app(names[-1]) if names[0] == "bench" else main.build_app(names[0])
    found = []
    for info in app.registered_commands:
        if (info.name or info.callback.__name__) == names[-1]:
            for name, parameter in inspect.signature(info.callback).parameters.items():
                hint = typing.get_args(parameter.annotation)[0]
                kind = next((arm for arm in (hint, *typing.get_args(hint)) if arm in (int, float)), None)
                if kind is not None:
                    found.append((f"--{name.replace('_', '-')}", kind))
    return found


@pytest.mark.parametrize(("command", "arguments"), [case[:2] for case in OTHERS], ids=[case[0] for case in OTHERS])
def test_numbers_and_texts_of_the_other_commands(command: str, arguments: list[str]) -> None:
    texts = [argument for argument in arguments if not argument.startswith("-") and command in ("explain", "what-if")]
    for text in texts:
        result = run(command, *(text + "\udcff" if argument == text else argument for argument in arguments))
        assert (result.exit_code, "must be valid UTF-8" in result.stderr) == (2, True), result.exception
    for flag, kind in options_of(command):
        values = ("nan", "x") if kind is float else (str(2**64), str(-(2**64)), "9" * 5000)
        for value in values:
            result = run(command, *arguments, flag, value)
            assert result.exit_code == 2, (flag, value, result.output, result.exception)


@pytest.mark.parametrize("command", [case[0] for case in OTHERS])
def test_a_variable_has_its_flags_name(command: str) -> None:
    names = command.split()
    app = bench.build_app(names[-1]) if names[0] == "bench" else main.build_app(names[0])
    for info in app.registered_commands:
        if (info.name or info.callback.__name__) == names[-1]:
            for name, parameter in inspect.signature(info.callback).parameters.items():
                for flag in getattr(typing.get_args(parameter.annotation)[1], "param_decls", None) or ():
                    assert not flag.startswith("--") or flag.split("/")[0][2:].replace("-", "_") == name


def all_commands() -> Iterator[tuple[str, Any]]:
    def below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
        for one, its in (inner or {}).items():
            yield from below(f"{name} {one}".strip(), its)

    yield from below("", typer.main.get_command(main.build_app(None)))
    yield from below("bench", typer.main.get_command(bench.build_app(None)))


COMMANDS = dict(all_commands())


@pytest.mark.parametrize("command", COMMANDS)
def test_5_8_every_flag_has_a_help_text_of_its_own(command: str) -> None:
    texts: dict[str, str] = {}
    for parameter in COMMANDS[command].params:
        text = re.sub(r"\s*\[default: .*\]$", "", getattr(parameter, "help", None) or "").strip()
        assert text, f"{command}: {parameter.name} has none"
        assert text not in texts, f"{command}: {parameter.name} has that of {texts[text]}"
        texts[text] = parameter.name


def test_5_8_serve_writes_no_access_log_when_switched_off() -> None:
    assert ServeConfig().parts(model="", name="", secret_file="")[0].access_log
    assert not ServeConfig(access_log=False).parts(model="", name="", secret_file="")[0].access_log
