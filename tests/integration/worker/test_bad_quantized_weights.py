"""A worker whose quantized checkpoint holds what nobody should compute with ends before it is ready, by the names of file and
tensor (21: Bad input)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.common.errors import ConfigError
from diptych.common.secret import create_secret
from diptych.worker.config import WorkerConfig
from diptych.worker.model import load_model
from diptych_tests import quantized, router_fleet

DOWN = "model.layers.1.mlp.down_proj"
Tensors = dict[str, torch.Tensor]
CHECKPOINTS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "int8": (quantized.COMPRESSED_INT8, quantized.int8_rows),
    "fp8": (quantized.COMPRESSED_FP8, quantized.fp8_rows),
    "fp8 in blocks": (quantized.FP8, quantized.fp8_blocks),
    "awq": (quantized.AWQ, partial(quantized.awq, size=32)),
    "gptq": (quantized.GPTQ, partial(quantized.gptq, size=32, symmetric=True)),
    "gguf": ({}, quantized.gguf_rows),
}


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(f"{DOWN}.{name}")


def with_value(name: str, value: float) -> Callable[[Tensors], None]:
    """The first number of a tensor."""

    def change(tensors: Tensors) -> None:
        tensors[f"{DOWN}.{name}"].view(-1)[0] = value

    return change


def with_nan_block(tensors: Tensors) -> None:
    """The scale of the first block of GGUF, a half."""
    rows = tensors[f"{DOWN}.weight"]
    rows[0, :2] = torch.tensor([float("nan")], dtype=torch.float16).view(torch.uint8)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return router_fleet.make_model_folder(tmp_path_factory.mktemp("words") / "t") / "tokenizer.json"


@pytest.fixture
def write(tmp_path: Path, tokenizer: Path) -> Callable[..., Path]:
    """write(name of a checkpoint, changes of its config alone) -> its folder."""

    def make(checkpoint: str, **changes: Any) -> Path:
        config, quantize = CHECKPOINTS[checkpoint]
        folder = quantized.write_llama(tmp_path / "model", hidden=256 if "blocks" in checkpoint else 128, mlp=256)
        shutil.copy(tokenizer, folder)
        quantized.quantize_folder(folder, {**(config or quantized.gguf_config(folder)), **changes}, quantize)
        return folder

    return make


@pytest.mark.parametrize(
    ("checkpoint", "change", "tensor", "reason"),
    [
        *[(name, without("weight_scale"), "weight_scale", "is missing") for name in ("int8", "fp8")],
        ("fp8 in blocks", without("weight_scale_inv"), "weight_scale_inv", "is missing"),
        *[(name, without("scales"), "scales", "is missing") for name in ("awq", "gptq")],
        ("awq", without("qzeros"), "qzeros", "is missing"),
        *[("int8", with_value("weight_scale", bad), "weight_scale", f"has a scale of {bad}") for bad in (0.0, float("nan"))],
        ("fp8 in blocks", with_value("weight_scale_inv", float("nan")), "weight_scale_inv", "has a scale of nan"),
        ("gptq", with_value("scales", 0.0), "scales", "has a scale of 0.0"),
        ("gptq", with_value("g_idx", 8), "g_idx", "names the group 8: there are 8"),
        ("gptq", with_value("g_idx", 3), "g_idx", "does not give every group 32 inputs"),
        ("gguf", with_nan_block, "weight", "has a scale that is infinite or NaN"),
    ],
)  # fmt: skip
def test_a_bad_tensor_ends_the_start_by_its_name(
    tmp_path: Path,
    write: Callable[..., Path],
    checkpoint: str,
    change: Callable[[Tensors], None],
    tensor: str,
    reason: str,
) -> None:
    folder = write(checkpoint)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        load(folder, tmp_path)
    assert error.value.field == "model"
    assert f"tensor {DOWN}.{tensor} {reason}" in str(error.value)


def test_a_wrong_group_size_ends_the_start_with_both_shapes(tmp_path: Path, write: Callable[..., Path]) -> None:
    """The sizes divide; the tensors are of another one."""
    folder = write("awq", group_size=64)
    with pytest.raises(
        ConfigError, match=r"scales has shape \(4, 128\), where config.json asks for \(2, 128\)"
    ) as error:
        load(folder, tmp_path)
    assert error.value.field == "model"


@pytest.mark.parametrize("size", [48, 96, 7])
def test_a_group_size_that_divides_nothing_ends_the_start_by_its_field(
    tmp_path: Path, write: Callable[..., Path], size: int
) -> None:
    folder = write("gptq", group_size=size)
    with pytest.raises(ConfigError) as error:
        load(folder, tmp_path)
    assert error.value.field == "quantization_config.group_size"


def load(folder: Path, work: Path) -> None:
    """As a worker does before it serves anything."""
    create_secret(work / "secret")
    load_model(
        WorkerConfig(
            model=str(folder), role="prefill", secret_file=str(work / "secret"), num_blocks=24, backend="torch"
        )
    )
