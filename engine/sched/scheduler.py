"""The scheduler: no prefill phase and no decode phase, only `num_computed` catching up with `num_tokens`.

Each step, under a token budget, a sequence budget and a time budget:

    1. every decoding sequence gets its one token (preempting the youngest when no block is left to grow into);
    2. what is left of the budgets goes to sequences with more than one token to compute, first come, first served;
    3. then waiting requests are admitted in the order of arrival, as long as their blocks can be had.

`schedule(now)` changes no `num_computed`: a step that is given up has simply not happened. `update` makes it count.
Events of the step collect in order and leave by `take_events`.
"""

from __future__ import annotations

from itertools import chain, islice

from diptych.common.block_identity import IdentityHeader
from diptych.common.errors import DiptychError, InternalError, RequestCancelledError
from diptych.common.sampling import FinishReason
from diptych.engine.config import EngineConfig
from diptych.engine.messages import (
    Admitted,
    EngineAudit,
    EngineEvent,
    EngineRequest,
    EngineStats,
    Failed,
    Finished,
    KvMode,
    PrefillComplete,
    RangePacked,
    StepResult,
    TokensOut,
)
from diptych.engine.sched.admission import ModelLimits, check_request
from diptych.engine.sched.kv_cache_manager import KvCacheManager
from diptych.engine.sched.output import DetokenizerFactory
from diptych.engine.sched.pace import MIN_MEASURED_TOKENS, Pace
from diptych.engine.sched.packing import Packing, PackJob
from diptych.engine.sched.queues import WaitingQueues
from diptych.engine.sched.request import Request, State
from diptych.engine.sched.step import SchedulerOutput, choose_victim


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
        self.kv = KvCacheManager(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.packing = Packing(config.block_size, limits.kv_bytes_per_token, config.slab_quota_per_peer)
        self.pace = Pace(
            config.max_step_time_s, config.initial_prefill_tokens_per_s, max(config.block_size, MIN_MEASURED_TOKENS)
        )
        self.requests: dict[str, Request] = {}
        self._identity = identity
        self._detokenizer_factory = detokenizer_factory
        self._waiting = WaitingQueues()
        self._remote: dict[str, Request] = {}
        self._prefilling: dict[str, Request] = {}
        self._decoding: dict[str, Request] = {}
        self._events: list[EngineEvent] = []
        self._arrivals = 0
        self._prompt_tokens = self._cached_tokens = self._generated = self._preemptions = 0

    # ---- requests come and go ----

    def add(self, engine_request: EngineRequest) -> None:
        """Queue a request, or answer Failed at once when it can never run here."""
        attempt = engine_request.attempt
        twin = self.requests.get(attempt)
        if twin is not None:
            # Answering for the new one alone would end the attempt twice: both end here, once.
            self.fail(twin, InternalError(f"attempt {attempt} was submitted twice"))
            return
        self._arrivals += 1
        try:
            output = check_request(engine_request, self.config, self.limits, self._detokenizer_factory)
        except DiptychError as error:
            self._events.append(Failed(attempt, error))
            return
        header = self._identity.with_salt(engine_request.cache_salt)
        request = Request(engine_request, self._arrivals, header, self.limits.max_model_len, output)
        self.requests[attempt] = request
        self._waiting.push(request)
        if output is not None and output.finish is not None:  # the forced tokens ended it
            self._events.append(Admitted(attempt, 0))
            self._finish(request)

    def cancel(self, attempt: str) -> None:
        """Free everything of the attempt; unknown or ended ones are ignored."""
        request = self.requests.get(attempt)
        if request is not None:
            self._end(request, State.FINISHED_CANCELLED)
            self._events.append(Failed(attempt, RequestCancelledError(f"attempt {attempt} was cancelled")))

    def fail(self, request: Request, error: DiptychError) -> None:
        self._end(request, State.FINISHED_FAILED)
        self._events.append(Failed(request.attempt, error))

    def fail_all(self, error: DiptychError) -> None:
        for request in list(self.requests.values()):
            self.fail(request, error)

    def _finish(self, request: Request) -> None:
        assert request.output is not None
        finish = request.output.finish
        assert finish is not None
        self._end(request, State.FINISHED_STOPPED if finish.reason is FinishReason.STOP else State.FINISHED_LENGTH)
        counts = (request.output.num_outputs, request.num_cached_tokens)
        self._events.append(Finished(request.attempt, finish.reason, *counts, finish.stop_string, finish.stop_token_id))

    def _end(self, request: Request, state: State) -> None:
        """To a final state: out of every queue, and its blocks go back."""
        attempt = request.attempt
        if request.state in (State.WAITING, State.PREEMPTED):
            self._waiting.remove(request)
        self._remote.pop(attempt, None)
        self._prefilling.pop(attempt, None)
        self._decoding.pop(attempt, None)
        self.packing.drop(request)
        self.kv.free(request)
        request.move(state)
        del self.requests[attempt]

    # ---- a step ----

    def schedule(self, now: float) -> SchedulerOutput:
        """Choose what the next step computes. `now` is the caller's clock; no rule of today reads it."""
        out = SchedulerOutput()
        self._schedule_decode(out)
        budget = self.config.max_num_batched_tokens - out.num_decode
        cap = self.pace.prefill_cap(out.num_decode)
        if cap is not None:
            budget = min(budget, cap)
        for request in self._prefilling.values():
            if budget <= 0:
                break
            budget -= self._add_chunk(out, request, budget)
        self._admit(out, budget)
        return out

    def _schedule_decode(self, out: SchedulerOutput) -> None:
        decoding = self._decoding
        size = self.config.block_size
        full = [r for r in decoding.values() if len(r.block_ids) * size < len(r.token_ids)]
        if full:
            self._grow(full)
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
            seq.token_ids = [tokens[-1]]
            seq.start = request.num_computed
            seq.sample = True
            seq.output_index = len(tokens) - request.num_prompt
            seqs.append(seq)
        out.requests = served
        out.num_decode = len(served)

    def _add_chunk(self, out: SchedulerOutput, request: Request, budget: int) -> int:
        start, total = request.num_computed, len(request.token_ids)
        end = min(total, start + budget)
        if end < total and end - start > self.config.block_size:
            end -= end % self.config.block_size  # chunks end on block borders: whole blocks can be packed and cached
        seq = request.seq
        seq.token_ids = request.token_ids[start:end]
        seq.start = start
        seq.sample = end == total and request.samples
        seq.output_index = total - request.num_prompt
        out.seqs.append(seq)
        out.requests.append(request)
        out.num_prefill_tokens += end - start
        return end - start

    def _grow(self, full: list[Request]) -> None:
        full.sort(key=lambda r: r.arrival)
        for request in full:
            while request.state is State.RUNNING and not self.kv.grow(request):
                self._preempt(choose_victim(request, chain(self._decoding.values(), self._prefilling.values())))

    def _preempt(self, request: Request) -> None:
        self._decoding.pop(request.attempt, None)
        self._prefilling.pop(request.attempt, None)
        self.kv.free(request)
        request.num_computed = 0
        request.move(State.PREEMPTED)
        self._waiting.push_returned(request)
        self._preemptions += 1

    def _admit(self, out: SchedulerOutput, budget: int) -> None:
        """First come, first served by blocks: whoever cannot have its blocks holds up all behind it. A request that only
        lacks this step's token budget lets REMOTE ones pass (they compute nothing), but keeps its claim on blocks."""
        slots = self.config.max_num_seqs - len(self._decoding) - len(self._prefilling) - len(self._remote)
        claimed = 0
        may_compute = True
        while slots > 0:
            request = self._waiting.head(may_compute=may_compute)
            if request is None:
                return
            remote = request.mode is KvMode.REMOTE and request.state is State.WAITING
            if not remote and budget <= 0:
                claimed = self.kv.blocks_at_admission(request)
                may_compute = False
                continue
            if claimed and not self.kv.fits(request, claimed):
                return
            if not self.kv.admit(request, reserve=remote):
                return
            slots -= 1
            self._waiting.remove(request)
            self._note_admission(request)
            if remote:
                request.move(State.WAITING_FOR_REMOTE_KV)
                self._remote[request.attempt] = request
            else:
                request.move(State.RUNNING)
                self._prefilling[request.attempt] = request
                budget -= self._add_chunk(out, request, budget)

    def _note_admission(self, request: Request) -> None:
        if request.state is not State.WAITING:
            return
        request.num_cached_tokens = request.num_computed
        self._prompt_tokens += request.num_prompt
        self._cached_tokens += request.num_computed
        self._events.append(Admitted(request.attempt, request.num_computed))

    def update(self, out: SchedulerOutput, result: StepResult, duration_s: float) -> None:
        """The step was computed: advance its sequences, take their tokens, end those that are done.

        A bad row fails its request, and what that request read or wrote leaves the prefix cache.
        """
        self.pace.observe(duration_s, out.num_prefill_tokens, out.num_decode)
        size = self.config.block_size
        bad = result.bad_rows
        token_ids = result.token_ids
        for i, request in enumerate(out.requests):
            if bad and i in bad:
                self.kv.distrust(request)
                self.fail(
                    request, InternalError(f"the model gave unusable logits for attempt {request.attempt}: {bad[i]}")
                )
                continue
            seq = request.seq
            request.num_computed += len(seq.token_ids)
            if request.num_computed // size > request.num_published:
                self.kv.publish(request)
            if request.mode is KvMode.PREFILL:
                self._advance_prefill(request, token_ids[i], duration_s)
                continue
            if not seq.sample:
                continue
            token = token_ids[i]
            if token is None:
                self.fail(request, InternalError(f"the runner drew no token for attempt {request.attempt}"))
                continue
            if i >= out.num_decode:
                del self._prefilling[request.attempt]
                self._decoding[request.attempt] = request
            self.take_token(request, token)

    def take_token(self, request: Request, token: int) -> None:
        """One more output token: drawn here, or by prefill for a REMOTE request."""
        output = request.output
        assert output is not None
        offset = len(request.token_ids) - request.num_prompt
        request.token_ids.append(token)
        try:
            text = output.push(token)
        except Exception as error:  # one request's text must not end the engine
            self.fail(request, InternalError(f"making text of the tokens failed: {type(error).__name__}: {error}"))
            return
        self._generated += 1
        self._events.append(TokensOut(request.attempt, offset, (token,), text))
        if output.finish is not None:
            self._finish(request)

    # ---- PREFILL ----

    def _advance_prefill(self, request: Request, token: int | None, duration_s: float) -> None:
        request.compute_s += duration_s
        if request.want_kv:
            self.packing.offer(request)
        if request.num_computed < len(request.token_ids):
            return
        if request.samples:
            if token is None:
                self.fail(request, InternalError(f"the runner drew no token for attempt {request.attempt}"))
                return
            self._generated += 1
            self._events.append(TokensOut(request.attempt, 0, (token,), ""))
        del self._prefilling[request.attempt]
        request.move(State.PACKING)
        self._complete_if_packed(request)

    def packed(self, job: PackJob, checksum: int) -> None:
        """A job of `packing.next_job` was copied."""
        self.packing.packed(job)
        request = job.request
        size_bytes = job.num_tokens * self.limits.kv_bytes_per_token
        self._events.append(
            RangePacked(
                request.attempt,
                job.grant.slab,
                job.grant.generation,
                job.first_token,
                job.num_tokens,
                size_bytes,
                checksum,
            )
        )
        self._complete_if_packed(request)

    def pack_failed(self, job: PackJob, error: DiptychError) -> None:
        self.packing.give_back(job)
        self.fail(job.request, error)

    def _complete_if_packed(self, request: Request) -> None:
        if request.state is not State.PACKING or (request.want_kv and request.packed_until < request.kv_target):
            return
        self._end(request, State.FINISHED_HANDED_OFF)
        self._events.append(PrefillComplete(request.attempt, request.compute_s))

    # ---- REMOTE: what engine.sched.remote decides, carried out ----

    def join(self, request: Request) -> None:
        """All KV but the last token's is here: the request runs, computing one token a step."""
        del self._remote[request.attempt]
        request.num_computed = request.kv_target
        self.kv.publish(request)
        request.move(State.RUNNING)
        self._decoding[request.attempt] = request

    def run_locally(self, request: Request) -> None:
        """Compute from the pinned prefix on, in the blocks that are counted for it already."""
        del self._remote[request.attempt]
        self.kv.bind(request)
        request.covered.clear()
        request.move(State.RUNNING)
        self._prefilling[request.attempt] = request

    def queue_locally(self, request: Request) -> None:
        """Not admitted yet: from now on an ordinary request, at the head of the queue by its age."""
        self._waiting.remove(request)
        request.mode = KvMode.LOCAL
        self._waiting.push_returned(request)

    # ---- what others may know ----

    def take_events(self) -> list[EngineEvent]:
        events, self._events = self._events, []
        events.extend(self.kv.pool.take_events())
        return events

    def stats(self, *, steps: int, busy_since: float | None) -> EngineStats:
        counts = self.kv.pool.counts
        computing = sum(len(r.token_ids) - r.num_computed for r in self._prefilling.values())
        return EngineStats(
            num_running=len(self._decoding) + len(self._prefilling),
            num_waiting=len(self._waiting),
            num_waiting_remote=len(self._remote),
            kv_usage=(counts.running + counts.reserved) / counts.total,
            steps=steps,
            busy_since=busy_since,
            prefill_tokens_per_s=self.pace.prefill_tokens_per_s,
            decode_step_s=self.pace.decode_step_s,
            waiting_prompt_tokens=self._waiting.num_tokens_to_compute + computing,
            prompt_tokens_total=self._prompt_tokens,
            cached_tokens_total=self._cached_tokens,
            generation_tokens_total=self._generated,
            preemptions_total=self._preemptions,
        )

    def audit(self, full: bool) -> EngineAudit:
        """Counters; with `full` a walk of every block and request."""
        attempts: dict[str, int] = {}
        for request in self.requests.values():
            attempts[request.state.value] = attempts.get(request.state.value, 0) + 1
        violations = self.check() if full else self.kv.pool.violations()
        return EngineAudit(self.kv.pool.counts, attempts, self.packing.slabs_held, tuple(violations))

    def check(self) -> list[str]:
        return self.kv.check(self.requests.values())
