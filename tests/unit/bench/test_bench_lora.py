"""bench-lora: its adapters are as peft writes them, and its ratios pair the sides of a round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.bench.engine.lora import (
    ADAPTERS,
    BASE,
    OFF,
    Prompts,
    Throughput,
    commands_of,
    parse,
    serve_command,
    settings_of,
    write_adapters,
)
from diptych.cli import main
from diptych.cli.serve.config import ServeConfig
from diptych.common.adapters.peft import read_adapter
from diptych_tests import quantized
from diptych_tests.lora import linear_shapes


def test_adapters_have_every_linear_layer_and_differ(tmp_path: Path) -> None:
    model = quantized.write_llama(tmp_path / "model")
    made = write_adapters(model, tmp_path, 3, rank=4)
    facts = [read_adapter(folder) for folder in made.values()]
    assert len({one.id for one in facts}) == 3
    for one in facts:
        assert {module.name: (module.outputs, module.inputs) for module in one.modules} == linear_shapes(model)
        assert {(module.rank, module.scale) for module in one.modules} == {(4, 1.0)}


def test_a_ratio_is_the_median_over_rounds_of_both_sides(tmp_path: Path) -> None:
    point = Throughput(8, {OFF: [100.0, 50.0, 10.0], BASE: [100.0, 50.0, 10.0], ADAPTERS: [90.0, 40.0, 9.5]})
    assert point.ratio(ADAPTERS, BASE) == 0.9
    assert point.result()["ratios"] == {"adapters / base": 0.9, "adapters / off": 0.9, "base / off": 1.0}


def test_further_flags_of_serve_come_last() -> None:
    args = parse(["--rounds", "2", "--serve-args", "--device", "cuda"])
    assert (args.rounds, args.serve_args) == (2, ["--device", "cuda"])


def test_its_servers_are_started_by_flags_that_serve_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It named the model as an argument, which `serve` does not have: the command had never run."""
    seen: list[ServeConfig] = []
    monkeypatch.setattr(main, "_serve", lambda config: seen.append(config) or 0)
    args = parse(["--model", "/models/tiny", "--rank", "32", "--serve-args", "--threads", "3"])
    adapters = {name: tmp_path / name for name in ("a", "b")}
    for served in (adapters, {}):
        assert CliRunner().invoke(main.build_app(), serve_command(args, tmp_path, served)).exit_code == 0
    with_loras, without = seen
    assert (with_loras.model, with_loras.threads, with_loras.max_lora_rank) == ("/models/tiny", 3, 32)
    assert with_loras.lora_modules == tuple(f"{name}={path}" for name, path in adapters.items())
    assert (without.enable_lora, without.lora_modules) == (False, ())
    for command in commands_of(args).values():  # of the result
        assert CliRunner().invoke(main.build_app(), command.split()[1:]).exit_code == 0
    assert [(one.model, one.max_cpu_loras) for one in seen[2:] if one.enable_lora] == [("tiny", 8), ("tiny", 64)]


def test_a_result_contains_no_folder_of_the_machine() -> None:
    args = parse(
        [
            "--model",
            "/srv/models/tiny",
            "--out",
            "/tmp/x.json",
            "--serve-args",
            "--cache-dir",
            "/home/me/cache",
            "--n",
            "1",
        ]
    )
    settings = settings_of(args)
    assert (settings["model"], settings["serve_args"]) == ("tiny", ["--cache-dir", "cache", "--n", "1"])
    assert "/" not in json.dumps(settings)
    assert "/" not in json.dumps(commands_of(args))


def test_no_prompt_comes_twice() -> None:
    prompts = Prompts(1, 32_000)
    assert len({tuple(prompts.next(32)) for _ in range(64)}) == 64
