"""Quantized weights on the Triton back end, through the interpreter or on a GPU: logits beside the torch path's."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from diptych.engine.exec.backends.triton import TritonBackend
from diptych.engine.exec.cuda import quantized as kept
from diptych.engine.exec.cuda.quantized import Int4Linear, Int4WordsLinear, W8A8Linear
from diptych.engine.exec.kv_pool import kv_format_of
from diptych.engine.exec.models.registry import describe
from diptych_tests import quantized
from diptych_tests.logits import logits_of
from diptych_tests.quantized import AWQ, COMPRESSED_FP8, COMPRESSED_INT8, FP8, GPTQ

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1")
SMALL = {
    "num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32,
}  # fmt: skip


def act_order(weight):
    inputs = weight.shape[1]
    groups = (torch.arange(inputs) // 32)[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    return quantized.gptq(weight, 32, symmetric=False, groups=groups)


CHECKPOINTS = {
    "int8": (COMPRESSED_INT8, quantized.int8_rows),
    "fp8": (COMPRESSED_FP8, quantized.fp8_rows),
    "fp8-blocks": (FP8, quantized.fp8_blocks),
    "int4-awq": (AWQ, partial(quantized.awq, size=32)),
    "int4-act-order": ({**GPTQ, "desc_act": True, "sym": False}, act_order),
}
CHECKPOINTS |= {f"{name}-in-words": CHECKPOINTS[name] for name in ("int4-awq", "int4-act-order")}
BOUNDS = {"int8": 0.02, "fp8": 0.1, "fp8-blocks": 0.1} | {name: 1e-4 for name in CHECKPOINTS if name.startswith("int4")}
"""Of the relative error of logits beside the torch path's: what differs in the last bit before a row is quantized may take a
neighbouring code."""


@pytest.fixture
def folder_of(model_dir_of, monkeypatch):
    def make(name, **overrides):
        monkeypatch.setattr(kept, "WORDS", name.endswith("in-words"))
        torch.manual_seed(6)
        folder = model_dir_of("LlamaForCausalLM", **{**SMALL, **overrides})
        quantized.quantize_folder(folder, *CHECKPOINTS[name])
        return folder

    return make


def a_prompt(length):
    rng = random.Random(length)
    return [rng.randrange(320) for _ in range(length)]


def check_logits(folder, driver_of, name, **how):
    prompts, following = [a_prompt(n) for n in (1, 11)], a_prompt(1)
    expected = logits_of(driver_of(folder, backend="torch"), prompts, following)
    driver = driver_of(folder, backend="triton", **how)
    blocks = driver.runner._fused._runtime.decoder._weights.blocks
    int4 = Int4WordsLinear if name.endswith("in-words") else Int4Linear
    assert {type(linear) for block in blocks for linear in block.linears} <= {W8A8Linear, int4}
    got = logits_of(driver, prompts, following)
    error = float((got - expected).norm() / expected.norm())
    assert error < BOUNDS[name], f"{error:.2e}"
    assert error > 0, "the reference was compared with itself"


@interpreted
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_near_the_references(folder_of, driver_of, name):
    check_logits(folder_of(name), driver_of, name)


@interpreted
@pytest.mark.parametrize("name", ["int8", "fp8-blocks", "int4-awq", "int4-awq-in-words"])
def test_biases_norms_of_heads_and_another_activation(folder_of, driver_of, name):
    folder = folder_of(name, attention_bias=True, hidden_act="gelu_pytorch_tanh")
    check_logits(folder, driver_of, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_near_the_references_gpu(folder_of, driver_of, name):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is usable here")
    check_logits(folder_of(name), driver_of, name, device="cuda", graph_sizes=[2, 4])


def test_a_group_size_without_a_kernel_is_refused_by_name():
    description = describe(
        {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 96, "intermediate_size": 192,
         "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64}
    )  # fmt: skip
    kv = kv_format_of(description, block_size=8, dtype="float32")

    def refusal(size):
        declared = partial(replace, method="int4", settings=(("group_size", size),))
        return TritonBackend().refusal(description.blocks[0].with_linears(declared), kv)

    assert refusal(48) == "it has no int4 kernel for groups of 48"
    assert refusal(96) is None


@pytest.fixture
def small_chains(monkeypatch):
    """Two chains of sums in a tiny model; matrix products in the interpreter as a chain of instructions computes them."""
    from diptych.bench.kernels.ordered_dot import replaced
    from diptych.kernels import triton_invariant_matmul as matmul

    monkeypatch.setattr(*replaced())
    monkeypatch.setattr(matmul, "CHAINS_FROM", 64)


@interpreted
@pytest.mark.usefixtures("small_chains")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_batch_invariant_logits_are_the_same_bits_in_any_chunks_and_company(folder_of, driver_of, name):
    """Alone in one chunk, and beside another prompt in chunks of three."""
    folder, prompt, following = folder_of(name), a_prompt(8), [5]
    alone = logits_of(driver_of(folder, backend="triton", batch_invariant=True), [prompt], following, chunk=8)
    both = logits_of(
        driver_of(folder, backend="triton", batch_invariant=True), [a_prompt(2), prompt], following, chunk=3
    )
    assert torch.equal(alone[0], both[1]), "the prompt's last token"
    assert torch.equal(alone[1], both[3]), "the token that was decoded"
