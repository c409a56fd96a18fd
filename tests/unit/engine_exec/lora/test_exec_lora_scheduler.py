"""The scheduler's slots on a real model: whatever happens to a request on its way, its tokens are those of its adapter alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.common.adapters.peft import read_adapter
from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.executor import LocalExecutor
from diptych.engine.messages import EngineRequest, KeepAdapter
from diptych.engine.offline import OfflineEngine
from diptych_tests.lora import linear_shapes, merge_adapter, write_adapter
from diptych_tests.toy_grammar import Alternates

BLOCK, COUNT, VOCAB = 4, 10, 320
PROMPT = [5, 9, 17, 250, 31, 8, 77, 120, 3, 44, 12]
GREEDY = SamplingParams(COUNT, temperature=0.0, ignore_eos=True)
KINDS = {
    "greedy": GREEDY,
    "drawn": SamplingParams(COUNT, temperature=0.8, seed=4, ignore_eos=True),
    "constrained": replace(GREEDY, repetition_penalty=1.3, bad_words=((7,), (9, 17))),
    "choices": SamplingParams(COUNT, temperature=0.8, seed=4, n=2, ignore_eos=True),
    "best": SamplingParams(COUNT, temperature=0.8, seed=4, n=2, best_of=3, ignore_eos=True),
    "grammar": GREEDY,
    "beams": replace(GREEDY, beam_width=2, n=2),
}


@pytest.fixture(params=["torch", "native"])
def served(request, model_dir_of, tmp_path):
    """engine(slots, **settings) -> an engine that keeps three adapters; their ids behind the empty one; and engines of the
    model alone, and with the weights of each adapter added to its own."""
    model = model_dir_of("LlamaForCausalLM")
    ranks = {"a": 2, "b": 8, "c": 5}
    folders = [
        write_adapter(tmp_path / name, linear_shapes(model), rank=rank, alpha=2 * rank, seed=rank, size=0.25)
        for name, rank in ranks.items()
    ]
    facts = [read_adapter(folder) for folder in folders]

    def make(slots, num_blocks=64, **settings):
        hosts = settings.get("num_host_blocks", 0)
        runner = TorchModelRunner.load(
            model, num_blocks=num_blocks, block_size=BLOCK, num_threads=1, backend=request.param, num_host_blocks=hosts,
            max_loras=slots, max_lora_rank=8,
        )  # fmt: skip
        config = EngineConfig(
            num_blocks, BLOCK, max_step_time_s=None, mixed_step_time_s=None, check_invariants=True, **settings
        )
        identity = IdentityHeader(b"k" * 32, "m", "t", "float32", BLOCK)
        engine = OfflineEngine(LocalExecutor(runner), config, identity, clock=FakeClock())
        for folder, one in zip(folders, facts, strict=True):
            engine.send(KeepAdapter(runner.read_adapter(folder, one)))
        return engine

    def merged():
        for folder in (None, *folders):
            weights = (
                model if folder is None else merge_adapter(model, folder, folder.with_name(f"{folder.name}-merged"))
            )
            runner = TorchModelRunner.load(
                weights, num_blocks=64, block_size=BLOCK, num_threads=1, backend=request.param
            )
            config = EngineConfig(64, BLOCK, max_step_time_s=None, mixed_step_time_s=None)
            yield OfflineEngine(LocalExecutor(runner), config, IdentityHeader(b"k" * 32, "m", "t", "float32", BLOCK))

    return make, ["", *(one.id for one in facts)], merged


def outputs(engine, requests, arrivals=None):
    results = engine.generate(requests, arrivals)
    assert [result.error for result in results] == [None] * len(requests)
    return [(result.token_ids, result.other_choices) for result in results]


def requests_of(adapters):
    """One of each kind with each adapter."""
    return [
        EngineRequest(
            f"{kind}-{adapter[:4]}",
            Prompt(tuple(PROMPT), adapter=adapter),
            params,
            grammar=Alternates(VOCAB) if kind == "grammar" else None,
        )
        for kind, params in KINDS.items()
        for adapter in adapters
    ]


@pytest.mark.usefixtures("compiler")
def test_answers_of_every_kind_are_those_of_merged_weights(served):
    """Greedy, drawn, choices, the best of some, beams, and under a grammar: what no adapter's kernel computed."""
    make, adapters, merged = served
    requests = requests_of(adapters)
    found = outputs(make(2), requests)
    for adapter, engine in zip(adapters, merged(), strict=True):
        mine = [
            (request, answer)
            for request, answer in zip(requests, found, strict=True)
            if request.prompt.adapter == adapter
        ]
        plain = [replace(request, prompt=Prompt(tuple(PROMPT))) for request, _ in mine]
        assert outputs(engine, plain) == [answer for _, answer in mine]
    for request, (tokens, _) in zip(requests, found, strict=True):
        if request.grammar is not None:
            assert [token % 2 for token in tokens] == [0, 1] * (COUNT // 2)


@pytest.mark.usefixtures("compiler")
def test_tokens_are_those_of_the_adapter_alone(served):
    make, adapters, _ = served
    requests = requests_of(adapters)
    one_by_one = make(1)
    alone = [outputs(one_by_one, [request])[0] for request in requests]
    greedy = [tuple(tokens) for tokens, _ in alone[: len(adapters)]]
    assert len(set(greedy)) == len(adapters), "every adapter changes the answer"
    arrivals = [i // 3 for i in range(len(requests))]
    roomy = make(3)
    assert outputs(roomy, requests, arrivals) == alone
    tight = make(2, 24, num_host_blocks=16, preemption_mode="swap", max_num_batched_tokens=16)
    assert outputs(tight, requests, arrivals) == alone
    stats = tight.stats()
    assert min(stats.preemptions_total, stats.swaps_total, stats.adapters.evictions) > 0
    again = [replace(request, attempt=f"{request.attempt}-2") for request in requests]
    assert outputs(roomy, again, arrivals) == alone
    assert roomy.stats().cached_tokens_total > 0
    guessed = make(2)
    known = {request.attempt: tokens for request, (tokens, _) in zip(requests, alone, strict=True)}
    guessed.core.scheduler.drafter = lambda attempt, ids, most: known.get(attempt, [])[len(ids) - len(PROMPT) :][:most]
    plain = [request for request in requests if not request.sampling.beam_width and request.sampling.n == 1]
    expected = {request.attempt: answer for request, answer in zip(requests, alone, strict=True)}
    assert outputs(guessed, plain) == [expected[request.attempt] for request in plain]
    assert guessed.stats().steps < 3 * COUNT
