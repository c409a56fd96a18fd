"""Small things that a newcomer met."""

from __future__ import annotations

import socket
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.cli import main, model_store
from diptych.cli.serve_config import ServeConfig
from diptych.common.errors import ConfigError


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["diptych", flag])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert (ended.value.code, capsys.readouterr().out) == (0, metadata.version("diptych") + "\n")


@pytest.mark.parametrize("name", ["http_port", "grpc_port"])
def test_serve_looks_at_its_ports_before_it_fetches_a_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(*_: object) -> Path:
        raise AssertionError("it began to fetch the model")

    monkeypatch.setattr(model_store, "resolve_model", fetched)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{name}={port}: cannot be used on 127.0.0.1: Address already in use"):
            main._serve(ServeConfig(**{"http_port": 0, "grpc_port": 0, name: port}))


def test_capacity_takes_its_model_as_the_others_do(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}')

    def run(*arguments: str):
        return CliRunner().invoke(main.build_app("capacity"), ["capacity", *arguments])

    assert run("--model", str(config)).stdout == run(str(config)).stdout != ""
    for arguments in ((), (str(config), "--model", str(config))):
        assert isinstance(run(*arguments).exception, ConfigError)
