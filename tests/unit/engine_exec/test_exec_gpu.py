"""The torch path and the Triton path on a CUDA device, against the CPU."""

from __future__ import annotations

import random

import pytest
import torch

from diptych.common.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is usable here"),
]


def prompts_of(*lengths):
    rng = random.Random(3)
    return [[rng.randrange(320) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("sampling", [
    SamplingParams(max_tokens=9, temperature=0.0),
    SamplingParams(max_tokens=9, seed=5, temperature=0.9, top_p=0.9, top_k=40),
])  # fmt: skip
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_cuda_draws_what_the_cpu_draws(variant, driver_of, sampling, backend):
    folder, _ = variant
    prompts = prompts_of(5, 21, 40)
    expected = driver_of(folder).generate(prompts, 8, chunk=9, sampling=sampling)
    driver = driver_of(folder, device="cuda", backend=backend, **({"graph_sizes": [2, 4]} if backend == "triton" else {}))
    assert not driver.runner.pool.tensor.any()
    driver.runner.pool.tensor.fill_(float("nan") if backend == "triton" else 0.0)
    assert driver.generate(prompts, 8, chunk=9, sampling=sampling) == expected


def test_graphs_compute_what_the_kernels_do(tiny_dir, driver_of):
    """Every padded size, and steps with and without sampled rows, in bf16."""
    prompts = prompts_of(*range(3, 14))
    outputs = []
    for sizes in ([], [1, 2, 4, 8, 16]):
        driver = driver_of(tiny_dir, device="cuda", dtype="bfloat16", graph_sizes=sizes)
        outputs.append([driver.generate(prompts[:count], 6, chunk=5) for count in (1, 2, 3, 8, 11)])
        table = driver.table(8)
        first = driver.prefill(prompts[0], table, chunk=9)
        step = driver.seq([first], 3, table, sample=False, index=1)
        assert driver.runner.execute([step]).token_ids == [None]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_pack_on_cuda(tiny_dir, driver_of, dtype, backend):
    driver = driver_of(tiny_dir, device="cuda", dtype=dtype, backend=backend)
    driver.generate(prompts_of(20), 4)
    driver.runner.pool.tensor.normal_()
    size = 20 * driver.runner.kv_bytes_per_token
    first, second = bytearray(size), bytearray(size)
    checksum = driver.runner.pack([0, 1, 2], 20, memoryview(first))
    driver.runner.unpack([3, 4, 5], 20, memoryview(bytes(first)))
    assert driver.runner.pack([3, 4, 5], 20, memoryview(second)) == checksum
    assert first == second
