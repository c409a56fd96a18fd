"""A preempted request that goes back to a prefill worker draws what it would have drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.sampling import SamplingParams
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import (
    Admitted,
    FetchAgain,
    Finished,
    GrantSlabs,
    KvComplete,
    KvMode,
    Preempted,
    PrefillComplete,
    RangePacked,
    RunLocally,
    UnpackRange,
)


class Helper:
    """A prefill engine that computes the KV of any tokens for a decode engine."""

    def __init__(self, kit, engine):
        self.kit, self.engine, self.helped = kit, engine, 0

    def fetch(self, decode, request, outputs, cached):
        prefill = self.kit.make_engine()
        size = prefill.core.scheduler.limits.kv_bytes_per_token
        grants = {g.slab: g for g in self.kit.make_grants(40, 8 * size)}
        prefill.send(GrantSlabs(tuple(grants.values())))
        fields = {"mode": KvMode.PREFILL, "output_token_ids": tuple(outputs), "decode_cached_tokens": cached}
        prefill.send(replace(request, **fields))
        for event in self.kit.run_until_idle(prefill):
            if isinstance(event, RangePacked):
                payload = memoryview(bytes(grants[event.slab].payload[: event.size_bytes]))
                decode.send(UnpackRange(request.attempt, event.slab, event.first_token, event.num_tokens, payload))
            elif isinstance(event, PrefillComplete):
                decode.send(KvComplete(request.attempt))
        self.helped += 1


def run(kit, decode, requests, answer):
    """`answer(attempt, outputs so far, cached tokens)`: what follows a FetchAgain that was taken."""
    outputs = {request.attempt: [] for request in requests}
    ends, asked = {}, set()
    for request in requests:
        decode.send(request)
    for _ in range(2000):
        decode.core.step()
        events = decode.core.take_events()
        for event in events:
            match event:
                case Preempted(attempt):
                    asked.add(attempt)
                    decode.send(FetchAgain(attempt))
                case Admitted(attempt, cached) if attempt in asked:
                    answer(attempt, outputs[attempt], cached)
                case Finished(attempt):
                    ends[attempt] = event
                case _ if hasattr(event, "token_ids"):
                    assert event.offset == len(outputs[event.attempt])
                    outputs[event.attempt].extend(event.token_ids)
        if len(ends) == len(requests):
            return outputs, ends
    raise AssertionError(f"no end in sight: {outputs}")


def small_engine(kit, num_blocks=9, host=0, **fields):
    runner = FakeRunner(num_blocks, kit.BLOCK, num_host_blocks=host)
    return kit.make_engine(runner, num_blocks=num_blocks, num_host_blocks=host, **fields)


@pytest.mark.parametrize("host", [0, 16])
@given(
    lengths=st.lists(st.integers(1, 14), min_size=2, max_size=4),
    temperature=st.sampled_from([0.0, 1.0]),
    penalty=st.sampled_from([0.0, 0.7]),
    fails=st.sets(st.integers(0, 6)),
    caching=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_the_same_tokens_whoever_computes_them_again(kit, host, lengths, temperature, penalty, fails, caching):
    params = SamplingParams(18, seed=4, temperature=temperature, ignore_eos=True, frequency_penalty=penalty)
    requests = [
        kit.make_request(f"r{i}", range(40 * i, 40 * i + length), sampling=params) for i, length in enumerate(lengths)
    ]
    decode = small_engine(kit, host=host, initial_copy_bytes_per_s=1e12, enable_prefix_caching=caching)
    helper = Helper(kit, decode)
    by_name = {request.attempt: request for request in requests}

    def answer(attempt, outputs, cached):
        if helper.helped in fails:  # this one cannot help: the engine computes the rest itself
            helper.helped += 1
            decode.send(RunLocally(attempt))
        else:
            helper.fetch(decode, by_name[attempt], outputs, cached)

    outputs, ends = run(kit, decode, requests, answer)
    assert outputs == kit.undisturbed(requests)
    assert all(end.num_cached_tokens == 0 for end in ends.values())
    assert decode.core.scheduler.check() == []
    assert decode.core.scheduler.kv.pool.counts.running == 0
    assert decode.core.scheduler.kv.host.num_held == 0


def test_it_does_happen_and_saves_the_computing(kit):
    requests = [kit.make_request("a", 6, 18), kit.make_request("b", range(300, 307), 18)]
    decode = small_engine(kit, 8, enable_prefix_caching=False)
    helper = Helper(kit, decode)
    named = {request.attempt: request for request in requests}
    run(kit, decode, requests, lambda attempt, outputs, cached: helper.fetch(decode, named[attempt], outputs, cached))
    assert helper.helped == decode.stats().refetches_total > 0
    assert decode.core._executor.runner.computed_tokens == (6 + 17) + (7 + 17)  # nothing twice


def test_too_late_it_changes_nothing(kit):
    engine = kit.make_engine()
    request = kit.make_request("a", 6, 8)
    engine.send(request)
    engine.step()
    engine.send(FetchAgain("a"))
    engine.send(FetchAgain("nobody"))
    events = kit.run_until_idle(engine)
    assert kit.tokens_of(events)[-1] == kit.undisturbed([request])["a"][-1]
    assert engine.stats().refetches_total == 0


@pytest.mark.parametrize("fields", [{"n": 2}, {"beam_width": 2, "temperature": 0.0}])
@pytest.mark.parametrize("mode", ["auto", "recompute"])
def test_only_a_request_of_one_choice_and_only_by_measured_cost(kit, fields, mode):
    engine = small_engine(kit, 12, preemption_mode=mode)
    params = SamplingParams(16, ignore_eos=True, **fields)
    for request in (kit.make_request("a", 6, sampling=params), kit.make_request("b", range(300, 306), 16)):
        engine.send(request)
    reported = {event.attempt for event in kit.run_until_idle(engine) if isinstance(event, Preempted)}
    assert engine.stats().preemptions_total > 0
    assert reported <= ({"b"} if mode == "auto" else set())
