"""`diptych quantize` as a user types it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from diptych.cli import main
from diptych.cli.models import store
from diptych.cli.quantize import hint_of
from diptych.engine.exec.models.registry import describe
from diptych.engine.quantize.settings import MANIFEST_FILE, QuantizeSettings

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 96,
}  # fmt: skip


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "plain"
    folder.mkdir()
    torch.manual_seed(0)
    shapes = describe(CONFIG).plain_tensors()
    save_file({name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(models.WordLevel({"the": 0, "of": 1, "[UNK]": 63}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def diptych(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["diptych", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return ended.value.code


def test_a_folder_is_written_and_its_perplexity_printed(monkeypatch, capsys, model, tmp_path):
    out, calibration = tmp_path / "out", tmp_path / "calibration.txt"
    calibration.write_text("the end of the day " * 40)
    arguments = ("--method", "int4", "--asymmetric", "--group-size", 32, "--calibration", calibration, "--out", out)
    assert diptych(monkeypatch, "quantize", model, *arguments) == 0
    manifest = json.loads((out / MANIFEST_FILE).read_text())
    assert manifest["method"] == "int4"
    assert (manifest["group_size"], manifest["symmetric"], manifest["calibrated"]) == (32, False, True)
    found, printed = manifest["perplexity"], capsys.readouterr()
    assert f"perplexity {found['before']:.3f} before, {found['after']:.3f} after" in printed.out
    assert f"{out}: " in printed.out
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o644}, "a server runs as another user"
    for stage in ("perplexity before", "int4: layers", "perplexity after"):
        assert f"{stage}: 0%" in printed.err
        assert f"{stage}: 100%" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "int3"), "method"),
        (("--method", "fp8", "--group-size", "64"), "group_size"),
        (("--method", "fp8", "--calibration", "texts.txt"), "calibration='texts.txt'"),
        (("--method", "int4", "--group-size", "100"), "group_size"),
    ],
)
def test_settings_are_checked_before_a_model_is_fetched(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.setattr(store, "resolve_model", lambda *_: pytest.fail("fetched"))
    assert diptych(monkeypatch, "quantize", "smollm2", *arguments, "--out", tmp_path / "out") == 1
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_ctrl_c_leaves_no_folder(monkeypatch, model, tmp_path):
    from diptych.engine.quantize import run

    def interrupted(*args, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "copy_beside", interrupted)  # the weights are written by then
    before = sorted(tmp_path.iterdir())
    assert diptych(monkeypatch, "quantize", model, "--method", "int8", "--out", tmp_path / "out") == 130
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("settings", "ratio", "hint"),
    [
        (QuantizeSettings("int8"), 1.1, ""),
        (QuantizeSettings("int8"), 1.2, "warning: perplexity rose by 20%; try --calibration FILE, of text like the model's use"),
        (QuantizeSettings("fp8"), 1.2, "warning: perplexity rose by 20%"),
        (
            QuantizeSettings("int4", calibration=Path("texts.txt")), 1.441,
            "warning: perplexity rose by 44%; try --asymmetric, or a smaller --group-size, or --method int8",
        ),
    ],
)  # fmt: skip
def test_a_large_loss_comes_with_what_to_try(settings, ratio, hint):
    assert hint_of(settings, ratio) == hint
