"""The torch path and the Triton path on a CUDA device, against the CPU."""

from __future__ import annotations

import random

import pytest
import torch

from diptych.common.sampling import SamplingParams
from diptych.engine.exec.cuda.late_kernels import LATE
from diptych.engine.messages import DeviceRange

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
def test_cuda_draws_what_the_cpu_draws(each_model, driver_of, sampling, backend):
    folder, _ = each_model
    prompts = prompts_of(5, 21, 40)
    expected = driver_of(folder).generate(prompts, 8, chunk=9, sampling=sampling)
    driver = driver_of(
        folder, device="cuda", backend=backend, **({"graph_sizes": [2, 4]} if backend == "triton" else {})
    )
    assert not driver.runner.pool.tensor.any()
    driver.runner.pool.tensor.fill_(float("nan") if backend == "triton" else 0.0)
    assert driver.generate(prompts, 8, chunk=9, sampling=sampling) == expected


@pytest.mark.parametrize("fields", [
    {"top_p": 0.9, "top_k": 40},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "bad_words": ((7, 11), (12,)), "logprobs": 3, "top_p": 0.9},
])  # fmt: skip
@pytest.mark.parametrize("graph_sizes", [[], [2, 4]])
def test_steps_ahead_draw_what_the_cpu_draws(tiny_dir, driver_of, graph_sizes, fields):
    sampling = SamplingParams(max_tokens=9, seed=5, temperature=0.9, **fields)
    prompts = prompts_of(5, 21, 40)
    expected = driver_of(tiny_dir).generate(prompts, 40, sampling=sampling)
    driver = driver_of(tiny_dir, device="cuda", backend="triton", graph_sizes=graph_sizes)
    assert driver.generate_ahead(prompts, 40, sampling=sampling) == expected


@pytest.mark.parametrize("sampling", [
    SamplingParams(max_tokens=9, temperature=0.0),
    SamplingParams(max_tokens=9, seed=5, temperature=0.9, top_p=0.9, top_k=40),
])  # fmt: skip
@pytest.mark.parametrize("graph_sizes", [[], [2, 4]])
def test_18_chunks_that_are_launched_ahead_draw_what_the_cpu_draws(tiny_dir, driver_of, graph_sizes, sampling):
    prompts = prompts_of(40, 21, 5)
    expected = driver_of(tiny_dir).generate(prompts, 4, sampling=sampling)
    driver = driver_of(tiny_dir, device="cuda", backend="triton", graph_sizes=graph_sizes)
    driver.runner.pool.tensor.fill_(float("nan"))
    for _ in range(5):
        assert driver.chunks_ahead(*prompts, sampling=sampling) == [expected[0][:3], expected[1], expected[2][:2]]


@pytest.mark.parametrize("fields", [{}, {"repetition_penalty": 1.3, "bad_words": ((7, 11), (12,)), "logprobs": 3}])
@pytest.mark.parametrize("graph_sizes", [[], [2, 4, 8, 16]])
def test_drafts_are_verified_through_graphs(tiny_dir, driver_of, graph_sizes, fields):
    """A row of k tokens is k decode rows of one sequence: ids are those of plain decoding on the same kernels, and the CPU's."""
    sampling = SamplingParams(max_tokens=64, seed=5, temperature=0.9, top_k=40, **fields)
    prompts = prompts_of(5, 21, 40)
    expected = driver_of(tiny_dir).generate(prompts, 30, sampling=sampling)
    driver = driver_of(tiny_dir, device="cuda", backend="triton", graph_sizes=graph_sizes)
    assert driver.generate(prompts, 30, sampling=sampling) == expected
    outputs, _, yielded = driver.generate_with_drafts(prompts, expected, sampling=sampling)
    assert outputs == expected
    assert max(yielded) > 2


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
        assert driver.runner.execute([step]).token_ids == [()]
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


def test_overlapped_kernels_compute_what_separate_ones_do(monkeypatch):
    """Programmatic dependent launch off and on, without and with graphs: the same logits to the bit, many times over."""
    from diptych.bench.gpu.step import LLAMA_8B, random_weights
    from diptych.engine.exec.model_runner import TorchModelRunner
    from diptych.engine.exec.models.registry import describe
    from diptych.engine.messages import ScheduledSeq
    from diptych.kernels import pdl

    torch.manual_seed(0)
    weights = random_weights(describe({**LLAMA_8B, "num_hidden_layers": 4, "vocab_size": 32_000}))
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    tables = [list(range(i * 20, i * 20 + 20)) for i in range(12)]
    logits: dict[tuple[bool, bool], list[torch.Tensor]] = {}
    for overlap in (False, True):
        for graphs in (False, True):
            monkeypatch.setattr(pdl, "ENABLED", overlap)
            runner = TorchModelRunner(
                weights,
                eos_token_ids=(),
                num_blocks=240,
                block_size=16,
                max_model_len=320,
                graph_sizes=[1, 12] if graphs else [],
            )
            runner.pool.tensor.copy_(torch.randn(runner.pool.tensor.shape, generator=torch.Generator().manual_seed(1)))
            outs = logits[overlap, graphs] = []
            for count in (1, 12):
                seqs = [
                    ScheduledSeq(f"s{i}", [i + 7], 100 + 11 * i, (t,), True, greedy, 0) for i, t in enumerate(tables)
                ]
                with torch.inference_mode():
                    for _ in range(20):
                        batch = runner._fused.build(seqs[:count])
                        outs.append(runner._fused.execute(seqs[:count], batch, None).clone())
    for graphs in (False, True):
        for one, other in zip(logits[False, graphs], logits[True, graphs], strict=True):
            assert torch.equal(one, other)
    for outs in logits.values():
        assert all(torch.equal(outs[0], out) for out in outs[1:20])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_18_3_no_step_compiles_a_kernel_once_the_runner_is_ready(tiny_dir, driver_of, monkeypatch, caplog, dtype):
    """Prompts and batches of lengths that Triton specializes for (1, multiples of 16, others); all kinds of draws and moves."""
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    driver = driver_of(tiny_dir, device="cuda", dtype=dtype, num_blocks=4000)
    driver.runner.expect_compiled()
    prompts = prompts_of(1, 2, 5, 15, 16, 17, 32, 40, 3, 7, 9, 11, 30, 31, 33, 48, 64)
    constrained = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "bad_words": ((7, 11), (12,)), "logprobs": 3}
    for fields in (
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0.9, "seed": 5, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 0.9, "seed": 5, "top_p": 0.9, **constrained},
        {"temperature": 0.0, **constrained},
    ):
        sampling = SamplingParams(max_tokens=9, **fields)
        for count in (1, 2, 3, 16, 17):
            driver.generate(prompts[:count], 4, sampling=sampling)
        driver.generate(prompts[5:8], 4, chunk=9, sampling=sampling)
        driver.generate_ahead(prompts[:6], 6, sampling=sampling)
    mixed = [driver.seq(prompt, 0, driver.table(len(prompt)), index=0) for prompt in prompts]
    driver.runner.execute(mixed)
    blocks = list(range(64))
    for num_tokens in (1, 8, 16, 20, 100, 128, 512):
        size = num_tokens * driver.runner.kv_bytes_per_token
        payload = bytearray(size)
        driver.runner.pack(blocks, num_tokens, memoryview(payload))
        driver.runner.unpack(blocks, num_tokens, memoryview(payload))
        there = torch.zeros(size, dtype=torch.uint8, device="cuda")
        flat = DeviceRange(there.data_ptr(), size)
        driver.runner.pack(blocks, num_tokens, flat)
        driver.runner.unpack(blocks, num_tokens, flat).wait()
    assert not [record.getMessage() for record in caplog.records if LATE in record.getMessage()]
