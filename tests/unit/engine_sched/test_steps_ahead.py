"""Steps launched before the one before them has landed: the same tokens and ends, one step late to see a stop, and no block
that changes hands while a step with its owner is on the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.sampling import FinishReason, SamplingParams
from diptych.engine.fake_device import FakeDeviceRunner
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.grammar.program import mask_of, mask_words
from diptych.engine.messages import Cancel, Failed, Finished, TokensOut
from diptych.engine.runner import OutOfDeviceMemory

BLOCK = 4


def device(kit, num_blocks=64, **changes):
    runner = FakeDeviceRunner(num_blocks, BLOCK, num_host_blocks=changes.get("num_host_blocks", 0))
    engine = kit.make_engine(runner, num_blocks=num_blocks, **changes)
    engine.runner = runner
    return engine


def params(max_tokens=8, seed=0, **fields):
    return SamplingParams(max_tokens=max_tokens, seed=seed, **{"ignore_eos": True, **fields})


def outcome(events, attempt):
    tokens = [t for e in events if isinstance(e, TokensOut) and e.attempt == attempt for t in e.token_ids]
    ends = [e for e in events if isinstance(e, Finished | Failed) and e.attempt == attempt]
    assert len(ends) == 1, f"{attempt} ended {len(ends)} times"
    return tokens, ends[0].reason if isinstance(ends[0], Finished) else type(ends[0].error).__name__


def at_rest(engine):
    counts = engine.core.scheduler.kv.pool.counts
    assert counts.running == counts.reserved == 0
    assert not engine.core.scheduler.live.deferred_free
    assert not engine.core.scheduler.requests


def test_a_step_is_launched_behind_the_one_on_the_device_and_the_tokens_are_the_same(kit):
    requests = [kit.make_request(f"r{i}", 5 + i, sampling=params(9 + i, seed=i)) for i in range(6)]
    engine = device(kit)
    for request in requests:
        engine.send(request)
    events = kit.run_until_idle(engine)
    for request in requests:
        assert outcome(events, request.attempt) == (kit.undisturbed([request])[request.attempt], FinishReason.LENGTH)
    core = engine.core
    assert engine.runner.most_in_flight == 2
    # The prompts' step, then 13 of decode: only the first one has nothing before it on the device.
    assert core.steps == 14
    assert core.steps_ahead == 13
    assert (engine.stats().steps_ahead, dict(engine.stats().not_ahead)) == (13, {})
    # A length is known in advance: nobody took part in a step for nothing.
    assert engine.runner.computed_tokens == sum(len(r.prompt.token_ids) + r.sampling.max_tokens - 1 for r in requests)
    at_rest(engine)


def test_a_stop_is_seen_one_step_late_and_its_extra_token_is_dropped(kit):
    alone = kit.make_request("a", 6, sampling=params(12))
    tokens = kit.undisturbed([alone])["a"]
    stop = next(t for i, t in enumerate(tokens) if i >= 4 and t not in tokens[:i])
    cut = tokens.index(stop)
    engine = device(kit)
    engine.send(replace(alone, sampling=params(12, stop_token_ids=(stop,))))
    other = kit.make_request("b", 7, sampling=params(20, seed=5))
    engine.send(other)
    events = kit.run_until_idle(engine)
    assert outcome(events, "a") == (tokens[: cut + 1], FinishReason.STOP)
    assert outcome(events, "b") == (kit.undisturbed([other])["b"], FinishReason.LENGTH)
    assert engine.runner.computed_tokens == 6 + cut + 1 + 7 + 19  # one more than was asked for
    at_rest(engine)


def test_blocks_of_who_ended_stay_its_own_until_the_step_has_landed(kit):
    engine = device(kit)
    engine.send(kit.make_request("a", 6, sampling=params(30)))
    for _ in range(3):
        engine.step()
    core = engine.core
    held = list(core.scheduler.requests["a"].block_ids)
    assert core.plan_at is not None
    engine.send(Cancel("a"))
    assert [type(e) for e in core.take_events()].count(Failed) == 1
    assert core.scheduler.live.deferred_free
    assert all(core.scheduler.kv.pool.refs(block) for block in held)
    assert core.step()  # what is on the device lands, and is nobody's
    assert not any(isinstance(event, TokensOut) for event in core.take_events())
    assert core.plan_at is None
    at_rest(engine)


def test_a_step_of_beams_is_not_launched_ahead_and_says_why(kit):
    engine = device(kit)
    engine.send(kit.make_request("a", 6, sampling=params(6, beam_width=2, temperature=0.0)))
    plain = kit.make_request("b", 7, sampling=params(16, seed=5))
    engine.send(plain)
    events = kit.run_until_idle(engine)
    assert outcome(events, "b")[0] == kit.undisturbed([plain])["b"]
    assert engine.core.scheduler.live.not_ahead["beam search"] >= 4
    assert engine.core.steps_ahead >= 8, "once it has ended, the others go ahead again"


class NextTo:
    """A grammar and its matcher: after a token t only tokens of t's rest by 5 may follow, at first any. Its masks are right only
    if every token was taken in, once and in order."""

    size_bytes, num_words, slow = 100, mask_words(1000), False

    def __init__(self):
        self.last = None

    def matcher(self):
        return NextTo()

    def accept(self, token_id):
        allowed = self.last is None or token_id % 5 == self.last % 5
        self.last = token_id
        return allowed

    def fill(self, mask):
        mask[:] = mask_of(range(1000) if self.last is None else range(self.last % 5, 1000, 5), 1000)


HISTORIES = {
    "penalty": {"frequency_penalty": 1.5, "repetition_penalty": 1.2},
    "bad words": {"bad_words": ((3,), (5, 6), *((t, t + 1) for t in range(0, 990, 3)))},
    "min tokens": {"min_tokens": 5, "stop_token_ids": tuple(range(0, 1000, 3))},
    "allowed": {"allowed_token_ids": tuple(range(0, 1000, 9)), "logit_bias": ((9, 2.0),)},
    "grammar": {},
    "logprobs": {"logprobs": 2},
}


def dependent(kit, name, kind, prompt=6, max_tokens=12, **fields):
    """A request whose draws depend on the tokens before."""
    sampling = params(max_tokens, **{**HISTORIES[kind], **fields})
    return kit.make_request(name, prompt, sampling=sampling, grammar=NextTo() if kind == "grammar" else None)


@pytest.mark.parametrize("kind", sorted(HISTORIES))
def test_a_draw_that_depends_on_the_last_token_is_sent_when_it_is_known_and_its_step_before(kit, kind):
    request = dependent(kit, "a", kind)
    plain = kit.make_request("b", 7, sampling=params(16, seed=5))
    outcomes = []
    for engine in (kit.make_engine(), device(kit)):
        for one in (request, plain):
            engine.send(one)
        events = kit.run_until_idle(engine)
        outcomes.append([(outcome(events, name), [e.logprobs for e in events if isinstance(e, TokensOut)])
                         for name in ("a", "b")])  # fmt: skip
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][0][0][0]) >= 5
    assert dict(engine.core.scheduler.live.not_ahead) == {}
    assert engine.core.steps_ahead == engine.core.steps - 1, "all but the prompts' step"
    at_rest(engine)


def test_who_ended_is_not_followed_any_further(kit):
    """The grammar would not allow what came after a stop; nobody asks it."""
    stop = outcome(run(kit, kit.make_engine(), dependent(kit, "a", "grammar")), "a")[0][5]
    engine = device(kit)
    request = dependent(kit, "a", "grammar", stop_token_ids=(stop,))
    events = run(kit, engine, request)
    assert outcome(events, "a")[1] is FinishReason.STOP
    at_rest(engine)


def run(kit, engine, *requests):
    for request in requests:
        engine.send(request)
    return kit.run_until_idle(engine)


def test_draws_that_cannot_be_sent_end_their_step_and_nothing_is_launched_behind_it(kit):
    engine = device(kit)
    for name in ("a", "b"):
        engine.send(dependent(kit, name, "penalty"))
    for _ in range(3):
        engine.step()
    flight = engine.core._in_flight
    flight.step.fail_with(OutOfDeviceMemory("full"))
    ahead = engine.core.steps_ahead
    events = [*engine.core.take_events()]
    engine.core.step()
    assert engine.core.steps_ahead == ahead
    events += kit.run_until_idle(engine)
    assert [e.attempt for e in events if isinstance(e, Failed)] == ["b"]
    assert outcome(events, "a")[1] is FinishReason.LENGTH
    at_rest(engine)


def test_who_waits_and_fits_gets_a_step_of_its_own_and_who_does_not_fit_holds_up_nobody(kit):
    engine = device(kit, num_blocks=8)
    engine.send(kit.make_request("a", 8, sampling=params(12)))
    engine.step()
    engine.step()
    engine.send(kit.make_request("big", range(300, 320), sampling=params(4, seed=2)))
    engine.step()
    assert engine.core.scheduler.live.not_ahead["admission"] == 0
    events = kit.run_until_idle(engine)
    assert outcome(events, "a")[1] is FinishReason.LENGTH
    assert (
        outcome(events, "big")[0]
        == kit.undisturbed([kit.make_request("big", range(300, 320), sampling=params(4, seed=2))])["big"]
    )
    at_rest(engine)


def test_no_block_left_is_settled_after_landing_by_a_preemption(kit):
    requests = [kit.make_request(f"r{i}", 7, sampling=params(14, seed=i)) for i in range(4)]
    engine = device(kit, num_blocks=14)
    for request in requests:
        engine.send(request)
    events = kit.run_until_idle(engine)
    for request in requests:
        assert outcome(events, request.attempt)[0] == kit.undisturbed([request])[request.attempt]
    assert engine.core.scheduler.outbox.totals.preemptions
    assert engine.core.scheduler.live.not_ahead["no free block"]
    at_rest(engine)


def test_unusable_logits_end_their_request_though_the_next_step_is_on_the_device(kit):
    engine = device(kit)
    for name in ("a", "b"):
        engine.send(kit.make_request(name, 6, sampling=params(10, seed=len(name))))
    for _ in range(3):
        engine.step()
    engine.runner.bad_attempts.add("a")
    events = kit.run_until_idle(engine)
    assert outcome(events, "a")[1] == "InternalError"
    at_rest(engine)


@pytest.mark.parametrize(("error", "gone"), [(RuntimeError("broken"), {"a", "b"}), (OutOfDeviceMemory("full"), {"b"})])
def test_a_step_that_fails_on_the_device_ends_its_requests_and_the_engine_lives(kit, error, gone):
    engine = device(kit)
    for name in ("a", "b"):
        engine.send(kit.make_request(name, 6, sampling=params(10)))
    for _ in range(3):
        engine.step()

    def fail(_seqs):
        engine.runner.before_execute = None
        raise error

    engine.runner.before_execute = fail
    events = kit.run_until_idle(engine)
    assert {e.attempt for e in events if isinstance(e, Failed)} == gone
    engine.send(late := kit.make_request("c", 6, sampling=params(10)))
    assert outcome(kit.run_until_idle(engine), "c")[0] == kit.undisturbed([late])["c"]
    at_rest(engine)


def test_hand_off_into_a_decode_engine_that_is_ahead(kit):
    requests = [kit.make_request(f"r{i}", 9 + 3 * i, sampling=params(10 + i, seed=i)) for i in range(5)]
    decode = device(kit)
    pair = kit.Pair(kit.make_engine(), decode)
    outcomes = pair.run(requests)
    for attempt, tokens in kit.undisturbed(requests).items():
        assert outcomes[attempt].token_ids == tokens
    assert decode.core.steps_ahead
    assert not decode.core.scheduler.live.not_ahead["admission"], (
        "remote requests compute nothing: they are admitted ahead"
    )
    kit.run_until_idle(decode)
    at_rest(decode)


scenario = st.lists(
    st.tuples(
        st.integers(1, 24),  # prompt
        st.integers(1, 14),  # max_tokens
        st.sampled_from(["plain", "greedy", "stop", "choices", "same prompt", "prompt logprobs", "cancel", *HISTORIES]),
        st.integers(0, 25),  # the step before which it comes
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=120, deadline=None)
@given(
    requests=scenario,
    num_blocks=st.integers(10, 40),
    host=st.sampled_from([0, 12]),
    policy=st.sampled_from(["sojourn", "fcfs", "priority"]),
    step_tokens=st.sampled_from([512, 7]),
)
def test_ahead_or_not_everybody_gets_the_same(kit, requests, num_blocks, host, policy, step_tokens):
    """Against the same engine without a device: tokens, texts' ends and reasons of every request that was not cancelled."""
    made = {}
    for i, (prompt, max_tokens, kind, when) in enumerate(requests):
        fields = {
            "stop": {"stop_token_ids": tuple(range(0, 1000, 7))},
            **HISTORIES,
            "choices": {"n": 2},
            "greedy": {"temperature": 0.0},
            "prompt logprobs": {"prompt_logprobs": 1},
        }.get(kind, {})
        tokens = list(range(50, 50 + prompt)) if kind == "same prompt" else prompt
        if "min_tokens" in fields:
            fields = {**fields, "min_tokens": min(fields["min_tokens"], max_tokens)}
        request = kit.make_request(
            f"r{i}",
            tokens,
            sampling=params(max_tokens, seed=i % 3, **fields),
            priority=i % 2,
            grammar=NextTo() if kind == "grammar" else None,
        )
        made.setdefault(when, []).append((request, kind))
    seen = []
    for runner in (FakeRunner, FakeDeviceRunner):
        engine = kit.make_engine(
            runner(num_blocks, BLOCK, num_host_blocks=host),
            num_blocks=num_blocks,
            num_host_blocks=host,
            scheduling_policy=policy,
            max_num_seqs=6,
            max_num_batched_tokens=step_tokens,
        )
        events = []
        for turn in range(400):
            for request, _ in made.get(turn, ()):
                engine.send(request)
            for request, kind in made.get(turn - 6, ()):
                if kind == "cancel":
                    engine.send(Cancel(request.attempt))
            worked = engine.core.step()
            new = engine.core.take_events()
            events += new
            if not worked and not new and turn > 32:
                break
        got = {}
        for request, kind in (entry for entries in made.values() for entry in entries):
            choices = {}
            for event in events:
                if isinstance(event, TokensOut) and event.attempt == request.attempt:
                    choices.setdefault(event.choice, []).extend(event.token_ids)
            ends = [e for e in events if isinstance(e, Finished | Failed) and e.attempt == request.attempt]
            assert len(ends) == 1
            if kind != "cancel":
                got[request.attempt] = (choices, type(ends[0]), getattr(ends[0], "num_output_tokens", None))
        seen.append(got)
        at_rest(engine)
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("decoding", "may_wait"), [(0, False), (8, False), (9, True)])
def test_18_events_of_many_decodes_wait_for_the_next_launch_also_beside_a_prompt(kit, decoding, may_wait):
    """To hand out so many tokens takes the interpreter from the thread that has to launch the next step."""
    engine = device(kit, 256, max_num_seqs=32, steps_ahead=False)
    for i in range(decoding):
        engine.send(kit.make_request(f"r{i}", 5, sampling=params(30, seed=i)))
    if decoding:
        engine.core.step()
        engine.core.take_events()
    engine.send(kit.make_request("prompt", 7, sampling=params(3, seed=99)))
    engine.core.step()
    assert any(isinstance(e, TokensOut) and e.attempt == "prompt" for e in engine.core.take_events())
    assert engine.core.events_may_wait is may_wait


def seqs_of(step):
    return [(seq.attempt, seq.start, len(seq.token_ids), seq.sample) for seq in step._seqs]


def test_18_chunks_of_a_prompt_and_its_first_tokens_follow_one_another_on_the_device(kit):
    """A prompt of three chunks beside a sequence that decodes: each step is launched before the one before has landed."""
    engine = device(kit, max_num_batched_tokens=9)
    short, long = kit.make_request("a", 3, sampling=params(12)), kit.make_request("b", 21, sampling=params(3, seed=4))
    engine.send(short)
    engine.core.step()
    engine.send(long)
    launched = []
    for _ in range(5):
        engine.core.step()
        launched.append(seqs_of(engine.runner._last))
    assert launched == [
        [("a", 3, 1, True), ("b", 0, 8, False)],
        [("a", 4, 1, True), ("b", 8, 8, False)],
        [("a", 5, 1, True), ("b", 16, 5, True)],
        [("a", 6, 1, True), ("b", 21, 1, True)],
        [("a", 7, 1, True), ("b", 22, 1, True)],
    ]
    assert engine.runner._last._sources == [0, 1]
    b = engine.core.scheduler.requests["b"]
    assert (b.num_computed, b.tokens_on_device) == (22, 0), "its four landed steps, each counted once"
    assert engine.core.steps_ahead == engine.core.steps == 5
    events = kit.run_until_idle(engine)
    for request in (short, long):
        tokens = outcome(events, request.attempt)[0]
        assert tokens == kit.undisturbed([request])[request.attempt][-len(tokens) :]
    at_rest(engine)


def test_18_a_prompt_that_is_cancelled_between_two_of_its_chunks_keeps_its_blocks_until_both_have_landed(kit):
    engine = device(kit, max_num_batched_tokens=8)
    engine.send(kit.make_request("b", 21, sampling=params(3)))
    engine.core.step()
    engine.core.step()  # the first chunk has landed, the second is on the device
    blocks = list(engine.core.scheduler.requests["b"].block_ids)
    engine.send(Cancel("b"))
    assert all(engine.core.scheduler.kv.pool.refs(block) for block in blocks)
    engine.core.step()
    assert engine.runner.computed_tokens == 16
    at_rest(engine)


def test_18_a_prompt_that_is_more_than_a_chunk_to_compute_is_planned_alone_and_nobody_overtakes_who_lacks_blocks(kit):
    engine = device(kit, num_blocks=12)
    engine.send(kit.make_request("a", 8, sampling=params(30)))
    engine.core.step()
    engine.send(kit.make_request("logprobs", 6, sampling=params(2, prompt_logprobs=1)))
    engine.core.step()
    assert dict(engine.core.scheduler.live.not_ahead) == {"admission": 1}
    engine.core.step()
    assert dict(engine.core.scheduler.live.not_ahead) == {"admission": 1, "prompt": 1}, "and is read by itself"
    big = kit.make_request("big", range(300, 332), sampling=params(4, seed=2))
    small = [kit.make_request(f"s{i}", 5, sampling=params(6, seed=i)) for i in range(4)]
    for request in (big, *small):
        engine.send(request)
    events = kit.run_until_idle(engine)
    for request in (big, *small):
        assert outcome(events, request.attempt) == (kit.undisturbed([request])[request.attempt], FinishReason.LENGTH)
    at_rest(engine)
