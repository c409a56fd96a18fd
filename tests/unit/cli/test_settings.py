from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from diptych.cli.settings import merge as settings
from diptych.cli.settings.options import add_settings_command
from diptych.cli.up.config import UpConfig
from diptych.common.errors import ConfigError
from diptych.worker.config import WorkerConfig
from diptych.worker.rank_config import RankConfig


@dataclass(frozen=True)
class Example:
    http_port: int = 1
    ratio: float = 0.5
    name: str = "default"
    limit: int | None = None
    fast: bool = False
    api_key: str = ""
    redis_url: str = ""


def merge(flags=None, environ=None, file=None, **more) -> Example:
    return settings.merge(Example, flags or {}, environ=environ or {}, file=file, **more)


def test_flag_beats_environment_beats_file_beats_default():
    environ = {"DIPTYCH_HTTP_PORT": "3", "DIPTYCH_RATIO": "0.75"}
    file = {"http_port": 2, "ratio": 0.25, "name": "file"}
    config = merge({"http_port": "4", "ratio": None}, environ, file)
    assert config == Example(http_port=4, ratio=0.75, name="file")


def test_unknown_key_in_file_names_itself_and_the_known_ones():
    with pytest.raises(ConfigError, match=r"http_prot=8: unknown setting in the config file; known: .*http_port"):
        merge(file={"http_prot": 8})


def test_unknown_environment_key_is_an_error_but_another_commands_is_not():
    with pytest.raises(ConfigError, match="DIPTYCH_HTTP_PROT"):
        merge(environ={"DIPTYCH_HTTP_PROT": "8"})
    other = {"DIPTYCH_ROLE": "x", "DIPTYCH_RUN_DIR": "/x"}
    assert merge(environ=other, known_elsewhere=frozenset({"role"})) == Example()


@pytest.mark.parametrize(
    ("key", "value"),
    [("http_port", "many"), ("http_port", 1.5), ("http_port", True), ("fast", "maybe"), ("ratio", [1])],
)
def test_wrong_type_names_field_and_value(key, value):
    with pytest.raises(ConfigError, match=key):
        merge(file={key: value})


def test_optional_and_bool():
    assert merge({"limit": "7", "fast": "yes"}) == Example(limit=7, fast=True)
    assert merge({"limit": ""}) == Example()


def test_secrets_are_masked():
    line = settings.describe(Example(api_key="hush", redis_url="redis://me:hush@there:6379/0"))
    assert "api_key=***" in line
    assert "redis_url=redis://me:***@there:6379/0" in line
    assert "hush" not in line


@pytest.mark.parametrize(
    ("name", "text"), [("c.yaml", "http-port: 8\nname: x\n"), ("c.toml", 'http-port = 8\nname = "x"\n')]
)
def test_file_formats(tmp_path: Path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert settings.read_file(path) == {"http_port": 8, "name": "x"}


@pytest.mark.parametrize(("name", "text"), [("c.yaml", "a: [1"), ("c.toml", "a ="), ("c.yaml", "- 1"), ("c.ini", "")])
def test_bad_files(tmp_path: Path, name, text):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match="config="):
        settings.read_file(path)


def test_files_that_are_no_text_or_nested_without_end(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        settings.read_file(path)
    path.write_text("[" * 20_000)
    with pytest.raises(ConfigError, match="is nested too deep"):
        settings.read_file(path)


def test_missing_file(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        settings.read_file(tmp_path / "none.yaml")


def test_children_get_settings_of_ours_as_flags_and_their_own_by_environment(monkeypatch):
    monkeypatch.setenv("DIPTYCH_HTTP_PORT", "1")
    monkeypatch.setenv("DIPTYCH_LOG_LEVEL", "debug")
    monkeypatch.setenv("DIPTYCH_SCHEDULING_POLICY", "sjf")
    env = settings.child_environment(UpConfig)
    assert "DIPTYCH_HTTP_PORT" not in env
    assert env["DIPTYCH_LOG_LEVEL"] == "debug"
    assert env["DIPTYCH_SCHEDULING_POLICY"] == "sjf"


@dataclass(frozen=True)
class Listed:
    lora_dir: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (1, 2)


def test_a_list_is_given_by_one_flag_with_commas_or_by_several() -> None:
    seen: list[Listed] = []
    app = typer.Typer()
    app.callback()(lambda: None)
    add_settings_command(
        app, "run", Listed, lambda config: int(not seen.append(config)) - 1, known=lambda: [Listed], help="A test."
    )

    def given(*flags: str) -> Listed:
        result = CliRunner().invoke(app, ["run", *flags])
        assert result.exit_code == 0, result.output
        return seen.pop()

    assert given() == Listed()
    assert given("--lora-dir", "a,b", "--lora-dir", "c", "--sizes=3") == Listed(("a", "b", "c"), (3,))
    environ = {"DIPTYCH_LORA_DIR": "d,e"}
    assert settings.merge(Listed, {}, environ=environ) == Listed(("d", "e"))
    objects = ('{"a": 1, "b": {"c": "}, \\\\\\", {"}}', '{"d": [2, 3]}')
    assert given("--lora-dir", f"x,{objects[0]},{objects[1]}", "--lora-dir", "y{,z") == Listed(
        ("x", *objects, "y{", "z")
    ), "the commas of a JSON object separate nothing"
    assert settings.merge(Listed, {"lora_dir": ["a"]}, environ=environ) == Listed(("a",))
    assert settings.merge(Listed, {}, environ={"DIPTYCH_LORA_DIR": ""}) == Listed()
    assert CliRunner().invoke(app, ["run", "--sizes", "x"]).exit_code == 2


def test_23_variables_of_other_tools_come_last_and_only_where_they_are_meant() -> None:
    usual = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29600", "NODE_RANK": "3", "NNODES": "4"}
    rank = {"secret_file": "/s", "insecure": True}
    config = settings.merge(RankConfig, rank, environ=usual)
    assert (config.master_addr, config.master_port, config.node_rank, config.nnodes) == ("10.0.0.7", 29600, 3, 4)
    own = {"DIPTYCH_MASTER_PORT": "29700"}
    config = settings.merge(
        RankConfig, {**rank, "node_rank": "2"}, environ=usual | own, file={"master_addr": "10.0.0.9"}
    )
    assert (config.master_addr, config.master_port, config.node_rank) == ("10.0.0.9", 29700, 2)
    with pytest.raises(ConfigError, match="master_port='tcp://10.0.0.7:80': must be an integer .from MASTER_PORT"):
        settings.merge(RankConfig, rank, environ=usual | {"MASTER_PORT": "tcp://10.0.0.7:80"})

    several = {"tensor_parallel_size": 2, "nnodes": 2, "insecure": True}
    worker = settings.merge(WorkerConfig, several, environ=usual)
    assert (worker.nnodes, worker.master_addr, worker.master_port) == (2, "10.0.0.7", 29600)
    alone = settings.merge(WorkerConfig, {}, environ=usual | {"MASTER_PORT": "tcp://10.0.0.7:80"})
    assert (alone.nnodes, alone.master_addr, alone.master_port) == (1, "", 29500)
