"""Quantized checkpoints on the compiled kernels: the tokens of the torch back end, the same bits in any company, and what is left
to torch by name."""

from __future__ import annotations

import logging
import random
from functools import partial

import gguf
import pytest
import torch

from diptych.common.compiled import ALL_LANES
from diptych.common.errors import ConfigError
from diptych_tests import quantized
from diptych_tests.logits import logits_of
from diptych_tests.quantized import COMPRESSED_FP8, COMPRESSED_INT4, COMPRESSED_INT8, GPTQ

LAYERS = [
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]


def gguf_rows(kinds):
    """kinds: of each layer's weight by the order in which they are quantized: sorted names."""
    left = iter(kinds)

    def quantize(weight):
        kind = next(left)
        blocks = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
        return {"weight": torch.from_numpy(blocks)}, weight

    return quantize


def gguf_config(kinds):
    names = [f"model.layers.{i}.{name}" for i in range(3) for name in LAYERS]
    return {"quant_method": "gguf", "kinds": {name: kinds[name.rpartition(".")[2]] for name in names}}


ONE_KIND = {f"{name}_proj": "Q8_0" for name in ("q", "k", "v", "o", "gate", "up", "down")}
SEVERAL = {**ONE_KIND, "q_proj": "Q4_1", "k_proj": "Q4_1", "v_proj": "Q5_0", "down_proj": "Q5_0"}


def gguf_checkpoint(kinds):
    config = gguf_config(kinds)
    return config, gguf_rows([config["kinds"][name] for name in sorted(config["kinds"])])


def shuffled(weight):
    inputs = weight.shape[1]
    groups = (torch.arange(inputs) // 32)[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    return quantized.gptq(weight, 32, symmetric=False, groups=groups)


CHECKPOINTS = {
    "int8": lambda: (COMPRESSED_INT8, quantized.int8_rows),
    "int4": lambda: (COMPRESSED_INT4, partial(quantized.compressed_int4, size=32, symmetric=True)),
    "act-order": lambda: ({**GPTQ, "desc_act": True, "sym": False}, shuffled),
    "gguf": lambda: gguf_checkpoint(ONE_KIND),
    "gguf of several kinds": lambda: gguf_checkpoint(SEVERAL),
}


def prompt_of(length, seed=1):
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(length)]


@pytest.fixture
def folder_of(model_dir_of):
    """folder_of(checkpoint) -> a quantized model."""

    def make(checkpoint):
        folder = model_dir_of("LlamaForCausalLM", attention_bias=True)
        quantized.quantize_folder(folder, *checkpoint)
        return folder

    return make


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("lanes", ALL_LANES)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_quantized_checkpoint_gives_the_tokens_of_torch(folder_of, driver_of, set_lanes, name, lanes):
    set_lanes(lanes)
    folder = folder_of(CHECKPOINTS[name]())
    native, plain = driver_of(folder, backend="native"), driver_of(folder, backend="torch")
    assert native.runner.backend == "native"
    assert native.runner.weight_sizes.layers < 0.5 * 4 * native.runner.description.layer_weights
    prompts = [prompt_of(length, seed=length) for length in (1, 9, 40)]
    assert native.generate(prompts, 10, chunk=7) == plain.generate(prompts, 10)


BOUNDS = {"int8": 1e-3, "int4": 1e-3, "act-order": 1e-3, "gguf": 1e-3, "gguf of several kinds": 1e-3}
"""Of the relative error of logits beside the torch path's, whose sums are exact: each product is within 1e-4 of its norm
(docs/quantization.md), through three blocks; a code of int8 may be the neighbouring one where a norm differs in its last bit."""


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_21_logits_are_near_those_of_the_rule(folder_of, driver_of, name):
    folder, prompts, following = folder_of(CHECKPOINTS[name]()), [prompt_of(n, seed=n) for n in (1, 11)], [7]
    expected = logits_of(driver_of(folder, backend="torch"), prompts, following)
    got = logits_of(driver_of(folder, backend="native"), prompts, following)
    error = float((got - expected).norm() / expected.norm())
    assert 0 < error < BOUNDS[name], f"{error:.2e}"


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_kv_is_the_same_bits_at_every_chunk_size_and_in_a_batch(folder_of, driver_of, name):
    driver, kv = driver_of(folder_of(CHECKPOINTS[name]()), backend="native"), []
    for chunk in (1, 3, 16, 41):
        table = driver.table(41)
        other = driver.table(41)
        driver.prefill(prompt_of(41), table, chunk=chunk)
        driver.runner.execute([driver.seq([7], 0, other), driver.seq([5], 41 - 1, table, index=1)])
        kv.append(driver.runner.pool.tensor[table].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, :41].clone())
        driver.free += table + other
    assert all(torch.equal(some, kv[0]) for some in kv[1:])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        (
            lambda: (
                quantized.compressed(
                    "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}, None
                ),
                partial(quantized.compressed_int4, size=8, symmetric=True),
            ),
            "group_size 8 over 96 inputs is no multiple of 16 that divides them",
        ),
        (lambda: (COMPRESSED_FP8, quantized.fp8_rows), "it has no linear method fp8"),
        (
            lambda: gguf_checkpoint({**ONE_KIND, "up_proj": "Q4_1"}),
            r"its gate and up are of several kinds, Q8_0\+Q4_1",
        ),
    ],
)
def test_what_the_kernels_do_not_take_is_torchs_and_named(folder_of, driver_of, caplog, checkpoint, words):
    folder = folder_of(checkpoint())
    with caplog.at_level(logging.WARNING):
        driver = driver_of(folder)
    assert driver.runner.backend.startswith("torch")
    with pytest.raises(ConfigError, match=words):
        driver_of(folder, backend="native")
    assert driver.generate([prompt_of(9)], 3) == driver_of(folder, backend="torch").generate([prompt_of(9)], 3)
