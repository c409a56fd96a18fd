"""What a worker reports of its load is what its requests add up to, whatever became of them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from diptych.common.sampling import SamplingParams
from diptych.engine.core import InvariantError
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import (
    Cancel,
    Candidate,
    FetchAgain,
    FirstCandidates,
    FirstToken,
    GrantSlabs,
    KvComplete,
    KvMode,
    Preempted,
    RangePacked,
    RunLocally,
    UnpackRange,
)

SHARED = tuple(range(200, 800))


def load_of(engine):
    stats = engine.stats()
    return stats.num_running, stats.num_waiting, stats.num_waiting_remote, stats.waiting_prompt_tokens, stats.kv_usage


def test_cache_hits_do_not_count_as_load_for_ever(kit):
    """600 shared tokens, four requests one after the other: an idle prefill engine reports no load after each of them."""
    engine = kit.make_engine(num_blocks=256)
    for number in range(4):
        prompt = (*SHARED, *range(100 * number, 100 * number + 20))
        request = kit.make_request(f"r{number}", prompt, mode=KvMode.PREFILL, want_kv=False)
        engine.send(request)
        assert engine.stats().waiting_prompt_tokens == 620
        kit.run_until_idle(engine)
        assert load_of(engine) == (0, 0, 0, 0, 0.0)
    assert engine.stats().cached_tokens_total == 3 * 600


def test_what_is_preempted_counts_until_it_is_computed_again(kit):
    engine = kit.make_engine(num_blocks=9)
    requests = [kit.make_request(f"r{i}", [*range(300, 308), 60 + i], 20, seed=i) for i in range(2)]
    engine.generate(requests)
    assert engine.stats().preemptions_total > 0
    assert load_of(engine) == (0, 0, 0, 0, 0.0)


@pytest.mark.parametrize("figure", ["tokens", "queue"])
def test_the_audit_tells_a_load_that_is_not_the_requests_own(kit, figure):
    engine = kit.make_engine(max_num_seqs=1)
    for name in "ab":
        engine.send(kit.make_request(name, 10, 3))
    engine.step()
    scheduler = engine.core.scheduler
    assert scheduler.audit(True).violations == ()
    if figure == "tokens":
        scheduler.waiting.num_tokens_to_compute += 16
        want = "load: waiting_prompt_tokens is 26, by the requests' account 10"
    else:
        scheduler.running._paused["a"] = scheduler.requests["a"]
        want = "attempt a is running, and in the queues ['decoding', 'paused']"
    assert want in scheduler.audit(True).violations
    with pytest.raises(InvariantError, match="load: "):
        engine.step()


def make_machine(kit, policy):
    class Machine(RuleBasedStateMachine):
        """One engine that is asked for everything; what its peers would send comes at random."""

        def __init__(self):
            super().__init__()
            runner = FakeRunner(14, kit.BLOCK, num_host_blocks=6)
            self.engine = kit.make_engine(
                runner, num_blocks=14, num_host_blocks=6, max_num_batched_tokens=9, max_num_seqs=5,
                scheduling_policy=policy, initial_copy_bytes_per_s=1e4,
            )  # fmt: skip
            self.size = self.engine.core.scheduler.limits.kv_bytes_per_token
            grants = kit.make_grants(2, 8 * self.size)
            self.slabs = {grant.slab: grant for grant in grants}
            self.engine.send(GrantSlabs(grants))
            self.count = self.jobs = 0

        def alive(self, *modes):
            return [a for a, r in self.engine.core.scheduler.requests.items() if r.mode in modes and a == r.attempt_id]

        @rule(
            mode=st.sampled_from([KvMode.LOCAL, KvMode.LOCAL, KvMode.PREFILL, KvMode.REMOTE]),
            kind=st.sampled_from(["one", "one", "choices", "beams", "logprobs"]),
            blocks=st.integers(0, 3),
            own=st.integers(1, 9),
            outputs=st.integers(1, 14),
            sent=st.integers(0, 2),
            priority=st.integers(0, 2),
            want_kv=st.booleans(),
        )
        def add(self, mode, kind, blocks, own, outputs, sent, priority, want_kv):
            if len(self.engine.core.scheduler.requests) > 8:
                return
            self.count += 1
            fields = {
                "one": {},
                "choices": {"n": 3},
                "beams": {"beam_width": 2, "n": 2, "temperature": 0.0},
                "logprobs": {"prompt_logprobs": 0},
            }[kind]
            sampling = SamplingParams(max_tokens=outputs, seed=1, ignore_eos=True, **fields)
            forced = tuple(range(50, 50 + min(sent, outputs - 1))) if kind == "one" else ()
            prompt = (*SHARED[: kit.BLOCK * blocks], *range(10 * (self.count % 3), 10 * (self.count % 3) + own))
            more = {"want_kv": want_kv, "peer": "d"} if mode is KvMode.PREFILL else {}
            self.engine.send(
                kit.make_request(
                        f"r{self.count}", prompt, sampling=sampling, mode=mode, output_token_ids=forced,
                        priority=priority, **more,
                    )
            )  # fmt: skip

        @rule(data=st.data())
        def cancel(self, data):
            if alive := self.alive(*KvMode):
                self.engine.send(Cancel(data.draw(st.sampled_from(alive))))

        @rule(data=st.data(), command=st.sampled_from([RunLocally, FetchAgain, KvComplete]))
        def order(self, data, command):
            if alive := self.alive(KvMode.REMOTE, KvMode.LOCAL):
                self.engine.send(command(data.draw(st.sampled_from(alive))))

        @rule(data=st.data())
        def first_token(self, data):
            if alive := self.alive(KvMode.REMOTE):
                attempt = data.draw(st.sampled_from(alive))
                if self.engine.core.scheduler.requests[attempt].seq.num_candidates:
                    self.engine.send(FirstCandidates(attempt, tuple(Candidate(t, -1.0 - t) for t in range(1, 6))))
                else:
                    for choice in range(3):
                        self.engine.send(FirstToken(attempt, 40 + choice, choice))

        @rule(data=st.data())
        def kv_comes(self, data):
            """All of it, in one range."""
            if alive := self.alive(KvMode.REMOTE):
                request = self.engine.core.scheduler.requests[data.draw(st.sampled_from(alive))]
                left = request.kv_target - request.num_computed
                if left > 0:
                    self.jobs += 1
                    payload = memoryview(bytes(left * self.size))
                    first = request.num_computed
                    self.engine.send(UnpackRange(request.attempt, self.jobs, first, left, payload, last=True))

        @rule()
        def clear_caches(self):
            self.engine.core.scheduler.kv.pool.clear()

        @rule(count=st.integers(1, 3), refetch=st.booleans())
        def step(self, count, refetch):
            for _ in range(count):
                self.engine.core.step()
                for event in self.engine.core.take_events():
                    if isinstance(event, RangePacked):
                        self.engine.send(GrantSlabs((self.slabs[event.slab],)))
                    elif isinstance(event, Preempted) and refetch:
                        self.engine.send(FetchAgain(event.attempt))

        @invariant()
        def load_is_the_requests_own(self):
            assert self.engine.core.scheduler.check() == []

        def teardown(self):
            for attempt in self.alive(KvMode.REMOTE):
                self.engine.send(RunLocally(attempt))
            for _ in range(400):
                if not self.engine.core.scheduler.requests:
                    break
                self.step(1, refetch=False)
                for attempt in self.alive(KvMode.REMOTE):
                    self.engine.send(RunLocally(attempt))
            assert load_of(self.engine) == (0, 0, 0, 0, 0.0)
            assert self.engine.core.scheduler.audit(True).attempts == {}

    return Machine


@pytest.mark.parametrize("policy", ["priority", "sojourn"])
def test_load_is_the_requests_own_after_every_step(kit, policy):
    run_state_machine_as_test(
        make_machine(kit, policy),
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )
