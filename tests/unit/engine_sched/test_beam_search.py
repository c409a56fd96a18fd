"""Beam search: its rules against an exhaustive search, and its beams as requests that share blocks and give way together."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.errors import InvalidRequestError
from diptych.common.sampling import EarlyStopping, FinishReason, SamplingParams
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import (
    Cancel,
    Candidate,
    ChoiceFinished,
    Failed,
    Finished,
    ScheduledSeq,
    TokensOut,
)
from diptych.engine.sched.requests.beam_search import BeamSearch

EOS = 0


def language(vocab_size, seed):
    """next(outputs) -> logprob of every token: a random language, the same each time."""

    def next_logprobs(outputs):
        rng = random.Random(repr((seed, tuple(outputs))))
        weights = [rng.random() ** 3 + 1e-6 for _ in range(vocab_size)]
        return [math.log(w / sum(weights)) for w in weights]

    return next_logprobs


def search(next_logprobs, *, width, max_outputs, penalty=1.0, early=EarlyStopping.OFF, end_ids=frozenset({EOS})):
    beam_search = BeamSearch(
        width=width, length_penalty=penalty, early_stopping=early, max_outputs=max_outputs, end_ids=end_ids
    )
    outputs = {0: []}
    numbers = itertools.count(1)
    while not beam_search.done:
        candidates = {}
        for number, tokens in outputs.items():
            ranked = sorted(enumerate(next_logprobs(tokens)), key=lambda pair: -pair[1])
            candidates[number] = [Candidate(t, p) for t, p in ranked[: beam_search.num_candidates]]
        children = beam_search.advance(candidates, outputs.__getitem__)
        named = {next(numbers): child for child in children}
        outputs = {number: [*outputs[child.parent], child.token_id] for number, child in named.items()}
        beam_search.go_on(named)
    return beam_search.finished


def all_answers(next_logprobs, vocab_size, max_outputs, penalty):
    """Every answer there is, the best first."""
    out = []

    def grow(tokens, score):
        for token, logprob in enumerate(next_logprobs(tokens)):
            longer = (*tokens, token)
            if token == EOS or len(longer) == max_outputs:
                out.append(((score + logprob) / len(longer) ** penalty, longer))
            else:
                grow(longer, score + logprob)

    grow((), 0.0)
    return sorted(out, reverse=True)


@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(2, 4),
    max_outputs=st.integers(1, 4),
    penalty=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
)
@settings(max_examples=60, deadline=None)
def test_wide_enough_it_is_exhaustive(seed, vocab_size, max_outputs, penalty):
    """With room for every continuation, and no end before none can be better, nothing is missed."""
    model = language(vocab_size, seed)
    want = all_answers(model, vocab_size, max_outputs, penalty)
    got = search(
        model, width=vocab_size**max_outputs, max_outputs=max_outputs, penalty=penalty, early=EarlyStopping.NEVER
    )
    assert [answer.token_ids for answer in got] == [tokens for _, tokens in want]
    assert [answer.score for answer in got] == pytest.approx([score for score, _ in want])


@given(seed=st.integers(0, 10**6), max_outputs=st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_one_beam_that_ends_at_its_first_end_is_greedy(seed, max_outputs):
    model = language(5, seed)
    tokens: list[int] = []
    while len(tokens) < max_outputs and EOS not in tokens:
        logprobs = model(tokens)
        tokens.append(logprobs.index(max(logprobs)))
    [answer] = search(model, width=1, max_outputs=max_outputs, early=EarlyStopping.ON)
    assert list(answer.token_ids) == tokens


def test_early_stopping_decides_how_long_to_look():
    """An answer that ends at once is likely; one that goes on is hardly less so, and long answers count for more."""

    def model(outputs):
        return [math.log(p) for p in ((0.51, 0.49) if not outputs else (0.01, 0.99))]

    hasty = search(model, width=1, max_outputs=6, penalty=2.0, early=EarlyStopping.ON)
    patient = search(model, width=1, max_outputs=6, penalty=2.0, early=EarlyStopping.NEVER)
    middling = search(model, width=1, max_outputs=6, penalty=0.0)
    assert [answer.token_ids for answer in hasty] == [(EOS,)]
    assert [answer.token_ids for answer in patient] == [(1,) * 6]
    assert [answer.token_ids for answer in middling] == [(EOS,)]  # without a penalty a longer one only loses


# ---- as requests ----


def beam_params(width=3, max_tokens=8, **fields):
    return SamplingParams(
        **{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "beam_width": width, **fields}
    )


def run(kit, engine, *requests):
    for request in requests:
        engine.send(request)
    return kit.run_until_idle(engine, 5000)


def test_the_engine_gives_what_the_rules_give(kit):
    """Against the same search by hand over the fake model's own candidates."""
    runner = FakeRunner(64, kit.BLOCK)
    ends = tuple(range(0, 1000, 7))
    params = beam_params(3, 7, stop_token_ids=ends, n=3, length_penalty=0.7)
    events = run(kit, kit.make_engine(runner), kit.make_request("a", 9, sampling=params))
    got = {event.choice: event.token_ids for event in events if isinstance(event, TokensOut)}

    def next_logprobs(outputs):
        tokens = [*range(100, 109), *outputs]
        seq = ScheduledSeq("alone", tokens, 0, (list(range(8)),), True, params, 0, num_candidates=1000)
        candidates = FakeRunner(8, kit.BLOCK).execute([seq]).candidates[0]
        return [score for _, score in sorted((c.token_id, c.score) for c in candidates)]

    want = search(next_logprobs, width=3, max_outputs=7, penalty=0.7, end_ids=frozenset(ends))
    assert [got[i] for i in range(3)] == [answer.token_ids for answer in want]


def test_each_answer_ends_once_and_the_attempt_after_them(kit):
    params = beam_params(3, 6, n=2, stop_token_ids=tuple(range(0, 1000, 5)))
    events = run(kit, kit.make_engine(), kit.make_request("a", 10, sampling=params))
    outs = [e for e in events if isinstance(e, TokensOut)]
    ends = [e for e in events if isinstance(e, ChoiceFinished)]
    assert [e.choice for e in outs] == [e.choice for e in ends] == [0, 1]
    [end] = kit.ends_of(events)
    assert isinstance(end, Finished)
    assert end.num_output_tokens == sum(len(e.token_ids) for e in outs)
    assert events.index(end) > events.index(ends[-1])
    for out, one in zip(outs, ends, strict=True):
        stopped = out.token_ids[-1] % 5 == 0
        assert (one.reason, one.stop_token_id) == (
            (FinishReason.STOP, out.token_ids[-1]) if stopped else (FinishReason.LENGTH, None)
        )


def test_beams_share_the_prompt_and_leave_nothing(kit):
    runner = FakeRunner(64, kit.BLOCK)
    engine = kit.make_engine(runner)
    engine.send(kit.make_request("a", 41, sampling=beam_params(4, 12)))
    most = 0
    for _ in range(12):
        engine.step()
        most = max(most, engine.core.scheduler.kv.pool.counts.running)
    assert runner.computed_tokens == 41 + 4 * 11
    assert most <= 10 + 4 * 4  # the ten whole blocks of the prompt once, and each beam's tail
    assert engine.core.scheduler.kv.pool.counts.running == 0
    assert not engine.core.scheduler.live.num_groups


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_a_cancel_at_any_time_frees_all(kit, steps):
    engine = kit.make_engine()
    engine.send(kit.make_request("a", 10, sampling=beam_params(3, 12)))
    for _ in range(steps):
        engine.step()
    engine.send(Cancel("a"))
    [end] = kit.ends_of(kit.run_until_idle(engine))
    assert isinstance(end, Failed)
    scheduler = engine.core.scheduler
    assert (scheduler.kv.pool.counts.running, len(scheduler.requests), scheduler.live.num_groups) == (0, 0, 0)


def test_computed_in_parts_they_wait_for_each_other(kit):
    """Fewer tokens a step than beams: who was computed keeps its place until the last one was."""
    request = kit.make_request("a", 9, sampling=beam_params(4, 8))
    want = kit.tokens_of(run(kit, kit.make_engine(), request))
    engine = kit.make_engine(max_num_batched_tokens=3)
    engine.send(request)
    held, events = 0, []
    for _ in range(100):
        events += engine.step()
        held = max(held, len(engine.core.scheduler.running.paused))
    assert held == 3
    assert kit.tokens_of(events) == want


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_beam_that_gives_way_takes_the_others_along(kit, mode):
    host = 64 if mode == "swap" else 0
    engine = kit.make_engine(
        FakeRunner(15, kit.BLOCK, num_host_blocks=host),
        num_blocks=15,
        num_host_blocks=host,
        preemption_mode=mode,
        enable_prefix_caching=False,
        max_num_batched_tokens=7,
    )
    requests = [
        kit.make_request("a", 6, 20),
        kit.make_request("b", range(300, 306), sampling=beam_params(3, 14)),
        kit.make_request("c", range(500, 505), sampling=beam_params(2, 14)),
    ]
    for request in requests:
        engine.send(request)
    events, together = [], True
    for _ in range(400):
        events += engine.step()
        for group in engine.core.scheduler.live.beams:
            states = {beam.state.value for beam in group.members.values()}
            together &= len(states & {"running", "preempted"}) < 2
    assert engine.stats().preemptions_total >= 2
    assert (engine.stats().swaps_total > 0) == (mode == "swap")
    assert together
    for request in requests:
        assert kit.tokens_of(events, request.attempt) == kit.undisturbed([request])[request.attempt]
    assert engine.core.scheduler.check() == []


@pytest.mark.parametrize(
    ("fields", "config", "named"),
    [
        ({"beam_width": 9}, {"num_blocks": 16}, "beam_width"),
        ({"beam_width": 9}, {"max_num_seqs": 8}, "beam_width"),
    ],
)
def test_beams_that_can_never_run_together_are_refused(kit, fields, config, named):
    events = run(kit, kit.make_engine(**config), kit.make_request("a", 10, sampling=beam_params(**fields, width=9)))
    [end] = kit.ends_of(events)
    assert isinstance(end.error, InvalidRequestError)
    assert end.error.param == named


def test_a_bad_row_ends_all_beams_and_nobody_else(kit):
    engine = kit.make_engine()
    for request in (kit.make_request("a", 10, sampling=beam_params()), kit.make_request("b", range(300, 310))):
        engine.send(request)
    for _ in range(3):
        engine.step()
    engine.core._executor.runner.bad_attempts.add("a")
    events = kit.run_until_idle(engine)
    assert [type(end) for end in kit.ends_of(events)] == [Failed]
    assert [type(end) for end in kit.ends_of(events, "b")] == [Finished]
    assert engine.core.scheduler.kv.pool.counts.running == 0


def test_when_nothing_may_follow_it_says_so(kit):
    params = beam_params(2, 4, allowed_token_ids=(5,), bad_words=((5, 5),))
    [end] = kit.ends_of(run(kit, kit.make_engine(), kit.make_request("a", 10, sampling=params)))
    assert end.error.param == "allowed_token_ids"
    params = beam_params(2, 1, n=2, allowed_token_ids=(5,))
    [end] = kit.ends_of(run(kit, kit.make_engine(), kit.make_request("a", 10, sampling=params)))
    assert end.error.param == "n"
