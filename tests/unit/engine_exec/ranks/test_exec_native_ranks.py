"""Ranks on the compiled kernels: the tokens of one rank, for every way to keep weights and KV, in any company."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch

from diptych.common.adapters.peft import read_adapter
from diptych.common.errors import ConfigError
from diptych.engine.runner import RunnerLost
from diptych_tests import quantized
from diptych_tests.lora import linear_shapes, write_adapter
from diptych_tests.quantized import COMPRESSED_INT4, COMPRESSED_INT8, GPTQ, gguf_config, gguf_rows
from diptych_tests.rank_threads import ThreadCommunicator, ThreadedRanks

pytestmark = pytest.mark.usefixtures("compiler")
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
"""Of which four ranks take their parts at every width of vectors."""
BIASES = {"attention_bias": True, "mlp_bias": True}
MODELS = {
    "four KV heads": ("LlamaForCausalLM", BIASES),
    "two KV heads": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    "post norms, windows and softcaps": ("Gemma2ForCausalLM", {"sliding_window": 11}),
}


def prompts_of(*lengths):
    rng = random.Random(4)
    return [[rng.randrange(320) for _ in range(length)] for length in lengths]


PROMPTS = prompts_of(1, 9, 30)


@pytest.fixture
def ranks_of(driver_of):
    """ranks_of(folder, tensor parallel, pipeline, **load arguments) -> Driver of all ranks."""
    made = []

    def make(folder, *degrees, backend="native", **kwargs):
        settings = {"num_blocks": 96, "block_size": 8, "num_threads": 1, "backend": backend, **kwargs}
        made.append(ThreadedRanks(folder, *degrees, **settings))
        assert all(runner.backend == backend for runner in made[-1].runners)
        return driver_of(folder, runner=made[-1])

    yield make
    for ranks in made:
        ranks.close()


@pytest.fixture
def native_of(driver_of):
    return partial(driver_of, backend="native")


@pytest.mark.parametrize("degrees", [(2, 1), (4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_give_the_tokens_of_one(model_dir_of, native_of, ranks_of, name, degrees):
    architecture, fields = MODELS[name]
    folder = model_dir_of(architecture, **{**SHAPE, **fields})
    expected = native_of(folder).generate(PROMPTS, 8)
    ranks = ranks_of(folder, *degrees)
    assert ranks.generate(PROMPTS, 8, chunk=7) == expected
    assert ranks.generate_with_drafts(PROMPTS, expected)[0] == expected


@pytest.fixture
def folder_of(model_dir_of):
    """folder_of(a key of CHECKPOINTS) -> a quantized model."""

    def make(name):
        folder = model_dir_of("LlamaForCausalLM", **SHAPE, **BIASES)
        if name in CHECKPOINTS:
            quantized.quantize_folder(folder, *CHECKPOINTS[name](folder))
        return folder

    return make


def shuffled(weight):
    inputs = weight.shape[1]
    groups = (torch.arange(inputs) // 32)[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    return quantized.gptq(weight, 32, symmetric=False, groups=groups)


def gguf_of(folder):
    config = gguf_config(folder)
    return config | {"kinds": {name: kind for name, kind in config["kinds"].items() if not name.endswith(".bias")}}


CHECKPOINTS = {
    "int8": lambda folder: (COMPRESSED_INT8, quantized.int8_rows),
    "int4": lambda folder: (COMPRESSED_INT4, partial(quantized.compressed_int4, size=32, symmetric=True)),
    "gguf": lambda folder: (gguf_of(folder), gguf_rows),
    "act-order": lambda folder: ({**GPTQ, "desc_act": True, "sym": False}, shuffled),
}


@pytest.mark.parametrize("name", ["int8", "int4", "gguf"])
def test_quantized_ranks_give_the_tokens_of_torchs_ranks(folder_of, ranks_of, name):
    """Not those of one rank: with int8 each rank quantizes its own part of a row."""
    folder = folder_of(name)
    expected = ranks_of(folder, 2, backend="torch").generate(PROMPTS, 8)
    assert ranks_of(folder, 2).generate(PROMPTS, 8, chunk=7) == expected


@pytest.mark.parametrize("name", ["int4", "gguf"])
def test_ranks_with_groups_of_weights_give_the_tokens_of_one(folder_of, native_of, ranks_of, name):
    folder = folder_of(name)
    assert ranks_of(folder, 4).generate(PROMPTS, 8) == native_of(folder).generate(PROMPTS, 8)


def test_ranks_refuse_inputs_in_an_order_of_their_own(folder_of, ranks_of):
    with pytest.raises(ConfigError, match=r"orders its inputs \(act-order\)"):
        ranks_of(folder_of("act-order"), 2)


@pytest.mark.parametrize(
    "how", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8_e4m3"}], ids=str
)
def test_ranks_with_other_elements_give_the_tokens_of_one(folder_of, native_of, ranks_of, how):
    folder = folder_of("plain")
    assert ranks_of(folder, 2, **how).generate(PROMPTS, 8) == native_of(folder, **how).generate(PROMPTS, 8)


@pytest.mark.parametrize("how", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}], ids=str)
def test_pipeline_stages_have_the_bits_of_one_process(folder_of, native_of, ranks_of, how):
    """In bfloat16 rows were rounded between two stages, and are not between two layers."""
    folder = folder_of("plain")
    ids, known = native_of(folder, **how).in_one_batch(PROMPTS, [-1] * 3)
    same, logprobs = ranks_of(folder, 1, 3, **how).in_one_batch(PROMPTS, [-1] * 3)
    assert same == ids
    assert np.array_equal(logprobs, known)


@pytest.mark.parametrize("degree", [2, 4])
def test_adapters_on_ranks_give_the_tokens_of_one_in_any_company(folder_of, native_of, ranks_of, tmp_path, degree):
    folder = folder_of("plain")
    shapes = linear_shapes(folder)
    adapters = [write_adapter(tmp_path / str(rank), shapes, rank=rank, seed=rank, size=0.2) for rank in (3, 8)]
    how, slots = {"max_loras": 2, "max_lora_rank": 8}, (0, -1, 1)
    one, ranks = native_of(folder, **how), ranks_of(folder, degree, **how)
    for slot, adapter in enumerate(adapters):
        for runner in (one.runner, *ranks.runner.runners):
            runner.install_adapter(slot, runner.read_adapter(adapter, read_adapter(adapter)))
    expected, known = one.in_one_batch(PROMPTS, slots)
    ids, logprobs = ranks.in_one_batch(PROMPTS, slots)
    assert ids == expected
    np.testing.assert_allclose(logprobs, known, atol=5e-4)
    for i, slot in enumerate(slots):
        alone, same = ranks.in_one_batch(PROMPTS[i : i + 1], [slot])
        assert alone[0] == ids[i]
        assert np.array_equal(same[0], logprobs[i]), "the same bits"


def test_a_part_that_the_kernels_do_not_take_is_torchs_and_named(model_dir_of, native_of, ranks_of):
    """Four ranks have 40 of the 160 columns."""
    folder = model_dir_of("LlamaForCausalLM", **{**SHAPE, "intermediate_size": 160})
    with pytest.raises(ConfigError, match="intermediate_size 40 is no multiple of"):
        ranks_of(folder, 4)
    ranks = ThreadedRanks(folder, 4, num_blocks=96, block_size=8, num_threads=1)
    try:
        assert {runner.backend for runner in ranks.runners} == {"torch"}
        assert "intermediate_size 40 is no multiple of" in ranks.sampler.refusals[0]
    finally:
        ranks.close()


@pytest.mark.parametrize("sums", [0, 3, 5])
def test_a_rank_that_is_lost_in_the_middle_of_a_call_ends_the_step(folder_of, ranks_of, monkeypatch, sums):
    """The other rank waits for it in C at that time. sums: that the layers had before, of six."""
    all_reduce, left = ThreadCommunicator.all_reduce, sums + 1  # the first one is the embedding's

    def until_it_ends(self, x):
        nonlocal left
        if self.place.rank == 1:
            left -= 1
            if left < 0:
                self.close()
                raise RunnerLost("it was ended")
        return all_reduce(self, x)

    monkeypatch.setattr(ThreadCommunicator, "all_reduce", until_it_ends)
    driver = ranks_of(folder_of("plain"), 2)
    with pytest.raises(RunnerLost):
        driver.prefill(PROMPTS[2], driver.table(30), chunk=30)
    assert left == -1, "no further sum was asked for"
