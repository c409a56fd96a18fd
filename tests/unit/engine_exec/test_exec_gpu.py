"""The same torch path on a CUDA device."""

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
def test_cuda_draws_what_the_cpu_draws(variant, driver_of, sampling):
    folder, _ = variant
    prompts = prompts_of(5, 21, 40)
    cpu, cuda = (
        driver_of(folder, device=device).generate(prompts, 8, chunk=9, sampling=sampling) for device in ("cpu", "cuda")
    )
    assert cpu == cuda


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pack_on_cuda(tiny_dir, driver_of, dtype):
    driver = driver_of(tiny_dir, device="cuda", dtype=dtype)
    driver.generate(prompts_of(20), 4)
    driver.runner.pool.tensor.normal_()
    size = 20 * driver.runner.kv_bytes_per_token
    first, second = bytearray(size), bytearray(size)
    checksum = driver.runner.pack([0, 1, 2], 20, memoryview(first))
    driver.runner.unpack([3, 4, 5], 20, memoryview(bytes(first)))
    assert driver.runner.pack([3, 4, 5], 20, memoryview(second)) == checksum
    assert first == second
