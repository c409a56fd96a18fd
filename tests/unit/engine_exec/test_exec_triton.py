"""The Triton path of the runner on the CPU, through Triton's interpreter: the glue between kernels, without a GPU."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from diptych.common.errors import InternalError
from diptych.common.grammar import Grammar
from diptych.common.kv_format import full_format
from diptych.common.sampling import SAMPLING, EarlyStopping, SamplingParams, row
from diptych.common.sampling_table import Number
from diptych.engine.exec import sampler
from diptych.engine.exec.cuda import draw
from diptych.engine.exec.cuda.batch import lay_out
from diptych.engine.exec.cuda.block_tables import BlockTables
from diptych.engine.exec.cuda.draw import DeviceDraw
from diptych.engine.exec.cuda.late_kernels import LATE, warn_of_late_kernels
from diptych.engine.exec.sampling import draw_step
from diptych.engine.messages import ScheduledSeq, StepResult
from diptych.engine.runner import StepAborted

# The interpreter of Triton 3.6 takes loop bounds out of one-element arrays.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="set TRITON_INTERPRET=1")
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ONE_LAYER = SMALL | {"num_hidden_layers": 1}
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
SEEDED = SamplingParams(max_tokens=9, seed=5, temperature=0.8)
TOP_K = SamplingParams(max_tokens=9, seed=5, temperature=0.8, top_k=40)
CONSTRAINED = SamplingParams(
    max_tokens=9, seed=5, temperature=0.9, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias=((7, 3.0),),
    bad_words=((7, 11), (12,)), logprobs=2,
)  # fmt: skip


def prompts_of(*lengths):
    rng = random.Random(3)
    return [[rng.randrange(320) for _ in range(n)] for n in lengths]


@interpreted
@pytest.mark.parametrize(
    ("architecture", "overrides", "sampling"),
    [
        ("LlamaForCausalLM", {}, GREEDY),
        ("LlamaForCausalLM", {"attention_bias": True}, TOP_K),
        ("MistralForCausalLM", {"sliding_window": 5}, GREEDY),
        ("Qwen3ForCausalLM", {"head_dim": 16}, SEEDED),
    ],
)
def test_ids_are_the_torch_paths(model_dir_of, driver_of, architecture, overrides, sampling):
    folder = model_dir_of(architecture, **{**SMALL, **overrides})
    prompts = prompts_of(3, 12)
    expected = driver_of(folder).generate(prompts, 2, chunk=7, sampling=sampling)
    driver = driver_of(folder, backend="triton")
    driver.runner.pool.tensor.fill_(float("nan"))  # what a former owner left is never read
    assert driver.generate(prompts, 2, chunk=7, sampling=sampling) == expected


@interpreted
@pytest.mark.parametrize(("kv_cache_dtype", "kv_heads"), [("int8", 1), ("fp8_e4m3", 2)])
def test_ids_over_quantized_kv_are_the_torch_paths(model_dir_of, driver_of, kv_cache_dtype, kv_heads):
    folder = model_dir_of("LlamaForCausalLM", **ONE_LAYER | {"num_key_value_heads": kv_heads})
    prompts = prompts_of(3, 12)
    expected = driver_of(folder, kv_cache_dtype=kv_cache_dtype, backend="torch").generate(prompts, 2, chunk=7)
    for batch_invariant in (False, True):
        driver = driver_of(folder, backend="triton", kv_cache_dtype=kv_cache_dtype, batch_invariant=batch_invariant)
        driver.runner.pool.tensor.fill_(0xFF)  # what a former owner left is never read
        assert driver.generate(prompts, 2, chunk=7) == expected
        payload = bytearray(12 * driver.runner.kv_bytes_per_token)
        checksum = driver.runner.pack([3, 4], 12, memoryview(payload))
        assert checksum == xxhash.xxh3_64_intdigest(payload)


@interpreted
@pytest.mark.parametrize("sampling", [GREEDY, TOP_K, CONSTRAINED])
def test_tokens_are_fed_on_the_device_from_step_to_step(model_dir_of, driver_of, sampling):
    folder = model_dir_of("LlamaForCausalLM", **ONE_LAYER)
    prompts = prompts_of(3, 9, 5)
    expected = driver_of(folder).generate(prompts, 5, sampling=sampling)
    driver = driver_of(folder, backend="triton")
    assert driver.generate_ahead(prompts, 5, sampling=sampling) == expected
    step = driver.seq([1], 0, driver.table(4))
    with pytest.raises(InternalError, match="2 sources for 1 sequences"):
        driver.runner.launch([step], [0, -1])
    with pytest.raises(InternalError, match="sequence 3 of the step before draws no token"):
        driver.runner.launch([step], [3])
    step.num_draws = 2
    with pytest.raises(InternalError, match="only sequences of one draw"):
        driver.runner.launch([step])
    with pytest.raises(InternalError, match="takes no steps ahead"):
        driver_of(folder).runner.launch([step])


@interpreted
@pytest.mark.parametrize("sampling", [GREEDY, TOP_K])
def test_18_chunks_are_launched_ahead_beside_decodes_and_what_they_draw_is_fed(model_dir_of, driver_of, sampling):
    folder = model_dir_of("LlamaForCausalLM", **ONE_LAYER)
    prompts = prompts_of(9, 6, 5)
    expected = driver_of(folder).generate(prompts, 4, sampling=sampling)
    driver = driver_of(folder, backend="triton")
    driver.runner.pool.tensor.fill_(float("nan"))
    assert driver.chunks_ahead(*prompts, sampling=sampling) == [expected[0][:3], expected[1], expected[2][:2]]


@interpreted
def test_chunks_and_decodes_share_a_step_and_kv_moves(model_dir_of, driver_of):
    folder = model_dir_of("LlamaForCausalLM", **ONE_LAYER)
    one, two = prompts_of(9, 6)
    plain, fused = driver_of(folder), driver_of(folder, backend="triton")
    results = []
    for driver in (plain, fused):
        table, other = driver.table(12), driver.table(8)
        first = driver.prefill(one, table, chunk=99)
        mixed = [driver.seq(two, 0, other), driver.seq([first], 9, table, index=1)]
        results.append([first, *driver.runner.execute(mixed).token_ids])
        payload = bytearray(10 * driver.runner.kv_bytes_per_token + 3)
        checksum = driver.runner.pack(table, 10, memoryview(payload))
        assert checksum == xxhash.xxh3_64_intdigest(bytes(payload[:-3]))
        there = driver.table(12)
        driver.runner.unpack(there, 10, memoryview(bytes(payload)))
        [token] = results[-1][2]
        results[-1] += driver.runner.execute([driver.seq([token], 10, there, index=2)]).token_ids
        with pytest.raises(InternalError):
            driver.runner.pack([1], 9, memoryview(payload))
        with pytest.raises(StepAborted):
            driver.runner.execute(mixed, lambda: True)
    assert results[0] == results[1]


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_logprobs_and_bad_rows(model_dir_of, driver_of):
    driver = driver_of(model_dir_of("LlamaForCausalLM", **ONE_LAYER), backend="triton")
    with torch.inference_mode():
        driver.runner._fused._warm_up(320, 256)  # what a GPU does before it is ready
    [prompt] = prompts_of(5)
    step = driver.seq(prompt, 0, driver.table(8))
    [expected] = driver.runner.execute([step]).token_ids
    step.top_logprobs = 2
    result = driver.runner.execute([step])
    assert result.token_ids == [expected]
    [entry] = result.logprobs[0]
    assert (entry.token_id,) == expected
    step.top_logprobs, step.start, step.token_ids = None, 5, [1]
    driver.runner.pool.tensor[step.block_tables[0][0], :, 1, 2] = float("nan")
    assert list(driver.runner.execute([step]).bad_rows) == [0]


parameters = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.floats(0.25, 3, width=32),
        "frequency_penalty": st.floats(-2, 2, width=32),
        "presence_penalty": st.floats(-2, 2, width=32),
        "logit_bias": st.dictionaries(st.integers(0, 299), st.floats(-100, 100, width=32), max_size=5).map(
            lambda d: tuple(d.items())
        ),
        "allowed_token_ids": st.lists(st.integers(0, 299), min_size=1, max_size=20).map(tuple),
        "bad_words": st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
        "min_tokens": st.integers(0, 9),
        "top_k": st.integers(0, 20),
        "temperature": st.sampled_from([0.0, 0.7]),
        "logprobs": st.integers(0, 3),
    },
)


@interpreted
@settings(max_examples=25, deadline=None)
@given(rows=st.lists(
    st.tuples(parameters, st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(1, 12)), min_size=1, max_size=4
))  # fmt: skip
@example(rows=[({"allowed_token_ids": (3,), "bad_words": ((3,),), "top_k": 4, "temperature": 0.7}, [1, 2], 1)])
@example(rows=[({"allowed_token_ids": (3,), "bad_words": ((3,),), "temperature": 0.7}, [1, 2], 1)])
def test_constrained_draws_and_logprobs_are_the_samplers(rows):
    """Against draws that sync: tokens, refusals, bad rows and logprobs of batches in which every row asks for something else."""
    logits = torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(len(rows))) * 3
    logits[0, 5] = float("nan") if len(rows) == 4 else 0.0
    results = []
    for on_device in (False, True):
        seqs = []
        for i, (fields, history, num_prompt) in enumerate(rows):
            sampling = SamplingParams(max_tokens=50, seed=i, **fields)
            num_prompt = min(num_prompt, len(history))
            seq = ScheduledSeq(
                f"r{i}", [history[-1]], len(history) - 1, ([0],), True, sampling, len(history) - num_prompt
            )
            seq.top_logprobs = sampling.logprobs
            if sampling.constrained:
                seq.history, seq.num_prompt = history, num_prompt
            seqs.append(seq)
        result = StepResult([()] * len(seqs))
        if on_device:
            DeviceDraw(torch.device("cpu"), 8).draw(seqs, range(len(seqs)), logits, (2,)).fill(result)
        else:
            draw_step(seqs, range(len(seqs)), [], logits, (2,), result)
        results.append(result)
    here, there = results
    assert here.token_ids == there.token_ids
    assert (here.bad_rows.keys(), here.refused_rows) == (there.bad_rows.keys(), there.refused_rows)
    assert here.logprobs.keys() == there.logprobs.keys()
    for i, [entry] in here.logprobs.items():
        [other] = there.logprobs[i]
        assert (entry.token_id, entry.rank, [t for t, _ in entry.top]) == (
            other.token_id, other.rank, [t for t, _ in other.top])  # fmt: skip
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert torch.isnan(logits[0, 5]) == (len(rows) == 4), "logits are left alone"


@dataclass(frozen=True, slots=True)
class NewParams(SamplingParams):
    """The table with one more row."""

    top_n_sigma: float = row(0.0, Number(0.0, 9.0), "sampling", "a parameter that exists in this test only")


@pytest.fixture
def new_filter(monkeypatch):
    """Its use in the reference, as a newcomer writes it."""
    before = sampler._filter

    def with_top_n_sigma(scaled, params):
        for i, some in enumerate(params):
            if isinstance(some, NewParams) and some.top_n_sigma:
                scaled[i].masked_fill_(scaled[i] < -some.top_n_sigma * scaled[i].std(), float("-inf"))
        return before(scaled, params)

    monkeypatch.setattr(sampler, "_filter", with_top_n_sigma)


@interpreted
@pytest.mark.usefixtures("new_filter")
@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.3}])
def test_a_parameter_that_only_the_reference_knows_is_not_ignored(model_dir_of, driver_of, more):
    """Drawn in a step, and in steps that are launched ahead."""
    folder = model_dir_of("LlamaForCausalLM", **ONE_LAYER)
    prompts = prompts_of(3, 9)
    params = NewParams(max_tokens=9, seed=5, temperature=1.8, top_n_sigma=0.3, **more)
    expected = driver_of(folder).generate(prompts, 5, sampling=params)
    assert expected != driver_of(folder).generate(prompts, 5, sampling=replace(params, top_n_sigma=0.0))
    assert driver_of(folder, backend="triton").generate(prompts, 5, sampling=params) == expected
    assert driver_of(folder, backend="triton").generate_ahead(prompts, 5, sampling=params) == expected


OTHER_VALUES = {
    "seed": 3, "temperature": 0.5, "top_p": 0.6, "top_k": 3, "ignore_eos": True, "stop_token_ids": (5,), "stop": ("a",),
    "min_p": 0.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "logit_bias": ((3, 2.0),),
    "allowed_token_ids": (3, 4), "bad_words": ((3,),), "min_tokens": 2, "include_stop_str_in_output": True, "n": 2,
    "best_of": 2, "logprobs": 1, "prompt_logprobs": 1, "grammar": Grammar("regex", "a"), "beam_width": 2,
    "length_penalty": 0.5, "early_stopping": EarlyStopping.ON, "max_tokens": 7,
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLING)
def test_a_row_that_the_device_does_not_list_takes_the_reference(monkeypatch, name):
    """Of every parameter of the table, as if it were the newest one."""
    monkeypatch.setattr(draw, "IMPLEMENTED", draw.IMPLEMENTED - {name})
    monkeypatch.setattr(draw, "_OTHERS", {})
    set_to = SamplingParams(**{"max_tokens": 9, name: OTHER_VALUES[name]})
    assert not draw.is_implemented(set_to)
    assert not draw.is_plain(ScheduledSeq("a", [1], 0, [0], True, set_to, 0))
    assert draw.is_implemented(SamplingParams(9)) == (name != "max_tokens")


def test_the_device_lists_only_parameters_of_the_table():
    assert set(SAMPLING) >= draw.IMPLEMENTED


def seq_of(attempt, table, *, tokens=1, start=0, sample=True):
    return ScheduledSeq(attempt, [7] * tokens, start, (table,), sample, GREEDY, 0)


def test_block_tables_send_only_what_is_new():
    tables = BlockTables(6, (100,), torch.device("cpu"), num_rows=2)
    blocks = [10, 11, 12]
    a, b = seq_of("a", blocks), seq_of("b", [20, 21])
    [row_a, row_b] = tables.rows([a, b], [2, 2])
    assert tables.tensors[0][row_a, :2].tolist() == [10, 11]
    tables.tensors[0][row_a, 0] = 99  # would be sent again only if the start had changed
    blocks.append(13)
    assert tables.rows([b, a], [2, 4]) == [row_b, row_a]
    assert tables.tensors[0][row_a, :4].tolist() == [99, 11, 12, 13]
    a.block_tables = ([30, 31],)
    tables.rows([a], [2])
    assert tables.tensors[0][row_a, :2].tolist() == [30, 31]
    c = seq_of("c", [40])
    assert tables.rows([c], [1]) == [row_b]  # the longest unused
    assert tables.rows([b, c], [2, 1]) == [row_a, row_b]
    assert tables.tensors[0][row_a, :2].tolist() == [20, 21]


def test_block_tables_of_a_window_group_keep_what_was_sent_when_the_window_slides():
    tables = BlockTables(6, (100, 50), torch.device("cpu"), num_rows=2)
    full, window = tables.tensors
    a = replace(seq_of("a", [10, 11, 12]), block_tables=([10, 11, 12], [1, 2, 3]), first_blocks=(0, 0))
    [row] = tables.rows([a], [3])
    window[row, 1:3] = torch.tensor([41, 42])  # would be sent again only if they had changed
    a.block_tables, a.first_blocks = ([10, 11, 12, 13], [2, 3, 4]), (0, 1)
    tables.rows([a], [4])
    assert full[row, :4].tolist() == [10, 11, 12, 13]
    assert window[row, 1:4].tolist() == [41, 42, 4]
    a.block_tables, a.first_blocks = ([10, 11, 12, 13], [5]), (0, 3)
    tables.rows([a], [4])
    assert window[row, 3].tolist() == 5
    a.block_tables, a.first_blocks = ([10, 11, 12, 13], [7, 8, 9]), (0, 1)  # it began again
    tables.rows([a], [4])
    assert window[row, 1:4].tolist() == [7, 8, 9]
    with pytest.raises(InternalError, match="outside the pool of 50"):
        tables.rows([replace(a, block_tables=([10], [50]), first_blocks=(0, 0))], [1])


def test_block_tables_refuse_broken_promises():
    tables = BlockTables(6, (100,), torch.device("cpu"), num_rows=2)
    for seqs, words in (
        ([seq_of("a", [100])], "outside the pool"),
        ([seq_of("a", [-1])], "outside the pool"),
        ([seq_of("a", [1])] * 2, "twice"),
        ([seq_of(x, [1]) for x in "abc"], "at most 2"),
    ):
        with pytest.raises(InternalError, match=words):
            tables.rows(seqs, [1] * len(seqs))


def test_layout_puts_single_tokens_first():
    seqs = [
        seq_of("a", [5, 6], tokens=3, start=7),
        seq_of("b", [9], start=4),
        seq_of("c", [1], tokens=2, sample=False),
    ]
    kv = full_format(1, 1, 16, block_size=8, dtype="float32")
    batch = lay_out(seqs, kv, 100)
    assert batch.order == [1, 0, 2]
    assert batch.positions == [4, 7, 8, 9, 0, 1]
    assert batch.slots == [[76, 47, 48, 49, 8, 9]]
    assert (batch.num_decode, batch.counts, batch.starts) == (1, [3, 2], [7, 0])
    assert (batch.sample_rows, batch.sample_seqs) == ([0, 3], [1, 0])
    for bad in (seq_of("x", [1], start=8), seq_of("x", [1], tokens=0), seq_of("x", list(range(20)), start=100)):
        with pytest.raises(InternalError):
            lay_out([bad], kv, 100)


def test_18_3_a_kernel_that_comes_late_is_named(monkeypatch, caplog):
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    warn_of_late_kernels()
    knobs.runtime.jit_post_compile_hook(
        key="k", repr="_rms_norm_kernel[num_warps=4](x_ptr: ())", fn=None, compile={"signature": {"x_ptr": "*bf16"}},
        is_manual_warmup=False, already_compiled=False,
    )  # fmt: skip
    assert f"{LATE}: _rms_norm_kernel {{'x_ptr': '*bf16'}}" in caplog.text
