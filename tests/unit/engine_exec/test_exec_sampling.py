"""Constraints, filters, several draws and logprobs on whole batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine import constraints
from diptych.engine.config import EngineConfig
from diptych.engine.constraints import Constraint
from diptych.engine.exec.constrain import constrain, token_logprobs
from diptych.engine.exec.sampler import Draw, draw_tokens
from diptych.engine.executor import LocalExecutor
from diptych.engine.messages import EngineRequest, ScheduledSeq

VOCAB = 300
EOS = (2,)


def logits_of(rows, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def draw(index=0, history=(5, 6, 7), num_prompt=3, num_draws=1, choice=0, **fields) -> Draw:
    sampling = SamplingParams(max_tokens=50, **fields)
    constraint = None
    if sampling.constrained:
        constraint = Constraint(sampling, EOS)
        constraint.advance(history, num_prompt)
    return Draw(sampling, index, choice, constraint, num_draws)


ids = st.integers(0, VOCAB - 1)
parameters = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.floats(0.25, 3, width=32),
        "frequency_penalty": st.floats(-2, 2, width=32),
        "presence_penalty": st.floats(-2, 2, width=32),
        "logit_bias": st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=5).map(lambda d: tuple(d.items())),
        "allowed_token_ids": st.lists(ids, min_size=1, max_size=20).map(tuple),
        "bad_words": st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
        "min_tokens": st.integers(0, 9),
        "stop_token_ids": st.lists(ids, max_size=3).map(tuple),
    },
)


@given(
    rows=st.lists(
        st.tuples(parameters, st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(1, 12)),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=80, deadline=None)
def test_a_batch_equals_the_plain_rules_row_by_row(rows):
    logits = logits_of(len(rows) + 2)
    made = []
    for fields, history, num_prompt in rows:
        constraint = Constraint(SamplingParams(max_tokens=9, **fields), EOS)
        constraint.advance(history, min(num_prompt, len(history)))
        made.append(constraint)
    got = logits.clone()
    constrain(got, range(1, len(rows) + 1), made)
    assert torch.equal(got[0], logits[0])
    assert torch.equal(got[-1], logits[-1])
    for i, constraint in enumerate(made, 1):
        want = logits[i].numpy().copy()
        constraints.apply(want, constraint)
        np.testing.assert_allclose(got[i].numpy(), want, rtol=1e-5, atol=1e-4)


def test_penalties_count_prompt_and_outputs_apart():
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 6, 7]] = torch.tensor([2.0, -2.0, 4.0])
    constraint = Constraint(
        SamplingParams(9, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25), EOS
    )
    constraint.advance([5, 6, 7, 7], 2)
    constrain(logits, [0], [constraint])
    assert logits[0, [5, 6, 7, 8]].tolist() == [1.0, -4.0, 2.0 - 2 * 0.5 - 0.25, 0.0]


def test_counts_grow_with_the_tokens_and_equal_a_fresh_start():
    rng = np.random.default_rng(1)
    history = rng.integers(0, VOCAB, 400).tolist()
    sampling = SamplingParams(9, repetition_penalty=1.1)
    grown, fresh = Constraint(sampling, EOS), Constraint(sampling, EOS)
    for end in range(200, 401):
        grown.advance(history[:end], 150)
    fresh.advance(history, 150)
    assert dict(zip(grown.seen, grown.counts, strict=True)) == dict(zip(fresh.seen, fresh.counts, strict=True))


def test_min_tokens_forbids_ends_and_then_does_not():
    logits = torch.zeros(2, VOCAB)
    logits[:, 2], logits[:, 9], logits[:, 4] = 9.0, 8.0, 1.0
    fields = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (9,)}
    early, late = draw(history=(5, 6), num_prompt=1, **fields), draw(history=(5, 6, 7), num_prompt=1, **fields)
    assert draw_tokens(logits, [early, late]).token_ids == [4, 2]
    ignoring = draw(history=(5, 6), num_prompt=1, ignore_eos=True, **fields)
    assert draw_tokens(logits[:1], [ignoring]).token_ids == [2]


def test_no_token_left_is_refused_and_neighbours_draw_on():
    logits = logits_of(3)
    logits[2, 7] = float("nan")
    impossible = draw(allowed_token_ids=(4,), bad_words=((4,),), temperature=0.0)
    drawn = draw_tokens(logits, [impossible, draw(temperature=0.0), draw(repetition_penalty=1.2)])
    assert list(drawn.refused) == [0]
    assert list(drawn.bad) == [2]
    assert drawn.token_ids == [-1, int(logits[1].argmax()), -1]


@given(min_p=st.floats(0.01, 1.0), temperature=st.floats(0.3, 2.0))
@settings(max_examples=30, deadline=None)
def test_min_p_keeps_what_is_likely_enough(min_p, temperature):
    logits = logits_of(1)
    probabilities = torch.softmax(logits[0] / temperature, -1)
    allowed = set(torch.nonzero(probabilities >= min_p * probabilities.max() * 0.9999)[:, 0].tolist())
    draws = [draw(i, seed=3, min_p=min_p, temperature=temperature) for i in range(40)]
    assert set(draw_tokens(logits.expand(40, -1), draws).token_ids) <= allowed


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0}, {"top_k": 5}, {"min_p": 0.1, "logit_bias": ((4, 3.0),)}])
def test_several_draws_of_a_row_are_those_of_each_choice_alone(fields):
    logits = logits_of(2)
    together = draw_tokens(logits, [draw(seed=8, **fields), draw(3, seed=8, choice=2, num_draws=4, **fields)])
    alone = [draw_tokens(logits[1:], [draw(3, seed=8, choice=choice, **fields)]).token_ids[0] for choice in range(2, 6)]
    assert [together.token_ids[1], *together.more[1]] == alone
    assert together.more.keys() == {1}


def test_logprobs_are_the_models_own():
    logits = logits_of(3)
    want = torch.log_softmax(logits, -1)
    entries = token_logprobs(logits, [4, 5, int(logits[2].argmax())], [0, 3, 1])
    assert [e.token_id for e in entries] == [4, 5, int(logits[2].argmax())]
    for row, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(want[row, entry.token_id]), abs=1e-6)
        assert entry.rank == 1 + int((want[row] > want[row, entry.token_id]).sum())
    assert [len(e.top) for e in entries] == [0, 3, 1]
    assert [token for token, _ in entries[1].top] == torch.topk(want[1], 3).indices.tolist()
    assert entries[2].rank == 1


def test_prompt_logprobs_of_a_chunk_are_those_of_each_token(tiny):
    prompt = list(range(20, 34))
    table = tiny.table(20)
    seq = tiny.seq(prompt, 0, table, sampling=SamplingParams(9, temperature=0.0, prompt_logprobs=2))
    seq.prompt_targets = prompt[1:]
    other = ScheduledSeq("other", [9, 8, 7], 0, (tiny.table(8),), True, SamplingParams(9, temperature=0.0), 0)
    result = tiny.runner.execute([other, seq])
    assert len(result.prompt_logprobs[1]) == 13
    [alone] = tiny.runner.execute([tiny.seq(prompt, 0, tiny.table(20))]).token_ids
    assert result.token_ids[1] == alone
    for i, entry in enumerate(result.prompt_logprobs[1]):
        step = tiny.seq(prompt[: i + 1], 0, tiny.table(16), sampling=SamplingParams(9, temperature=0.0))
        step.top_logprobs = 2
        [[known]] = tiny.runner.execute([step]).logprobs.values()
        assert entry.token_id == prompt[i + 1]
        assert [t for t, _ in entry.top] == [t for t, _ in known.top]
        assert [p for _, p in entry.top] == pytest.approx([p for _, p in known.top], abs=1e-5)
        tiny.free.extend(step.block_tables[0])


FEATURES: dict[str, dict] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "bias and words": {"logit_bias": ((5, 4.0), (9, -9.0)), "bad_words": ((4,), (5, 5)), "min_p": 0.02},
    "allowed": {"allowed_token_ids": tuple(range(2, 60, 3)), "min_tokens": 5},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "choices": {"n": 3, "logprobs": 0},
    "beams": {"beam_width": 3, "n": 2, "logprobs": 0, "temperature": 0.0, "stop_token_ids": tuple(range(2, 320, 9))},
}


@pytest.fixture
def engine_of(tiny_dir):
    """engine_of(num_blocks, **config) -> the production engine on the tiny model."""
    from diptych.common.block_identity import IdentityHeader
    from diptych.common.clock import FakeClock
    from diptych.engine.exec.model_runner import TorchModelRunner
    from diptych.engine.offline import OfflineEngine

    def make(num_blocks=96, **fields):
        host = fields.get("num_host_blocks", 0)
        runner = TorchModelRunner.load(
            tiny_dir, num_blocks=num_blocks, block_size=8, num_threads=1, num_host_blocks=host
        )
        config = EngineConfig(
            num_blocks, 8, max_step_time_s=None, mixed_step_time_s=None, check_invariants=True, **fields
        )
        return OfflineEngine(
            LocalExecutor(runner), config, IdentityHeader(b"k" * 32, "m", "t", "float32", 8), clock=FakeClock()
        )

    return make


def run(engine, requests):
    from diptych.engine.messages import Finished, TokensOut

    for request in requests:
        engine.send(request)
    out: dict = {}
    left = len(requests)
    for _ in range(3000):
        for event in engine.step():
            if isinstance(event, TokensOut):
                out.setdefault((event.attempt, event.choice), []).extend(event.token_ids)
                if event.logprobs:
                    out.setdefault((event.attempt, event.choice, "lp"), []).extend(e.logprob for e in event.logprobs)
            assert not hasattr(event, "error"), event
            left -= isinstance(event, Finished)
        if not left:
            return out
    raise AssertionError("no end")


def same(got, want):
    assert got.keys() == want.keys()
    for key in want:
        if key[-1] == "lp":
            assert got[key] == pytest.approx(want[key], abs=1e-4)  # torch adds up by the shape of the step
        else:
            assert got[key] == want[key], key


@pytest.mark.parametrize("greedy", [True, False])
def test_token_identity_on_a_model(engine_of, greedy):
    """Alone; in a batch of all; in a pool so small that requests are preempted, by recompute and by swap; in small chunks;
    with a warm cache."""
    base = SamplingParams(max_tokens=12, seed=5, temperature=0.0 if greedy else 0.9)
    requests = [
        EngineRequest(name, Prompt(tuple(range(10 + i, 29 + 2 * i))), replace(base, **fields))
        for i, (name, fields) in enumerate(FEATURES.items())
    ]
    want: dict = {}
    for request in requests:
        want.update(run(engine_of(), [request]))
    same(run(engine_of(), requests), want)
    for mode in ("recompute", "swap"):
        engine = engine_of(15, num_host_blocks=64 if mode == "swap" else 0, preemption_mode=mode)
        same(run(engine, requests), want)
        assert engine.stats().preemptions_total > 0
    engine = engine_of(96, long_prefill_token_threshold=5, max_num_batched_tokens=16)
    same(run(engine, requests), want)
    same(run(engine, requests), want)  # warm
