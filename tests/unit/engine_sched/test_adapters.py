"""LoRA adapters in the scheduler: slots, who waits for one, and that each row is computed with its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.fake_device import FakeDeviceRunner
from diptych.engine.fake_runner import FakeAdapter, FakeRunner
from diptych.engine.messages import (
    Admitted,
    DropAdapter,
    Failed,
    Finished,
    KeepAdapter,
    KvMode,
    RunLocally,
    TokensOut,
)

IDS = tuple(range(100, 109))


def request_of(kit, name, attempt=None, max_tokens=12, ids=IDS, **fields):
    return kit.make_request(attempt or name, Prompt(ids, adapter=kit.adapter_id(name)), max_tokens, **fields)


def alone(kit, request):
    """What an engine of its own yields for the request."""
    names = {kit.adapter_id(name): name for name in "abcdef"}
    name = names.get(request.prompt.adapter)
    engine = kit.make_lora_engine([name] if name else [], 1)
    return engine.generate([request])[0].token_ids


def test_every_row_is_computed_with_its_own_adapter_and_shares_no_block(kit):
    """Choices, a preemption, a hand-off and a forced start go with it."""
    requests = [request_of(kit, name) for name in ("", "a", "b")]
    expected = {request.attempt: alone(kit, request) for request in requests}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    preempted = []
    for num_blocks in (64, 8):
        engine = kit.make_lora_engine("ab", 2, num_blocks=num_blocks)
        results = engine.generate(requests)
        assert {r.attempt: r.token_ids for r in results} == expected
        assert [r.num_cached_tokens for r in results] == [0, 0, 0], "no block of another adapter"
        preempted.append(engine.stats().preemptions_total > 0)
    assert preempted == [False, True]
    engine = kit.make_lora_engine("ab", 2)
    again = [replace(requests[1], attempt=name) for name in ("first", "second")]
    first, second = engine.generate(again, arrivals=[0, 20])
    assert (first.token_ids, second.token_ids, second.num_cached_tokens) == (expected["a"], expected["a"], 8)
    half = expected["a"][:5]
    [result] = kit.make_lora_engine("a", 1).generate([request_of(kit, "a", output_token_ids=tuple(half))])
    assert half + result.token_ids == expected["a"]
    pair = kit.Pair(kit.make_lora_engine("ba", 2), kit.make_lora_engine("ab", 2))
    assert pair.run([requests[1]])["a"].token_ids == expected["a"]


def test_choices_and_beams_compute_with_the_adapter_of_their_attempt(kit):
    for params in (
        SamplingParams(max_tokens=6, n=3, ignore_eos=True),
        SamplingParams(max_tokens=6, n=2, beam_width=2, temperature=0.0, ignore_eos=True),
    ):

        def outputs(engine, params=params):
            results = engine.generate([request_of(kit, name, sampling=params) for name in ("a", "b")])
            return [(r.token_ids, r.other_choices) for r in results]

        together = outputs(kit.make_lora_engine("ab", 2))
        assert together == outputs(kit.make_lora_engine("ab", 1)), "one behind the other"
        assert together[0] != together[1]


def test_an_adapter_that_was_never_given_is_refused_by_name(kit):
    engine = kit.make_lora_engine("a", 1)
    engine.send(request_of(kit, "b"))
    (failed,) = engine.step()
    assert isinstance(failed, Failed)
    assert (failed.error.param, failed.error.http_status) == ("adapter", 400)
    assert kit.adapter_id("b") in failed.error.message


def test_what_waits_for_a_slot_holds_up_nobody_but_the_younger_ones_of_that_slot(kit):
    seen = []
    runner = FakeRunner(64, kit.BLOCK, max_loras=1, before_execute=lambda seqs: seen.append({s.attempt for s in seqs}))
    engine = kit.make_lora_engine("ab", 1, runner)
    engine.send(request_of(kit, "a", "a0", 10))
    engine.step()
    engine.send(request_of(kit, "b", "b0", 4))
    engine.step()
    for name, attempt in (("a", "a1"), ("", "base")):
        engine.send(request_of(kit, name, attempt, 4))
    kit.run_until_idle(engine)
    first = {
        attempt: next(i for i, step in enumerate(seen) if attempt in step) for attempt in ("a0", "base", "b0", "a1")
    }
    assert first["base"] == 2, "the base model's rows go on"
    assert first["b0"] == max(i for i, step in enumerate(seen) if "a0" in step) + 1, "as soon as the slot is free"
    assert first["a1"] > first["b0"], "a younger request does not keep the slot from it"
    assert engine.stats().adapters.installs == 3
    assert engine.stats().adapters.evictions == 2


def test_the_slot_of_an_adapter_that_others_wait_for_is_taken_last(kit):
    engine = kit.make_lora_engine("abc", 2)
    for name in "ab":
        engine.generate([request_of(kit, name, max_tokens=2)])
    engine.generate([request_of(kit, "c", max_tokens=2)])
    assert engine.stats().adapters.resident == (kit.adapter_id("c"), kit.adapter_id("b")), (
        "the one unused for longest left"
    )
    engine.generate([request_of(kit, "b", "again", max_tokens=2)])
    assert engine.stats().adapters.installs == 3


def test_sequences_that_decode_wait_for_a_part_of_an_adapter_at_a_time(kit):
    """Drill: an adapter of 20 MB was copied as a whole before one step."""
    seen, installed = [], []
    runner = FakeRunner(
        64, kit.BLOCK, max_loras=4, before_execute=lambda seqs: seen.append({seq.attempt for seq in seqs}),
        before_install=lambda slot, adapter: installed.append((runner.executed_steps, slot)),
    )  # fmt: skip
    engine = kit.make_lora_engine((), 4, runner)
    budget = engine.core.scheduler.throughput.install_budget()
    for name in "ab":
        engine.send(KeepAdapter(FakeAdapter(kit.adapter_id(name), num_bytes=5 * budget, num_parts=10)))
    engine.send(request_of(kit, "", "base", 20))
    engine.step()
    for name in "ab":
        engine.send(request_of(kit, name, max_tokens=2))
    kit.run_until_idle(engine)
    assert installed == [(step, 0 if step <= 5 else 1) for step in range(1, 11)], "two parts before each step"
    assert all("base" in step for step in seen[:20]), "which goes on meanwhile"
    assert [next(i for i, step in enumerate(seen) if name in step) for name in "ab"] == [6, 11]
    idle = kit.make_lora_engine("abcd", 4)
    for name in "abcd":
        idle.send(request_of(kit, name, max_tokens=2))
    idle.step()
    assert idle.stats().adapters.installs == 4, "nobody waits"


def test_an_adapter_is_installed_while_its_request_waits_for_kv(kit):
    """It is whole when the KV is there, or what is left is copied at once."""
    for steps in (1, 3, 9):
        engine = kit.make_lora_engine("a", 1, parts=6)
        engine.send(request_of(kit, "", "base", 30))
        engine.step()
        engine.send(request_of(kit, "a", mode=KvMode.REMOTE))
        events = [event for _ in range(steps) for event in engine.step()]
        assert any(isinstance(event, Admitted) and event.attempt == "a" for event in events), (
            "prefill may begin at once"
        )
        assert engine.stats().adapters.installs == (steps > 6)
        engine.send(RunLocally("a"))
        events = kit.run_until_idle(engine)
        assert kit.tokens_of(events, "a") == alone(kit, request_of(kit, "a"))
        assert engine.stats().adapters.installs == 1


def test_dropped_while_used_it_serves_those_that_name_it_and_no_other(kit):
    engine = kit.make_lora_engine("ab", 1)
    expected = alone(kit, request_of(kit, "a"))
    engine.send(request_of(kit, "a"))
    engine.step()
    engine.send(DropAdapter(kit.adapter_id("a")))
    engine.send(request_of(kit, "a", "late"))
    events = kit.run_until_idle(engine)
    [failed] = [event for event in events if isinstance(event, Failed)]
    assert (failed.attempt, failed.error.param) == ("late", "adapter")
    assert expected[-len(kit.tokens_of(events, "a")) :] == kit.tokens_of(events, "a")
    assert engine.stats().adapters.resident == ()
    engine.send(KeepAdapter(FakeAdapter(kit.adapter_id("a"))))
    [result] = engine.generate([request_of(kit, "a", "new")])
    assert result.token_ids == expected


def test_a_failed_install_ends_its_requests_and_no_other(kit):
    def install(slot, adapter):
        if adapter.id == kit.adapter_id("b"):
            raise RuntimeError("no memory")

    runner = FakeRunner(64, kit.BLOCK, max_loras=2, before_install=install)
    engine = kit.make_lora_engine("ab", 2, runner)
    for name in ("", "a", "b"):
        engine.send(request_of(kit, name))
    events = kit.run_until_idle(engine)
    [failed] = [event for event in events if isinstance(event, Failed)]
    assert failed.attempt == "b"
    assert "no memory" in failed.error.message
    for name in ("", "a"):
        assert kit.tokens_of(events, name) == alone(kit, request_of(kit, name))
    assert engine.stats().adapters.resident == (kit.adapter_id("a"),)


@pytest.mark.parametrize("slots", [1, 2])
def test_steps_ahead_go_on_with_adapters(kit, slots):
    """A slot is written behind the step on the device that still reads it."""
    requests = [request_of(kit, name, f"{name}{i}", 9 + i) for i in range(3) for name in ("a", "", "b", "c")]
    runner = FakeDeviceRunner(128, kit.BLOCK, max_loras=slots)
    engine = kit.make_lora_engine("abc", slots, runner, num_blocks=128)
    results = engine.generate(requests, arrivals=[i for i, _ in enumerate(requests)])
    assert [r.token_ids for r in results] == [alone(kit, request) for request in requests]
    assert engine.stats().steps_ahead > 10
    assert engine.stats().adapters.installs >= 3


def test_drafts_are_verified_with_the_adapter_of_their_row(kit):
    requests = [request_of(kit, name, max_tokens=16) for name in ("a", "b", "")]
    expected = {request.attempt: alone(kit, request) for request in requests}

    def drafter(attempt, token_ids, most):
        return expected[attempt][len(token_ids) - len(IDS) :][: min(most, 3)]

    engine = kit.make_lora_engine("ab", 2)
    engine.core.scheduler.drafter = drafter
    results = engine.generate(requests)
    assert {r.attempt: r.token_ids for r in results} == expected
    assert engine.stats().steps < 10


def test_the_requests_of_an_adapter_that_waits_can_be_cancelled(kit):
    from diptych.engine.messages import Cancel

    engine = kit.make_lora_engine("ab", 1)
    engine.send(request_of(kit, "a", "a0", 10))
    engine.step()
    engine.send(request_of(kit, "b", "b0"))
    engine.step()
    engine.send(Cancel("b0"))
    engine.send(request_of(kit, "a", "a1", 3))
    events = engine.step()
    assert any(isinstance(event, TokensOut) and event.attempt == "a1" for event in events), "the claim is gone with it"
    ends = [e.attempt for e in kit.run_until_idle(engine) if isinstance(e, Finished)]
    assert sorted(ends) == ["a0", "a1"]


def test_under_the_priority_policy_a_slot_is_taken_from_those_of_less_importance_only(kit):
    def first_steps(slots, important):
        seen = []
        runner = FakeRunner(
            64, kit.BLOCK, max_loras=slots, before_execute=lambda seqs: seen.append({s.attempt for s in seqs})
        )
        engine = kit.make_lora_engine("ab", slots, runner, scheduling_policy="priority")
        engine.send(request_of(kit, "a", "a0", 8, priority=5))
        engine.step()
        engine.send(request_of(kit, "b", "b0", 3, priority=important))
        events = kit.run_until_idle(engine)
        assert kit.tokens_of(events, "b0") == alone(kit, request_of(kit, "b", max_tokens=3))
        assert engine.stats().preemptions_total == (slots == 1 and important < 5)
        return next(i for i, step in enumerate(seen) if "b0" in step)

    assert [first_steps(1, 1), first_steps(2, 1), first_steps(1, 5), first_steps(1, 9)] == [1, 2, 8, 8]


def test_blocks_that_come_back_or_come_from_elsewhere_are_those_of_the_same_adapter(kit):
    """Preempted to the host tier and back; pulled under the keys of the adapter."""
    requests = [request_of(kit, name, max_tokens=14) for name in ("a", "b", "")]
    expected = {request.attempt: alone(kit, request) for request in requests}
    runner = FakeRunner(8, kit.BLOCK, max_loras=1, num_host_blocks=16)
    engine = kit.make_lora_engine("ab", 1, runner, num_blocks=8, num_host_blocks=16, preemption_mode="swap")
    results = engine.generate(requests)
    assert {r.attempt: r.token_ids for r in results} == expected
    again = engine.generate([replace(request, attempt=f"{request.attempt}2") for request in requests])
    assert [r.token_ids for r in again] == list(expected.values())
    assert any(r.num_cached_tokens for r in again)


def test_many_adapters_on_few_slots_keep_nobody_out_and_hold_up_no_base_row(kit):
    """64 adapters on 8 slots, each of which would fit into a step's budget a part at a time only."""
    seen = []
    runner = FakeRunner(
        256, kit.BLOCK, max_loras=8, before_execute=lambda seqs: seen.append({seq.attempt for seq in seqs})
    )
    engine = kit.make_lora_engine((), 8, runner, num_blocks=256, max_num_seqs=32)
    budget = engine.core.scheduler.throughput.install_budget()
    names = [f"adapter-{i}" for i in range(64)]
    for name in names:
        engine.send(KeepAdapter(FakeAdapter(kit.adapter_id(name), num_bytes=2 * budget, num_parts=4)))
    base = request_of(kit, "", "base", 400)
    engine.send(base)
    engine.step()
    requests = [request_of(kit, name, f"{name}/{turn}", 6) for turn in range(2) for name in names]
    for request in requests:
        engine.send(request)
    events = kit.run_until_idle(engine, 3000)
    finished = {event.attempt for event in events if isinstance(event, Finished)}
    assert finished == {"base", *(request.attempt for request in requests)}
    first = [step for step in seen if "base" in step]
    assert seen[: len(first)] == first, "it is in every step until it ends"
    stats = engine.stats().adapters
    assert (len(stats.resident), stats.installs - stats.evictions) == (8, 8)
    assert stats.installs <= 2 * len(names)
