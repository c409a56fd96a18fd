"""Whoever decodes waits for prompts no longer than a bound, by measured cost, and prompts go on all the same.

The machine is a model (`bench.engine.mixed_steps`): the scheduler learns it from durations alone, as it does a real one.
"""

from __future__ import annotations

import pytest

from diptych.bench.engine.mixed_steps import Machine, serve
from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.engine.config import EngineConfig
from diptych.engine.executor import LocalExecutor
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import KvMode
from diptych.engine.offline import OfflineEngine
from diptych.engine.sched.batching.throughput import ThroughputEstimator

BLOCK = 16
IDENTITY = IdentityHeader(b"k" * 32, "m", "t", "u", BLOCK)


@pytest.mark.parametrize("waves", [1, 4])
def test_eight_users_wait_no_longer_for_prompts_than_the_bound(waves):
    """Without one: 0.3 s, at hardly more tokens a second."""
    bounded, free = serve(8, waves), serve(8, waves, mixed_step_time_s=None)
    assert bounded.gap_ms(99) <= 55
    assert bounded.gaps_ms.max() <= 65
    assert free.gap_ms(99) > 250
    assert bounded.tokens_per_s >= 0.9 * free.tokens_per_s


def test_more_than_the_machine_can_serve_stretches_steps_instead_of_starving_prompts():
    bounded, free = serve(32, 2), serve(32, 2, mixed_step_time_s=None)
    assert bounded.tokens_per_s >= 0.94 * free.tokens_per_s
    assert bounded.gap_ms(99) < 0.6 * free.gap_ms(99)
    assert bounded.first_token_s.max() < 1.3 * free.first_token_s.max()


def test_a_machine_whose_decode_steps_take_longer_than_the_bound_computes_prompts_half_of_its_time():
    machine = Machine().slower(10)
    slow = serve(8, 1, machine, num_prompt=64)
    assert slow.gap_ms(99) <= 2.2 * 180  # a decode step of eight takes 180 ms there
    assert slow.tokens_per_s >= 0.85 * serve(8, 1, machine, num_prompt=64, mixed_step_time_s=None).tokens_per_s


def test_without_decoding_sequences_steps_are_as_large_as_ever():
    alone, free = serve(1, 1, num_prompt=900), serve(1, 1, num_prompt=900, mixed_step_time_s=None)
    assert alone.first_token_s == pytest.approx(free.first_token_s)


def test_a_local_prompt_on_a_decode_worker_is_computed_in_small_steps_too(kit):
    """P/D: decode computes up to 64 uncached tokens itself, beside what it decodes."""
    chunks = []
    clock = FakeClock()

    def compute(seqs):
        chunks.append([len(seq.token_ids) for seq in seqs if len(seq.token_ids) > 1])
        clock.advance(Machine().duration_s(seqs))

    runner = FakeRunner(200, BLOCK, before_execute=compute)
    engine = OfflineEngine(LocalExecutor(runner), EngineConfig(200, BLOCK), IDENTITY, clock=clock)
    for name in range(4):
        engine.send(kit.make_request(f"old{name}", range(100 * name, 100 * name + 64), 40))
    for _ in range(12):
        engine.step()
    chunks.clear()
    engine.send(kit.make_request("new", range(500, 564), 4, mode=KvMode.LOCAL))
    for _ in range(4):
        engine.step()
    assert sum(map(sum, chunks)) == 64
    assert max(map(sum, chunks)) <= 40


def test_the_cap_follows_the_size_of_the_decode_step():
    pace = ThroughputEstimator(0.5, 1000.0, 16, mixed_step_time_s=0.05)
    assert pace.decode_s(8) == 0.0
    pace.observe(0.02, 0, 8)
    pace.observe(0.08, 0, 32)
    assert [pace.decode_s(n) for n in (0, 1, 8, 15, 32, 500)] == [0.0, 0.02, 0.02, 0.02, 0.08, 0.08]
    assert pace.prefill_cap(8) == 30
    assert pace.prefill_cap(32) == 80  # as long again as the step takes
    assert pace.prefill_cap(0) == 500
    assert pace.prefill_cap(8, backlog=2000) == 30
    assert pace.prefill_cap(8, backlog=4000) == 80  # four seconds of prompts: twice the time
    assert pace.prefill_cap(8, backlog=10**6) == 480  # never beyond any step's bound
    assert ThroughputEstimator(None, 1000.0, 16, mixed_step_time_s=0.05).prefill_cap(0) is None
    assert ThroughputEstimator(0.5, 100.0, 16, mixed_step_time_s=0.01).prefill_cap(4) == 16


def test_prompt_tokens_beside_decoding_sequences_have_a_bound_of_their_own():
    pace = ThroughputEstimator(None, 1000.0, 16, max_mixed_tokens=512)
    assert [pace.prefill_cap(n, backlog=10**6) for n in (0, 1, 256)] == [None, 512, 512]
    pace = ThroughputEstimator(0.5, 1000.0, 16, mixed_step_time_s=0.05, max_mixed_tokens=40)
    assert [pace.prefill_cap(n) for n in (0, 1)] == [500, 40]
    assert pace.prefill_cap(1, backlog=4000) == 40
    free, bounded = (serve(8, 4, mixed_step_time_s=None, max_mixed_prefill_tokens=most) for most in (0, 32))
    assert bounded.gap_ms(99) < 0.3 * free.gap_ms(99)
