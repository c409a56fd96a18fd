"""Small obstacles for newcomers."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.cli import main
from diptych.cli.models import store as model_store
from diptych.cli.serve.config import ServeConfig
from diptych.cli.settings import merge as settings
from diptych.cli.settings.options import field_help
from diptych.cli.temporary import temporary_folder
from diptych.cli.up.config import UpConfig
from diptych.common.errors import ConfigError


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["diptych", flag])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert (ended.value.code, capsys.readouterr().out) == (0, metadata.version("diptych") + "\n")


def test_status_names_the_commands_that_show_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["diptych", "status"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert "diptych top" in told
    assert "restart" not in told


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


def test_a_wrong_value_says_where_it_came_from() -> None:
    for flags, environ, given, source in (
        ({"http_port": "abc"}, {}, {}, "from --http-port"),
        ({}, {"DIPTYCH_HTTP_PORT": "abc"}, {}, "from DIPTYCH_HTTP_PORT"),
        ({}, {}, {"http_port": "abc"}, "in the config file"),
    ):
        with pytest.raises(ConfigError, match=f"http_port='abc': must be an integer \\({source}\\)"):
            settings.merge(ServeConfig, flags, environ=environ, file=given)
    with pytest.raises(ConfigError, match="block_size=0: must be at least 1 \\(from DIPTYCH_BLOCK_SIZE\\)"):
        settings.merge(ServeConfig, {}, environ={"DIPTYCH_BLOCK_SIZE": "0"})


def test_a_usage_error_reads_as_the_others_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["diptych", "doctor", "--zzz"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: No such option: --zzz"


def test_a_pool_that_makes_no_sense_is_refused_before_anybody_is_asked() -> None:
    result = CliRunner().invoke(main.build_app("what-if"), ["what-if", "--prompt", "a", "--pool", "4X"])
    assert "pool must be like" in str(result.exception)


def test_every_flag_of_up_is_explained() -> None:
    assert {field.name for field in dataclasses.fields(UpConfig)} - set(field_help(UpConfig)) == set()


def test_serve_without_a_folder_for_temporary_files_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 15, 4.14: it was a FileNotFoundError with a trace."""
    away = tmp_path / "away"
    monkeypatch.setenv("TMPDIR", str(away))
    monkeypatch.setattr(tempfile, "tempdir", str(away))
    with (
        pytest.raises(ConfigError, match="TMPDIR=.*away': must name a writable folder"),
        temporary_folder("x-"),
    ):
        pass
    monkeypatch.delenv("TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(away)])
    with pytest.raises(ConfigError, match="No usable temporary directory"), temporary_folder("x-"):
        pass


@pytest.mark.parametrize("arguments", [[], ["keys"], ["bench"]])
def test_5_8_a_command_without_arguments_shows_its_help(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["diptych", *arguments])
    with pytest.raises(SystemExit) as caught:
        main.main()
    shown = capsys.readouterr()
    assert caught.value.code == 0
    assert shown.out.startswith(f"Usage: {' '.join(['diptych', *arguments])} [OPTIONS] COMMAND")
    assert shown.err == ""


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ([], "nothing was ever set up here"),
        (["bin/diptych"], "the set-up has not ended"),
        (["bin/diptych", ".serve"], "down was run"),
    ],
)
def test_5_8_make_down_knows_a_set_up_that_has_not_ended(tmp_path: Path, there: list[str], words: str) -> None:
    shutil.copy(Path(__file__).resolve().parents[3] / "Makefile", tmp_path)
    for name in there:
        file = tmp_path / ".venv" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("#!/bin/sh\necho down was run\n")
        file.chmod(0o755)
    done = subprocess.run(["make", "down"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert words in done.stdout


def test_the_list_of_commands_cuts_no_sentence() -> None:
    shown = CliRunner().invoke(main.build_app(), ["--help"], terminal_width=80).output
    assert "explain" in shown
    assert not [line for line in shown.partition("Commands:")[2].splitlines() if "..." in line]


def test_make_help_lists_every_target_in_one_column() -> None:
    root = Path(__file__).resolve().parents[3]
    shown = subprocess.run(["make", "help"], cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    makefile = (root / "Makefile").read_text()
    described = dict(re.findall(r"^([a-z-]+):.*## (.*)$", makefile, re.MULTILINE))
    assert [line.split()[0] for line in shown] == list(described)
    assert len({line.index(described[line.split()[0]]) for line in shown}) == 1
    phony = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert set(described) <= {name for names in phony for name in names.split()}


def test_what_if_says_what_the_length_of_the_answer_changes() -> None:
    shown = " ".join(CliRunner().invoke(main.build_app("what-if"), ["what-if", "--help"]).stdout.split())
    assert "Length of the answer in tokens" in shown
    assert "Colocated" not in shown


def test_23_a_degree_that_the_model_cannot_have_is_refused_before_anything_is_imported(tmp_path: Path) -> None:
    """It took as long as the imports of a worker, 20 s on a busy machine."""
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3,
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    program = f"""
import sys
from diptych.cli import main
for command in ("serve", "prefill", "decode"):
    sys.argv = ["diptych", command, "--model", {str(tmp_path)!r}, "--tensor-parallel-size", "4"]
    try:
        main.main()
    except SystemExit as ended:
        print(command, ended.code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    words = (
        "error: tensor_parallel_size=4: the model has 9 attention heads (num_attention_heads); --tensor-parallel-size can "
        "be 1, 3"
    )
    assert done.stdout.splitlines() == ["serve 1 False", "prefill 1 False", "decode 1 False"]
    assert done.stderr.splitlines() == [words] * 3
