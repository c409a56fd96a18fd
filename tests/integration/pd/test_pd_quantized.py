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
from diptych.engine.exec.attention import attention_version
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.rpc.v1 import router_pb2
from diptych.worker.model import LoadedModel
from diptych_tests import quantized

PROMPT = [(7 * i + 3) % 320 for i in range(90)]
CHECKPOINTS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "int8": (quantized.COMPRESSED_INT8, quantized.int8_rows),
    "fp8": (quantized.COMPRESSED_FP8, quantized.fp8_rows),
    "int4": (quantized.AWQ, partial(quantized.awq, size=32)),
    "gguf": ({}, quantized.gguf_rows),
}


def write(folder: Path, method: str) -> Path:
    config, quantize = CHECKPOINTS[method]
    quantized.write_llama(folder)
    quantized.quantize_folder(folder, config or quantized.gguf_config(folder), quantize)
    return folder


def load(folder: Path) -> LoadedModel:
    runner = TorchModelRunner.load(folder, num_blocks=64, block_size=16, num_threads=1, backend="torch")
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


@pytest.mark.parametrize("method", CHECKPOINTS)
async def test_tokens_of_a_pair_are_those_of_one_worker(pd: ModuleType, tmp_path: Path, method: str) -> None:
    """Cold, from the cache of prefill, and with a prefix on decode; chunks of 32 tokens here and of 16 there."""
    folder = write(tmp_path / "model", method)
    longer = [*PROMPT, 5, 6, 7, *PROMPT[:20]]
    settings = {"slab_bytes": 1 << 17}
    async with (
        pd.cluster(num_prefill=0, decode=lambda: load(folder), decode_config=settings) as alone,
        pd.FakeRouter(alone.decode.address) as router,
    ):
        expected = [
            list((await router.run(alone.submit_message(attempt=f"l{i}", prompt=prompt, max_tokens=12))).token_ids)
            for i, prompt in enumerate((PROMPT, longer))
        ]
    async with (
        pd.cluster(
            prefill=lambda: load(folder),
            decode=lambda: load(folder),
            prefill_config={**settings, "max_num_batched_tokens": 16},
            decode_config=settings,
        ) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        assert cluster.decode.model.compat.method == method
        for attempt, prompt, tokens in (("a", PROMPT, expected[0]), ("b", longer, expected[1])):
            message = cluster.submit_message(
                attempt=attempt, prompt=prompt, max_tokens=12, policy=router_pb2.FAILURE_POLICY_FAIL
            )
            answer = await router.run(message)
            assert answer.error is None
            assert list(answer.token_ids) == tokens
            assert not answer.explanation.local_prefill
            assert answer.explanation.kv_bytes > 0
        await cluster.nothing_left()


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
