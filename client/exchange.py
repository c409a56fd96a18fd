r"""The state machine of one call, without I/O; the sync and the async client both drive it.

WAITING --Started--> STREAMING --Finished--> FINISHED --end of stream--> (result)
   |  \--UNAVAILABLE, budget left--> WAITING (next try after the pause that `on_error` returns)
   |                          \--resumed elsewhere--> RESUMING --Started--> STREAMING, repeated tokens are dropped
STREAMING --broken, resume, budget left--> WAITING (`request` then continues after the received tokens)
   any --error, gap, repeat, end without Finished--> FAILED (raised)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from random import Random
from typing import Any

from diptych.client.errors import StreamBrokenError
from diptych.client.request_parts import may_continue, name_callers_keyword, resume_id, resumed
from diptych.client.types import (
    FINISH_REASONS,
    Choice,
    Completion,
    Delta,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
    explanation_from,
    logprobs_from,
    usage_from,
)
from diptych.common.errors import DiptychError, DuplicateRequestError, InvalidRequestError, RequestDeadlineError
from diptych.rpc.v1 import router_pb2, types_pb2

UNAVAILABLE = 14
CUT = (UNAVAILABLE, 10)
"""gRPC codes of a stream that broke while it ran: UNAVAILABLE, ABORTED."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retries after UNAVAILABLE. Before the first message at most `max_tries` in all, while the pauses fit into
    `budget_s`; of a stream that broke later and has resume=True, while they fit into `resume_budget_s`, because a worker
    or router that died may need that long to come back.

    A pause is uniform between half and all of base_s * 2**n, at most max_pause_s, and never shorter than the server's
    Retry-After.
    """

    max_tries: int = 4
    base_s: float = 0.1
    max_pause_s: float = 2.0
    budget_s: float = 5.0
    resume_budget_s: float = 60.0

    def pause_s(self, tries: int, advice_s: float | None, rng: Random) -> float:
        pause: float = min(self.max_pause_s, self.base_s * 2 ** min(tries - 1, 30)) * rng.uniform(0.5, 1.0)
        return max(pause, advice_s or 0.0)


class State(Enum):
    WAITING = "waiting"
    STREAMING = "streaming"
    RESUMING = "resuming"
    FINISHED = "finished"
    FAILED = "failed"


MAX_TIMEOUT_S = 1e9
"""30 years: whoever asks for more wants no bound. From 1e10 on gRPC takes a deadline for one that has passed."""


def checked_timeout(timeout_s: object) -> float:
    """Returns: at most MAX_TIMEOUT_S. Raises: InvalidRequestError unless `timeout_s` is a positive, finite number of seconds."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0.0 < timeout_s < math.inf:
        raise InvalidRequestError("timeout_s must be a positive, finite number of seconds", param="timeout_s")
    return float(min(timeout_s, MAX_TIMEOUT_S))


class Attempts:
    """Deadline and retries of one call.

    Args:
        timeout_s: for the whole call, including retries and pauses.
        now: seconds on a monotonic clock.
    """

    def __init__(self, timeout_s: float, retry: RetryPolicy, now: Callable[[], float], rng: Random) -> None:
        self._timeout_s = checked_timeout(timeout_s)
        self._retry = retry
        self._now = now
        self._rng = rng
        self._started = now()
        self._tries = 1
        self._paused_s = 0.0
        self._resumes = False

    def remaining_s(self) -> float:
        """Raises: RequestDeadlineError when no time is left."""
        left = self._started + self._timeout_s - self._now()
        if left <= 0.0:
            raise RequestDeadlineError(f"no answer within timeout_s={self._timeout_s:g}", param="timeout_s")
        return left

    @property
    def tries(self) -> int:
        return self._tries

    def pause_after(self, error: DiptychError, *, force: bool = False, resumes: bool = False) -> float:
        """Seconds to wait before the next try.

        Args:
            resumes: a stream broke after its first message, and will be continued.

        Raises: `error` itself when it is not UNAVAILABLE (unless `force` or `resumes`) or the budget is spent.
        """
        retry = self._retry
        self._resumes |= resumes
        if error.grpc_code != UNAVAILABLE and not force and not resumes:
            raise error
        if not self._resumes and self._tries >= retry.max_tries:
            raise error
        pause = retry.pause_s(self._tries, error.retry_after_s, self._rng)
        budget_s = retry.resume_budget_s if self._resumes else retry.budget_s
        if self._paused_s + pause > budget_s or pause >= self.remaining_s():
            raise error
        self._tries += 1
        self._paused_s += pause
        return pause


@dataclass(slots=True)
class _PartialChoice:
    """The received part of one choice."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: types_pb2.ChoiceFinished | None = None
    text_size: int = 0
    repeated_ids: int = 0
    repeated_text: int = 0
    """Tokens and characters that the current stream has sent, including those received before it was resumed."""
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def take(self, pieces: Sequence[router_pb2.Piece]) -> dict[str, Any]:
        """Append the pieces. Returns: the Delta fields that they make."""
        content, reasoning, calls = [], [], []
        for piece in pieces:
            match piece.WhichOneof("piece"):
                case "content":
                    content.append(piece.content)
                case "reasoning":
                    reasoning.append(piece.reasoning)
                case "call_start":
                    start = piece.call_start
                    self.calls.append(ToolCall(start.id, start.name, ""))
                    calls.append(ToolCallDelta(start.index, start.id, start.name))
                case "call_arguments":
                    part = piece.call_arguments
                    if part.index != len(self.calls) - 1:
                        raise StreamBrokenError(
                            f"arguments of call {part.index} arrived, but {len(self.calls)} calls have begun"
                        )
                    call = self.calls[-1]
                    self.calls[-1] = replace(call, arguments=call.arguments + part.text)
                    calls.append(ToolCallDelta(part.index, arguments=part.text))
        self.content += content
        self.reasoning += reasoning
        return {"content": "".join(content), "reasoning": "".join(reasoning), "tool_calls": tuple(calls)}

    def choice(self, index: int, whole: router_pb2.Finished) -> Choice:
        """Args: whole: how the answer ended, if it has one choice."""
        end = whole if self.finished is None else self.finished
        return Choice(
            index=index,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            finish_reason=FINISH_REASONS.get(end.finish_reason, f"unknown({end.finish_reason})"),
            stop_string=end.stop_string,
            stop_token_id=end.stop_token_id if end.HasField("stop_token_id") else None,
            logprobs=tuple(self.logprobs),
            content="".join(self.content),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(self.calls),
        )


class ReadOnce:
    """What both kinds of streams tell of their one exchange, which begins with the iteration."""

    _exchange: Exchange | None = None

    @property
    def request_id(self) -> str:
        """The router's id of this request; empty before its first message."""
        return self._exchange.request_id if self._exchange else ""

    @property
    def seed(self) -> int | None:
        """The seed of the sampling, for `resume_after` in another process; None before the router's first message."""
        return self._exchange.seed if self._exchange else None

    @property
    def result(self) -> Completion:
        """The whole answer. Raises: StreamBrokenError unless the stream has ended properly."""
        if self._exchange is None:
            raise StreamBrokenError("there is no result: the stream was not read")
        return self._exchange.result()

    def _begin(self, attempts: Attempts, request: router_pb2.GenerateRequest, *, resume: bool) -> Exchange:
        if self._exchange is not None:
            raise RuntimeError("a stream can be iterated once")
        self._exchange = Exchange(attempts, request, resume=resume)
        return self._exchange


class Exchange:
    """Checks the order of a stream's messages and assembles the answer.

    Args:
        request: the original request; see the property `request`.
        resume: continue after the received tokens when the stream breaks.
    """

    def __init__(
        self, attempts: Attempts, request: router_pb2.GenerateRequest | None = None, *, resume: bool = False
    ) -> None:
        self._attempts = attempts
        self._request = router_pb2.GenerateRequest() if request is None else request
        self._first_offset = len(self._request.resume_after.token_ids)
        self._resume = resume
        self._num_resumed = 0
        self._resume_ref = ""
        self._state = State.WAITING
        self._started: router_pb2.Started | None = None
        self._finished: router_pb2.Finished | None = None
        self._choices: dict[int, _PartialChoice] = {}
        self._prompt_logprobs: list[TokenLogprobs] = []

    def remaining_s(self) -> float:
        return self._attempts.remaining_s()

    @property
    def request_id(self) -> str:
        """The router's id of this request; empty before its first message."""
        return self._started.request_id if self._started else ""

    @property
    def request(self) -> router_pb2.GenerateRequest:
        """The request of the next call. Once the stream has begun, it goes on after what has arrived."""
        if self._started is None or not self._num_resumed:
            return self._request
        request = self._request
        if may_continue(request):
            had = request.resume_after.token_ids
            request = resumed(request, [*had, *self._choice(0).token_ids], self._started.seed, self._num_resumed)
        if self._resume_ref:
            rest = router_pb2.GenerateRequest()
            rest.CopyFrom(request)
            parts = [self._choice(number) for number in range(max(1, request.sampling.n))]
            seen = [(part.token_ids, part.text_size, part.finished is not None) for part in parts]
            rest.resume_id = resume_id(self._resume_ref, seen)
            request = rest
        return request

    @property
    def seed(self) -> int | None:
        """The seed of the sampling; None before the router's first message."""
        return None if self._started is None else self._started.seed

    def on_message(self, message: router_pb2.GenerateResponse) -> Delta | None:
        """Raises: StreamBrokenError when the message violates the protocol in this state."""
        kind = message.WhichOneof("event") or ""
        return self.on_event(kind, getattr(message, kind) if kind else None, message.pieces)

    def on_event(self, kind: str, event: Any, pieces: Sequence[router_pb2.Piece] = ()) -> Delta | None:
        """Args: kind: a field of GenerateResponse; pieces: those of the message. Raises: as on_message."""
        if kind == "tokens" and self._state is State.STREAMING:
            return self._on_tokens(event, pieces)
        if kind == "started" and self._state in (State.WAITING, State.RESUMING):
            self._pin_adapter(event)
            self._started = self._started or event
            self._resume_ref = event.resume_ref or self._resume_ref
            self._state = State.STREAMING
            return None
        if kind == "choice_finished" and self._state is State.STREAMING:
            self._choice(event.choice).finished = event
            return self._rest(event.choice, pieces)
        if kind == "prompt_logprobs" and self._state is State.STREAMING:
            repeated = len(self._prompt_logprobs) + 1 - event.first_token  # more than 0: a resumed stream repeats them
            self._prompt_logprobs.extend(logprobs_from(entry) for entry in event.logprobs[max(0, repeated) :])
            return None
        if kind == "finished" and self._state is State.STREAMING:
            self._finished = event
            self._state = State.FINISHED
            return self._rest(0, pieces)
        raise self._broken(f"{kind or 'an unknown event'} arrived while the stream was {self._state.value}")

    def _pin_adapter(self, started: router_pb2.Started) -> None:
        """Further attempts of this answer name the version that began it. Raises: InvalidRequestError where the router ignored
        the adapter."""
        wanted = self._request.adapter
        if wanted and started.adapter != wanted:
            self._state = State.FAILED
            text = f"adapter: the router knows no adapters (another version): {wanted!r} would be ignored"
            raise InvalidRequestError(text, param="adapter")
        if started.adapter:
            self._request.adapter, self._request.adapter_version = started.adapter, started.adapter_version

    def on_unseen_tokens(self, tokens: router_pb2.TokenDelta) -> None:
        """As on_event, for tokens whose Delta is not delivered. Raises: as on_message."""
        partial = self._choice(tokens.choice)
        plain = self._state is State.STREAMING and partial.finished is None and not tokens.logprobs
        in_order = partial.repeated_ids == len(partial.token_ids) == tokens.offset - self._first_offset
        if not (plain and in_order):
            self.on_event("tokens", tokens)
            return
        text = tokens.text
        partial.token_ids += tokens.token_ids
        partial.repeated_ids = len(partial.token_ids)
        partial.texts.append(text)
        partial.text_size += len(text)
        partial.repeated_text += len(text)

    def resume(self) -> None:
        """The answer restarts on another stream. Tokens that the caller already has are compared and dropped.

        Raises: StreamBrokenError when the answer has ended.
        """
        if self._state not in (State.WAITING, State.STREAMING, State.RESUMING):
            raise self._broken(f"the stream was {self._state.value} and cannot be resumed")
        if self._state is State.STREAMING:
            self._state = State.RESUMING
        for partial in self._choices.values():
            partial.repeated_ids = partial.repeated_text = 0

    def on_end(self) -> None:
        """The stream ended with status OK. Raises: StreamBrokenError unless Finished came before."""
        if self._state is not State.FINISHED:
            raise self._broken(f"the stream ended without Finished after {self._num_tokens()} tokens")

    def on_error(self, error: DiptychError) -> float:
        """Seconds to wait before the call may be opened again. Raises: `error` when it is final."""
        name_callers_keyword(error, self._request)
        known = bool(self._resume_ref) or may_continue(self._request)
        resumes = self._state is State.STREAMING and self._resume and known and error.grpc_code in CUT
        # After a broken call the router may still count that request as running.
        again = isinstance(error, DuplicateRequestError) and self._attempts.tries > 1
        if self._state not in (State.WAITING, State.RESUMING) and not resumes:
            self._state = State.FAILED
            raise error
        try:
            pause = self._attempts.pause_after(error, force=again, resumes=resumes)
        except DiptychError:
            self._state = State.FAILED
            raise
        if resumes:
            self._num_resumed += 1
            self._state = State.WAITING
            for partial in self._choices.values():
                partial.repeated_ids, partial.repeated_text = len(partial.token_ids), partial.text_size
        return pause

    def result(self) -> Completion:
        """Raises: StreamBrokenError when the answer is not complete."""
        started, finished = self._started, self._finished
        if self._state is not State.FINISHED or started is None or finished is None:
            raise StreamBrokenError(f"there is no result: the stream is {self._state.value}, not finished")
        self._choice(0)
        choices = tuple(partial.choice(index, finished) for index, partial in sorted(self._choices.items()))
        return Completion(
            text=choices[0].text,
            token_ids=choices[0].token_ids,
            finish_reason=choices[0].finish_reason,
            usage=usage_from(finished.usage),
            request_id=started.request_id,
            model=started.model,
            stop_string=choices[0].stop_string,
            stop_token_id=choices[0].stop_token_id,
            explanation=explanation_from(finished.explanation) if finished.HasField("explanation") else None,
            choices=choices,
            logprobs=choices[0].logprobs,
            prompt_logprobs=tuple(self._prompt_logprobs),
            content=choices[0].content,
            reasoning=choices[0].reasoning,
            tool_calls=choices[0].tool_calls,
            seed=started.seed,
            adapter=started.adapter,
            adapter_version=started.adapter_version,
        )

    def _rest(self, choice: int, pieces: Sequence[router_pb2.Piece]) -> Delta | None:
        """Content that was held back until the choice's end."""
        if not pieces:
            return None
        partial = self._choice(choice)
        offset = self._first_offset + len(partial.token_ids)
        return Delta(offset, (), "", choice, **partial.take(pieces))

    def _on_tokens(self, tokens: router_pb2.TokenDelta, pieces: Sequence[router_pb2.Piece]) -> Delta | None:
        partial = self._choice(tokens.choice)
        expected = partial.repeated_ids
        offset = tokens.offset - self._first_offset
        if offset != expected:
            kind = "a gap" if offset > expected else "a repeat"
            due = self._first_offset + expected
            raise self._broken(f"{kind} in the tokens: got offset {tokens.offset}, expected {due}")
        ids, text, logprobs = tuple(tokens.token_ids), tokens.text, tokens.logprobs
        repeated = len(partial.token_ids) - expected
        partial.repeated_ids += len(ids)
        partial.repeated_text += len(text)
        if repeated > 0 or partial.finished is not None:  # a resumed stream repeats them
            again, ids = ids[:repeated], ids[repeated:]
            if list(again) != partial.token_ids[expected : expected + len(again)]:
                raise self._broken(f"the resumed answer differs from the first one at token {expected}")
            text = text[max(0, len(text) - (partial.repeated_text - partial.text_size)) :]
            if not ids and not text:
                return None
            if partial.finished is not None:
                raise self._broken(f"tokens of choice {tokens.choice} arrived after its end")
        offset = self._first_offset + len(partial.token_ids)
        given = tuple(logprobs_from(entry) for entry in logprobs[len(logprobs) - len(ids) :]) if logprobs else ()
        partial.token_ids.extend(ids)
        partial.texts.append(text)
        partial.text_size += len(text)
        partial.logprobs.extend(given)
        parts = partial.take(pieces) if pieces else {}
        return Delta(offset, ids, text, tokens.choice, given, **parts)

    def _choice(self, index: int) -> _PartialChoice:
        return self._choices.setdefault(index, _PartialChoice())

    def _num_tokens(self) -> int:
        return sum(len(partial.token_ids) for partial in self._choices.values())

    def _broken(self, message: str) -> StreamBrokenError:
        self._state = State.FAILED
        return StreamBrokenError(f"{message} (request {self.request_id or 'not started'})")
