"""CUDA graphs of steps with chunks: padded rows, chunks and tiles change nothing."""

from __future__ import annotations

import importlib.util
import random

import pytest
import torch

from diptych.common.sampling import SamplingParams
from diptych_tests.cpu_graphs import CpuGraphs

SHAPES = ((0, 16), (0, 24), (4, 16))
SMALL = {
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ONE_LAYER = {"num_hidden_layers": 1}
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "gemma2": (
        "Gemma2ForCausalLM", {"sliding_window": 9, "query_pre_attn_scalar": 48, "attn_logit_softcapping": 5.0}
    ),
}  # fmt: skip
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    # Of the interpreter's numpy, on padded rows: attention writes nothing there, so they hold anything.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


def prompts_of(*lengths):
    rng = random.Random(3)
    return [[rng.randrange(SMALL["vocab_size"]) for _ in range(n)] for n in lengths]


@pytest.fixture
def graphs_of(monkeypatch):
    """graphs_of(driver of the Triton back end on a CPU) -> its graphs, which count their replays."""
    from triton import knobs

    if not knobs.runtime.interpret:
        pytest.skip("set TRITON_INTERPRET=1")
    from diptych.engine.exec.cuda import chunk_graphs

    feed_ids = chunk_graphs.feed_ids

    def give(driver):
        runner = driver.runner
        fused, cpu = runner._fused, CpuGraphs(monkeypatch, runner._fused._runtime.decoder)
        monkeypatch.setattr(chunk_graphs, "feed_ids", cpu.captured(feed_ids))
        with torch.inference_mode():
            fused._chunk_graphs = chunk_graphs.ChunkGraphs(
                cpu, torch.device("cpu"), fused._draw.drawn, num_groups=len(runner.pool.groups),
                num_kv_heads=runner.description.num_kv_heads, num_programs=8, shapes=SHAPES,
            )  # fmt: skip
        return cpu

    return give


def mixed_steps(driver):
    """Ids of two prompts, of a third and fourth whose chunks run beside the first two's decode steps, and of more of these."""
    prompts = prompts_of(7, 9, 15, 5)
    tables = [driver.table(60) for _ in prompts]
    seq = lambda i, tokens, start, index, sample=True: driver.seq(  # noqa: E731
        tokens, start, tables[i], sample=sample, sampling=GREEDY, index=index, history=None
    )
    outs = [list(row) for row in driver.runner.execute([seq(0, prompts[0], 0, 0), seq(1, prompts[1], 0, 0)]).token_ids]
    step = [
        seq(0, outs[0], 7, 1), seq(2, prompts[2][:11], 0, 0, sample=False), seq(1, outs[1], 9, 1), seq(3, prompts[3], 0, 0)
    ]  # fmt: skip
    rows = driver.runner.execute(step).token_ids
    outs = [[*outs[0], *rows[0]], [*outs[1], *rows[2]], [], list(rows[3])]
    rows = driver.runner.execute([seq(2, prompts[2][11:], 11, 0), seq(0, outs[0][-1:], 8, 2)]).token_ids
    outs[2], outs[0] = list(rows[0]), [*outs[0], *rows[1]]
    rows = driver.runner.execute(
        [seq(i, outs[i][-1:], len(prompts[i]) + len(outs[i]) - 1, len(outs[i])) for i in range(4)]
    )
    return [[*out, *row] for out, row in zip(outs, rows.token_ids, strict=True)]


@pytest.mark.parametrize(
    ("name", "invariant"),
    [  # on a GPU all four
        ("llama", False),
        ("gemma2", True),
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("gemma2", False, marks=pytest.mark.slow),
    ],
)
def test_a_graph_computes_what_its_step_does(model_dir_of, driver_of, graphs_of, name, invariant):
    architecture, fields = FAMILIES[name]
    folder = model_dir_of(architecture, **SMALL, **fields)
    expected = mixed_steps(driver_of(folder, backend="triton", batch_invariant=invariant))
    driver = driver_of(folder, backend="triton", batch_invariant=invariant)
    graphs = graphs_of(driver)
    driver.free.sort(reverse=True)  # the first prompt has block 0, into which a padded row would store by mistake
    driver.runner.pool.tensor.fill_(float("nan"))  # padded rows store nothing, and what they read reaches nobody
    assert mixed_steps(driver) == expected
    assert graphs.replays == 3


def test_a_graph_reads_the_tokens_that_the_step_before_drew(model_dir_of, driver_of, graphs_of):
    """Launched before they are known, beside a chunk."""
    folder = model_dir_of("LlamaForCausalLM", **SMALL | ONE_LAYER)
    prompts = prompts_of(9, 6, 5)
    expected = driver_of(folder, backend="triton").generate(prompts, 4, sampling=GREEDY)
    driver = driver_of(folder, backend="triton")
    graphs = graphs_of(driver)
    driver.runner.pool.tensor.fill_(float("nan"))
    assert driver.chunks_ahead(*prompts) == [expected[0][:3], expected[1], expected[2][:2]]
    assert graphs.replays == 2


def test_steps_that_no_graph_holds_are_launched(model_dir_of, driver_of, graphs_of):
    driver = driver_of(model_dir_of("LlamaForCausalLM", **SMALL | ONE_LAYER), backend="triton")
    graphs = graphs_of(driver)
    seq = lambda count, sample=True: driver.seq([1] * count, 0, driver.table(count), sample=sample)  # noqa: E731
    for seqs, replays in (
        ([seq(24)], 1),
        ([seq(25)], 1),  # too many tokens
        ([seq(5, sample=False)], 1),  # no logits are wanted: the graph computes some
        ([seq(2) for _ in range(8)], 2),
        ([seq(2) for _ in range(9)], 2),  # too many chunks
        ([seq(1) for _ in range(5)] + [seq(2)], 2),  # too many rows that decode
        ([seq(1), seq(2)], 3),
    ):
        driver.runner.execute(seqs)
        assert graphs.replays == replays, [len(s.token_ids) for s in seqs]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is usable here")
@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_on_a_gpu_compute_what_the_steps_do(model_dir_of, driver_of, name):
    """To the bit under --batch-invariant, in bf16; ids of a CPU in fp32."""
    architecture, fields = FAMILIES[name]
    folder = model_dir_of(architecture, **fields)
    how = {"device": "cuda", "backend": "triton"}
    outputs = [
        mixed_steps(driver_of(folder, dtype="bfloat16", batch_invariant=True, chunk_graphs=graphs, **how))
        for graphs in ((), SHAPES)
    ]
    assert outputs[0] == outputs[1]
    driver = driver_of(folder, chunk_graphs=SHAPES, **how)
    driver.runner.pool.tensor.fill_(float("nan"))
    assert mixed_steps(driver) == mixed_steps(driver_of(folder, backend="torch"))
