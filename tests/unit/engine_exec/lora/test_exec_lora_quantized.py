"""Adapters over quantized layers: what they add does not depend on how the weights below are kept, on any back end."""

from __future__ import annotations

import importlib.util
from functools import partial

import numpy as np
import pytest
import torch

from diptych.common.adapters.peft import read_adapter
from diptych.engine.exec.formats.registry import quantization_of
from diptych.engine.exec.layers.linear import Linear, Part
from diptych.engine.exec.lora import LayerAdapter, LoraLinear, LoraSizes, LoraSlots
from diptych.engine.exec.methods.base import PLAIN_ROWS, WHOLE, StepRows, cut_out
from diptych.engine.exec.methods.registry import METHODS
from diptych.engine.exec.models.config_keys import TrackedConfig
from diptych_tests import quantized
from diptych_tests.lora import linear_shapes, merge_adapter, write_adapter
from diptych_tests.quantized import AWQ, COMPRESSED_FP8, COMPRESSED_INT8, FP8, GPTQ


def in_another_order(weight):
    """GPTQ with act-order: the groups' inputs lie apart."""
    inputs = weight.shape[1]
    groups = (torch.arange(inputs) // 32)[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    return quantized.gptq(weight, 32, symmetric=False, groups=groups)


CHECKPOINTS = {
    "int4": (AWQ, partial(quantized.awq, size=32), 1e-4),
    "int4-act-order": ({**GPTQ, "desc_act": True, "sym": False}, in_another_order, 1e-4),
    "gguf": (quantized.gguf_config, quantized.gguf_rows, 1e-4),
    "int8": (COMPRESSED_INT8, quantized.int8_rows, 0.12),  # activations are rounded as well
    "fp8": (COMPRESSED_FP8, quantized.fp8_rows, 0.4),
    "fp8-blocks": (FP8, quantized.fp8_blocks, 0.4),
}
PROMPTS = [[5, 9, 17, 250, 31, 8, 77, 120, 3], [44, 12, 90]]
COMPANY = [*PROMPTS, [7, 300, 11, 2, 5]]
SLOTS = [1, -1, 0]


def logprobs_of(driver, slot):
    """Of the likeliest tokens behind each prompt, by their ids: one step."""
    steps = []
    for prompt in PROMPTS:
        seq = driver.seq(prompt, 0, driver.table(len(prompt) + 1))
        seq.adapter, seq.top_logprobs = slot, 5
        steps.append(seq)
    result = driver.runner.execute(steps)
    return np.array([[logprob for _, logprob in result.logprobs[i][0].top] for i in range(len(PROMPTS))])


def write_model(folder, name, hidden=64, **sizes):
    """Blocks of FP8 are of 128 x 128, and K is half as wide as the rows."""
    return quantized.write_llama(folder, hidden=256 if name == "fp8-blocks" else hidden, **sizes)


def quantize(folder, name):
    """Returns: the same values as plain tensors."""
    config, rule, _ = CHECKPOINTS[name]
    return quantized.quantize_folder(folder, config(folder) if callable(config) else config, rule)


def installed(driver, *adapters):
    for slot, adapter in enumerate(adapters):
        driver.runner.install_adapter(slot, driver.runner.read_adapter(adapter, read_adapter(adapter)))
    return driver


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_an_adapter_adds_to_quantized_layers_what_it_adds_to_plain_ones(name, driver_of, tmp_path):
    tolerance = CHECKPOINTS[name][2]
    folder = write_model(tmp_path / "model", name)
    plain = tmp_path / "plain"
    plain.mkdir()
    quantized.plain_folder(plain, folder, quantize(folder, name))
    adapter = write_adapter(tmp_path / "adapter", linear_shapes(plain), rank=3, seed=5, size=0.25)
    driver = driver_of(folder, backend="torch", max_loras=2, max_lora_rank=4)
    assert driver.runner.description.method == name.partition("-")[0]
    driver.runner.install_adapter(1, driver.runner.read_adapter(adapter, read_adapter(adapter)))
    merged = logprobs_of(driver_of(merge_adapter(plain, adapter, tmp_path / "merged"), backend="torch"), -1)
    adapted, bare = logprobs_of(driver, 1), logprobs_of(driver, -1)
    assert np.abs(adapted - merged).max() < tolerance
    assert np.abs(adapted - merged).max() < np.abs(bare - merged).max() / 2
    np.testing.assert_array_equal(bare, logprobs_of(driver, 0), "an empty slot adds nothing")


def adapters_of(tmp_path, folder):
    """Of some layers and of all, with several ranks."""
    some = linear_shapes(folder, ("q_proj", "v_proj", "up_proj", "down_proj"))
    return (
        write_adapter(tmp_path / "some", some, rank=3, seed=1, size=0.25),
        write_adapter(tmp_path / "all", linear_shapes(folder), rank=4, seed=2, size=0.25,
                      ranks=lambda name: 1 if "o_proj" in name else 4),
    )  # fmt: skip


def check_against_torch(driver_of, folder, adapters, backend, tolerance, **how):
    """Returns: the driver, with the adapters in its slots."""
    reference = installed(driver_of(folder, backend="torch", max_loras=2, max_lora_rank=4), *adapters)
    driver = installed(driver_of(folder, backend=backend, max_loras=2, max_lora_rank=4, **how), *adapters)
    assert driver.runner.backend == backend
    expected, got = (one.in_one_batch(COMPANY, SLOTS, count=1) for one in (reference, driver))
    none = driver.in_one_batch(COMPANY, [-1] * 3, count=1)
    np.testing.assert_allclose(got[1], expected[1], atol=tolerance)
    changed = np.abs(got[1] - none[1])[:, 0] > 2 * tolerance
    assert changed[[0, 2]].any(), "adapters change something"
    assert np.array_equal(got[1][1], none[1][1]) or backend != "native"
    return driver


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["int4", "int4-act-order", "gguf", "int8"])
def test_on_the_compiled_kernels_they_add_over_every_format(name, driver_of, tmp_path):
    """Near torch's numbers, and the same bits in any company."""
    folder = write_model(tmp_path / "model", name, hidden=128)
    quantize(folder, name)
    driver = check_against_torch(driver_of, folder, adapters_of(tmp_path, folder), "native", 0.1)
    ids, together = driver.in_one_batch(COMPANY, SLOTS, count=2)
    for i, slot in enumerate(SLOTS):
        alone = driver.in_one_batch(COMPANY[i : i + 1], [slot], count=2)
        assert alone[0] == ids[i : i + 1]
        assert np.array_equal(alone[1][0], together[i]), "in any company"


class Stored:
    """Implements TensorSource: the random weight of a layer, quantized."""

    def __init__(self, name, rule, shape):
        self.tensors = {f"{name}.{end}": tensor for end, tensor in rule(torch.randn(shape))[0].items()}

    def take(self, name, shape, *, as_stored=False, where=()):
        tensor = self.tensors[name]
        assert tuple(tensor.shape) == shape
        return cut_out(tensor if as_stored else tensor.float(), where)

    def shape(self, name):
        return tuple(self.tensors[name].shape) if name in self.tensors else None

    def file_of(self, name):
        return "model.safetensors"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["int4-act-order", "int8", "fp8"])
def test_a_layer_of_triton_adds_them_over_every_format(name):
    """Its inputs are in the model's order for A, whatever order the weights below have them in. Whole models: with int8 in
    test_exec_lora_triton.py, with every format on a GPU below."""
    from triton import knobs

    from diptych.engine.exec.cuda.adapted import AdaptedLinear
    from diptych.engine.exec.cuda.quantized import keep_quantized

    if not knobs.runtime.interpret:
        pytest.skip("set TRITON_INTERPRET=1")
    torch.manual_seed(3)
    config, rule, _ = CHECKPOINTS[name]
    layer = quantization_of(TrackedConfig(config)).declare(Linear((Part("l", 32),), 64))
    method = METHODS[layer.method]
    weights = method.load(layer, Stored("l", rule, (32, 64)), WHOLE)
    slots = LoraSlots((32,), 64, LoraSizes(2, 4), torch.empty(0))
    slots.install(1, LayerAdapter(torch.randn(1, 3, 64), torch.randn(32, 3), (3,)))
    x, rows = torch.randn(5, 64), StepRows(torch.tensor([1, -1, 0, 1, -1], dtype=torch.int32))
    expected = LoraLinear(lambda x, step: method.apply(weights, x, step), slots)(x, rows)
    base = keep_quantized(weights)
    got = AdaptedLinear(base, slots)(x, rows)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
    assert torch.equal(got[[1, 2, 4]], base(x, PLAIN_ROWS)[[1, 2, 4]]), "without an adapter, and of an empty slot"
    assert (got - base(x, PLAIN_ROWS))[[0, 3]].abs().min(1).values.gt(0).all()


def check_on_triton(name, driver_of, tmp_path, **how):
    folder = write_model(tmp_path / "model", name, layers=1)
    quantize(folder, name)
    check_against_torch(driver_of, folder, adapters_of(tmp_path, folder), "triton", 0.1, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4", "int4-act-order", "int8", "fp8", "fp8-blocks"])
def test_on_a_gpu_they_add_over_every_format(name, driver_of, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is usable here")
    check_on_triton(name, driver_of, tmp_path, device="cuda", graph_sizes=[4])
