from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.common.errors import ConfigError, InternalError, InvalidRequestError, PromptTooLongError
from diptych.common.request import Prompt
from diptych.common.sampling import FinishReason, SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import Admitted, BlocksStored, Cancel, Failed, Finished, KvMode, TokensOut
from diptych.engine.runner import StepAborted
from diptych.engine.sched.batching.throughput import ThroughputEstimator
from diptych.engine.sched.requests.request import LEGAL_MOVES, IllegalMoveError, State


def recording(kit, num_blocks=64, **fields):
    """A runner that notes what each step computes: [(attempt, start, count)]."""
    steps = []
    runner = FakeRunner(num_blocks, kit.BLOCK, before_execute=lambda seqs: steps.append(_shape(seqs)), **fields)
    return runner, steps


def _shape(seqs):
    return [(s.attempt, s.start, len(s.token_ids)) for s in seqs]


# ---- budgets and order ----


def test_decode_tokens_come_first_and_chunks_end_on_block_borders(kit):
    runner, steps = recording(kit)
    engine = kit.make_engine(runner, max_num_batched_tokens=24)
    engine.send(kit.make_request("old", 3, 20))
    engine.step()
    engine.send(kit.make_request("new", 25, 20))
    engine.step()
    engine.step()
    assert steps == [[("old", 0, 3)], [("old", 3, 1), ("new", 0, 20)], [("old", 4, 1), ("new", 20, 5)]]


@pytest.mark.parametrize(("mode", "first"), [(KvMode.LOCAL, 6), (KvMode.PREFILL, 4)])
def test_a_small_chunk_of_a_local_prompt_takes_all_that_it_may(kit, mode, first):
    """Up to half of a small budget would be lost to block borders, which only packing needs."""
    runner, steps = recording(kit)
    engine = kit.make_engine(runner, max_num_batched_tokens=6)
    engine.send(kit.make_request("a", 9, 1, mode=mode, **({"want_kv": False} if mode.value == "prefill" else {})))
    kit.run_until_idle(engine)
    assert steps == [[("a", 0, first)], [("a", first, 9 - first)]]


def test_first_come_first_served_and_several_prompts_share_a_step(kit):
    runner, steps = recording(kit)
    engine = kit.make_engine(runner, max_num_batched_tokens=10)
    for name in "abc":
        engine.send(kit.make_request(name, [ord(name)] * 6, 1))
    kit.run_until_idle(engine)
    assert steps == [[("a", 0, 6), ("b", 0, 4)], [("b", 4, 2), ("c", 0, 6)]]


def test_no_more_sequences_than_allowed(kit):
    runner, steps = recording(kit)
    engine = kit.make_engine(runner, max_num_seqs=2)
    engine.generate([kit.make_request(f"r{i}", 4, 3) for i in range(5)])
    assert max(map(len, steps)) == 2


def test_more_decoding_sequences_than_tokens_take_turns(kit):
    runner, steps = recording(kit)
    engine = kit.make_engine(runner, max_num_batched_tokens=2)
    requests = [kit.make_request(f"r{i}", [40 + i], 4) for i in range(5)]
    results = engine.generate(requests)
    assert all(len(step) <= 2 for step in steps)
    assert {r.attempt: r.token_ids for r in results} == kit.undisturbed(requests)


def test_the_time_budget_caps_the_chunk_from_the_measured_rate(kit):
    steps = []

    def compute(seqs):  # 100 tokens a second
        steps.append(_shape(seqs))
        engine.clock.advance(sum(len(s.token_ids) for s in seqs) / 100)

    engine = kit.make_engine(
        FakeRunner(64, kit.BLOCK, before_execute=compute), max_step_time_s=0.4, initial_prefill_tokens_per_s=50.0
    )
    engine.generate([kit.make_request(prompt=120, max_tokens=1)])
    chunks = [step[0][2] for step in steps]
    assert chunks[0] == 20
    assert 36 <= max(chunks) <= 40
    assert engine.stats().prefill_tokens_per_s == pytest.approx(100)


def test_pace_always_grants_a_little_and_does_not_learn_from_tiny_chunks():
    pace = ThroughputEstimator(0.5, 1.0, 16)
    assert pace.prefill_cap(0) == 16
    pace.observe(1.0, 2, 0)
    assert pace.prefill_tokens_per_s == 0.0
    pace.observe(0.1, 0, 4)
    pace.observe(0.3, 100, 4)
    assert pace.prefill_tokens_per_s == pytest.approx(500)
    assert pace.prefill_cap(4) == 200
    assert ThroughputEstimator(None, 1.0, 16).prefill_cap(3) is None


def test_a_remote_request_passes_one_that_only_lacks_token_budget(kit):
    engine = kit.make_engine(max_num_batched_tokens=4, scheduling_policy="fcfs")
    engine.send(kit.make_request("first", 12, 2))
    engine.send(kit.make_request("second", 12, 2))
    engine.send(kit.make_request("remote", 5, 2, mode=KvMode.REMOTE))
    admitted = [e.attempt for e in engine.step() if isinstance(e, Admitted)]
    assert admitted == ["first", "remote"]


def test_a_remote_request_does_not_take_the_blocks_of_one_before_it(kit):
    engine = kit.make_engine(num_blocks=8, max_num_batched_tokens=4, scheduling_policy="fcfs")
    engine.send(kit.make_request("first", 12, 2))
    engine.send(kit.make_request("second", 12, 2))
    engine.send(kit.make_request("remote", 5, 2, mode=KvMode.REMOTE))
    assert [e.attempt for e in engine.step() if isinstance(e, Admitted)] == ["first"]


# ---- blocks ----


def test_two_growing_requests_on_seven_blocks_both_end(kit):
    engine = kit.make_engine(num_blocks=7)
    requests = [kit.make_request(f"r{i}", [60 + i, 61, 62], 20, seed=i) for i in range(2)]
    results = engine.generate(requests)
    assert {r.attempt: r.token_ids for r in results} == kit.undisturbed(requests)
    assert engine.stats().preemptions_total > 0


def test_the_youngest_is_preempted(kit):
    engine = kit.make_engine(num_blocks=7, enable_prefix_caching=False)
    ends = []
    for name in ("old", "young"):
        engine.send(kit.make_request(name, 3, 20))
    for event in kit.run_until_idle(engine):
        if isinstance(event, Finished):
            ends.append(event.attempt)
    assert ends == ["old", "young"]


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"prompt": [5] * 4096}, PromptTooLongError, "prompt"),
        ({"prompt": 300}, PromptTooLongError, "prompt"),
        ({"prompt": 200, "max_tokens": 100}, InvalidRequestError, "max_tokens"),
        ({"prompt": []}, InvalidRequestError, "prompt"),
        ({"prompt": [5, 1000]}, InvalidRequestError, "prompt_token_ids"),
        ({"prompt": [-1]}, InvalidRequestError, "prompt_token_ids"),
        ({"prompt": Prompt((1,), adapter="a" * 32)}, InvalidRequestError, "adapter"),
        ({"prompt": Prompt((1,), media=(b"png",))}, InvalidRequestError, "media"),
        ({"output_token_ids": (5000,)}, InvalidRequestError, "output_token_ids"),
        ({"max_tokens": 1, "output_token_ids": (5, 6)}, InvalidRequestError, "output_token_ids"),
        ({"mode": KvMode.PREFILL, "decode_cached_tokens": 3}, InvalidRequestError, "decode_cached_tokens"),
        ({"sampling": SamplingParams(max_tokens=2, stop=("x",))}, InvalidRequestError, "stop"),
    ],
)
def test_what_can_never_run_is_refused_at_once(kit, fields, error, param):
    engine = kit.make_engine()
    engine.send(kit.make_request(**fields))
    (failed,) = engine.step()
    assert isinstance(failed, Failed)
    assert type(failed.error) is error
    assert failed.error.param == param


def test_a_hit_leaves_the_last_prompt_token_to_compute(kit):
    for num_prompt, hit in ((3, 0), (4, 0), (5, 4), (8, 4), (9, 8)):
        runner, steps = recording(kit)
        engine = kit.make_engine(runner)
        requests = [kit.make_request(name, num_prompt, 3) for name in ("first", "second")]
        first, second = engine.generate(requests, arrivals=[0, 10])
        assert second.num_cached_tokens == hit
        assert first.token_ids == second.token_ids
        assert [s for s in steps if s[0][0] == "second"][0] == [("second", hit, num_prompt - hit)]


def test_another_salt_never_hits_and_the_same_one_does(kit):
    engine = kit.make_engine()
    salts = {"a": b"x", "b": b"y", "c": b"x", "d": b""}
    results = engine.generate(
        [kit.make_request(n, 9, 2, cache_salt=s) for n, s in salts.items()], arrivals=[0, 9, 18, 27]
    )
    assert [r.num_cached_tokens for r in results] == [0, 0, 8, 0]


def test_the_cache_can_be_off(kit):
    engine = kit.make_engine(enable_prefix_caching=False)
    results = engine.generate([kit.make_request(n, 9, 2) for n in "ab"], arrivals=[0, 9])
    assert [r.num_cached_tokens for r in results] == [0, 0]
    assert engine.core.scheduler.kv.pool.counts.cached == 0


def test_generated_blocks_are_cached_too(kit):
    engine = kit.make_engine()
    (first,) = engine.generate([kit.make_request("a", 6, 7)])
    turn = [*range(100, 106), *first.token_ids, 5]
    (second,) = engine.generate([kit.make_request("b", turn, 2)])
    assert second.num_cached_tokens == 12


def test_stored_events_name_the_keys_of_the_identity(kit):
    from diptych.common.block_identity import block_keys

    engine = kit.make_engine()
    engine.send(kit.make_request(prompt=9, max_tokens=1, cache_salt=b"t"))
    (stored,) = [e for e in engine.step() if isinstance(e, BlocksStored)]
    assert list(stored.keys) == block_keys(replace(kit.IDENTITY, salt=b"t"), range(100, 109))


# ---- forced tokens, ends ----


def test_forced_tokens_continue_where_the_former_attempt_stopped(kit):
    request = kit.make_request(
        prompt=7, max_tokens=9, seed=5, sampling=SamplingParams(max_tokens=9, seed=5, ignore_eos=True)
    )
    whole = kit.undisturbed([request])["a"]
    for sent in range(1, 9):
        engine = kit.make_engine()
        engine.send(replace(request, output_token_ids=tuple(whole[:sent])))
        events = kit.run_until_idle(engine)
        assert kit.tokens_of(events) == whole[sent:]
        assert next(e.offset for e in events if isinstance(e, TokensOut)) == sent
        assert kit.ends_of(events)[0].num_output_tokens == 9


def test_forced_tokens_that_ended_it_already(kit):
    engine = kit.make_engine()
    engine.send(kit.make_request(prompt=7, max_tokens=2, output_token_ids=(5, 6)))
    assert kit.run_until_idle(engine) == [Admitted("a", 0), Finished("a", FinishReason.LENGTH, 2, 0)]


def test_eos_stop_ids_and_the_context_end(kit):
    request = kit.make_request(prompt=5, max_tokens=10)
    whole = kit.undisturbed([request])["a"]
    third = whole[2]
    engine = kit.make_engine(FakeRunner(64, kit.BLOCK, eos_token_ids=(third,)))
    ignoring = replace(request, attempt="i")
    stopping = replace(request, attempt="s", sampling=SamplingParams(max_tokens=10))
    by_id = replace(
        request, attempt="t", sampling=SamplingParams(max_tokens=10, ignore_eos=True, stop_token_ids=(whole[4],))
    )
    i, s, t = engine.generate([ignoring, stopping, by_id])
    assert i.token_ids == whole
    assert s.token_ids == whole[:3]
    assert (s.finished.reason, s.finished.stop_token_id) == (FinishReason.STOP, None)
    assert t.token_ids == whole[:5]
    assert t.finished.stop_token_id == whole[4]
    engine = kit.make_engine(FakeRunner(64, kit.BLOCK, max_model_len=9))
    (result,) = engine.generate([request])
    assert result.token_ids == whole[:4]
    assert result.finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 27])
def test_what_fills_the_pool_to_its_last_block_runs_and_one_token_more_is_refused_with_numbers(kit, num_prompt):
    """pool_tokens + 1 - num_prompt outputs: what routers take for max_tokens where nothing was said."""
    engine = kit.make_engine(num_blocks=7)
    [full] = engine.generate([kit.make_request("full", num_prompt, 28 + 1 - num_prompt)])
    assert len(full.token_ids) == 29 - num_prompt
    engine = kit.make_engine(num_blocks=7)
    [more] = engine.generate([kit.make_request("more", num_prompt, 28 + 2 - num_prompt)])
    assert isinstance(more.error, InvalidRequestError)
    assert (more.error.param, "29 tokens; this worker's pool holds 28" in more.error.message) == ("max_tokens", True)


# ---- trouble ----


def test_cancel_frees_in_every_state(kit):
    engine = kit.make_engine(num_blocks=7, max_num_batched_tokens=8, enable_prefix_caching=False)
    names = ["decoding", "prefilling", "waiting"]
    engine.send(kit.make_request("decoding", 3, 5))
    engine.step()
    engine.send(kit.make_request("prefilling", 12, 5))
    engine.send(kit.make_request("waiting", 12, 5))
    engine.step()
    states = engine.core.scheduler.audit(True).attempts
    assert states == {"running": 2, "waiting": 1}
    for name in names:
        engine.send(Cancel(name))
    events = engine.step()
    assert sorted(e.attempt for e in events if isinstance(e, Failed)) == sorted(names)
    assert engine.core.scheduler.kv.pool.counts.free == 7
    assert engine.stats().waiting_prompt_tokens == 0


def test_cancel_of_a_preempted_request(kit):
    engine = kit.make_engine(num_blocks=7, enable_prefix_caching=False)
    for name in ("old", "young"):
        engine.send(kit.make_request(name, 3, 20))
    while "preempted" not in engine.core.scheduler.audit(False).attempts:
        engine.step()
    engine.send(Cancel("young"))
    kit.run_until_idle(engine)
    assert engine.core.scheduler.kv.pool.counts.free == 7


def test_a_bad_row_fails_its_request_alone_and_leaves_nothing_in_the_cache(kit):
    engine = kit.make_engine()
    requests = [kit.make_request("good", [1, 3, 5, 7, 9], 6), kit.make_request("bad", 9, 6)]
    for request in requests:
        engine.send(request)
    events = engine.step()
    engine.core._executor.runner.bad_attempts.add("bad")
    events += kit.run_until_idle(engine)
    (failed,) = kit.ends_of(events, "bad")
    assert isinstance(failed.error, InternalError)
    assert kit.tokens_of(events, "good") == kit.undisturbed(requests)["good"]
    engine.core._executor.runner.bad_attempts.clear()
    (again,) = engine.generate([kit.make_request("again", 9, 2)])
    assert again.num_cached_tokens == 0


def test_a_step_that_raises_fails_its_requests_and_the_engine_lives_on(kit, caplog):
    def explode(seqs):
        if any(s.attempt == "bomb" for s in seqs):
            raise RuntimeError("out of memory")

    engine = kit.make_engine(FakeRunner(64, kit.BLOCK, before_execute=explode))
    engine.send(kit.make_request("bomb"))
    (failed,) = kit.ends_of(engine.step(), "bomb")
    assert "out of memory" in str(failed.error)
    assert engine.core.scheduler.kv.pool.counts.free == 64
    (after,) = engine.generate([kit.make_request("after")])
    assert after.finished is not None


def test_an_aborted_step_does_not_count(kit):
    abort = [True]

    def give_up(seqs):
        if abort[0]:
            raise StepAborted

    request = kit.make_request(prompt=9)
    engine = kit.make_engine(FakeRunner(64, kit.BLOCK, before_execute=give_up))
    engine.send(request)
    engine.step()
    assert engine.core.scheduler.requests["a"].num_computed == 0
    abort[0] = False
    assert kit.tokens_of(kit.run_until_idle(engine)) == kit.undisturbed([request])["a"]


def test_a_step_is_given_up_only_when_nobody_wants_it(kit):
    engine = kit.make_engine()
    for name in "ab":
        engine.send(kit.make_request(name, 9))
    engine.core.step({"a", "b"})
    assert [engine.core.scheduler.requests[n].num_computed for n in "ab"] == [0, 0]
    engine.core.step({"a"})
    assert [engine.core.scheduler.requests[n].num_computed for n in "ab"] == [9, 9]


def test_an_attempt_that_comes_twice_ends_once(kit):
    engine = kit.make_engine()
    engine.send(kit.make_request())
    engine.step()
    engine.send(kit.make_request())
    events = kit.run_until_idle(engine)
    (failed,) = kit.ends_of(events)
    assert "twice" in str(failed.error)
    assert engine.core.scheduler.requests == {}


def test_an_illegal_move_names_the_moves_before_it(kit):
    engine = kit.make_engine()
    engine.send(kit.make_request())
    engine.step()
    request = engine.core.scheduler.requests["a"]
    with pytest.raises(IllegalMoveError, match=r"running -> waiting is no legal move; so far waiting -> running"):
        request.move(State.WAITING)
    assert set(LEGAL_MOVES) == set(State)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_blocks", 0), ("block_size", True), ("max_step_time_s", float("nan")), ("slab_quota_per_peer", -1)],
)
def test_config_names_the_field(field, value):
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{"num_blocks": 4, field: value})


def test_config_must_fit_the_runner(kit):
    for runner in (FakeRunner(32, kit.BLOCK), FakeRunner(64, 2 * kit.BLOCK)):
        with pytest.raises(ConfigError):
            kit.make_engine(runner)
