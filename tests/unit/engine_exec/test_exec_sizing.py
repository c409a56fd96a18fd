"""How many blocks a GPU holds, and that a step without memory is one step's trouble."""

from __future__ import annotations

import pytest
import torch

from diptych.common.errors import ConfigError
from diptych.common.kv_format import full_format, windowed_format
from diptych.common.kv_groups import PoolDemand
from diptych.common.kv_parts import split
from diptych.common.sampling import SamplingParams
from diptych.engine.exec.cuda.sizing import PoolBudget, blocks_that_fit
from diptych.engine.exec.model_runner import TorchModelRunner, _trial_graphs
from diptych.engine.messages import ScheduledSeq
from diptych.engine.runner import OutOfDeviceMemory

GIB = 1 << 30
KV = full_format(32, 8, 128, block_size=16, dtype="bfloat16")
assert KV.block_bytes == 2 << 20
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is usable here")]


def fit(*, total=80, free=80.0, used=17, step=2, reserve=1, share=0.9):
    budget = PoolBudget(share, 2048, reserve_bytes=reserve * GIB)
    return blocks_that_fit(budget, KV, None, total=total * GIB, free=int(free * GIB), used=used * GIB, step=step * GIB)


def test_what_is_left_is_cut_into_blocks():
    assert fit() == (72 * GIB - 20 * GIB - (256 << 20)) // (2 << 20)


def test_15_3_4_two_workers_on_one_gpu_have_a_share_each_whatever_the_other_has_taken_by_now():
    alone, beside = fit(share=0.45, free=63), fit(share=0.45, free=40)
    assert alone == beside == (36 * GIB - 20 * GIB - (256 << 20)) // (2 << 20)


def test_what_others_have_taken_is_not_promised():
    assert fit(free=30) == (30 * GIB - 3 * GIB - (256 << 20)) // (2 << 20)


def test_23_a_stage_with_windows_only_leaves_the_number_of_blocks_to_the_others():
    """Each has its own memory, and all take the smallest number. Half a MiB a block of two layers."""
    kv = windowed_format([64, 64, 0, 0], 16, 256, block_size=16, dtype="bfloat16")
    assert kv.block_bytes == 1 << 20
    demand, budget = PoolDemand(8, 256), PoolBudget(0.5, 256)
    windows, full = (
        blocks_that_fit(budget, kv, demand, own, total=8 * GIB, free=8 * GIB, used=GIB, step=0)
        for own in split(kv, pipeline=2)
    )
    assert full == (3 * GIB - (256 << 20)) // (1 << 19)
    assert full < windows


@pytest.mark.parametrize("values", [{"used": 72}, {"free": 3.1}])
def test_a_gpu_without_room_is_refused_with_its_numbers(values):
    with pytest.raises(ConfigError, match="of the GPU's 80.0 GiB .* are free; .* already, a step takes 2.0"):
        fit(**values)


def test_15_3_4_no_memory_for_the_pool_is_reported_with_numbers(tiny_dir, monkeypatch):
    def no_room(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 70.31 GiB. GPU 0 has ...")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 15 * GIB)
    monkeypatch.setattr(TorchModelRunner, "__init__", no_room)
    with pytest.raises(ConfigError, match="5.0 of the GPU's 80.0 GiB are free, this process has 15.0") as caught:
        TorchModelRunner.load(tiny_dir, num_blocks=64)
    assert caught.value.field == "num_blocks"


def test_18_a_trial_captures_the_largest_graph_and_leaves_room_for_what_the_others_put_out():
    pytest.importorskip("triton", reason="Triton is not installed")
    from diptych.engine.exec.cuda.chunk_graphs import CHUNK_GRAPHS

    assert _trial_graphs([1, 8, 4096], [], 640) == ([4096], [], 2 * (2 << 20)), "the allocator rounds up to 2 MiB"
    assert _trial_graphs([16, 32, 256], [], 128_256 * 2) == ([256], [], (4 << 20) + (8 << 20))
    shapes = [(0, 512), (24, 512), (16, 64)]
    assert _trial_graphs([], shapes, 128_256 * 2) == ([], [(24, 512)], (2 << 20) + (6 << 20)), "8 rows and 24"
    assert _trial_graphs(None, None, 640) == ([256], [(256, 512)], (16 + len(CHUNK_GRAPHS) - 1) * (2 << 20))
    assert _trial_graphs([], [], 640) == ([], [], 0)
    assert _trial_graphs([1, 8, 4096], [], 640, slots=True) == ([4096], [], 4 * (2 << 20)), "with and without adapters"


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, float("nan")])
def test_the_share_is_checked(share):
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        PoolBudget(share, 2048)


def test_a_cpu_has_no_such_budget(tiny_dir):
    with pytest.raises(ConfigError, match="only a GPU's pool"):
        TorchModelRunner.load(tiny_dir, budget=PoolBudget(0.9, 64))


def _prompt(runner: TorchModelRunner, name: str, count: int) -> ScheduledSeq:
    table = list(range(-(-count // runner.block_size)))
    return ScheduledSeq(name, [7] * count, 0, (table,), True, SamplingParams(max_tokens=1, temperature=0.0), 0)


class TestOnTheGpu:
    pytestmark = on_gpu

    def test_the_pool_takes_its_share_and_no_more(self, tiny_dir):
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        share = 1.0 - free / total + 1.5 * GIB / total
        runner = TorchModelRunner.load(
            tiny_dir,
            device="cuda",
            dtype="bfloat16",
            graph_sizes=[1, 8],
            chunk_graphs=[(0, 64)],
            budget=PoolBudget(share, 64),
        )
        torch.cuda.synchronize()
        left, _ = torch.cuda.mem_get_info()
        pool = runner.num_blocks * runner.block_size * runner.kv_bytes_per_token
        assert pool > GIB
        assert free - left <= 1.5 * GIB

    def test_a_step_without_memory_is_reported_and_the_next_one_runs(self, tiny_dir, monkeypatch):
        runner = TorchModelRunner.load(tiny_dir, device="cuda", dtype="bfloat16", num_blocks=16, graph_sizes=[1])
        expected = runner.execute([_prompt(runner, "a", 40)]).token_ids
        compute = runner._fused.execute

        def greedy(seqs, batch, should_abort):
            compute(seqs, batch, should_abort)
            return torch.empty(1 << 45, dtype=torch.uint8, device="cuda")

        with monkeypatch.context() as patch:
            patch.setattr(runner._fused, "execute", greedy)
            with pytest.raises(OutOfDeviceMemory, match="out of memory"):
                runner.execute([_prompt(runner, "b", 60)])
        assert runner.execute([_prompt(runner, "c", 40)]).token_ids == expected
