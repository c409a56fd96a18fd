"""The owner of one attempt on decode, from Accepted to End. See lifecycle.py for its states.

Everything runs on the event loop, driven by the engine's events, the remote prefill's task, and the deadline timer. End
is sent exactly once; afterwards the attempt only waits for the engine's last event (`forgotten`).
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import structlog

from diptych.common.errors import DiptychError, InternalError, RequestDeadlineError
from diptych.common.grammar import Grammar
from diptych.common.secret import tenant_of
from diptych.decode.admission import GiveUp, Local, Remote, choose_route, most_own_tokens, next_after_failure
from diptych.decode.explain import Facts, choice_finished, end_of
from diptych.decode.lifecycle import AttemptLifecycle, State
from diptych.decode.outbox import Events
from diptych.decode.refetch_policy import choose_refetch_source, refetch_time_s
from diptych.decode.remote_prefill import RemotePrefill, RemotePrefillCallbacks, RemotePrefillContext
from diptych.decode.spans import AttemptSpan
from diptych.decode.submission import Submission
from diptych.engine.grammar.program import Program
from diptych.engine.messages import (
    Admitted,
    AllGiven,
    Cancel,
    Candidate,
    ChoiceFinished,
    EngineRequest,
    Failed,
    FetchAgain,
    Finished,
    FirstCandidates,
    FirstToken,
    KvComplete,
    KvMode,
    Preempted,
    PromptLogprobs,
    RunLocally,
    TokensOut,
)
from diptych.rpc.convert import claim_to_proto, logprobs_from_proto, logprobs_to_proto, prompt_fields, sampling_to_proto
from diptych.rpc.errors import to_failure
from diptych.rpc.v1 import decode_pb2, prefill_pb2, types_pb2
from diptych.worker import wire
from diptych.worker.adapters import Adapters
from diptych.worker.ports import Engine
from diptych.worker.reads.block_pulls import BlockPulls, KvSource, source_to_proto
from diptych.worker.refs import WorkerRef

_LEG_MARGIN_S = 0.25

CompileGrammar = Callable[[Grammar], Awaitable[tuple[Program, bytes]]]
"""The compiled program, and the mask of the first token (empty: no restriction)."""


class Attempt:
    """One attempt.

    Args:
        path: the transport's path for the explanation, for example "ucx:tcp".
        forget: called once, after the engine's last event of the attempt.
        compile_grammar: slow; an error of it ends the attempt before it was accepted.
        adapters: of this worker; loading one is slow, too.
    """

    def __init__(
        self,
        submission: Submission,
        outbox: Events,
        engine: Engine,
        context: RemotePrefillContext,
        *,
        path: str,
        forget: Callable[[str], None],
        compile_grammar: CompileGrammar,
        adapters: Adapters,
    ) -> None:
        self._sub = submission
        self._outbox = outbox
        self._engine = engine
        self._context = context
        self._path = path
        self._on_forgotten = forget
        self._adapters = adapters
        self._holds_adapter = False
        self._lifecycle = AttemptLifecycle(submission.attempt)
        self._began = context.clock.now()
        self._outputs: dict[int, list[int]] = {submission.choice: list(submission.output_token_ids)}
        """Tokens already sent, or held by the client, by choice."""
        self._compile_grammar = compile_grammar
        self._prepare_task: asyncio.Task[None] | None = None
        self._pull_task: asyncio.Task[None] | None = None
        self._first_mask = b""
        self._entered = False
        """The engine has the request."""
        self._prompt_logprobs_until = 1
        """Logprobs of prompt tokens before this one were sent (the first has none)."""
        self._leg_number = 0
        self._num_cached = 0
        """Leading tokens of prompt and forced outputs that the engine had when it reserved blocks."""
        self._local_s_per_token = 0.0
        """Cost of the last preemption's local recovery in this engine."""
        self._prefill_task: asyncio.Task[None] | None = None
        self._facts = Facts(
            request_id=submission.request_id,
            decode=submission.placement.decode.worker_id,
            decode_pid=os.getpid(),
            prompt_tokens=len(submission.prompt.token_ids),
            backend=context.backend,
            claim=submission.claim,
        )
        self._timer = asyncio.get_running_loop().call_later(submission.remaining_s, self._on_deadline)
        self._log = structlog.get_logger(__name__).bind(request_id=submission.request_id, attempt=submission.attempt)
        self._span = AttemptSpan(submission)

    @property
    def state(self) -> State:
        return self._lifecycle.state

    def start(self) -> None:
        """Load the adapter and compile the grammar, if any; then send Accepted and hand the request to the engine."""
        adapter, grammar = self._sub.prompt.adapter, self._sub.sampling.grammar
        self._holds_adapter = bool(adapter) and self._adapters.hold(adapter)
        if grammar is None and self._holds_adapter == bool(adapter):
            self._enter(None)
        else:
            self._prepare_task = asyncio.create_task(self._prepare(grammar), name=f"prepare {self._sub.attempt}")

    async def _prepare(self, grammar: Grammar | None) -> None:
        sub, program = self._sub, None
        try:
            if sub.prompt.adapter and not self._holds_adapter:
                await self._adapters.load_and_hold(sub.prompt.adapter, sub.adapter_folder)
                self._holds_adapter = True
            if grammar is not None:
                program, self._first_mask = await self._compile_grammar(grammar)
        except DiptychError as error:
            self.end_with(error)
        except Exception as error:  # a bug must not leave the request hanging
            self._log.exception("unexpected error in preparing a request")
            self.end_with(InternalError(f"unexpected error in preparing a request: {error!r}"))
        else:
            if not self._lifecycle.ended:
                self._enter(program)

    def _enter(self, grammar: Program | None) -> None:
        """Take leading blocks from another worker first, where the placement says so."""
        self._outbox.accepted(self._sub.attempt)
        source, pulls = self._sub.placement.decode_source, self._context.pulls
        if source is None or pulls is None:
            self._send_to_engine(grammar)
        else:
            self._pull_task = asyncio.create_task(
                self._pull_first(source, pulls, grammar), name=f"pull of {self._sub.attempt}"
            )

    async def _pull_first(self, source: KvSource, pulls: BlockPulls, grammar: Program | None) -> None:
        sub = self._sub
        try:
            so_far = (*sub.prompt.token_ids, *sub.output_token_ids)
            self._facts.pulled = await pulls.pull(
                source,
                msgspec.structs.replace(sub.prompt, token_ids=so_far),
                attempt=sub.attempt,
                request_id=sub.request_id,
                remaining_s=max(sub.remaining_s - self._elapsed(), 0.001),
            )
        except Exception:  # a bug must not leave the request hanging
            self._log.exception("unexpected error in a pull")
        if not self._lifecycle.ended:
            self._send_to_engine(grammar)

    def _send_to_engine(self, grammar: Program | None) -> None:
        sub = self._sub
        self._entered = True
        self._engine.send(
            EngineRequest(
                attempt=sub.attempt,
                prompt=sub.prompt,
                sampling=sub.sampling,
                # May become local (RunLocally), once the number of cached tokens is known.
                mode=KvMode.REMOTE,
                tenant=tenant_of(sub.prompt.cache_salt),
                priority=sub.priority,
                output_token_ids=sub.output_token_ids,
                choice=sub.choice,
                grammar=grammar,
                own_tokens=most_own_tokens(sub.placement, len(sub.prompt.token_ids) + len(sub.output_token_ids)),
                claim=sub.claim,
            )
        )

    # ---- the engine's events ----

    def on_admitted(self, event: Admitted) -> None:
        if self._lifecycle.ended:
            return
        if self._lifecycle.state is not State.ADMITTING:
            self._refetch(event.num_cached_tokens)
            return
        self._facts.reserved_s = self._elapsed()
        sub, self._num_cached = self._sub, event.num_cached_tokens
        self._facts.cached_decode = min(event.num_cached_tokens, len(sub.prompt.token_ids))
        self._facts.tiers = wire.tier_tokens_to_proto(event.tiers)
        self._facts.kept_decode = event.num_kept_tokens
        # Of a continuation the tokens so far are computed, too, but for the last one.
        needed = len(sub.prompt.token_ids) + max(0, len(sub.output_token_ids) - 1)
        uncached = max(1, needed - event.num_cached_tokens)
        self._take(choose_route(sub.placement, uncached, sub.policy))

    def on_preempted(self, event: Preempted) -> None:
        """Request the KV from the faster source; if the engine follows, it sends Admitted."""
        if self._lifecycle.state in (State.DECODING, State.COMPUTING):
            self._local_s_per_token = event.resume_s / max(1, event.num_tokens)
            if self._choose_recovery(event.num_tokens) is not None:
                self._engine.send(FetchAgain(self._sub.attempt))

    def _choose_recovery(self, num_tokens: int) -> WorkerRef | None:
        context, links = self._context, self._context.links.snapshot()
        kv_bytes = context.kv.transfer_bytes(0, num_tokens)
        return choose_refetch_source(
            num_tokens * self._local_s_per_token,
            [
                (ref, refetch_time_s(context.rates, links.get(name), name, num_tokens=num_tokens, kv_bytes=kv_bytes))
                for ref in self._sub.placement.prefill
                for name in (ref.worker_id,)
            ],
        )

    def _refetch(self, num_cached: int) -> None:
        """It has blocks again, after FetchAgain. The tokens still cached here may have made local recovery faster."""
        num_tokens = len(self._sub.prompt.token_ids) + len(self._outputs[self._sub.choice]) - 1
        ref = self._choose_recovery(num_tokens - num_cached) if num_tokens > num_cached else None
        if ref is None:
            self._engine.send(RunLocally(self._sub.attempt))
            return
        self._lifecycle.move(State.FETCHING)
        self._prefill_task = asyncio.create_task(
            self._run_refetch(ref, num_cached), name=f"remote prefill {self._sub.attempt}"
        )

    async def _run_refetch(self, ref: WorkerRef, num_cached: int) -> None:
        """After any failure the KV can be computed here."""
        self._leg_number += 1
        remote = self._new_remote_prefill(ref, num_cached)
        try:
            await remote.run()
        except DiptychError as error:
            self._log.info("not fetched again", prefill=ref.worker_id, reason=error.reason)
        except Exception:  # a bug must not leave the request hanging
            self._log.exception("unexpected error in a remote prefill")
        if remote.complete:
            self._facts.fetched_again(ref.worker_id, remote.facts)
        elif self._lifecycle.state is State.FETCHING:
            self._prefill_task = None
            self._note(f"preempted: {ref.worker_id} could not compute the KV again, it was computed here")
            self._lifecycle.move(State.DECODING)
            self._engine.send(RunLocally(self._sub.attempt))

    def on_tokens(self, event: TokensOut) -> None:
        if self._lifecycle.ended:
            return
        outputs = self._outputs.setdefault(event.choice, [])
        if event.offset != len(outputs):
            self.end_with(InternalError(f"the engine sent token {event.offset}, expected {len(outputs)}"))
            return
        cached_tokens = 0
        if not self._facts.first_token_s:
            self._facts.first_token_s = self._elapsed()
            cached_tokens = self._facts.cached_tokens
        outputs.extend(event.token_ids)
        self._outbox.tokens(event, cached_tokens)

    def on_choice_finished(self, event: ChoiceFinished) -> None:
        if not self._lifecycle.ended:
            self._outbox.choice_finished(self._sub.attempt, choice_finished(event))

    def on_prompt_logprobs(self, event: PromptLogprobs) -> None:
        """Of a prompt that is computed here."""
        entries = [logprobs_to_proto(entry) for entry in event.logprobs]
        self._on_prompt_logprobs(types_pb2.PromptLogprobs(first_token=event.first_token, logprobs=entries))

    def on_finished(self, event: Finished) -> None:
        if not self._lifecycle.ended:
            if self._lifecycle.state is State.COMPUTING:
                self._facts.computed_here(self._facts.cached_decode)
            self._outbox.end(self._sub.attempt, end_of(event, self._facts, self._path))
            self._span.finished(self._facts, event.num_output_tokens)
            self._close()
        self._forget()

    def on_failed(self, event: Failed) -> None:
        if not self._lifecycle.ended:
            self._send_failure(event.error)
            self._close()
        self._forget()

    # ---- ends from outside ----

    def end_with(self, error: DiptychError) -> None:
        """End after a cancel, deadline, lost router or own failure: send End, cancel in the engine and at prefill.
        Idempotent."""
        if self._lifecycle.ended:
            return
        self._send_failure(error)
        self._close()
        if self._entered:
            self._engine.send(Cancel(self._sub.attempt))
        else:
            self._forget()

    def _forget(self) -> None:
        """After the engine's last event."""
        if self._holds_adapter:
            self._holds_adapter = False
            self._adapters.release(self._sub.prompt.adapter)
        self._on_forgotten(self._sub.attempt)

    def _on_deadline(self) -> None:
        self.end_with(RequestDeadlineError("the request's deadline passed"))

    def _send_failure(self, error: DiptychError) -> None:
        self._log.info("request failed", reason=error.reason, error=error.message, state=self._lifecycle.state.value)
        end = decode_pb2.End(failure=to_failure(error), prefill_faults=self._facts.faults())
        self._outbox.end(self._sub.attempt, end)
        self._span.failed(error)

    def _close(self) -> None:
        self._lifecycle.move(State.ENDED)
        self._timer.cancel()
        for task in (self._prefill_task, self._prepare_task, self._pull_task):
            if task is not None:
                task.cancel()

    # ---- the prompt ----

    def _take(self, route: Local | Remote | GiveUp) -> None:
        match route:
            case GiveUp(error):
                self.end_with(error)
            case Local(note):
                self._note(note)
                self._lifecycle.move(State.COMPUTING)
                self._facts.computed_here(self._facts.cached_decode)
                self._engine.send(RunLocally(self._sub.attempt))
            case Remote(candidates, note):
                self._note(note)
                self._lifecycle.move(State.FETCHING)
                self._prefill_task = asyncio.create_task(
                    self._run_remote_prefill(candidates), name=f"remote prefill {self._sub.attempt}"
                )

    def _note(self, note: str) -> None:
        if note:
            self._facts.notes.append(note)
            self._log.info("not as planned", note=note)

    async def _run_remote_prefill(self, candidates: tuple[WorkerRef, ...]) -> None:
        ref, rest = candidates[0], candidates[1:]
        self._leg_number += 1
        try:
            remote = self._new_remote_prefill(ref, self._num_cached)
            self._facts.prefill, self._facts.remote = ref.worker_id, remote.facts
            await remote.run()
        except DiptychError as error:
            self._on_prefill_failed(ref, rest, error)
        except Exception as error:  # a bug must not leave the request hanging
            self._log.exception("unexpected error in a remote prefill")
            self._on_prefill_failed(ref, rest, InternalError(f"unexpected error in a remote prefill: {error!r}"))

    def _on_prefill_failed(self, ref: WorkerRef, rest: tuple[WorkerRef, ...], error: DiptychError) -> None:
        if self._lifecycle.state is not State.FETCHING:
            return
        self._prefill_task = None
        self._facts.prefill_faults.append((ref.worker_id, error.reason))
        self._log.info("a prefill worker failed", prefill=ref.worker_id, reason=error.reason, error=error.message)
        self._take(next_after_failure(self._sub.policy, ref, error, rest))

    def _new_remote_prefill(self, ref: WorkerRef, num_cached: int) -> RemotePrefill:
        sub = self._sub
        remaining_s = sub.remaining_s - self._elapsed()
        # Tokens left to sample; a one-token answer needs no KV.
        want_kv = sub.sampling.max_tokens > 1
        outputs = self._outputs.get(sub.choice, [])
        request = prefill_pb2.PrefillRequest(
            attempt=f"{sub.attempt}/{self._leg_number}",
            request_id=sub.request_id,
            output_token_ids=outputs,
            sampling=sampling_to_proto(replace(sub.sampling, grammar=None)),
            first_token_mask=b"" if outputs else self._first_mask,
            decode_cached_tokens=num_cached if want_kv else 0,
            want_kv=want_kv,
            prefill=wire.ref_to_proto(ref),
            decode=wire.ref_to_proto(sub.placement.decode),
            remaining_s=max(remaining_s - min(_LEG_MARGIN_S, 0.05 * remaining_s), 0.001),
            priority=sub.priority,
            source=source_to_proto(sub.placement.prefill_source),
            claim=claim_to_proto(sub.claim),
            **prompt_fields(sub.prompt, adapter_folder=sub.adapter_folder),
        )
        return RemotePrefill(
            self._context,
            RemotePrefillCallbacks(
                self._on_first_token,
                self._on_first_candidates,
                self._on_kv_complete,
                self._on_prompt_logprobs,
                self._on_all_given,
            ),
            attempt=sub.attempt,
            ref=ref,
            request=request,
            num_tokens=len(sub.prompt.token_ids) + max(0, len(outputs) - 1),
            traceparent=self._span.traceparent,
        )

    def _on_first_token(self, token: prefill_pb2.FirstToken) -> None:
        if not self._lifecycle.ended:
            logprobs = logprobs_from_proto(token.logprobs) if token.HasField("logprobs") else None
            self._engine.send(FirstToken(self._sub.attempt, token.token_id, token.choice, logprobs))

    def _on_first_candidates(self, candidates: list[prefill_pb2.FirstToken]) -> None:
        if not self._lifecycle.ended:
            self._engine.send(FirstCandidates(self._sub.attempt, tuple(map(_candidate, candidates))))

    def _on_prompt_logprobs(self, entries: types_pb2.PromptLogprobs) -> None:
        """Each is sent once, also when a second worker computes the prompt again."""
        known = self._prompt_logprobs_until - entries.first_token
        if self._lifecycle.ended or known >= len(entries.logprobs):
            return
        if known < 0:
            self.end_with(InternalError(f"logprobs of prompt token {entries.first_token} arrived too early"))
            return
        fresh = types_pb2.PromptLogprobs(first_token=self._prompt_logprobs_until, logprobs=entries.logprobs[known:])
        self._prompt_logprobs_until += len(fresh.logprobs)
        self._outbox.prompt_logprobs(self._sub.attempt, fresh)

    def _on_all_given(self) -> None:
        if self._lifecycle.state is State.FETCHING and self._sub.sampling.max_tokens != 1:
            self._engine.send(AllGiven(self._sub.attempt))

    def _on_kv_complete(self) -> None:
        if self._lifecycle.state is not State.FETCHING or self._sub.sampling.max_tokens == 1:
            return  # a one-token answer ends with its first token
        self._facts.kv_complete_s = self._facts.kv_complete_s or self._elapsed()
        self._lifecycle.move(State.DECODING)
        self._engine.send(KvComplete(self._sub.attempt))

    def _elapsed(self) -> float:
        return self._context.clock.now() - self._began


def _candidate(message: prefill_pb2.FirstToken) -> Candidate:
    """Raises: InternalError for an invalid message."""
    if not math.isfinite(message.score):
        raise InternalError("prefill sent a candidate without a score")
    logprobs = logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None
    return Candidate(message.token_id, message.score, logprobs)
