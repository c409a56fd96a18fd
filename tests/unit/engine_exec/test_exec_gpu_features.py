"""The whole engine on a CUDA device: constraints, logprobs, choices, preemption and the pinned host tier, against the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import MonotonicClock
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.executor import LocalExecutor
from diptych.engine.messages import (
    BlockCopy,
    CopyKind,
    EngineRequest,
    Failed,
    Finished,
    PromptLogprobs,
    TokensOut,
)
from diptych.engine.offline import OfflineEngine

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is usable here"),
]

BLOCK = 8
FEATURES: dict[str, dict] = {
    "plain": {},
    "nucleus": {"top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "bias": {"logit_bias": ((5, 4.0), (9, -9.0), (300, 2.5))},
    "bad words": {"bad_words": ((4,), (5, 5)), "allowed_token_ids": tuple(range(3, 40))},
    "min tokens": {"allowed_token_ids": tuple(range(2, 60, 3)), "min_tokens": 5, "ignore_eos": False},
    "logprobs": {"logprobs": 5},
    "prompt logprobs": {"logprobs": 0, "prompt_logprobs": 3},
    "choices": {"n": 3, "logprobs": 1, "frequency_penalty": 0.5},
    "best of": {"n": 2, "best_of": 4},
    "beams": {"beam_width": 3, "n": 2, "logprobs": 1, "temperature": 0.0, "stop_token_ids": tuple(range(2, 320, 9))},
    "beams with penalties": {"beam_width": 2, "repetition_penalty": 1.3, "min_tokens": 4, "temperature": 0.0},
}


@pytest.fixture
def engine_on(tiny_dir):
    """engine_on(device, num_blocks, backend=None, **config) -> the production engine on the tiny model."""

    def make(device, num_blocks=160, backend=None, **fields):
        host = fields.get("num_host_blocks", 0)
        runner = TorchModelRunner.load(
            tiny_dir,
            device=device,
            num_blocks=num_blocks,
            block_size=BLOCK,
            num_threads=1,
            num_host_blocks=host,
            backend=backend,
        )
        config = EngineConfig(
            num_blocks, BLOCK, max_step_time_s=None, mixed_step_time_s=None, check_invariants=True, **fields
        )
        return OfflineEngine(
            LocalExecutor(runner), config, IdentityHeader(b"k" * 32, "m", "t", "float32", BLOCK), clock=MonotonicClock()
        )

    return make


def requests_of(greedy):
    base = SamplingParams(max_tokens=12, seed=5, temperature=0.0 if greedy else 0.9, ignore_eos=True)
    return [
        EngineRequest(name, Prompt(tuple(range(10 + i, 29 + 2 * i))), replace(base, **fields))
        for i, (name, fields) in enumerate(FEATURES.items())
    ]


def run(engine, requests):
    """Returns: by (attempt, choice) the token ids; with "lp" behind, their logprobs; with "prompt", the prompt's."""
    for request in requests:
        engine.send(request)
    out: dict = {}
    left = len(requests)
    for _ in range(3000):
        for event in engine.step():
            if isinstance(event, TokensOut):
                out.setdefault((event.attempt, event.choice), []).extend(event.token_ids)
                if event.logprobs:
                    known = out.setdefault((event.attempt, event.choice, "lp"), [])
                    known.extend(x for entry in event.logprobs for x in (entry.logprob, *(p for _, p in entry.top)))
            elif isinstance(event, PromptLogprobs):
                out.setdefault((event.attempt, "prompt", "lp"), []).extend(entry.logprob for entry in event.logprobs)
            assert not isinstance(event, Failed), event
            left -= isinstance(event, Finished)
        if not left:
            return out
    raise AssertionError("no end")


def same(got, want):
    assert got.keys() == want.keys()
    for key in want:
        if key[-1] == "lp":
            assert got[key] == pytest.approx(want[key], abs=1e-4)
        else:
            assert got[key] == want[key], key


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_every_feature_gives_what_the_cpu_gives(engine_on, backend, greedy):
    """In one batch; preempted by recompute and by swap; in small chunks; with a warm cache."""
    requests = requests_of(greedy)
    want = run(engine_on("cpu"), requests)
    same(run(engine_on(DEVICE, backend=backend), requests), want)
    for mode in ("recompute", "swap"):
        host = 160 if mode == "swap" else 0
        engine = engine_on(DEVICE, 16, backend, num_host_blocks=host, preemption_mode=mode)
        same(run(engine, requests), want)
        stats = engine.stats()
        assert stats.preemptions_total > 0
        assert (stats.swaps_total > 0) == (mode == "swap")
    engine = engine_on(DEVICE, backend=backend, long_prefill_token_threshold=5, max_num_batched_tokens=32)
    same(run(engine, requests), want)
    same(run(engine, requests), want)  # warm


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_evicted_blocks_come_back_from_pinned_memory(engine_on, backend):
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    requests = [EngineRequest(f"r{i}", Prompt(tuple(range(50 * i, 50 * i + 41))), greedy) for i in range(4)]
    want = run(engine_on("cpu"), requests)
    engine = engine_on(DEVICE, 14, backend, num_host_blocks=64, initial_copy_bytes_per_s=1e12)
    assert engine.core._executor.runner.pool.host.is_pinned()
    for again in range(3):
        for request in requests:
            got = run(engine, [replace(request, attempt=f"{request.attempt}/{again}")])
            assert got[f"{request.attempt}/{again}", 0] == want[request.attempt, 0]
    assert engine.stats().restored_tokens_total > 0
    assert engine.core.measure_copies() > 0
    assert engine.core.scheduler.check() == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_block_copies_move_every_byte(tiny_dir, driver_of, dtype):
    runner = driver_of(tiny_dir, device=DEVICE, dtype=dtype, num_blocks=8, num_host_blocks=4).runner
    pool = runner.pool.tensor.normal_()
    before = pool.clone()
    copies = [
        BlockCopy(CopyKind.TO_HOST, 0, 3),
        BlockCopy(CopyKind.FORK, 1, 0),  # after block 0 was saved
        BlockCopy(CopyKind.FROM_HOST, 3, 5),
        BlockCopy(CopyKind.TO_HOST, 2, 3),  # the slot's next owner
        BlockCopy(CopyKind.FROM_HOST, 3, 6),
    ]
    runner.copy_blocks(copies)
    assert torch.equal(pool[5], before[0])
    assert torch.equal(pool[0], before[1])
    assert torch.equal(pool[6], before[2])
    assert torch.equal(runner.pool.host[3], before[2].cpu())
    for untouched in (1, 2, 3, 4, 7):
        assert torch.equal(pool[untouched], before[untouched])
