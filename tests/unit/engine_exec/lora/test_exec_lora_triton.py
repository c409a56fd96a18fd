"""Adapters in the CUDA decoder: the numbers of torch, kernel by kernel and from graphs, over plain and quantized weights; in
steps without adapters the graphs and bits of a model without slots."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from diptych.common.adapters.peft import read_adapter
from diptych_tests import quantized
from diptych_tests.cpu_graphs import CpuGraphs
from diptych_tests.lora import linear_shapes, write_adapter

SMALL = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
PROMPTS = [[5, 9, 17, 250, 31, 8, 77], [44, 12, 90], [200, 201, 202, 9, 9]]
SLOTS = [1, -1, 0]
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    # Of the interpreter's numpy, on padded rows.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    from triton import knobs

    if request.param == "cpu" and not knobs.runtime.interpret:
        pytest.skip("set TRITON_INTERPRET=1")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device is usable here")
    return request.param


@pytest.fixture
def model(model_dir_of):
    return model_dir_of("LlamaForCausalLM", **SMALL)


@pytest.fixture
def folders(model, tmp_path):
    """An adapter of some modules and one of all, with several ranks."""
    return [
        write_adapter(tmp_path / "some", linear_shapes(model, ("q_proj", "v_proj", "up_proj", "down_proj")), rank=3, seed=1),
        write_adapter(tmp_path / "all", linear_shapes(model), rank=2, seed=2, ranks=lambda name: 5 if "o_proj" in name else 2),
    ]  # fmt: skip


def with_adapters(driver, folders):
    for slot, folder in enumerate(folders):
        driver.runner.install_adapter(slot, driver.runner.read_adapter(folder, read_adapter(folder)))
    return driver


def run(driver, slots, count=2, prompts=PROMPTS, *, ahead=False):
    return driver.in_one_batch(prompts, slots, count, ahead=ahead)


def same(got, expected, atol=1e-4):
    assert got[0] == expected[0]
    np.testing.assert_allclose(got[1], expected[1], atol=atol)


@pytest.mark.parametrize("invariant", [False, True])
def test_each_row_has_its_adapter(model, folders, driver_of, device, invariant):
    """On a GPU from graphs, of chunks and of decodes; steps ahead, too."""
    expected = run(with_adapters(driver_of(model, backend="torch", max_loras=2, max_lora_rank=5), folders), SLOTS)
    driver = with_adapters(
        driver_of(model, backend="triton", device=device, max_loras=2, max_lora_rank=5, batch_invariant=invariant),
        folders,
    )
    same(run(driver, SLOTS, ahead=True), expected)
    if device == "cuda":
        bare = driver_of(model, backend="triton", device=device, batch_invariant=invariant)
        none, got = run(bare, [-1] * 3), run(driver, [-1] * 3)
        assert (got[0], got[1].tolist()) == (none[0], none[1].tolist())


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("added_by_readers", [True, False])
def test_plain_layers_compute_the_first_product_themselves(
    model_dir_of, tmp_path, driver_of, monkeypatch, device, added_by_readers
):
    """As on a GPU, where all plain layers are kept alike; with a bias, and beside a row of the base model."""
    from diptych.engine.exec.backends import triton
    from diptych.engine.exec.cuda import adapted, decoder
    from diptych.engine.exec.linear import DenseLinear

    model = model_dir_of(
        "LlamaForCausalLM", **{**SMALL, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 1}
    )
    folder = write_adapter(tmp_path / "all", linear_shapes(model), rank=5, seed=2)
    expected = run(with_adapters(driver_of(model, backend="torch", max_loras=2, max_lora_rank=5), [folder]), [0, -1, 0])
    monkeypatch.setattr(triton, "keep_linear", lambda method, weights: DenseLinear(weights.weight, weights.bias))
    driver = with_adapters(driver_of(model, backend="triton", max_loras=2, max_lora_rank=5), [folder])
    layers = driver.runner._fused._runtime.decoder._weights.blocks[0].linears
    assert all(layer.joined is not None and layer.joined.weight.shape[0] % 128 == 0 for layer in layers)
    assert all(layer.base.weight.data_ptr() == layer.joined.weight.data_ptr() for layer in layers), "one copy"
    if not added_by_readers:
        monkeypatch.setattr(decoder, "MAX_ROWS_OF_READERS", 0)
    monkeypatch.setattr(adapted, "lora_shrink", None)
    same(run(driver, [0, -1, 0], ahead=added_by_readers), expected)


def test_a_large_a_is_not_read_for_all_slots(monkeypatch):
    from diptych.engine.exec.cuda import adapted
    from diptych.engine.exec.linear import DenseLinear
    from diptych.engine.exec.lora import LoraSizes, LoraSlots

    base = DenseLinear(torch.randn(8, 4), None)
    slots = LoraSlots((8,), 4, LoraSizes(2, 2), base.weight)
    monkeypatch.setattr(adapted, "JOINED_BYTES", slots.a.nbytes)
    assert adapted.AdaptedLinear(base, slots).joined is not None
    assert adapted.AdaptedLinear(base, slots, join=False).joined is None
    monkeypatch.setattr(adapted, "JOINED_BYTES", slots.a.nbytes - 1)
    assert adapted.AdaptedLinear(base, slots).joined is None


def test_rows_that_decode_lie_by_adapter(model, driver_of):
    """In the order given within one; chunks stay behind them."""
    from diptych.engine.exec.cuda.batch import lay_out

    driver = driver_of(model, backend="torch")
    seqs = [driver.seq([7, 8, 9], 0, driver.table(4)), *(driver.seq([i], 3, driver.table(4)) for i in range(4))]
    for seq, adapter in zip(seqs, (0, 1, -1, 0, 1), strict=True):
        seq.adapter = adapter
    batch = lay_out(seqs, driver.runner.pool.kv, 16)
    assert (batch.order, batch.sample_seqs) == ([2, 3, 1, 4, 0], [2, 3, 1, 4, 0])
    assert batch.adapters == [-1, 0, 1, 1, 0, 0, 0]
    assert batch.token_ids == [1, 2, 0, 3, 7, 8, 9]


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_step_without_adapters_replays_the_graph_of_a_model_without_slots(
    model_dir_of, tmp_path, driver_of, monkeypatch, device
):
    from diptych.engine.exec.cuda import adapted, graphs

    model = model_dir_of("LlamaForCausalLM", **{**SMALL, "num_hidden_layers": 1})
    folder = write_adapter(tmp_path / "all", linear_shapes(model), rank=2, seed=2)
    torch_driver = with_adapters(driver_of(model, backend="torch", max_loras=1, max_lora_rank=5), [folder])
    driver = with_adapters(driver_of(model, backend="triton", max_loras=1, max_lora_rank=5), [folder])
    none = run(driver_of(model, backend="triton"), [-1, -1], prompts=PROMPTS[1:])
    fused = driver.runner._fused
    cpu = CpuGraphs(monkeypatch, fused._runtime.decoder)
    monkeypatch.setattr(graphs, "feed_ids", cpu.captured(graphs.feed_ids))
    with torch.inference_mode():
        fused._graphs = graphs.DecodeGraphs(
            cpu, torch.device("cpu"), fused._draw.drawn, num_groups=1, num_kv_heads=1, num_programs=8, sizes=(2,), slots=True
        )  # fmt: skip
    same(run(driver, [0, -1], prompts=PROMPTS[1:]), run(torch_driver, [0, -1], prompts=PROMPTS[1:]))
    assert cpu.replays == 1
    launched = []
    monkeypatch.setattr(adapted, "lora_shrink", lambda *args, **how: launched.append(args))
    got = run(driver, [-1, -1], prompts=PROMPTS[1:])
    assert (cpu.replays, launched) == (2, [])
    assert (got[0], got[1].tolist()) == (none[0], none[1].tolist())


def test_over_quantized_weights(model, folders, driver_of, device):
    """Their layers read plain rows where rows have adapters, and quantize them themselves."""
    quantized.quantize_folder(model, quantized.COMPRESSED_INT8, quantized.int8_rows)
    plain, driver = (
        with_adapters(driver_of(model, backend=backend, device=where, max_loras=2, max_lora_rank=5), folders)
        for backend, where in (("torch", "cpu"), ("triton", device))
    )
    same(run(driver, SLOTS), run(plain, SLOTS), atol=1e-2)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize(("quantize", "invariant"), [(False, True), (True, False)])
def test_kernels_of_layers_with_adapters_are_compiled_before_readiness(
    model, driver_of, monkeypatch, device, quantize, invariant
):
    """At all numbers of rows that take another kernel, those of the base's unfused gate and up included."""
    from diptych.engine.exec.cuda import adapted, decoder

    for name, value in (("ROWS_OF_LORA_LAUNCHES", (1,)), ("ROWS_OF_LAUNCHES", (2,)), ("_MOST_ROWS", 1)):
        monkeypatch.setattr(decoder, name, value)
    if quantize:
        quantized.quantize_folder(model, quantized.COMPRESSED_INT8, quantized.int8_rows)
    driver = driver_of(model, backend="triton", max_loras=1, max_lora_rank=4, batch_invariant=invariant)
    launched, shrink = [], adapted.lora_shrink
    monkeypatch.setattr(
        adapted, "lora_shrink", lambda x, *args, **how: launched.append(x.shape) or shrink(x, *args, **how)
    )
    with torch.inference_mode():
        driver.runner._fused._runtime.decoder.compile_linears()
    block, rows = driver.runner.description.blocks[0], (1, 2) if quantize else (1,)
    assert launched == [(count, layer.inputs) for layer in block.linears for count in rows]
