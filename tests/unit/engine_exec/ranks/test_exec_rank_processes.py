"""A model over the real executor: a process for each rank, sums over gloo. The ids are those of one rank."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.executor import LocalExecutor
from diptych.engine.messages import EngineRequest
from diptych.engine.offline import OfflineEngine
from diptych.engine.ranks.executor import RanksExecutor
from diptych.engine.ranks.starting import RankSpec
from diptych_tests.rank_threads import places

pytestmark = pytest.mark.multiproc
BLOCK, COUNT, GENEROUS_S = 8, 10, 240.0
LLAMA = {
    "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 96,
    "num_hidden_layers": 4,
}  # fmt: skip
GREEDY = SamplingParams(COUNT, temperature=0.0, ignore_eos=True)


def requests_of(vocab_size, *lengths):
    rng = random.Random(4)
    return [
        EngineRequest(f"r{i}", Prompt(tuple(rng.randrange(vocab_size) for _ in range(length))), params)
        for i, length in enumerate(lengths)
        for params in [replace(GREEDY, n=1 + i % 2, temperature=0.6 * (i % 2), seed=i)]
    ]


def engine_of(executor, **settings):
    settings = {"max_step_time_s": None, "mixed_step_time_s": None, "check_invariants": True, **settings}
    config = EngineConfig(settings.pop("num_blocks", executor.capabilities.num_blocks), BLOCK, **settings)
    return OfflineEngine(executor, config, IdentityHeader(b"k" * 32, "m", "t", "float32", BLOCK), clock=FakeClock())


def outputs(engine, requests, name=""):
    results = engine.generate([replace(request, attempt=request.attempt + name) for request in requests])
    assert [result.error for result in results] == [None] * len(requests)
    return [(result.token_ids, result.other_choices) for result in results]


def executor_over(folder, meeting, tensor_parallel, pipeline, **settings):
    every = places(tensor_parallel, pipeline)
    arguments = {
        "model": str(folder), "rendezvous": f"file://{meeting}", "tensor_parallel": tensor_parallel, "pipeline": pipeline,
        "deadline_s": GENEROUS_S, "block_size": BLOCK, "backend": "torch", "num_threads": 1, **settings,
    }  # fmt: skip
    specs = [
        RankSpec("diptych.engine.exec.parallel.rank_runner:make", {**arguments, "rank": place.rank}, dict(os.environ))
        for place in every
    ]
    [sampler] = [place.rank for place in every if place.samples]
    return RanksExecutor(specs, sampler=sampler, deadline_s=GENEROUS_S)


def check(folder, meeting, degrees, requests, **settings):
    """Cold, warm, in chunks; and in a tight pool, where sequences are swapped out and computed again."""
    local = {"num_blocks": 200, "block_size": BLOCK, "backend": "torch", "num_threads": 1, **settings}
    expected = outputs(engine_of(LocalExecutor(TorchModelRunner.load(folder, **local))), requests)
    executor = executor_over(folder, meeting, *degrees, num_blocks=100, num_host_blocks=6, **settings)
    try:
        roomy = engine_of(executor)
        assert outputs(roomy, requests) == expected
        assert outputs(roomy, requests, "-warm") == expected
        assert roomy.stats().cached_tokens_total > 0
        tight = engine_of(executor, num_blocks=12, num_host_blocks=6, preemption_mode="swap", max_num_batched_tokens=24)
        assert outputs(tight, requests, "-tight") == expected
        assert tight.stats().preemptions_total >= tight.stats().swaps_total > 0
    finally:
        executor.close()


@pytest.mark.parametrize(
    "degrees", [(2, 1), *(pytest.param(one, marks=pytest.mark.slow) for one in ((4, 1), (1, 2), (2, 2)))], ids=str
)
def test_ranks_in_processes_give_the_ids_of_one(tmp_path, model_dir_of, degrees):
    folder = model_dir_of("LlamaForCausalLM", **LLAMA)
    check(folder, tmp_path / "meeting", degrees, requests_of(320, 3, 17, 40, 25, 30, 22, 28))


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_smollm2_on_three_ranks(tmp_path, real_model_dir, backend):
    """9 heads, 3 KV heads."""
    requests = requests_of(49152, 3, 17, 40, 25, 30, 22, 28)
    check(real_model_dir, tmp_path / "meeting", (3, 1), requests, backend=backend)
