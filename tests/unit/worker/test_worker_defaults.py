"""Defaults of unset worker settings: by the device, and the KV size of a token."""

from __future__ import annotations

import dataclasses

import pytest

from diptych.common.errors import ConfigError
from diptych.common.kv_format import full_format
from diptych.kvtransfer.slabs.layout import RingSpec, payload_capacity
from diptych.worker.config import WorkerConfig
from diptych.worker.defaults import (
    CPU,
    GPU_MIXED_TOKENS,
    GPU_SEQS,
    GPU_SLABS,
    DeviceFacts,
    ModelFacts,
    is_open,
    settled,
)
from diptych.worker.model import checkpoint_dtype

GIB = 1 << 30
H200 = DeviceFacts("cuda", "NVIDIA H200", 140 * GIB)
H100 = DeviceFacts("cuda", "NVIDIA H100 80GB HBM3", 79 * GIB)
L4 = DeviceFacts("cuda", "NVIDIA L4", 22 * GIB)


def model_facts(dtype: str, layers: int, heads: int, dim: int) -> ModelFacts:
    return ModelFacts(dtype, full_format(layers, heads, dim, block_size=16, dtype=dtype))


LLAMA_8B = model_facts("bfloat16", 32, 8, 128)
SMOL = model_facts("float32", 30, 3, 64)


def test_15_3_3_a_gpus_defaults_for_a_model_of_8b():
    config, lines = settled(WorkerConfig(device="cuda"), H200, LLAMA_8B)
    assert (config.dtype, config.transport) == ("bfloat16", "auto")
    assert (config.max_num_batched_tokens, config.max_num_seqs, config.max_step_time_s) == (4096, 256, 0.0)
    assert (config.mixed_step_time_s, config.max_mixed_prefill_tokens) == (0.0, 512)
    assert (config.num_slabs, config.slab_bytes) == (16, 258 << 20)
    assert "slab_bytes=270532608: 2,048 tokens of 128 KiB of KV each, in 258 MiB" in lines
    assert "max_num_seqs=256: on NVIDIA H200" in lines


def test_a_slab_is_sized_by_the_bytes_of_quantized_kv():
    config, lines = settled(WorkerConfig(device="cuda", kv_cache_dtype="fp8_e4m3"), H200, LLAMA_8B)
    assert (config.dtype, config.kv_cache_dtype) == ("bfloat16", "fp8_e4m3")
    assert "slab_bytes=140509184: 2,048 tokens of 66 KiB of KV each, in 134 MiB" in lines


def test_a_kv_cache_dtype_that_there_is_not_is_refused_by_name():
    with pytest.raises(ConfigError) as error:
        WorkerConfig(kv_cache_dtype="fp4")
    assert error.value.field == "kv_cache_dtype"
    assert "auto, fp8_e4m3, fp8_e5m2, int8" in str(error.value)


def test_a_mixed_step_is_the_largest_graph_with_chunks():
    pytest.importorskip("triton", reason="Triton is not installed")
    from diptych.engine.exec.cuda.chunk_graphs import CHUNK_GRAPHS

    rows, tokens = max(CHUNK_GRAPHS, key=sum)
    assert (rows, tokens) == (GPU_SEQS, GPU_MIXED_TOKENS)


def test_a_cpus_defaults_are_what_they_were():
    config, lines = settled(WorkerConfig(), DeviceFacts(), None)
    assert {name: getattr(config, name) for name in CPU} == CPU
    assert len(lines) == len(CPU)


def test_serve_keeps_no_staging_memory_on_a_gpu():
    config, _ = settled(WorkerConfig(device="cuda", transport="inproc"), H200, LLAMA_8B)
    assert config.slab_bytes == CPU["slab_bytes"]


@pytest.mark.parametrize("device", [DeviceFacts(), H100], ids=lambda device: device.kind)
def test_what_was_set_stays(device):
    given = {
        "dtype": "float16",
        "transport": "nixl",
        "max_num_seqs": 7,
        "max_num_batched_tokens": 99,
        "max_step_time_s": 0.25,
        "mixed_step_time_s": 0.0,
        "max_mixed_prefill_tokens": 64,
        "slab_bytes": 8 << 20,
        "num_slabs": 3,
        "num_second_slabs": 1,
    }
    config = WorkerConfig(device=device.kind, **given)
    assert settled(config, device, LLAMA_8B) == (config, [])


def test_a_bound_of_zero_is_a_setting():
    assert settled(WorkerConfig(max_step_time_s=0.0), DeviceFacts(), None)[0].max_step_time_s == 0.0


@pytest.mark.parametrize("device", [H200, H100, L4], ids=lambda device: device.name)
@pytest.mark.parametrize("model", [LLAMA_8B, SMOL, model_facts("bfloat16", 80, 64, 128)])
@pytest.mark.parametrize("given", [{}, {"num_slabs": 2}, {"slab_bytes": 64 << 20}])
def test_15_3_3_the_ring_holds_ranges_and_keeps_to_its_share(device, model, given):
    config, _ = settled(WorkerConfig(device="cuda", **given), device, model)
    ring = RingSpec(config.num_slabs, config.slab_bytes)
    assert ring.total_bytes <= 0.08 * device.total_bytes
    assert 2 <= config.num_slabs <= GPU_SLABS
    per_token = model.kv.bytes_per_token
    if not given and model is not SMOL and device is not L4 and model is LLAMA_8B:
        assert payload_capacity(config.slab_bytes) >= 2048 * per_token
    assert payload_capacity(config.slab_bytes) >= 16 * per_token


def test_nothing_is_left_open():
    for device, model in ((DeviceFacts(), None), (H100, SMOL)):
        config, _ = settled(WorkerConfig(device=device.kind), device, model)
        assert not [name for name in CPU if is_open(config, name)]
    assert set(CPU) <= {field.name for field in dataclasses.fields(WorkerConfig)}


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"text_config": {"torch_dtype": "torch.bfloat16"}}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_the_checkpoints_own_dtype(config, dtype):
    assert checkpoint_dtype(config) == dtype


def test_a_checkpoint_in_a_dtype_that_we_lack_is_named():
    with pytest.raises(ConfigError, match="the checkpoint has float8_e4m3fn: name one of float32"):
        checkpoint_dtype({"torch_dtype": "float8_e4m3fn"})


@pytest.mark.parametrize("name", [".", ".."])
def test_a_worker_is_not_called_by_a_folder_that_is_there(name):
    with pytest.raises(ConfigError, match="worker_id"):
        WorkerConfig(worker_id=name)
