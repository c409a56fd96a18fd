"""A model on several ranks of the Triton back end gives the tokens that it gives on one. Kernels are interpreted, and ranks are
threads; what the GPUs do between them has tests of its own, see tests/kernels/test_triton_all_reduce.py."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from diptych.common.adapters.peft import read_adapter
from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.kv_groups import PoolDemand
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.exec.backends import triton
from diptych.engine.exec.linear import DenseLinear
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.executor import LocalExecutor
from diptych.engine.messages import EngineRequest
from diptych.engine.offline import OfflineEngine
from diptych_tests.lora import linear_shapes, write_adapter
from diptych_tests.rank_threads import ThreadedRanks

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1"),
]
SHAPE = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "num_hidden_layers": 2, "vocab_size": 64,
}  # fmt: skip
GREEDY = SamplingParams(6, temperature=0.0, ignore_eos=True)


@pytest.fixture
def one_kernel_at_a_time(monkeypatch):
    """The interpreter keeps its place in one object for all threads."""
    from triton.runtime.interpreter import GridExecutor

    lock, call = threading.Lock(), GridExecutor.__call__

    def locked(self, *args, **kwargs):
        with lock:
            return call(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", locked)


@pytest.mark.parametrize(("architecture", "degrees", "settings"), [
    ("LlamaForCausalLM", (2, 1), {}),
    ("LlamaForCausalLM", (1, 2), {}),
    ("Qwen2ForCausalLM", (2, 1), {"batch_invariant": True}),
], ids=["tensor", "pipeline", "batch-invariant"])  # fmt: skip
def test_ranks_give_the_tokens_of_one(one_kernel_at_a_time, model_dir_of, driver_of, architecture, degrees, settings):
    folder = model_dir_of(architecture, **SHAPE)
    rng = random.Random(4)
    prompts = [[rng.randrange(64) for _ in range(length)] for length in (1, 9)]
    common = {"num_blocks": 32, "block_size": 8, "backend": "triton", "num_threads": 1, **settings}
    expected = driver_of(folder, **common).generate(prompts, 3, chunk=7)
    ranks = ThreadedRanks(folder, *degrees, **common)
    try:
        assert all(runner.backend == "triton" for runner in ranks.runners)
        assert driver_of(folder, runner=ranks).generate(prompts, 3, chunk=7) == expected
    finally:
        ranks.close()


def test_23_stages_have_pools_for_the_kv_groups_of_their_layers(one_kernel_at_a_time, model_dir_of):
    """The first one sees every token, the second one a window, whose freed blocks are used again."""
    windows = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    folder = model_dir_of("Qwen2ForCausalLM", **SHAPE, **windows)
    rng = random.Random(4)
    requests = [EngineRequest(f"r{n}", Prompt(tuple(rng.randrange(64) for _ in range(n))), GREEDY) for n in (5, 29)]
    steps = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    config = EngineConfig(24, 4, **steps, max_step_time_s=None, mixed_step_time_s=None, check_invariants=True)

    def outputs(runner):
        identity = IdentityHeader(b"k" * 32, "m", "t", "float32", 4)
        results = OfflineEngine(LocalExecutor(runner), config, identity, clock=FakeClock()).generate(requests)
        assert [one.error for one in results] == [None, None]
        return [one.token_ids for one in results]

    common = {"num_blocks": 24, "block_size": 4, "num_threads": 1, "demand": PoolDemand(**steps)}
    expected = outputs(TorchModelRunner.load(folder, backend="torch", **common))
    ranks = ThreadedRanks(folder, 1, 2, backend="triton", **common)
    try:
        assert [[g.name for g in runner.pool.kv.groups] for runner in ranks.runners] == [["full"], ["window-9"]]
        assert [runner.pool.num_blocks for runner in ranks.runners] == [(24,), (12,)]
        assert outputs(ranks) == expected
    finally:
        ranks.close()


def test_ranks_add_their_parts_of_adapters(one_kernel_at_a_time, model_dir_of, driver_of, monkeypatch, tmp_path):
    """Where A lies behind the weights, as on a GPU: what a rank adds is in the sum over the ranks once."""
    folder = model_dir_of("LlamaForCausalLM", **SHAPE | {"num_hidden_layers": 1})
    written = write_adapter(tmp_path / "all", linear_shapes(folder), rank=3, seed=1)
    common = {"num_blocks": 32, "block_size": 8, "num_threads": 1, "max_loras": 1, "max_lora_rank": 4}
    prompts, slots = [[5, 9, 17, 50, 31], [44, 12, 60], [7]], [0, -1, 0]

    def installed(driver, *runners):
        for runner in runners:
            runner.install_adapter(0, runner.read_adapter(written, read_adapter(written)))
        return driver.in_one_batch(prompts, slots, 2)

    plain = driver_of(folder, backend="torch", **common)
    expected = installed(plain, plain.runner)
    monkeypatch.setattr(triton, "keep_linear", lambda method, weights: DenseLinear(weights.weight, weights.bias))
    ranks = ThreadedRanks(folder, 2, 1, backend="triton", **common)
    try:
        tokens, logprobs = installed(driver_of(folder, runner=ranks), *ranks.runners)
        assert tokens == expected[0]
        np.testing.assert_allclose(logprobs, expected[1], atol=1e-4)
    finally:
        ranks.close()
