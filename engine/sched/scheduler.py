"""The scheduler: no prefill phase and no decode phase, only `num_computed` advancing to `num_tokens`.

Each step, under a token budget, a sequence budget and a time budget:

    1. every decoding sequence gets its next token (preempting the last by rank when no block is left to grow into);
    2. what is left of the budgets goes to sequences with more than one token to compute, in order of their admission;
    3. then waiting requests are admitted in the policy's order, as long as their blocks can be allocated.

Under a policy that `passes` (the default), 2 and 3 are one: prompts that have begun and those that wait, in the order
in which they are due. A step that ends a prompt computes little of a prompt that it does not end, so that the first
token is sent soon. A request that lacks blocks is passed by those that fit, as long as they use nothing that it lacks.

`schedule` changes no `num_computed`: a step that is given up has no effect. `apply` makes a step take effect. The
owners of the collections, and the moves between them, are in `engine.sched.lifecycle.lifecycle`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

from diptych.common.block_identity import IdentityHeader, header_of_request
from diptych.common.errors import DiptychError, InternalError, RequestCancelledError
from diptych.engine.config import EngineConfig
from diptych.engine.messages import (
    Admitted,
    BlockCopy,
    EngineAudit,
    EngineEvent,
    EngineRequest,
    EngineStats,
    FirstCandidates,
    FirstToken,
    Install,
    KvMode,
    PublishCached,
    PullBlocks,
    StepResult,
    UnpackRange,
)
from diptych.engine.sched import report, results
from diptych.engine.sched.batching.step import SchedulerOutput
from diptych.engine.sched.handoff.layer_groups import LayerGroups
from diptych.engine.sched.handoff.packing import PackJob
from diptych.engine.sched.handoff.remote import UnpackJob
from diptych.engine.sched.lifecycle import preemption
from diptych.engine.sched.lifecycle.lifecycle import Lifecycle
from diptych.engine.sched.lifecycle.passing import Passing
from diptych.engine.sched.lifecycle.publishing import plan_source, publish_cached, publish_source
from diptych.engine.sched.lifecycle.pulls import NewBlocks, begin_pull, end_pull
from diptych.engine.sched.lifecycle.restores import Restore, end_restore, plan_restore
from diptych.engine.sched.lifecycle.swap_cost import Rates
from diptych.engine.sched.requests.admission import ModelLimits, check_request
from diptych.engine.sched.requests.output import DetokenizerFactory
from diptych.engine.sched.requests.request import Request, State

_FILL_S = 0.05
"""Time that a step that ends a prompt may spend on other prompts, under a policy that passes. On a GPU it is ample."""
PROMPT_LOGPROBS_CHUNK = 256
"""Tokens of a chunk whose every row needs logits: they take 4 bytes a vocabulary entry each."""


class Drafter(Protocol):
    """Guesses the next tokens of a sequence. A wrong guess costs time and changes no output."""

    def __call__(self, attempt: str, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """Args: token_ids: prompt and outputs so far, not to be changed. Returns: at most `most` token ids, maybe
        none."""
        ...


class Scheduler:
    """Decides what each step computes. One thread only; no torch, no clock, no I/O.

    Args:
        drafter: decoding rows carry its guesses, where budget and blocks are left over; None: one token a row.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: ModelLimits,
        identity: IdentityHeader,
        detokenizer_factory: DetokenizerFactory | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.config = config
        self.drafter = drafter
        self.limits = limits
        self.live = live = Lifecycle(config, limits, detokenizer_factory)
        self.kv, self.policy, self.throughput = live.kv, live.policy, live.throughput
        self.waiting, self.running, self.remote = live.waiting, live.running, live.remote
        self.packing, self.outbox, self.adapters = live.packing, live.outbox, live.adapters
        self.passing = Passing(live)
        self._identity = identity
        self._arrivals = 0

    @property
    def requests(self) -> Mapping[str, Request]:
        """Those that have not ended, by attempt."""
        return self.live.requests

    # ---- commands ----

    def add(self, engine_request: EngineRequest, now: float = 0.0, from_disk: int = 0) -> None:
        """Queue a request, or fail it at once when it can never run here. Args: from_disk: leading tokens whose KV was read from
        files for it; they are in the prefix cache, or were."""
        attempt, live = engine_request.attempt, self.live
        if live.knows(attempt):
            # Failing the new one alone would end the attempt twice: both end here, once.
            live.end_attempt(attempt, State.FINISHED_FAILED)
            self.outbox.fail(attempt, InternalError(f"attempt {attempt} was submitted twice"))
            return
        self._arrivals += 1
        try:
            output = check_request(engine_request, self.config, self.limits, live.detokenizer_factory)
            header = header_of_request(self._identity, engine_request.prompt)
            live.adapters.check(engine_request.prompt.adapter)
        except DiptychError as error:
            self.outbox.fail(attempt, error)
            return
        request = Request(
            engine_request, self._arrivals, header, self.limits.max_model_len, output, now, self.kv.num_groups
        )
        if from_disk:
            request.tier_tokens[self.kv.disk.name] = from_disk
        live.add(request)
        if output is not None and output.finish is not None:  # the forced tokens ended it
            self.outbox.add(Admitted(attempt, 0))
            live.finish(request)

    def publish_cached(self, command: PublishCached, now: float = 0.0) -> None:
        """The blocks are packed like those of a PREFILL request whose prompt is computed."""
        if self._is_new(command.attempt):
            self.kv.set_time(now)
            publish_cached(self.live, command, self._identity, self._arrivals, now)

    def plan_source(self, command: PublishCached, now: float) -> Restore | None:
        """See engine.sched.lifecycle.publishing. No step is needed for it."""
        if self.live.knows(command.attempt):
            return None  # `publish_cached` says so
        self.kv.set_time(now)
        self._arrivals += 1
        return plan_source(self.live, command, self._identity, self._arrivals, now, self._disk_rates)

    def publish_source(self, command: PublishCached, now: float) -> None:
        """What was read for it is packed; what is cached alone, where that is all that can be used."""
        if not publish_source(self.live, command):
            self.publish_cached(command, now)

    def pull_blocks(self, command: PullBlocks, now: float = 0.0) -> None:
        """See PullBlocks. No step is needed for it."""
        if not self._is_new(command.attempt):
            return
        try:
            header = header_of_request(self._identity, command.prompt)
        except DiptychError as error:
            self.outbox.fail(command.attempt, error)
            return
        self.kv.set_time(now)
        begin_pull(self.live, command, header, self._arrivals, now)

    def end_pull(self, attempt: str) -> NewBlocks | None:
        """See EndPull. Returns: what is new, if what it was computed from is to be recorded."""
        return end_pull(self.live, attempt)

    def plan_restore(self, wanted: EngineRequest, now: float) -> Restore | None:
        """See engine.sched.lifecycle.restores. No step is needed for it."""
        if self.live.knows(wanted.attempt):
            return None  # `add` says so
        try:
            header = header_of_request(self._identity, wanted.prompt)
            self.adapters.check(wanted.prompt.adapter)
        except DiptychError:
            return None  # the same
        self.kv.set_time(now)
        self._arrivals += 1
        return plan_restore(self.live, wanted, header, self._arrivals, now, self._disk_rates)

    @property
    def _disk_rates(self) -> Rates:
        return replace(self.live.rates, copy_bytes_per_s=self.throughput.disk_bytes_per_s)

    def end_restore(self, name: str) -> tuple[int, NewBlocks | None]:
        """See engine.sched.lifecycle.restores."""
        return end_restore(self.live, name)

    def _is_new(self, attempt: str) -> bool:
        """Of what the engine is sent; both fail otherwise."""
        if self.live.knows(attempt):
            self.live.end_attempt(attempt, State.FINISHED_FAILED)
            self.outbox.fail(attempt, InternalError(f"attempt {attempt} was submitted twice"))
            return False
        self._arrivals += 1
        return True

    def cancel(self, attempt: str) -> None:
        """Free everything of the attempt; unknown or ended ones are ignored."""
        if self.live.end_attempt(attempt, State.FINISHED_CANCELLED):
            self.outbox.fail(attempt, RequestCancelledError(f"attempt {attempt} was cancelled"))

    def fail(self, request: Request, error: DiptychError) -> None:
        """End the request's attempt, with all its choices; one that has ended is ignored."""
        self.live.fail(request, error)

    def fail_all(self, error: DiptychError) -> None:
        self.live.fail_all(error)

    # ---- commands of REMOTE requests ----

    def plan_unpack(self, command: UnpackRange) -> UnpackJob | None:
        """See RemoteRequests.plan."""
        return self.remote.plan(command)

    def unpacked(self, job: UnpackJob, *, last: bool) -> None:
        """Every byte of the range is there, and was verified. After the last one the request runs in the next step,
        without a round trip to the event loop. If a range before it is missing, KvComplete reports that."""
        self.remote.unpacked(job)
        if last and not self.remote.missing(job.request):
            self.kv_complete(job.request.attempt)

    def first_token(self, command: FirstToken) -> None:
        """Send prefill's token at once; it may end the request. Those of several choices wait until all are here and so
        is the KV that they share. Ignored when the request has a token already: a token that was sent is not
        replaced."""
        request = self.remote.get(command.attempt)
        if request is None or request.num_outputs > 0:
            return
        live, group = self.live, self.live.choices.of(request)
        try:
            self._check_vocabulary("token", command.token_id)
            if request.seq.num_candidates:
                raise InternalError("prefill sent a token; beam search needs candidates")
            if group is not None:
                group.add_first_token(command)
        except DiptychError as error:
            live.fail(request, error)
            return
        if group is None:
            logprobs = () if command.logprobs is None else (command.logprobs,)
            results.take_tokens(live, request, (command.token_id,), logprobs)
        self._join_if_ready(request)

    def first_candidates(self, command: FirstCandidates) -> None:
        """Beam search: they wait until the KV is here. Ignored when the attempt has candidates already, or runs."""
        request = self.remote.get(command.attempt)
        if request is None:
            return
        group = self.live.beams.of(request)
        try:
            if group is None:
                raise InternalError("prefill sent candidates; the attempt is no beam search")
            for candidate in command.candidates:
                self._check_vocabulary("candidate", candidate.token_id)
        except DiptychError as error:
            self.live.fail(request, error)
            return
        if group.first_candidates is None:
            group.first_candidates = command.candidates
        self._join_if_ready(request)

    def kv_complete(self, attempt: str) -> None:
        """Join the running batch, or wait for the first token. A gap in the KV fails the request: it must never be
        attended."""
        request = self.remote.get(attempt)
        if request is None:
            return
        missing = self.remote.missing(request)
        if missing:
            self.live.fail(request, InternalError(f"KV was called complete, but {missing} never came"))
            return
        self.remote.set_complete(request)
        self._join_if_ready(request)

    def run_locally(self, attempt: str) -> None:
        """Compute the prompt here. A request that is not admitted yet becomes a LOCAL one where it stands in the
        queue."""
        request = self.requests.get(attempt)
        if request is None:
            return
        if request.state is State.WAITING_FOR_REMOTE_KV:
            self.remote.remove(request)
            if self.kv.slides:
                # It has blocks of what the token behind the KV sees only, which is not what the prompt's tokens see.
                self.kv.free(request)
                self.adapters.give(request)
                request.num_computed = 0
                request.move(State.PREEMPTED)
                self.waiting.push_returned(request)
                return
            # Computed from the pinned prefix on, in the blocks that are counted for it already.
            self.kv.bind(request)
            self.adapters.need(request)
            request.move(State.RUNNING)
            self.running.start_prefill(request)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
            request.mode = KvMode.LOCAL
            self.waiting.push_returned(request)

    def fetch_again(self, attempt: str) -> None:
        """See FetchAgain. What the host tier holds of the request is freed."""
        request = self.requests.get(attempt)
        if request is None or request.state is not State.PREEMPTED or not request.may_be_refetched:
            return
        self.waiting.remove(request)
        self.kv.free(request)
        request.mode = KvMode.REMOTE
        request.num_computed, request.kv_target = 0, request.num_tokens - 1
        request.move(State.WAITING)
        self.waiting.push_returned(request)
        self.outbox.totals.refetches += 1

    def _check_vocabulary(self, what: str, token_id: int) -> None:
        if not 0 <= token_id < self.limits.vocab_size:
            raise InternalError(f"prefill sent {what} {token_id}, which is outside the vocabulary")

    def _join_if_ready(self, request: Request) -> None:
        """All KV but the last token's is here: the request runs, and computes one token a step."""
        if request.state is not State.WAITING_FOR_REMOTE_KV:
            return
        live, complete = self.live, self.remote.is_complete(request)
        # Where each choice or beam ends with its first token, no KV is needed.
        enough = complete or request.max_tokens_total == request.num_prompt + 1
        beams, choices = live.beams.of(request), live.choices.of(request)
        if beams is not None:
            if beams.first_candidates is not None and enough:
                self._join(request)
                results.take_candidates(live, request, list(beams.first_candidates))
        elif choices is not None and not request.num_outputs:
            if (first_tokens := choices.first_tokens) is not None and enough:
                self._join(request)
                results.fork_choices(live, request, first_tokens)
        elif complete and request.num_outputs > 0:
            self._join(request)

    def _join(self, request: Request) -> None:
        complete = self.remote.remove(request)
        self.kv.bind(request)
        self.adapters.need(request)
        request.move(State.RUNNING)
        self.running.start_decode(request)
        if complete:
            request.num_computed = request.kv_target
            self.kv.advance(request)

    # ---- a step ----

    def schedule(self, now: float) -> SchedulerOutput:
        """Choose what the next step computes. `now` is the caller's clock; only the ages of blocks depend on it. Copies
        that must be carried out before the step are in `take_copies`."""
        live = self.live
        self.kv.set_time(now)
        out = SchedulerOutput()
        self.begin_adapters()
        if live.num_groups:
            preemption.enforce_max_num_seqs(live)
        if self.policy.preempts:
            preemption.preempt_for_priority(live)
        self.passing.begin_step()
        self._schedule_decode(out)
        if self.drafter is not None:
            self._add_drafts(out)
        self.add_prompts(out)
        return self._unless_stuck(out, now)

    def begin_adapters(self) -> None:
        """Of a step. Sequences that decode wait for what is installed before it."""
        self.adapters.begin_step(self.throughput.install_budget() if self.running.decoding else None)

    def add_prompts(self, out: SchedulerOutput) -> None:
        """What is left of the step's budgets goes to prompts."""
        live = self.live
        budget = self.config.max_num_batched_tokens - out.num_decode - out.num_draft_tokens
        cap = self.throughput.prefill_cap(out.num_decode, report.prompt_tokens_left(live))
        if cap is not None:
            budget = min(budget, cap)
        if not self.policy.passes:
            for request in self.running.prefilling.values():
                if budget <= 0:
                    break
                budget -= self._add_chunk(out, request, budget)
            self.admit(out, budget)
            return
        due = self.policy.due
        begun = sorted(self.running.prefilling.values(), key=due)
        if not begun and not len(self.waiting):
            self.policy.idle()
        for request in begun:
            budget = self.admit(out, budget, before=due(request))
            if (allowed := self._allowed(out, request, budget)) > 0:
                budget -= self._add_chunk(out, request, allowed)
        self.admit(out, budget)

    def _unless_stuck(self, out: SchedulerOutput, now: float) -> SchedulerOutput:
        """The step; another one where window blocks are so short that none of the prompts that have begun goes on."""
        if out.seqs or not self.kv.slides or not self.running.prefilling:
            return out
        return self.schedule(now) if preemption.make_room_for_chunks(self.live) else out

    def _allowed(self, out: SchedulerOutput, request: Request, budget: int) -> int:
        """How much of the budget the request's next chunk may take."""
        if not self.policy.passes or not out.ends_prompt or request.num_left <= budget:
            return budget
        return min(budget, int(_FILL_S * self.throughput.rate) - out.num_filled)

    def _schedule_decode(self, out: SchedulerOutput) -> None:
        preemption.grow(self.live)
        served = self.running.next_decodes(self.config.max_num_batched_tokens)
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

    def _guesses(self, request: Request, left: int) -> list[int]:
        """The drafter's, behind the tokens that are known; at most `left`."""
        tokens = request.token_ids
        most = 0 if request.seq.num_candidates else min(left, request.max_tokens_total - len(tokens) - 1)
        drafts = list(self.drafter(request.attempt, tokens, most))[:most] if self.drafter and most > 0 else []
        if any(not 0 <= token < self.limits.vocab_size for token in drafts):
            raise ValueError(f"attempt {request.attempt}: a guess is outside the vocabulary: {drafts}")
        return drafts

    def has_drafts(self) -> bool:
        """Whether a decoding sequence, or one whose prompt ends in the step on the device, has a guess behind the tokens that
        are known. While one of its tokens is being drawn, that is the best sign of a guess behind that one."""
        if self.drafter is None:
            return False
        decoding, prompts = self.running.decoding.values(), self.running.prefilling.values()
        left = self.config.max_num_batched_tokens - len(decoding)
        ended = (request for request in prompts if request.num_left == 0)
        return any(self._guesses(request, left) for request in chain(decoding, ended))

    def _add_drafts(self, out: SchedulerOutput) -> None:
        """Guesses get what is left of the token budget. They preempt nothing: without a free block a row has fewer of
        them."""
        left = self.config.max_num_batched_tokens - out.num_decode
        for request, seq in zip(out.requests, out.seqs, strict=True):
            tokens, drafts = request.token_ids, self._guesses(request, left)
            while drafts and not self._covers(request, len(tokens) + len(drafts)):
                drafts.pop()
            seq.num_drafts = len(drafts)
            if drafts:
                seq.token_ids = [tokens[-1], *drafts]
                out.num_draft_tokens += len(drafts)
                left -= len(drafts)

    def _covers(self, request: Request, num_tokens: int) -> bool:
        """Give the request blocks for its first `num_tokens` tokens; False when there are not that many."""
        while request.block_end * self.config.block_size < num_tokens:
            if not self.kv.grow(request):
                return False
        return True

    def _add_chunk(self, out: SchedulerOutput, request: Request, budget: int) -> int:
        total, left = len(request.token_ids), request.num_left
        if not left:
            return 0  # the step on the device ends it
        start = total - left
        if self.config.long_prefill_token_threshold:
            budget = min(budget, self.config.long_prefill_token_threshold)
        if request.prompt_logprobs_from is not None:
            budget = min(budget, PROMPT_LOGPROBS_CHUNK)
        end = min(total, start + budget)
        if end < total and end - start > self.config.block_size * (1 if request.mode is KvMode.PREFILL else 4):
            # Chunks end on block borders, so that whole blocks can be packed and cached; small ones of LOCAL prompts
            # need not.
            end -= end % self.config.block_size
        end = self.kv.cover(request, end)
        if end <= start:
            return 0  # it waits for window blocks
        if request.tokens_on_device:
            request.seq = replace(request.seq)  # that one's numbers are still wanted
        seq = request.seq
        seq.token_ids = request.token_ids[start:end]
        seq.num_drafts = 0
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

    def admit(self, out: SchedulerOutput, budget: int, before: float = math.inf) -> int:
        """Admit waiting requests in the policy's order. One that cannot have its blocks holds up all behind it, unless
        the policy lets those pass (see `Passing`). One that only lacks this step's token budget lets REMOTE ones pass
        (they compute nothing), but keeps its claim on blocks.

        Args: before: admit only those that are due before this. Returns: what is left of the budget."""
        live = self.live
        slots = live.free_slots()
        claimed: list[int] = []
        may_compute = True
        while slots > 0:
            request = self.waiting.head(may_compute=may_compute, passed=self.passing.passed)
            if request is None or (before < math.inf and self.policy.due(request) >= before):
                break
            remote = request.mode is KvMode.REMOTE and request.state is State.WAITING
            if not remote and (allowed := self._allowed(out, request, budget)) <= 0:
                claimed = preemption.blocks_wanted(live, request)
                may_compute = False
                continue
            if not self.adapters.may_run(request, computes=not remote):
                continue  # `head` leaves it out from now on
            if claimed and not self.kv.fits(request, claimed):
                break
            beams = live.beams.preempted_with(request)
            if not (preemption.fits(live, request) if beams else self.kv.admit(request, reserve=remote)):
                if claimed or not self.passing.lacks_blocks(request):
                    break
                continue
            slots -= len(beams) or 1
            for beam in beams:
                budget -= self._resume_beam(out, beam, budget)
            if beams:
                continue
            self.waiting.admitted(request)
            self.passing.admitted(request)
            self.adapters.take(request)
            self._note_admission(request)
            if remote:
                request.move(State.WAITING_FOR_REMOTE_KV)
                self.remote.admit(request)
                self.policy.computed(request.num_tokens - request.num_computed)
            else:
                request.move(State.RUNNING)
                self.running.start_prefill(request)
                budget -= self._add_chunk(out, request, allowed)
        return budget

    def _resume_beam(self, out: SchedulerOutput, beam: Request, budget: int) -> int:
        """Resume one of an attempt's preempted beams, whose blocks all fit. Returns: tokens of it that this step
        computes."""
        admitted = self.kv.admit(beam, reserve=False)
        assert admitted, f"attempt {beam.attempt} does not fit, though all beams together did"
        self.waiting.admitted(beam)
        self.passing.admitted(beam)
        self.adapters.take(beam)
        beam.move(State.RUNNING)
        self.running.start_prefill(beam)
        return self._add_chunk(out, beam, budget) if budget > 0 else 0

    def _note_admission(self, request: Request) -> None:
        if request.state is not State.WAITING:
            return
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached_tokens = min(request.num_computed, request.num_prompt)
            self.outbox.totals.prompt_tokens += request.num_prompt
            self.outbox.totals.cached_tokens += request.num_cached_tokens
            self._note_tiers(request)
        tiers, num_kept = tuple(request.tier_tokens.items()), request.num_kept_tokens
        self.outbox.add(Admitted(request.attempt_id, request.num_computed, tiers, num_kept))

    def _note_tiers(self, request: Request) -> None:
        """What was read for it may have been evicted again before it was admitted."""
        totals, left = self.outbox.totals.from_tiers, request.num_cached_tokens
        for name, num_tokens in request.tier_tokens.items():
            request.tier_tokens[name] = num_tokens = min(num_tokens, left)
            left -= num_tokens
            totals[name] = totals.get(name, 0) + num_tokens

    def apply(self, out: SchedulerOutput, result: StepResult, duration_s: float) -> None:
        """The step was computed."""
        if len(result.token_ids) != len(out.seqs):
            error = InternalError(f"the runner answered {len(result.token_ids)} of {len(out.seqs)} sequences")
            for request in out.requests:
                self.live.fail(request, error)
            return
        results.apply_step_result(self.live, out, result, duration_s)

    # ---- packing of PREFILL requests ----

    def layer_groups(self, out: SchedulerOutput) -> LayerGroups:
        """Layers of the step that are sent while it runs; none where the KV has several groups."""
        return LayerGroups(
            out,
            self.packing,
            prefill_tokens_per_s=self.throughput.prefill_tokens_per_s,
            num_layers=self.limits.num_layers,
            kv_bytes_per_token=self.limits.kv_bytes_per_token,
        )

    def packed(self, job: PackJob, checksum: int) -> None:
        """A job of `packing` was copied."""
        self.outbox.add(self.packing.packed(job, checksum))
        self.live.end_if_packed(job.request)

    def pack_failed(self, job: PackJob, error: DiptychError) -> None:
        self.packing.give_back(job)
        self.live.fail(job.request, error)

    # ---- what is read from outside ----

    def take_events(self) -> list[EngineEvent]:
        events = self.outbox.take()
        events.extend(self.kv.pool.take_events())
        if self.config.num_host_blocks:
            events.extend(self.kv.host.take_events())
        if self.config.num_disk_blocks:
            events.extend(self.kv.disk.take_events())
        return events

    def take_copies(self) -> list[BlockCopy]:
        """Block copies to carry out, in this order, before anything is computed, unpacked or packed."""
        return self.kv.take_copies()

    def take_installs(self) -> list[Install]:
        """To be carried out before the step is computed."""
        return self.adapters.take_installs()

    def install_failed(self, slot: int, error: DiptychError) -> None:
        """Every request that names its adapter ends."""
        for attempt in self.adapters.not_installed(slot):
            if (request := self.requests.get(attempt)) is not None:
                self.live.fail(request, error)

    def stats(self, *, steps: int, steps_ahead: int, busy_since: float | None) -> EngineStats:
        return report.stats(self.live, steps=steps, steps_ahead=steps_ahead, busy_since=busy_since)

    def audit(self, full: bool) -> EngineAudit:
        """Counters; with `full` a walk of every block and request."""
        return report.audit(self.live, full)

    def check(self) -> list[str]:
        """Laws that do not hold: of blocks, and of the load that routers place by."""
        return report.check(self.live)
