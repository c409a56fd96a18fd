"""Quantized weights across the two pools: tokens of a pair are those of one worker, and unlike weights never meet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.common.checkpoint.hashing import model_fingerprint
from diptych.common.compat import Compat, identified
from diptych.common.kv_format import QUANTIZED_KV, SAME_DTYPE
from diptych.engine.exec.attention import attention_version
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.worker.model import LoadedModel
from diptych_tests import quantized
from diptych_tests.pd_moves import check_tokens_of_a_pair

INT4 = quantized.compressed(
    "pack-quantized",
    {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False, "actorder": "group"},
    None,
)


def act_order(weight: torch.Tensor) -> tuple[quantized.Tensors, torch.Tensor]:
    """Groups of inputs in another order, with zero points."""
    inputs = weight.shape[1]
    groups = (torch.arange(inputs) // 32)[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    return quantized.compressed_int4(weight, 32, symmetric=False, groups=groups)


CHECKPOINTS: dict[str, tuple[dict[str, Any], Callable[..., Any], dict[str, int]]] = {
    "int8": (quantized.COMPRESSED_INT8, quantized.int8_rows, {}),
    "fp8": (quantized.COMPRESSED_FP8, quantized.fp8_rows, {}),
    "fp8-blocks": (quantized.FP8, quantized.fp8_blocks, {"hidden": 256}),
    "int4": (quantized.AWQ, partial(quantized.awq, size=32), {}),
    "int4-act-order": (INT4, act_order, {}),
    "gguf": ({}, quantized.gguf_rows, {}),
}
CASES = [
    (name, backend)
    for backend in ("torch", "native")
    for name in CHECKPOINTS
    if backend == "torch" or not name.startswith("fp8")  # which torch computes there, too
]


def write(folder: Path, name: str, layers: int = 2) -> Path:
    config, quantize, sizes = CHECKPOINTS[name]
    quantized.write_llama(folder, **{"hidden": 128, "mlp": 256, "layers": layers, **sizes})
    quantized.quantize_folder(folder, config or quantized.gguf_config(folder), quantize)
    return folder


def load(folder: Path, backend: str = "torch", num_blocks: int = 64, kv_cache_dtype: str = SAME_DTYPE) -> LoadedModel:
    runner = TorchModelRunner.load(
        folder, num_blocks=num_blocks, block_size=16, num_threads=1, backend=backend, kv_cache_dtype=kv_cache_dtype
    )
    assert runner.backend == backend
    assert runner.capabilities.kv is not None
    compat = Compat(
        model="quantized",
        model_revision=model_fingerprint(folder),
        tokenizer_revision="none",
        kv=runner.capabilities.kv,
        compute_dtype="float32",
        attention_version=attention_version("cpu"),
        sampler_version="1",
        method=runner.description.method,
        backend=runner.backend,
    )
    identity, compat = identified(compat, bytes(32))
    return LoadedModel(runner, compat, identity, None)


@pytest.mark.parametrize(("name", "backend"), CASES)
async def test_tokens_of_a_pair_are_those_of_one_worker(
    pd: ModuleType, tmp_path: Path, request: pytest.FixtureRequest, name: str, backend: str
) -> None:
    if backend == "native":
        request.getfixturevalue("compiler")
    folder = write(
        tmp_path / "model", name, layers=2 if backend == "native" else 1
    )  # torch's exact sums take their time
    assert load(folder, backend).compat.method == name.partition("-")[0]
    await check_tokens_of_a_pair(pd, partial(load, folder, backend))


@pytest.mark.parametrize("kv_cache_dtype", QUANTIZED_KV)
async def test_21_a_worker_says_which_method_and_which_kv_serve_and_what_a_token_takes(
    pd: ModuleType, tmp_path: Path, kv_cache_dtype: str
) -> None:
    """By its metrics, to operators; by its lease, to a router, which charges hand-offs by it, scales included."""
    folder = write(tmp_path / "model", "int4")
    make = partial(load, folder, kv_cache_dtype=kv_cache_dtype)
    config = {"kv_cache_dtype": kv_cache_dtype, "slab_bytes": 1 << 17}
    async with pd.cluster(num_prefill=0, decode=make, decode_config=config) as cluster:
        labels = {sample.name: sample.labels for sample in await pd.samples(cluster.decode)}
        assert labels["diptych_cache_config_info"]["cache_dtype"] == QUANTIZED_KV[kv_cache_dtype]
        model = labels["diptych_model_config_info"]
        assert (model["method"], model["dtype"], model["kernels"]) == ("int4", "float32", "torch")
        record = cluster.decode.record()
        assert record.kv_bytes_per_token == 2 * 2 * 2 * (32 + 4), "layers, K and V, KV heads, codes and a scale"
        assert record.compat["method"] == "int4"
        assert record.compat["kv_dtype"] == QUANTIZED_KV[kv_cache_dtype]


def test_blocks_of_unlike_quantized_weights_share_no_name(tmp_path: Path) -> None:
    """Another method, another scale, another code: another golden identity, which the handshake compares."""
    made = [write(tmp_path / method, method) for method in ("int8", "int4")]
    for name in ("weight_scale", "weight"):
        folder = write(tmp_path / name, "int8")
        tensors = load_file(folder / "model.safetensors")
        changed = tensors[f"model.layers.1.mlp.up_proj.{name}"]
        changed[0, 0] = changed[0, 0] * 1.5 if changed.dtype == torch.float32 else -changed[0, 0] - 1
        save_file(tensors, folder / "model.safetensors")
        made.append(folder)
    models = [load(folder) for folder in (*made, write(tmp_path / "same", "int8"))]
    golden = [model.compat.block_identity_golden for model in models]
    assert len(set(golden)) == 4
    assert golden[-1] == golden[0]
