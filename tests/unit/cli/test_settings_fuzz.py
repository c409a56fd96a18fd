"""Any value of a setting is accepted, or rejected by name, never with a traceback."""

from __future__ import annotations

import dataclasses
import datetime
import typing
from pathlib import Path
from typing import Any

import pytest

from diptych.cli.serve.config import ServeConfig
from diptych.cli.settings import merge as settings
from diptych.cli.up.config import UpConfig
from diptych.common.errors import ConfigError
from diptych.router.config import RouterConfig
from diptych.worker.config import WorkerConfig
from diptych.worker.rank_config import RankConfig

CONFIGS = (UpConfig, ServeConfig, RouterConfig, WorkerConfig, RankConfig)
FIELDS = [(cls, field.name) for cls in CONFIGS for field in dataclasses.fields(cls)]
HUGE_IS_FINE = {"kv_memory_bytes", "disk_kv_bytes", "fault_corrupt_every"}
WRONG: list[Any] = [
    [], [1], {}, {"a": 1}, None, float("nan"), float("inf"), -float("inf"), "a\0b", b"\xff", {1}, object(),
    datetime.date(2024, 1, 1), 10**11, 2**63, 2**64, -1, -(2**70), 1.5, True, "", "x", "\ud800", "9" * 5000, "1e400", [[1]],
    "nan", (), ["a", None],
]  # fmt: skip


def hint_of(cls: type, name: str) -> Any:
    return settings.hints_of(cls)[name]


def needed(cls: type) -> dict[str, Any]:
    known: dict[type, dict[str, Any]] = {
        RouterConfig: {"model": "/m", "secret_file": "/s"},
        WorkerConfig: {"role": "decode"},
        RankConfig: {"master_addr": "127.0.0.1", "node_rank": 1, "secret_file": "/s"},
    }
    return known.get(cls, {})


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=[f"{cls.__name__}.{name}" for cls, name in FIELDS])
def test_a_key_with_anything_in_it(cls: type, name: str) -> None:
    for value in WRONG:
        try:
            made = settings.merge(cls, {}, environ={}, file=needed(cls) | {name: value})
        except ConfigError:
            continue
        got, hint = getattr(made, name), hint_of(cls, name)
        arms = [arm for arm in typing.get_args(hint) if arm is not type(None)] or [hint]
        kinds = (tuple,) if typing.get_origin(hint) is tuple else (*arms, type(None))
        assert isinstance(got, kinds), (value, got)


INTEGERS = [(cls, name) for cls, name in FIELDS if int in (hint_of(cls, name), *typing.get_args(hint_of(cls, name)))]


@pytest.mark.parametrize(("cls", "name"), INTEGERS, ids=[f"{cls.__name__}.{name}" for cls, name in INTEGERS])
def test_absurd_integers(cls: type, name: str) -> None:
    for value in (10**11, 2**63, 2**64, -1, -(2**63) - 1):
        if value == 10**11 and name in HUGE_IS_FINE:
            continue
        for given in (value, str(value)):
            with pytest.raises(ConfigError) as caught:
                settings.merge(cls, {name: given}, environ={}, file=needed(cls))
            assert str(caught.value).startswith(f"{name}="), caught.value


@pytest.mark.parametrize("suffix", [".yaml", ".toml"])
def test_a_key_given_twice(suffix: str, tmp_path: Path) -> None:
    sign = "=" if suffix == ".toml" else ":"
    for first, second in (("http_port", "http-port"), ("http-port", "http_port"), ("http_port", "http_port")):
        file = tmp_path / f"settings{suffix}"
        file.write_text(f"{first} {sign} 1\n{second} {sign} 2\n")
        with pytest.raises(ConfigError, match=r"twice|overwrite"):
            settings.read_file(file)


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".yaml", "http-port: 0x" + "F" * 50_000),
        (".yaml", "model: 0x" + "F" * 50_000),
        (".yaml", 'a: !!timestamp "x"'),
        (".yaml", 'http-port: !!bool "x"'),
        (".yaml", "1: 2"),
        (".yaml", "null: 2"),
        (".yaml", "a: " + "[" * 5000),
        (".yaml", "a: !!int x"),
        (".yaml", "a: !!float x"),
        (".yaml", "a: !!set [1]"),
        (".yaml", "a: !!omap 3"),
        (".toml", "http-port = " + "9" * 5000),
        (".toml", "http-port = " + "9" * 4000),
        (".toml", "a = " + "[" * 5000),
        (".toml", "http-port = 2024-01-01"),
        (".toml", "[http-port]\na = 1"),
    ],
    ids=range(16),
)
def test_files_that_break_their_readers(suffix: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / f"settings{suffix}"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        settings.merge(ServeConfig, {}, environ={}, file=settings.read_file(file))
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "text", ["a: 2024-13-45", "a: &a [*a]", "? [1]\n: 2", "a: !!binary x", "a: !!python/object:os.system x"]
)
def test_yaml_that_makes_no_sense(text: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        settings.merge(ServeConfig, {}, environ={}, file=settings.read_file(file))
