from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.common.errors import InvalidRequestError
from diptych.common.sampling import SamplingParams
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import (
    Cancel,
    ChoiceFinished,
    CopyKind,
    Failed,
    Finished,
    FirstToken,
    KvMode,
    RunLocally,
    TokensOut,
)

THREE = SamplingParams(max_tokens=9, seed=4, ignore_eos=True, n=3)


def choice_tokens(events, attempt="a"):
    out: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, TokensOut) and event.attempt == attempt:
            out.setdefault(event.choice, []).extend(event.token_ids)
    return out


class Watching(FakeRunner):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.copies = []

    def copy_blocks(self, copies):
        self.copies += copies
        super().copy_blocks(copies)


@pytest.mark.parametrize(("prompt", "forks"), [(10, 2), (8, 0)])
def test_choices_share_the_prompt_and_copy_only_a_tail_they_write_to(kit, prompt, forks):
    runner = Watching(64, kit.BLOCK)
    engine = kit.make_engine(runner)
    engine.send(kit.make_request("a", prompt, sampling=THREE))
    engine.step()
    assert runner.computed_tokens == prompt
    whole = prompt // kit.BLOCK
    engine.step()
    assert engine.core.scheduler.kv.pool.counts.running == whole + 3
    events = kit.run_until_idle(engine)
    assert [c.kind for c in runner.copies] == [CopyKind.FORK] * forks
    assert runner.computed_tokens == prompt + 3 * 8
    assert isinstance(kit.ends_of(events)[0], Finished)


def test_each_choice_is_what_it_would_be_alone(kit):
    engine = kit.make_engine()
    engine.send(kit.make_request("a", 10, sampling=THREE))
    together = choice_tokens(kit.run_until_idle(engine))
    assert len({tuple(t) for t in together.values()}) == 3
    for choice in range(3):
        alone = kit.make_engine()
        alone.send(kit.make_request("a", 10, sampling=replace(THREE, n=1), choice=choice))
        assert choice_tokens(kit.run_until_idle(alone)) == {choice: together[choice]}


def test_every_choice_ends_once_and_the_attempt_after_them(kit):
    engine = kit.make_engine()
    sampling = replace(THREE, stop_token_ids=tuple(range(0, 1000, 4)), max_tokens=30)
    engine.send(kit.make_request("a", 10, sampling=sampling))
    events = kit.run_until_idle(engine)
    ends = [e for e in events if isinstance(e, (ChoiceFinished, Finished))]
    assert sorted(e.choice for e in ends[:3]) == [0, 1, 2]
    assert isinstance(ends[3], Finished)
    assert len(ends) == 4
    tokens = choice_tokens(events)
    assert {e.choice: e.num_output_tokens for e in ends[:3]} == {c: len(t) for c, t in tokens.items()}
    assert ends[3].num_output_tokens == sum(map(len, tokens.values()))


def test_best_of_gives_out_the_likeliest(kit):
    sampling = replace(THREE, n=4, logprobs=0)
    engine = kit.make_engine()
    engine.send(kit.make_request("a", 10, sampling=sampling))
    events = kit.run_until_idle(engine)
    scores: dict[int, list[float]] = {}
    for event in events:
        if isinstance(event, TokensOut):
            scores.setdefault(event.choice, []).extend(entry.logprob for entry in event.logprobs)
    order = sorted(scores, key=lambda c: -sum(scores[c]) / len(scores[c]))
    tokens = choice_tokens(events)
    engine.send(kit.make_request("a", 10, sampling=replace(sampling, n=2, best_of=4, logprobs=None)))
    events = kit.run_until_idle(engine)
    assert choice_tokens(events) == {0: tokens[order[0]], 1: tokens[order[1]]}
    assert not any(e.logprobs for e in events if isinstance(e, TokensOut))
    assert [e.choice for e in events if isinstance(e, ChoiceFinished)] == [0, 1]
    [end] = kit.ends_of(events)
    assert end.num_output_tokens == 4 * 9


def test_more_choices_than_places_take_turns(kit):
    engine = kit.make_engine(max_num_seqs=2)
    sampling = replace(THREE, n=5)
    engine.send(kit.make_request("a", 10, sampling=sampling))
    running = 0
    events = []
    for _ in range(200):
        new = engine.step()
        events += new
        running = max(running, engine.stats().num_running) if kit.ends_of(events) else running
    wide = kit.make_engine()
    wide.send(kit.make_request("a", 10, sampling=sampling))
    assert choice_tokens(events) == choice_tokens(kit.run_until_idle(wide))
    assert engine.core.scheduler.live.num_groups == 0


@pytest.mark.parametrize("steps", range(6))
def test_a_cancel_at_any_time_frees_all(kit, steps):
    engine = kit.make_engine(num_blocks=7)
    engine.send(kit.make_request("a", 10, sampling=THREE))
    for _ in range(steps):
        engine.step()
    engine.send(Cancel("a"))
    events = kit.run_until_idle(engine)
    assert len([e for e in events if isinstance(e, Failed)]) == 1
    scheduler = engine.core.scheduler
    assert (scheduler.requests, scheduler.live.num_groups, scheduler.kv.pool.counts.running) == ({}, 0, 0)


def test_a_cancel_after_the_first_choice_has_ended(kit):
    sampling = replace(THREE, stop_token_ids=tuple(range(0, 1000, 3)), max_tokens=60)
    engine = kit.make_engine()
    engine.send(kit.make_request("a", 10, sampling=sampling))
    events = []
    while not any(isinstance(e, ChoiceFinished) for e in events):
        events += engine.step()
    assert not kit.ends_of(events)
    engine.send(Cancel("a"))
    [end] = kit.ends_of(kit.run_until_idle(engine))
    assert isinstance(end, Failed)
    assert engine.core.scheduler.kv.pool.counts.running == 0


def test_a_second_submission_ends_both_once(kit):
    engine = kit.make_engine()
    for _ in range(2):
        engine.send(kit.make_request("a", 10, sampling=THREE))
    [end] = kit.ends_of(kit.run_until_idle(engine))
    assert "twice" in end.error.message
    assert engine.core.scheduler.live.num_groups == 0


def test_falling_back_to_local_prefill_with_first_tokens_at_hand(kit):
    want = kit.make_engine()
    want.send(kit.make_request("a", 10, sampling=THREE))
    engine = kit.make_engine()
    engine.send(kit.make_request("a", 10, sampling=THREE, mode=KvMode.REMOTE))
    engine.step()
    tokens = choice_tokens(kit.run_until_idle(want))
    engine.send(FirstToken("a", tokens[1][0], 1))
    engine.send(RunLocally("a"))
    assert choice_tokens(kit.run_until_idle(engine)) == tokens


def test_one_token_a_choice_needs_no_kv(kit):
    engine = kit.make_engine()
    sampling = replace(THREE, max_tokens=1)
    engine.send(kit.make_request("a", 10, sampling=sampling, mode=KvMode.REMOTE))
    engine.step()
    for choice in range(3):
        engine.send(FirstToken("a", 40 + choice, choice))
    events = engine.step()
    assert choice_tokens(events) == {0: [40], 1: [41], 2: [42]}
    assert isinstance(kit.ends_of(events)[0], Finished)
    assert engine.core.scheduler.kv.pool.counts.running == 0


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"logit_bias": ((1000, 1.0),)}, "logit_bias"),
        ({"bad_words": ((1, 1000),)}, "bad_words"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"stop_token_ids": (10**9,)}, "stop_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_never_reach_a_batch(kit, sampling, named):
    engine = kit.make_engine()
    engine.send(kit.make_request("a", sampling=replace(SamplingParams(3), **sampling)))
    [end] = kit.ends_of(engine.step())
    assert isinstance(end.error, InvalidRequestError)
    assert end.error.param == named


def test_forced_tokens_and_several_choices_do_not_go_together(kit):
    engine = kit.make_engine()
    engine.send(kit.make_request("a", sampling=THREE, output_token_ids=(5,)))
    [end] = kit.ends_of(engine.step())
    assert end.error.param == "n"


def test_parameters_that_leave_no_token_fail_their_own_request(kit):
    engine = kit.make_engine()
    nothing = SamplingParams(9, allowed_token_ids=(4,), bad_words=((4,),))
    engine.send(kit.make_request("a", sampling=nothing))
    engine.send(kit.make_request("b"))
    events = kit.run_until_idle(engine)
    [end] = kit.ends_of(events)
    assert isinstance(end.error, InvalidRequestError)
    assert isinstance(kit.ends_of(events, "b")[0], Finished)
