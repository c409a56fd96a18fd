"""Gemma 2 and 3 on a CUDA device, against the CPU: windows shorter than the prompts, softcap, ropes by layer, wide heads."""

from __future__ import annotations

import random

import pytest
import torch

from diptych.common.kv_groups import PoolDemand
from diptych.common.sampling import SamplingParams
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych_tests.kv_groups import GroupDriver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is usable here"),
]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
FAMILIES = {
    "gemma2": ("Gemma2ForCausalLM", {"attn_logit_softcapping": 5.0}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {"rope_parameters": ROPES, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
}
HEADS = {"32": {"head_dim": 32}, "256": {"head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1}}
"""256: of every released Gemma, and the most that the kernels' shared memory holds."""


def prompts_of(*lengths):
    rng = random.Random(3)
    return [[rng.randrange(320) for _ in range(n)] for n in lengths]


@pytest.fixture
def folder_of(model_dir_of):
    def make(name, head_dim):
        architecture, fields = FAMILIES[name]
        common = {"sliding_window": 11, "query_pre_attn_scalar": 48, "num_hidden_layers": 4}
        return model_dir_of(architecture, **common, **fields, **HEADS[head_dim])

    return make


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("name", FAMILIES)
def test_cuda_draws_what_the_cpu_draws(folder_of, driver_of, name, head_dim, backend):
    folder = folder_of(name, head_dim)
    prompts = prompts_of(5, 21, 40)
    expected = driver_of(folder).generate(prompts, 16, chunk=9, sampling=GREEDY)
    driver = driver_of(
        folder, device="cuda", backend=backend, **({"graph_sizes": [2, 4]} if backend == "triton" else {})
    )
    assert driver.runner.backend == backend
    assert driver.generate(prompts, 16, chunk=9, sampling=GREEDY) == expected


@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_compute_what_the_kernels_do(folder_of, driver_of, name, head_dim):
    """In bf16, as it is served."""
    folder = folder_of(name, head_dim)
    prompts = prompts_of(5, 21, 40, 12)
    with_graphs, without = (
        driver_of(folder, device="cuda", dtype="bfloat16", graph_sizes=sizes).generate(prompts, 16, sampling=GREEDY)
        for sizes in ([4], [])
    )
    assert with_graphs == without


@pytest.mark.parametrize("graph_sizes", [[4], []], ids=["graphs", "kernels"])
@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("name", FAMILIES)
def test_17_freed_blocks_of_window_groups_are_not_read(folder_of, driver_of, name, head_dim, graph_sizes):
    """Blocks behind a window hold NaN, or another sequence's KV, at once; chunks run beside decoding sequences."""
    folder = folder_of(name, head_dim)
    prompts = prompts_of(5, 21, 40)
    expected = driver_of(folder).generate(prompts, 16, chunk=9, sampling=GREEDY)
    runner = TorchModelRunner.load(
        folder, device="cuda", num_blocks=42, block_size=4, graph_sizes=graph_sizes,
        demand=PoolDemand(max_num_seqs=4, max_num_batched_tokens=24),
    )  # fmt: skip
    assert [group.window for group in runner.pool.kv.groups] == [0, 11]
    driver = GroupDriver(runner)
    assert driver.generate(prompts, 16, chunk=9) == expected
    source = GroupDriver(runner, seed=3)
    arrived = []
    for number, prompt in enumerate(prompts):
        seq = source.begin(f"p{number}", prompt)
        source.prefill(seq, 9)
        parts = source.packed(seq)
        source.end(seq)
        arrived.append(source.unpacked(f"d{number}", seq.tokens, len(prompt), parts))
    source.decode(arrived, 16)
    assert [seq.outputs for seq in arrived] == expected
