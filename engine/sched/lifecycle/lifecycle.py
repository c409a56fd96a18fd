"""A request's moves between the owners of the scheduler's collections.

    WaitingQueues     waits for admission
    RunningSet        computes
    RemoteRequests    waits for its KV
    Packing           is computed; ranges of its KV wait for slabs
    ChoiceGroups, BeamGroups   several sequences of one attempt
    KvCacheManager    blocks
    AdapterSlots      slots of LoRA adapters
    Outbox            events

Each owner changes its own collections only. A move that concerns several of them is one method here: the end of a
request, a fork, a preemption. Decisions are made elsewhere: admission in `Scheduler`, the choice of a victim in
`preemption`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain

from diptych.common.errors import DiptychError
from diptych.common.sampling import FinishReason
from diptych.engine.config import EngineConfig
from diptych.engine.messages import Finished, KvMode, Preempted, PrefillComplete
from diptych.engine.sched.adapters import AdapterSlots
from diptych.engine.sched.batching.policies import make_policy
from diptych.engine.sched.batching.queues import WaitingQueues
from diptych.engine.sched.batching.running import RunningSet
from diptych.engine.sched.batching.throughput import MIN_MEASURED_TOKENS, ThroughputEstimator
from diptych.engine.sched.cache.kv_cache_manager import KvCacheManager
from diptych.engine.sched.handoff.packing import Packing
from diptych.engine.sched.handoff.remote import RemoteRequests
from diptych.engine.sched.lifecycle.outbox import Outbox
from diptych.engine.sched.lifecycle.swap_cost import Rates, restore_is_cheaper, swap_is_cheaper
from diptych.engine.sched.requests.admission import ModelLimits, make_output
from diptych.engine.sched.requests.beams import BeamGroups
from diptych.engine.sched.requests.choices import ChoiceGroups
from diptych.engine.sched.requests.output import DetokenizerFactory
from diptych.engine.sched.requests.request import Request, State


class Lifecycle:
    """Owns the live requests, and holds the owners of everything else."""

    def __init__(
        self, config: EngineConfig, limits: ModelLimits, detokenizer_factory: DetokenizerFactory | None
    ) -> None:
        self.config = config
        self.block_size = config.block_size
        self.limits = limits
        self.detokenizer_factory = detokenizer_factory
        self.throughput = ThroughputEstimator(
            config.max_step_time_s,
            config.initial_prefill_tokens_per_s,
            max(config.block_size, MIN_MEASURED_TOKENS),
            config.initial_copy_bytes_per_s,
            mixed_step_time_s=config.mixed_step_time_s,
            max_mixed_tokens=config.max_mixed_prefill_tokens,
        )
        self.kv = KvCacheManager(
            config.num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            num_host_blocks=config.num_host_blocks,
            num_disk_blocks=config.num_disk_blocks,
            kv=limits.kv,
            group_blocks=limits.group_blocks,
            max_chunk=config.max_num_batched_tokens,
            tenant_cache_share=config.tenant_cache_share,
            claim_share=config.claim_share,
            tier_eviction=config.tier_eviction,
            worth_restoring=lambda num_tokens: restore_is_cheaper(num_tokens, self.rates),
        )
        self.policy = make_policy(config.scheduling_policy, sjf_aging_tokens_per_s=config.sjf_aging_tokens_per_s)
        self.adapters = AdapterSlots(limits.max_loras, self.policy.rank)
        self.waiting = WaitingQueues(self.policy, self.kv.cached_tokens, lambda: self.adapters.stuck)
        self.running = RunningSet()
        self.remote = RemoteRequests(self.kv, limits)
        self.choices = ChoiceGroups()
        self.beams = BeamGroups(limits.eos_token_ids)
        self.packing = Packing(
            config.block_size, limits.group_parts, config.slab_quota_per_peer, limits.num_layers, limits.kv
        )
        self.outbox = Outbox()
        self.emit, self.totals = self.outbox.add, self.outbox.totals
        self.not_ahead: Counter[str] = Counter()
        """Steps that were not launched before the last one had landed, by the reason."""
        self._requests: dict[str, Request] = {}
        self._deferred_free: list[Request] = []

    @property
    def requests(self) -> Mapping[str, Request]:
        """Those that have not ended, by attempt."""
        return self._requests

    @property
    def deferred_free(self) -> Iterable[Request]:
        """Ended while a step with them is on the device: their blocks are freed when it has landed."""
        return self._deferred_free

    @property
    def rates(self) -> Rates:
        return Rates(self.throughput.rate, self.throughput.copy_bytes_per_s, self.limits.kv_bytes_per_token)

    @property
    def num_groups(self) -> int:
        """Attempts with several choices or beams."""
        return len(self.choices) + len(self.beams)

    def free_slots(self) -> int:
        """Sequences that may be admitted; negative after a fork beyond max_num_seqs."""
        return self.config.max_num_seqs - len(self.running) - self.remote.num_sequences

    def set_detokenizer(self, factory: DetokenizerFactory | None) -> None:
        self.detokenizer_factory = factory

    # ---- the beginning ----

    def add(self, request: Request) -> None:
        """A new request waits for admission."""
        self._requests[request.attempt] = request
        self.adapters.enter(request)
        self.policy.entered(request)
        if request.sampling.beam_width:
            self.beams.open(request)
        elif request.sampling.num_choices > 1:
            self.choices.open(request)
        self.waiting.push(request)

    def enter_computed(self, request: Request) -> None:
        """A request whose blocks hold all that is to be packed: it computes nothing."""
        self._requests[request.attempt] = request
        self.policy.entered(request)
        self.offer_computed(request)

    def offer_computed(self, request: Request) -> None:
        """As `enter_computed`, for one that is here already."""
        request.move(State.RUNNING)
        self.packing.offer(request)
        self.prompt_computed(request)

    def enter_pull(self, request: Request) -> None:
        """A request that has its blocks and waits for KV, and computes nothing."""
        self._requests[request.attempt] = request
        self.policy.entered(request)
        request.move(State.WAITING_FOR_REMOTE_KV)
        self.remote.admit(request, pull=True)

    def fork_choices(self, request: Request) -> list[Request]:
        """The other choices of a request whose prompt is computed; they decode, and have no token of their own yet."""
        group = self.choices.of(request)
        assert group is not None
        request.seq.num_draws = 1
        forked = []
        for choice in group.numbers[1:]:
            output = make_output(
                request.sampling,
                request.token_ids[: request.num_prompt],
                self.limits,
                request.max_tokens_total - request.num_prompt,
                self.detokenizer_factory,
            )
            other = request.fork_choice(choice, output)
            self._enter_fork(request, other)
            group.join(other)
            self.running.start_decode(other)
            forked.append(other)
        self.kv.trim(request)
        for one in (request, *forked):
            self.running.needs_block(one)
        return forked

    def fork_beam(self, parent: Request) -> Request:
        """Another beam with the same tokens; it does not run yet."""
        group = self.beams.of(parent)
        assert group is not None
        beam = group.fork(parent.choice)
        self._enter_fork(parent, beam)
        return beam

    def _enter_fork(self, parent: Request, other: Request) -> None:
        self.kv.fork(parent, other)
        self._requests[other.attempt] = other
        self.adapters.enter(other)
        self.adapters.fork(parent, other)
        self.policy.entered(other)

    # ---- the end ----

    def close_session(self, session: bytes) -> int:
        """Free what only this session has claimed; its running requests claim nothing when they end. Returns: tokens whose KV is
        no longer cached."""
        for request in self.with_blocks():
            claim = request.source.claim
            if claim is not None and claim.session == session:
                request.source = replace(request.source, claim=None)
        return self.kv.close_session(session)

    def end(self, request: Request, state: State) -> None:
        """To a final state: out of every collection, and its blocks are freed."""
        if request.state in (State.WAITING, State.PREEMPTED):
            self.waiting.remove(request)
        self.running.remove(request)
        self.remote.remove(request)
        self.packing.drop(request)
        if request.steps_on_device:
            self._deferred_free.append(request)
        else:
            self.kv.free(request)
        request.move(state)
        self.adapters.leave(request)
        self.policy.left(request)
        del self._requests[request.attempt]
        self.choices.leave(request)
        self.beams.leave(request)

    def end_attempt(self, attempt_id: str, state: State) -> bool:
        """Ends every sequence of it. Returns: False when there is none."""
        members = self.choices.members(attempt_id) or self.beams.members(attempt_id)
        if not members and (request := self._requests.get(attempt_id)) is not None:
            members = [request]
        for request in members:
            self.end(request, state)
        return bool(members)

    def knows(self, attempt_id: str) -> bool:
        """The attempt has not ended."""
        return attempt_id in self._requests or attempt_id in self.choices or attempt_id in self.beams

    def fail(self, request: Request, error: DiptychError) -> None:
        """End the request's attempt, with all its choices; one that has ended is ignored."""
        if self._requests.get(request.attempt) is request and self.end_attempt(
            request.attempt_id, State.FINISHED_FAILED
        ):
            self.outbox.fail(request.attempt_id, error)

    def fail_all(self, error: DiptychError) -> None:
        for request in list(self._requests.values()):
            self.fail(request, error)

    def finish(self, request: Request) -> None:
        """Its output has come to its end."""
        assert request.output is not None
        finish = request.output.finish
        assert finish is not None
        group = self.choices.of(request)
        self.end(request, State.FINISHED_STOPPED if finish.reason is FinishReason.STOP else State.FINISHED_LENGTH)
        counts = (request.output.num_outputs, request.num_cached_tokens)
        if group is not None:
            self.outbox.extend(group.finished(request.choice, finish, *counts))
            return
        self.outbox.add(Finished(request.attempt_id, finish.reason, *counts, finish.stop_string, finish.stop_token_id))

    # ---- PREFILL ----

    def prompt_computed(self, request: Request) -> None:
        """Nothing is left to compute; what is left to pack keeps its blocks."""
        self.running.remove(request)
        self.adapters.give(request)
        request.move(State.PACKING)
        self.end_if_packed(request)

    def end_if_packed(self, request: Request) -> None:
        if request.state is not State.PACKING or not self.packing.is_packed(request):
            return
        self.end(request, State.FINISHED_HANDED_OFF)
        self.outbox.add(PrefillComplete(request.attempt_id))

    # ---- preemption ----

    def preempt(self, request: Request) -> None:
        """Free its blocks, and those of its attempt's other beams. The KV is kept in the host tier where that is
        cheaper than computing it again."""
        for one in self.beams.running_with(request):
            self._preempt_one(one)

    def _preempt_one(self, request: Request) -> None:
        self.running.remove(request)
        self.adapters.give(request)
        group = self.beams.of(request)
        if group is not None and group.take_back_candidates(request):
            request.num_computed -= 1
        num_tokens, totals = request.num_computed, self.outbox.totals
        if self._swaps_out(request):
            totals.swaps += 1
            resume_s = self.rates.restore_s(num_tokens)
        else:
            self.kv.free(request)
            request.num_computed = 0
            resume_s = self.rates.recompute_s(num_tokens)
        request.move(State.PREEMPTED)
        self.waiting.push_returned(request)
        totals.preemptions += 1
        refetch = request.may_be_refetched and request.mode is not KvMode.PREFILL
        if refetch and self.config.preemption_mode == "auto":
            self.outbox.add(Preempted(request.attempt_id, num_tokens, resume_s))

    def _swaps_out(self, request: Request) -> bool:
        mode = self.config.preemption_mode
        if mode == "recompute" or not self.config.num_host_blocks:
            return False
        worth = mode == "swap" or swap_is_cheaper(request.num_computed, self.rates)
        return worth and self.kv.swap_out(request)

    # ---- steps that are being computed ----

    def hold(self, requests: Iterable[Request]) -> None:
        """A step with these is being computed: the blocks of one that ends are not freed before `let_go`."""
        for request in requests:
            request.steps_on_device += 1

    def let_go(self, requests: Iterable[Request]) -> None:
        for request in requests:
            request.steps_on_device -= 1
        self.free_landed()

    def free_landed(self) -> None:
        """Free the blocks of ended requests whose last step has landed."""
        if not self._deferred_free:
            return
        left = []
        for request in self._deferred_free:
            if request.steps_on_device:
                left.append(request)
            else:
                self.kv.free(request)
        self._deferred_free = left

    def with_blocks(self) -> Iterable[Request]:
        """Every request that may own blocks."""
        return chain(self._requests.values(), self._deferred_free)
