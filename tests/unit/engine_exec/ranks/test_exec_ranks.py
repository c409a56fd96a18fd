"""A model on several ranks gives the tokens that it gives on one: ranks as threads, sums over their memory."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from diptych.common.adapters.peft import read_adapter
from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.kv_groups import PoolDemand
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.exec.parallel import micro_batches
from diptych.engine.exec.parallel.rank_runner import make
from diptych.engine.executor import LocalExecutor
from diptych.engine.messages import EngineRequest, KeepAdapter
from diptych.engine.offline import OfflineEngine
from diptych.engine.runner import OutOfDeviceMemory, RunnerLost, StepAborted
from diptych_tests import quantized
from diptych_tests.lora import linear_shapes, write_adapter
from diptych_tests.rank_threads import ThreadedRanks

LLAMA = {
    "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 96,
    "num_hidden_layers": 4,
}  # fmt: skip
BLOCK, COUNT = 8, 10
"""The prompts of 3, 17 and 40 tokens and their answers cross a border of blocks each."""
GREEDY = SamplingParams(COUNT, temperature=0.0, ignore_eos=True)


def prompts_of(*lengths):
    rng = random.Random(4)
    return [[rng.randrange(320) for _ in range(length)] for length in lengths]


@pytest.fixture(autouse=True)
def small_micro_batches(monkeypatch):
    """So that steps of few rows are cut, too."""
    monkeypatch.setitem(micro_batches.LEAST_ROWS, "cpu", 1)


@pytest.fixture
def ranks(request):
    made = []

    def make(folder, *degrees, **settings):
        settings = {"num_blocks": 64, "block_size": BLOCK, "backend": "torch", "num_threads": 1, **settings}
        if settings["backend"] == "native":
            request.getfixturevalue("compiler")
        if degrees == (1, 1):
            return TorchModelRunner.load(folder, **settings)
        made.append(ThreadedRanks(folder, *degrees, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def engine_of(runner, **settings):
    settings = {"max_step_time_s": None, "mixed_step_time_s": None, "check_invariants": True, **settings}
    config = EngineConfig(runner.num_blocks, BLOCK, **settings)
    return OfflineEngine(
        LocalExecutor(runner), config, IdentityHeader(b"k" * 32, "m", "t", "float32", BLOCK), clock=FakeClock()
    )


def outputs(engine, requests, arrivals=None):
    results = engine.generate(requests, arrivals)
    assert [result.error for result in results] == [None] * len(requests)
    return [(result.token_ids, result.other_choices) for result in results]


KINDS = {
    "greedy": GREEDY,
    "drawn": SamplingParams(COUNT, temperature=0.7, seed=4, ignore_eos=True),
    "choices": SamplingParams(COUNT, temperature=0.7, seed=4, n=2, ignore_eos=True),
    "constrained": replace(GREEDY, repetition_penalty=1.3, bad_words=((7,), (9, 17)), logprobs=2, prompt_logprobs=1),
    "beams": replace(GREEDY, beam_width=2, n=2),
}
REQUESTS = [
    EngineRequest(f"{kind}-{i}", Prompt(tuple(prompt)), params)
    for i, prompt in enumerate(prompts_of(3, 17, 40))
    for number, (kind, params) in enumerate(KINDS.items())
    if i != number % 3  # two lengths of three for each kind
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory, tiny_model_dir):
    """llama(KV heads) -> a random model, requests, and what one rank answers to each alone."""
    made = {}

    def make(kv_heads):
        if kv_heads not in made:
            fields = {**LLAMA, "num_key_value_heads": kv_heads}
            folder = tiny_model_dir(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", **fields)
            runner = TorchModelRunner.load(folder, num_blocks=200, block_size=BLOCK, backend="torch", num_threads=1)
            alone = engine_of(runner)
            made[kv_heads] = folder, [outputs(alone, [request])[0] for request in REQUESTS]
        return made[kv_heads]

    return make


@pytest.mark.parametrize(
    ("degrees", "kv_heads"), [((2, 1), 4), ((4, 1), 4), ((1, 2), 4), ((2, 2), 4), ((1, 4), 4), ((4, 1), 2), ((2, 2), 2)]
)
def test_ids_are_those_of_one_rank_cold_and_warm(llama, ranks, degrees, kv_heads):
    folder, expected = llama(kv_heads)
    arrivals = [i // 3 for i in range(len(REQUESTS))]
    roomy = engine_of(ranks(folder, *degrees, num_blocks=200))
    assert outputs(roomy, REQUESTS, arrivals) == expected
    again = [replace(request, attempt=f"{request.attempt}-2") for request in REQUESTS]
    assert outputs(roomy, again, arrivals) == expected
    assert roomy.stats().cached_tokens_total > 0


@pytest.mark.parametrize(("degrees", "kv_heads"), [((2, 1), 4), ((1, 4), 4), ((2, 2), 2)])
def test_ids_are_those_of_one_rank_chunked_and_preempted(llama, ranks, degrees, kv_heads):
    folder, expected = llama(kv_heads)
    arrivals = [i // 3 for i in range(len(REQUESTS))]
    tight = engine_of(
        ranks(folder, *degrees, num_blocks=14, num_host_blocks=5), num_host_blocks=5, preemption_mode="swap",
        max_num_batched_tokens=24,
    )  # fmt: skip
    assert outputs(tight, REQUESTS, arrivals) == expected
    stats = tight.stats()
    assert stats.preemptions_total > stats.swaps_total > 0, "some were computed again"


FAMILIES = {
    "gemma3": (
        "Gemma3ForCausalLM",
        {"sliding_window": 11, "query_pre_attn_scalar": 48, "num_hidden_layers": 4,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 9, "query_pre_attn_scalar": 48, "num_hidden_layers": 4}),
    "bias": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "qwen3-one-kv-head": ("Qwen3ForCausalLM", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
}  # fmt: skip


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=["tp2", "pp2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_windows_biases_and_tied_ends(model_dir_of, ranks, family, degrees):
    """Gemma's second stage has layers of both kinds, or of one: its pool has the KV groups of its layers."""
    architecture, fields = FAMILIES[family]
    folder = model_dir_of(architecture, **fields)
    requests = [EngineRequest(f"r{i}", Prompt(tuple(p)), GREEDY) for i, p in enumerate(prompts_of(2, 30, 53))]
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    demand = PoolDemand(**settings)
    one, several = (engine_of(ranks(folder, *one, demand=demand), **settings) for one in ((1, 1), degrees))
    expected = outputs(one, requests)
    assert outputs(several, requests) == expected
    assert outputs(several, [replace(request, attempt=f"{request.attempt}-2") for request in requests]) == expected


def test_layers_with_a_window_keep_every_token_where_there_are_several_ranks(model_dir_of, ranks):
    """A worker of two ranks served Gemma with tables for one KV group, and every step failed: the engine knows no others."""
    architecture, fields = FAMILIES["gemma3"]
    folder = model_dir_of(architecture, **fields)
    settings = {"model": str(folder), "num_blocks": 8, "rank": 0, "rendezvous": "", "backend": "torch"}
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    assert [group.name for group in make(**settings, **limits).pool.kv.groups] == ["full"]
    grouped = make(**settings, **limits, window_groups=True)
    assert [group.name for group in grouped.pool.kv.groups] == ["full", "window-11"]
    requests = [EngineRequest(f"r{i}", Prompt(tuple(p)), GREEDY) for i, p in enumerate(prompts_of(2, 30))]
    alone, several = (outputs(engine_of(ranks(folder, *one)), requests) for one in ((1, 1), (2, 1)))
    assert alone == several


def test_a_stage_without_layers_of_a_kv_group_has_no_pool_for_it(model_dir_of, ranks):
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
    fields = {"sliding_window": 11, "query_pre_attn_scalar": 48, "num_hidden_layers": 4, "layer_types": kinds}
    folder = model_dir_of("Gemma3ForCausalLM", **fields)
    demand = PoolDemand(4, 16)
    both = ranks(folder, 1, 2, demand=demand)
    assert [[group.name for group in runner.pool.kv.groups] for runner in both.runners] == [["window-11"], ["full"]]
    requests = [EngineRequest(f"r{i}", Prompt(tuple(p)), GREEDY) for i, p in enumerate(prompts_of(2, 30))]
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    alone = outputs(engine_of(ranks(folder, 1, 1, demand=demand), **settings), requests)
    assert outputs(engine_of(both, **settings), requests) == alone


@pytest.mark.parametrize(
    ("degrees", "backend"),
    [((1, 2), "torch"), ((1, 2), "native"), ((2, 2), "torch"), ((1, 4), "torch")],
    ids=["pp2", "native-pp2", "tp2-pp2", "pp4"],
)
def test_23_stages_free_what_is_behind_a_window_and_are_preempted(model_dir_of, ranks, degrees, backend):
    """In pools that hold a few windows, cold and warm. With pipeline stages every layer kept every token."""
    architecture, fields = FAMILIES["gemma3"]
    folder = model_dir_of(architecture, **fields)
    kinds = {"greedy": GREEDY, "choices": replace(GREEDY, temperature=0.7, seed=4, n=2)}
    requests = [
        EngineRequest(f"{kind}-{i}", Prompt(tuple(prompt)), params)
        for i, prompt in enumerate(prompts_of(30, 53, 61))
        for kind, params in kinds.items()
    ]
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    demand = PoolDemand(**settings)
    one = ranks(folder, 1, 1, demand=demand, num_blocks=200, backend=backend)
    expected = outputs(engine_of(one, **settings), requests)
    several = ranks(folder, *degrees, demand=demand, num_blocks=22, backend=backend)
    tight = engine_of(several, **settings)
    assert outputs(tight, requests, [0, 0, 1, 1, 2, 2]) == expected
    assert tight.stats().preemptions_total > 0
    assert outputs(tight, [replace(one, attempt=f"{one.attempt}-2") for one in requests]) == expected
    assert tight.stats().cached_tokens_total > 0
    counts = dict(zip([group.name for group in several.kv.groups], several.capabilities.group_blocks, strict=True))
    assert counts == {"full": 22, "window-11": 14}
    for runner in several.runners:
        groups = [group.name for group in runner.pool.kv.groups]
        assert [pool.tensor.shape[0] for pool in runner.pool.groups] == [counts[name] for name in groups]


@pytest.mark.parametrize("degrees", [(2, 1), (1, 3)], ids=["tp2", "pp3"])
def test_adapters_add_on_every_rank(model_dir_of, ranks, tmp_path, degrees):
    folder = model_dir_of("LlamaForCausalLM")
    written = [
        write_adapter(tmp_path / name, linear_shapes(folder, modules), rank=rank, seed=rank, size=0.25)
        for name, rank, modules in (("all", 4, ()), ("some", 2, ("layers.2.mlp.down_proj", "o_proj")))
    ]
    facts = [read_adapter(one) for one in written]
    prompts = [tuple(prompt) for prompt in prompts_of(5, 18)]
    requests = [
        EngineRequest(f"r{i}-{adapter[:4]}", Prompt(prompt, adapter=adapter), GREEDY)
        for i, prompt in enumerate(prompts)
        for adapter in ("", *(one.id for one in facts))
    ]
    found = []
    for one in ((1, 1), degrees):
        runner = ranks(folder, *one, max_loras=1, max_lora_rank=4)
        engine = engine_of(runner)
        for where, fact in zip(written, facts, strict=True):
            engine.send(KeepAdapter(runner.read_adapter(where, fact)))
        found.append(outputs(engine, requests))
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens, _ in found[0]}) == len(requests), "every adapter changes the answer"


def test_guesses_are_verified_on_every_rank(model_dir_of, driver_of, ranks):
    folder = model_dir_of("LlamaForCausalLM")
    prompts = prompts_of(3, 12, 9)
    truths = driver_of(folder, backend="torch").generate(prompts, COUNT)
    driver = driver_of(folder, runner=ranks(folder, 2, 2))
    found, _, yielded = driver.generate_with_drafts(prompts, truths)
    assert found == truths
    assert len(yielded) < sum(map(len, truths)) - len(truths)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8"])
def test_a_quantized_cache_is_that_of_the_ranks_heads(model_dir_of, driver_of, ranks, kv_cache_dtype):
    folder = model_dir_of("LlamaForCausalLM")
    prompts = prompts_of(3, 25)
    alone = driver_of(folder, backend="torch", kv_cache_dtype=kv_cache_dtype).generate(prompts, COUNT, chunk=7)
    several = ranks(folder, 2, 3, kv_cache_dtype=kv_cache_dtype)
    assert driver_of(folder, runner=several).generate(prompts, COUNT, chunk=7) == alone


WIDE = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 256,
}
METHODS = {
    "gptq": (quantized.GPTQ, lambda w: quantized.gptq(w, 32, symmetric=True), 0.0),
    "awq": (quantized.AWQ, lambda w: quantized.awq(w, 32), 0.0),
    "int4": (quantized.COMPRESSED_INT4, lambda w: quantized.compressed_int4(w, 32, symmetric=True), 0.0),
    "gguf": (None, quantized.gguf_rows, 0.0),
    "int8": (quantized.COMPRESSED_INT8, quantized.int8_rows, 0.3),
    "fp8": (quantized.COMPRESSED_FP8, quantized.fp8_rows, 0.8),
    "fp8-blocks": (quantized.FP8, quantized.fp8_blocks, 0.8),
}
"""Checkpoint, and how far log probabilities may be apart: a rank quantizes its own inputs of `o` and `down` by their own largest
value; 0: weights alone are quantized."""


@pytest.mark.parametrize("method", METHODS)
def test_quantized_layers_are_cut_with_their_scales(model_dir_of, driver_of, ranks, method):
    folder = model_dir_of("LlamaForCausalLM", **{**WIDE, "num_hidden_layers": 2})
    config, quantize, apart = METHODS[method]
    quantized.quantize_folder(folder, config or quantized.gguf_config(folder), quantize)
    prompts = prompts_of(1, 9, 20)
    alone, several = driver_of(folder, backend="torch"), driver_of(folder, runner=ranks(folder, 2, 2))
    first = []
    for driver in (alone, several):
        rows = [
            driver.seq(prompt, 0, driver.table(len(prompt)), sampling=replace(GREEDY, logprobs=5)) for prompt in prompts
        ]
        result = driver.runner.execute(rows)
        first.append([result.logprobs[i][0].logprob for i in range(len(prompts))])
    np.testing.assert_allclose(first[1], first[0], atol=apart + 1e-3)
    if not apart:
        assert several.generate(prompts, COUNT, chunk=7) == alone.generate(prompts, COUNT, chunk=7)
    half = several.runner.runners[0].weight_sizes
    assert half.layers < 0.3 * alone.runner.weight_sizes.layers, "a quarter of the weights, in memory of their own"


def test_a_prompt_goes_through_the_stages_in_pieces(model_dir_of, ranks):
    """With the log probabilities of its own tokens, which come from several micro-batches, beside sequences that decode."""
    folder = model_dir_of("LlamaForCausalLM")
    shown = replace(GREEDY, logprobs=1, prompt_logprobs=1)
    requests = [
        EngineRequest(f"r{i}", Prompt(tuple(prompt)), params)
        for i, (prompt, params) in enumerate(zip(prompts_of(5, 150, 100), (GREEDY, shown, shown), strict=True))
    ]
    found = []
    for degrees in ((1, 1), (1, 3), (2, 2)):
        runner = ranks(folder, *degrees)
        results = engine_of(runner, max_num_batched_tokens=256).generate(requests, [0, 2, 2])
        found.append(
            [
                (one.token_ids, [[entry.logprob for entry in of] for of in (one.logprobs, one.prompt_logprobs)])
                for one in results
            ]
        )
    [alone, *others] = found
    assert [len(prompt) for _, (_, prompt) in alone] == [0, 149, 99]
    for several in others:
        for (ids, known), (same, numbers) in zip(alone, several, strict=True):
            assert same == ids
            for some, right in zip(numbers, known, strict=True):
                np.testing.assert_allclose(some, right, atol=2e-4)


def test_a_step_is_given_up_at_the_same_layer_on_all_ranks_and_layers_are_told(model_dir_of, driver_of, ranks):
    folder = model_dir_of("LlamaForCausalLM")
    both = ranks(folder, 2)
    driver, [prompt] = driver_of(folder, runner=both), prompts_of(20)
    expected = driver_of(folder, backend="torch").generate([prompt], 6)
    table = driver.table(len(prompt))

    def given_up(runner):
        looks = iter((False, False, True))
        with pytest.raises(StepAborted):
            runner.execute([driver.seq(prompt, 0, table)], lambda: next(looks))
        return next(looks, None)

    assert both.on_all(given_up) == [None, None]
    told = []
    for runner in both.runners:
        assert runner.capabilities.reports_layers
        runner.on_layers = lambda num_layers, told=told: told.append(num_layers)
    assert driver.generate([prompt], 6) == expected
    assert sorted(told) == sorted([1, 2] * 2 * 6)
    assert not any(runner.capabilities.reports_layers for runner in ranks(folder, 1, 2).runners), "micro-batches"


@pytest.mark.parametrize("method", ["lay_out", "forward"])
@pytest.mark.parametrize("degrees", [(1, 2), (1, 4)])
def test_a_step_that_fails_in_one_stage_loses_its_rank(model_dir_of, driver_of, ranks, monkeypatch, degrees, method):
    """The stages before it have sent rows of this step, which the next step would take for its own."""
    stages = ranks(model_dir_of("LlamaForCausalLM", **LLAMA), *degrees)
    driver, [prompt] = driver_of(None, runner=stages), prompts_of(64)
    decoder = stages.runners[-1]._stage._decoder
    real, calls = getattr(decoder, method), []

    def fails_once(*arguments, **named):
        calls.append(method)
        if len(calls) == 2:
            raise OutOfDeviceMemory("made up")
        return real(*arguments, **named)

    monkeypatch.setattr(decoder, method, fails_once)
    with pytest.raises(RunnerLost, match="failed in a step of several stages: made up"):
        stages.execute([driver.seq(prompt, 0, driver.table(len(prompt)))])
    assert len(calls) == 2, "nothing more of the step is computed"
