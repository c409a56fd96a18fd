"""Random lives of requests on a prefill and a decode engine with tiny pools.

Whatever the order of adds, cancels, steps, grants, ranges, first tokens, completions and fallbacks: the block law holds after
every step (check_invariants), every request ends exactly once, the tokens are those of the undisturbed run, and nothing is
held at the end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from diptych.common.errors import RequestCancelledError
from diptych.common.kv_groups import PoolDemand
from diptych.common.request import Prompt
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import (
    Admitted,
    Cancel,
    Failed,
    Finished,
    FirstToken,
    GrantSlabs,
    KvComplete,
    KvMode,
    PrefillComplete,
    RangePacked,
    RangeUnpacked,
    RunLocally,
    TokensOut,
    UnpackRange,
)


class Life:
    def __init__(self, request):
        self.request = request
        self.tokens = list(request.output_token_ids)
        self.end = None
        self.cancelled = False
        self.local = request.mode is KvMode.LOCAL
        self.prefill_ended = True


def make_machine(kit, windows=(), adapters=("",)):
    """`windows`: of each layer. The pools of window groups hold one sequence and no more. `adapters`: names that requests
    have; each engine has two slots."""
    wanted: dict = {}

    def make_engine(num_blocks, max_num_batched_tokens, **settings):
        demand = PoolDemand(1, max_num_batched_tokens)
        runner = FakeRunner(num_blocks, kit.BLOCK, windows=windows, demand=demand, max_loras=2)
        return kit.make_lora_engine(
            [a for a in adapters if a],
            2,
            runner,
            parts=4,
            num_blocks=num_blocks,
            max_num_batched_tokens=max_num_batched_tokens,
            **settings,
        )

    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.prefill = make_engine(12, 6, slab_quota_per_peer=2)
            self.decode = make_engine(9, 8, max_num_seqs=4)
            token_bytes = self.prefill.core.scheduler.limits.kv_bytes_per_token
            self.free_slabs = deque(kit.make_grants(3, 8 * token_bytes))
            self.slabs = {g.slab: g for g in self.free_slabs}
            self.lives: dict[str, Life] = {}
            self.inbox: deque = deque()  # commands for decode, in the order in which prefill caused them
            self.jobs: set[int] = set()
            self.num_jobs = 0

        @rule(
            mode=st.sampled_from([KvMode.LOCAL, KvMode.REMOTE, KvMode.REMOTE]),
            shared=st.integers(0, 3),
            num_own=st.integers(1, 9),
            max_tokens=st.integers(1, 12),
            sent=st.integers(0, 3),
            adapter=st.sampled_from(adapters),
        )
        def add(self, mode, shared, num_own, max_tokens, sent, adapter):
            if sum(life.end is None for life in self.lives.values()) >= 8:
                return
            attempt = f"r{len(self.lives)}"
            prompt = (
                *range(300, 300 + 4 * shared),
                *range(10 + len(self.lives) % 3, 10 + len(self.lives) % 3 + num_own),
            )
            named = Prompt(prompt, adapter=kit.adapter_id(adapter))
            request = kit.make_request(attempt, named, max_tokens, seed=1, mode=mode)
            key = (named, max_tokens)
            if key not in wanted:
                wanted[key] = kit.undisturbed([request], windows, [a for a in adapters if a])[attempt]
            forced = tuple(wanted[key][: min(sent, max_tokens - 1)])
            self.lives[attempt] = Life(replace(request, output_token_ids=forced))
            self.decode.send(self.lives[attempt].request)

        @rule(data=st.data(), both=st.booleans())
        def cancel(self, data, both):
            alive = [a for a, life in self.lives.items() if life.end is None]
            if alive:
                attempt = data.draw(st.sampled_from(alive))
                self.lives[attempt].cancelled = True
                self.decode.send(Cancel(attempt))
                if both:
                    self.prefill.send(Cancel(attempt))

        @rule(data=st.data())
        def run_locally(self, data):
            alive = [a for a, life in self.lives.items() if life.end is None and not life.local]
            if alive:
                attempt = data.draw(st.sampled_from(alive))
                self.lives[attempt].local = True
                self.prefill.send(Cancel(attempt))
                self.decode.send(RunLocally(attempt))

        @rule()
        def clear_caches(self):
            self.decode.core.scheduler.kv.clear()
            self.prefill.core.scheduler.kv.clear()

        @rule(count=st.integers(1, 3))
        def grant(self, count):
            for _ in range(min(count, len(self.free_slabs))):
                self.prefill.send(GrantSlabs((self.free_slabs.popleft(),)))

        @rule(count=st.integers(1, 4))
        def deliver(self, count):
            for _ in range(min(count, len(self.inbox))):
                command = self.inbox.popleft()
                if isinstance(command, UnpackRange):
                    self.jobs.add(command.job)
                self.decode.send(command)

        @rule(count=st.integers(1, 4))
        def step_prefill(self, count):
            for _ in range(count):
                self.prefill.core.step()
                for event in self.prefill.core.take_events():
                    self.on_prefill(event)

        @rule(count=st.integers(1, 4))
        def step_decode(self, count):
            for _ in range(count):
                self.decode.core.step()
                for event in self.decode.core.take_events():
                    self.on_decode(event)

        def on_prefill(self, event):
            match event:
                case RangePacked(attempt, slab, _, first, num_tokens, size, num_layers=num_layers, group=group):
                    data = memoryview(bytes(self.slabs[slab].payload[:size]))
                    self.free_slabs.append(self.slabs[slab])
                    self.num_jobs += 1
                    self.inbox.append(
                        UnpackRange(attempt, self.num_jobs, first, num_tokens, data, num_layers=num_layers, group=group)
                    )
                case TokensOut(attempt, _, token_ids):
                    self.inbox.append(FirstToken(attempt, token_ids[0]))
                case PrefillComplete(attempt):
                    self.inbox.append(KvComplete(attempt))
                    self.lives[attempt].prefill_ended = True
                case Failed(attempt):
                    self.lives[attempt].prefill_ended = True

        def on_decode(self, event):
            match event:
                case Admitted(attempt, cached):
                    life = self.lives[attempt]
                    assert cached % kit.BLOCK == 0
                    known = len(life.request.prompt.token_ids) + len(life.request.output_token_ids)
                    assert cached < known, "one token is left to compute"
                    if not life.local and not life.cancelled:
                        life.prefill_ended = False
                        request = replace(
                            life.request, mode=KvMode.PREFILL, decode_cached_tokens=cached, peer="d",
                            reusable=len(life.request.prompt.token_ids) % 2 == 1,
                        )  # fmt: skip
                        self.prefill.send(request)
                case TokensOut(attempt, offset, token_ids):
                    life = self.lives[attempt]
                    assert life.end is None
                    assert offset == len(life.tokens)
                    life.tokens.extend(token_ids)
                case RangeUnpacked(_, job):
                    self.jobs.remove(job)
                case Finished(attempt) | Failed(attempt):
                    life = self.lives[attempt]
                    assert life.end is None
                    life.end = event
                    want = wanted[life.request.prompt, life.request.sampling.max_tokens]
                    if isinstance(event, Finished):
                        assert life.tokens == want
                    else:
                        assert life.cancelled, event.error
                        assert isinstance(event.error, RequestCancelledError)
                        assert life.tokens == want[: len(life.tokens)]

        def teardown(self):
            for _ in range(2000):
                if all(life.end is not None for life in self.lives.values()):
                    break
                self.grant(3)
                self.step_prefill(1)
                self.deliver(4)
                self.step_decode(1)
            else:
                stuck = {a: life for a, life in self.lives.items() if life.end is None}
                raise AssertionError(f"no end: {list(stuck)} {self.decode.core.scheduler.audit(True)}")
            for attempt, life in self.lives.items():
                if not life.prefill_ended:
                    self.prefill.send(Cancel(attempt))
            self.step_prefill(1)
            self.deliver(len(self.inbox) or 1)
            self.step_decode(1)
            assert not self.jobs
            for engine in (self.prefill, self.decode):
                audit = engine.core.scheduler.audit(True)
                assert audit.violations == ()
                for blocks in (audit.blocks, *audit.more_blocks):
                    assert (blocks.running, blocks.reserved) == (0, 0)
                assert audit.attempts == {}

    return Machine


@pytest.mark.parametrize(
    ("windows", "adapters"),
    [((), ("",)), ((), ("", "a", "b", "c", "d")), ((0, 6, 6, 9), ("", "a", "b", "c")), ((7, 7), ("",))],
    ids=["full", "full and adapters", "full and windows, and adapters", "one window"],
)
def test_every_request_ends_once_with_the_undisturbed_tokens(kit, windows, adapters):
    run_state_machine_as_test(
        make_machine(kit, windows, adapters),
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
