"""The scheduler: no prefill phase and no decode phase, only `num_computed` catching up with `num_tokens`.

Each step, under a token budget, a sequence budget and a time budget:

    1. every decoding sequence gets its one token (preempting the last by rank when no block is left to grow into);
    2. what is left of the budgets goes to sequences with more than one token to compute, in the order of their admission;
    3. then waiting requests are admitted in the policy's order, as long as their blocks can be had.

Under a policy that `passes` (the default), 2 and 3 are one: prompts that have begun and those that wait, in the order in which
they are due. A step that ends a prompt takes little of one that it does not end, so that the first token is soon out; and who
lacks blocks is passed by those that fit, as long as they are not what it lacks.

`schedule` changes no `num_computed`: a step that is given up has simply not happened. `engine.sched.results` makes it count.
Events of the step collect in order and leave by `take_events`.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain, islice

from diptych.common.block_identity import IdentityHeader
from diptych.common.errors import DiptychError, InternalError, RequestCancelledError
from diptych.common.sampling import FinishReason
from diptych.engine.config import EngineConfig
from diptych.engine.messages import (
    Admitted,
    BlockCopy,
    EngineAudit,
    EngineEvent,
    EngineRequest,
    Failed,
    Finished,
    KvMode,
)
from diptych.engine.sched import preemption, report
from diptych.engine.sched.admission import ModelLimits, check_request, make_output
from diptych.engine.sched.beams import Beams
from diptych.engine.sched.choices import Choices
from diptych.engine.sched.kv_cache_manager import KvCacheManager
from diptych.engine.sched.output import DetokenizerFactory
from diptych.engine.sched.packing import Packing
from diptych.engine.sched.passing import Passing
from diptych.engine.sched.policies import make_policy
from diptych.engine.sched.queues import WaitingQueues
from diptych.engine.sched.request import Request, State
from diptych.engine.sched.step import SchedulerOutput
from diptych.engine.sched.swap_cost import Rates, restore_is_cheaper
from diptych.engine.sched.throughput import MIN_MEASURED_TOKENS, ThroughputEstimator

_FILL_S = 0.05
"""What a step that ends a prompt may take beyond that, under a policy that passes. On a GPU that is no limit."""
PROMPT_LOGPROBS_CHUNK = 256
"""Tokens of a chunk whose every row needs logits: they take 4 bytes a vocabulary entry each."""


class Scheduler:
    """Owns every request of the engine and the block pool. One thread only; no torch, no clock, no I/O."""

    def __init__(
        self,
        config: EngineConfig,
        limits: ModelLimits,
        identity: IdentityHeader,
        detokenizer_factory: DetokenizerFactory | None = None,
    ) -> None:
        self.config = config
        self.limits = limits
        self.kv = KvCacheManager(
            config.num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            num_host_blocks=config.num_host_blocks,
            tenant_quota=config.tenant_cache_blocks,
            worth_restoring=lambda num_tokens: restore_is_cheaper(num_tokens, self.rates),
        )
        self.packing = Packing(
            config.block_size, limits.kv_bytes_per_token, config.slab_quota_per_peer, limits.num_layers
        )
        self.pace = ThroughputEstimator(
            config.max_step_time_s,
            config.initial_prefill_tokens_per_s,
            max(config.block_size, MIN_MEASURED_TOKENS),
            config.initial_copy_bytes_per_s,
            mixed_step_time_s=config.mixed_step_time_s,
        )
        self.policy = make_policy(config.scheduling_policy, sjf_aging_tokens_per_s=config.sjf_aging_tokens_per_s)
        self.requests: dict[str, Request] = {}
        self.groups: dict[str, Choices | Beams] = {}
        """Attempts with several choices or beams."""
        self.events: list[EngineEvent] = []
        self._identity = identity
        self.detokenizer_factory = detokenizer_factory
        self.waiting = WaitingQueues(self.policy, self.kv.cached_tokens)
        self.passing = Passing()
        self.remote: dict[str, Request] = {}
        self.prefilling: dict[str, Request] = {}
        self.decoding: dict[str, Request] = {}
        self.held: dict[str, Request] = {}
        """Beams that are computed and wait, with their blocks, for the others of their attempt."""
        self.growing: list[Request] = []
        """Decoding requests whose next token needs a block of its own; whoever makes the need says so here."""
        self.deferred_free: list[Request] = []
        """Ended while a step with them is on the device: their blocks go back when it has landed."""
        self.not_ahead: Counter[str] = Counter()
        """Steps that were not launched before the last one had landed, by the reason."""
        self._arrivals = 0
        self.prompt_tokens = self.cached_tokens = self.preemptions = self.swaps = self.refetches = 0
        self.computed = self.generated = 0

    @property
    def rates(self) -> Rates:
        return Rates(self.pace.rate, self.pace.copy_bytes_per_s, self.limits.kv_bytes_per_token)

    # ---- requests come and go ----

    def add(self, engine_request: EngineRequest, now: float = 0.0) -> None:
        """Queue a request, or answer Failed at once when it can never run here."""
        attempt = engine_request.attempt
        if attempt in self.requests or attempt in self.groups:
            # Answering for the new one alone would end the attempt twice: both end here, once.
            self._end_attempt(attempt, State.FINISHED_FAILED)
            self.events.append(Failed(attempt, InternalError(f"attempt {attempt} was submitted twice")))
            return
        self._arrivals += 1
        try:
            output = check_request(engine_request, self.config, self.limits, self.detokenizer_factory)
        except DiptychError as error:
            self.events.append(Failed(attempt, error))
            return
        header = self._identity.with_salt(engine_request.prompt.cache_salt)
        request = Request(engine_request, self._arrivals, header, self.limits.max_model_len, output, now)
        self.requests[attempt] = request
        self.policy.entered(request)
        sampling = engine_request.sampling
        if sampling.beam_width:
            request.beams = self.groups[attempt] = Beams(request, self.limits.eos_token_ids)
            request.seq.num_candidates = request.beams.search.num_candidates
        elif sampling.num_choices > 1:
            request.choices = self.groups[attempt] = Choices(attempt, sampling, engine_request.choice)
            request.choices.members[request.choice] = request
            request.seq.num_draws = sampling.num_choices
        self.waiting.push(request)
        if output is not None and output.finish is not None:  # the forced tokens ended it
            self.events.append(Admitted(attempt, 0))
            self.finish(request)

    def cancel(self, attempt: str) -> None:
        """Free everything of the attempt; unknown or ended ones are ignored."""
        if self._end_attempt(attempt, State.FINISHED_CANCELLED):
            self.events.append(Failed(attempt, RequestCancelledError(f"attempt {attempt} was cancelled")))

    def fail(self, request: Request, error: DiptychError) -> None:
        """End the request's attempt, with all its choices; one that has ended is ignored."""
        if self.requests.get(request.attempt) is request and self._end_attempt(request.public, State.FINISHED_FAILED):
            self.events.append(Failed(request.public, error))

    def fail_all(self, error: DiptychError) -> None:
        for request in list(self.requests.values()):
            self.fail(request, error)

    def _end_attempt(self, attempt: str, state: State) -> bool:
        group = self.groups.get(attempt)
        members = list(group.members.values()) if group is not None else [self.requests.get(attempt)]
        for request in members:
            if request is None:
                return False
            self.end(request, state)
        self.groups.pop(attempt, None)
        return True

    def finish(self, request: Request) -> None:
        """Its output has come to its end."""
        assert request.output is not None
        finish = request.output.finish
        assert finish is not None
        self.end(request, State.FINISHED_STOPPED if finish.reason is FinishReason.STOP else State.FINISHED_LENGTH)
        counts = (request.output.num_outputs, request.num_cached_tokens)
        group = request.choices
        if group is not None:
            self.events.extend(group.ended(request.choice, finish, *counts))
            if not group.members:
                self.groups.pop(group.attempt, None)
            return
        self.events.append(Finished(request.public, finish.reason, *counts, finish.stop_string, finish.stop_token_id))

    def end(self, request: Request, state: State) -> None:
        """To a final state: out of every queue, and its blocks go back."""
        attempt = request.attempt
        if request.state in (State.WAITING, State.PREEMPTED):
            self.waiting.remove(request)
        self.remote.pop(attempt, None)
        self.prefilling.pop(attempt, None)
        self.decoding.pop(attempt, None)
        self.held.pop(attempt, None)
        self.packing.drop(request)
        request.end_pulls()
        if request.flights:
            self.deferred_free.append(request)
        else:
            self.kv.free(request)
        request.move(state)
        self.policy.left(request)
        del self.requests[attempt]
        if request.choices is not None:
            del request.choices.members[request.choice]
        if request.beams is not None:
            del request.beams.members[request.choice]
            request.beams.ready.pop(request.choice, None)

    # ---- a step ----

    def schedule(self, now: float) -> SchedulerOutput:
        """Choose what the next step computes. `now` is the caller's clock; no rule of today reads it, ages of blocks do. Copies
        that must be carried out before it are in `take_copies`."""
        self.kv.pool.ages.now = now
        out = SchedulerOutput()
        if self.groups:
            preemption.enforce_max_num_seqs(self)
        if self.policy.preempts:
            preemption.preempt_for_priority(self)
        self.passing.begin_step(self)
        self._schedule_decode(out)
        budget = self.config.max_num_batched_tokens - out.num_decode
        cap = self.pace.prefill_cap(out.num_decode, report.prompt_tokens_left(self))
        if cap is not None:
            budget = min(budget, cap)
        if not self.policy.passes:
            for request in self.prefilling.values():
                if budget <= 0:
                    break
                budget -= self._add_chunk(out, request, budget)
            self.admit(out, budget)
            return out
        due = self.policy.due
        begun = sorted(self.prefilling.values(), key=due)
        if not begun and not len(self.waiting):
            self.policy.idle()
        for request in begun:
            budget = self.admit(out, budget, before=due(request))
            if (allowed := self._allowed(out, request, budget)) > 0:
                budget -= self._add_chunk(out, request, allowed)
        self.admit(out, budget)
        return out

    def _allowed(self, out: SchedulerOutput, request: Request, budget: int) -> int:
        """How much of the budget the request's next chunk may take."""
        if not self.policy.passes or not out.ends_prompt or len(request.token_ids) - request.num_computed <= budget:
            return budget
        return min(budget, int(_FILL_S * self.pace.rate) - out.num_filled)

    def _schedule_decode(self, out: SchedulerOutput) -> None:
        decoding = self.decoding
        if self.growing:
            growing, self.growing = self.growing, []
            preemption.grow(self, growing)
        if len(decoding) > self.config.max_num_batched_tokens:
            served = list(islice(decoding.values(), self.config.max_num_batched_tokens))
            for request in served:  # whoever was served goes to the end, so that all have their turn
                decoding[request.attempt] = decoding.pop(request.attempt)
        else:
            served = list(decoding.values())
        seqs = out.seqs
        for request in served:
            tokens = request.token_ids
            seq = request.seq
            ids = seq.token_ids
            # Its own list of the step before: a new one would cost as much as all the rest of this loop.
            if len(ids) == 1:
                ids[0] = tokens[-1]
            else:
                seq.token_ids = [tokens[-1]]
            seq.start = request.num_computed
            seq.sample = True
            seq.output_index = len(tokens) - request.num_prompt
            seqs.append(seq)
        out.requests = served
        out.num_decode = len(served)

    def _add_chunk(self, out: SchedulerOutput, request: Request, budget: int) -> int:
        start, total = request.num_computed, len(request.token_ids)
        if self.config.long_prefill_token_threshold:
            budget = min(budget, self.config.long_prefill_token_threshold)
        if request.prompt_logprobs_from is not None:
            budget = min(budget, PROMPT_LOGPROBS_CHUNK)
        end = min(total, start + budget)
        if end < total and end - start > self.config.block_size * (1 if request.mode is KvMode.PREFILL else 4):
            # Chunks end on block borders: whole blocks can be packed and cached. A small one of a LOCAL prompt need not.
            end -= end % self.config.block_size
        seq = request.seq
        seq.token_ids = request.token_ids[start:end]
        seq.start = start
        seq.sample = end == total and request.samples
        seq.output_index = total - request.num_prompt
        if request.prompt_logprobs_from is not None:
            seq.prompt_targets = request.token_ids[start + 1 : min(end + 1, request.num_prompt)]
        elif seq.prompt_targets:
            seq.prompt_targets = ()
        out.seqs.append(seq)
        out.requests.append(request)
        out.num_prefill_tokens += end - start
        if end == total:
            out.ends_prompt = True
        elif out.ends_prompt:
            out.num_filled += end - start
        return end - start

    def running(self) -> chain[Request]:
        return chain(self.decoding.values(), self.prefilling.values(), self.held.values())

    def free_slots(self) -> int:
        taken = len(self.decoding) + len(self.prefilling) + len(self.remote) + len(self.held)
        return self.config.max_num_seqs - taken

    def fits(self, request: Request) -> bool:
        """Could it be admitted now? Preempted beams come back together."""
        beams = preemption.waiting_beams(request)
        if not beams:
            return self.free_slots() > 0 and self.kv.fits(request)
        return self.free_slots() >= len(beams) and self.blocks_wanted(request) <= self.kv.pool.available

    def blocks_wanted(self, request: Request) -> int:
        """At admission, with all the beams that come along; without what a cache may save."""
        return sum(self.kv.blocks_at_admission(one) for one in preemption.waiting_beams(request) or (request,))

    def admit(self, out: SchedulerOutput, budget: int, before: float = math.inf) -> int:
        """In the policy's order by blocks: whoever cannot have its blocks holds up all behind it, unless the policy lets those
        pass (see `Passing`). A request that only lacks this step's token budget lets REMOTE ones pass (they compute nothing),
        but keeps its claim on blocks.

        Args: before: of those that are due before. Returns: what is left of the budget."""
        slots = self.free_slots()
        claimed = 0
        may_compute = True
        while slots > 0:
            request = self.waiting.head(may_compute=may_compute, passed=self.passing.passed)
            if request is None or (before < math.inf and self.policy.due(request) >= before):
                break
            remote = request.mode is KvMode.REMOTE and request.state is State.WAITING
            if not remote and (allowed := self._allowed(out, request, budget)) <= 0:
                claimed = self.blocks_wanted(request)
                may_compute = False
                continue
            if claimed and not self.kv.fits(request, claimed):
                break
            beams = preemption.waiting_beams(request)
            if not (self.fits(request) if beams else self.kv.admit(request, reserve=remote)):
                if claimed or not self.passing.lacks_blocks(self, request):
                    break
                continue
            slots -= len(beams) or 1
            for beam in beams:
                budget -= self._come_back(out, beam, budget)
            if beams:
                continue
            self.waiting.admitted(request)
            self.passing.admitted(request)
            self._note_admission(request)
            if remote:
                request.move(State.WAITING_FOR_REMOTE_KV)
                self.remote[request.attempt] = request
                self.policy.computed(request.num_tokens - request.num_computed)
            else:
                request.move(State.RUNNING)
                self.prefilling[request.attempt] = request
                budget -= self._add_chunk(out, request, allowed)
        return budget

    def _come_back(self, out: SchedulerOutput, beam: Request, budget: int) -> int:
        """A preempted beam whose blocks are there for certain. Returns: the tokens that it computes in this step."""
        admitted = self.kv.admit(beam, reserve=False)
        assert admitted, f"attempt {beam.attempt} does not fit, though all beams together did"
        self.waiting.admitted(beam)
        self.passing.admitted(beam)
        beam.move(State.RUNNING)
        self.prefilling[beam.attempt] = beam
        return self._add_chunk(out, beam, budget) if budget > 0 else 0

    def _note_admission(self, request: Request) -> None:
        if request.state is not State.WAITING:
            return
        if request.refetched:
            self.events.append(Admitted(request.public, request.num_computed))
            return
        request.num_cached_tokens = request.num_computed
        self.prompt_tokens += request.num_prompt
        self.cached_tokens += request.num_computed
        self.events.append(Admitted(request.public, request.num_computed))

    # ---- what engine.sched.results decides, carried out ----

    def start_decoding(self, request: Request) -> None:
        del self.prefilling[request.attempt]
        request.seq.prompt_targets = ()
        self.decoding[request.attempt] = request

    def fork(self, request: Request) -> list[Request]:
        """The siblings of a request whose prompt is computed, RUNNING, without a token of their own."""
        group = request.choices
        assert group is not None
        request.seq.num_draws = 1
        siblings = []
        for choice in group.numbers[1:]:
            output = make_output(
                request.sampling, self.limits, request.max_tokens_total - request.num_prompt, self.detokenizer_factory
            )
            sibling = request.sibling(choice, output)
            self.kv.fork(request, sibling)
            self.requests[sibling.attempt] = sibling
            self.policy.entered(sibling)
            group.members[choice] = sibling
            self.decoding[sibling.attempt] = sibling
            siblings.append(sibling)
        self.kv.trim(request)
        self.growing.extend([request, *siblings])
        return siblings

    # ---- what others may know ----

    def take_events(self) -> list[EngineEvent]:
        events, self.events = self.events, []
        events.extend(self.kv.pool.take_events())
        if self.config.num_host_blocks:
            events.extend(self.kv.host.take_events())
        return events

    def take_copies(self) -> list[BlockCopy]:
        """Block copies to carry out, in this order, before anything is computed, unpacked or packed."""
        copies = self.kv.pool.copies
        if copies:
            self.kv.pool.copies = []
        return copies

    def audit(self, full: bool) -> EngineAudit:
        """Counters; with `full` a walk of every block and request."""
        return report.audit(self, full)

    def check(self) -> list[str]:
        """Laws that do not hold: of blocks, and of the load that routers place by."""
        return self.kv.check(chain(self.requests.values(), self.deferred_free)) + report.load_violations(self)
