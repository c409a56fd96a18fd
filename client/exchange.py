"""One call's life without I/O; the sync and the async client both drive it.

WAITING --Started--> STREAMING --Finished--> FINISHED --end of stream--> (result)
   |  \\--UNAVAILABLE, budget left--> WAITING (another try after `on_error`'s pause)
   |                          \\--resumed elsewhere--> RESUMING --Started--> STREAMING, what was given already is held back
   any --error, gap, repeat, end without Finished--> FAILED (raised)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Any

from diptych.client.errors import StreamBrokenError
from diptych.client.types import (
    FINISH_REASONS,
    Choice,
    Completion,
    Delta,
    TokenLogprobs,
    explanation_from,
    logprobs_from,
    usage_from,
)
from diptych.common.errors import DiptychError, InvalidRequestError, RequestDeadlineError
from diptych.rpc.v1 import router_pb2, types_pb2

UNAVAILABLE = 14


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Tries after UNAVAILABLE and before the first message: at most `max_tries` in all, and only while the pauses fit
    into `budget_s`. A pause is drawn between half of and the whole of base_s * 2**n, and is never shorter than the
    server's advice."""

    max_tries: int = 4
    base_s: float = 0.1
    max_pause_s: float = 2.0
    budget_s: float = 5.0

    def pause_s(self, tries: int, advice_s: float | None, rng: Random) -> float:
        pause: float = min(self.max_pause_s, self.base_s * 2 ** (tries - 1)) * rng.uniform(0.5, 1.0)
        return max(pause, advice_s or 0.0)


class State(Enum):
    WAITING = "waiting"
    STREAMING = "streaming"
    RESUMING = "resuming"
    FINISHED = "finished"
    FAILED = "failed"


def checked_timeout(timeout_s: object) -> float:
    """Raises: InvalidRequestError unless it is a positive, finite number of seconds: every call has a deadline."""
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not number or not 0.0 < timeout_s < math.inf:  # type: ignore[operator]
        raise InvalidRequestError("timeout_s must be a positive, finite number of seconds", param="timeout_s")
    return float(timeout_s)  # type: ignore[arg-type]


class Attempts:
    """Deadline and retries of one call.

    Args:
        timeout_s: for the whole call, tries and pauses together.
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

    def remaining_s(self) -> float:
        """Raises: RequestDeadlineError when nothing is left."""
        left = self._started + self._timeout_s - self._now()
        if left <= 0.0:
            raise RequestDeadlineError(f"no answer within timeout_s={self._timeout_s:g}", param="timeout_s")
        return left

    def pause_after(self, error: DiptychError) -> float:
        """Seconds to wait before the next try. Raises: `error` itself when it is not UNAVAILABLE or the budget is
        spent."""
        if error.grpc_code != UNAVAILABLE or self._tries >= self._retry.max_tries:
            raise error
        pause = self._retry.pause_s(self._tries, error.retry_after_s, self._rng)
        if self._paused_s + pause > self._retry.budget_s or pause >= self.remaining_s():
            raise error
        self._tries += 1
        self._paused_s += pause
        return pause


@dataclass(slots=True)
class _Growing:
    """A choice as it comes."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: types_pb2.ChoiceFinished | None = None
    text_size: int = 0
    repeated_ids: int = 0
    repeated_text: int = 0
    """How much of the answer a resumed stream has told again."""

    def choice(self, index: int, whole: router_pb2.Finished) -> Choice:
        """`whole` says how an answer with one choice ended."""
        end = whole if self.finished is None else self.finished
        return Choice(
            index=index,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            finish_reason=FINISH_REASONS.get(end.finish_reason, f"unknown({end.finish_reason})"),
            stop_string=end.stop_string,
            stop_token_id=end.stop_token_id if end.HasField("stop_token_id") else None,
            logprobs=tuple(self.logprobs),
        )


class Exchange:
    """Checks the stream's promises and puts the answer together."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._state = State.WAITING
        self._started: router_pb2.Started | None = None
        self._finished: router_pb2.Finished | None = None
        self._choices: dict[int, _Growing] = {}
        self._prompt_logprobs: list[TokenLogprobs] = []

    def remaining_s(self) -> float:
        return self._attempts.remaining_s()

    @property
    def request_id(self) -> str:
        """The router's id of this request; empty before its first message."""
        return self._started.request_id if self._started else ""

    def on_message(self, message: router_pb2.GenerateResponse) -> Delta | None:
        """Raises: StreamBrokenError when the message does not fit what came before."""
        kind = message.WhichOneof("event") or ""
        return self.on_event(kind, getattr(message, kind) if kind else None)

    def on_event(self, kind: str, event: Any) -> Delta | None:
        """`kind`: a field of GenerateResponse. Raises: as on_message."""
        if kind == "tokens" and self._state is State.STREAMING:
            return self._on_tokens(event)
        if kind == "started" and self._state in (State.WAITING, State.RESUMING):
            self._started = self._started or event
            self._state = State.STREAMING
            return None
        if kind == "choice_finished" and self._state is State.STREAMING:
            self._choice(event.choice).finished = event
            return None
        if kind == "prompt_logprobs" and self._state is State.STREAMING:
            known = len(self._prompt_logprobs) + 1 - event.first_token  # more than none: told again
            self._prompt_logprobs.extend(logprobs_from(entry) for entry in event.logprobs[max(0, known) :])
            return None
        if kind == "finished" and self._state is State.STREAMING:
            self._finished = event
            self._state = State.FINISHED
            return None
        raise self._broken(f"{kind or 'an unknown event'} came while the stream was {self._state.value}")

    def resume(self) -> None:
        """The answer comes from the start again, from elsewhere: what was given to the caller already is held back, and has
        to be the same. Raises: StreamBrokenError when it has ended."""
        if self._state not in (State.WAITING, State.STREAMING, State.RESUMING):
            raise self._broken(f"the stream was {self._state.value} and cannot be resumed")
        if self._state is State.STREAMING:
            self._state = State.RESUMING
        for growing in self._choices.values():
            growing.repeated_ids = growing.repeated_text = 0

    def on_end(self) -> None:
        """The stream ended with status OK. Raises: StreamBrokenError unless Finished came."""
        if self._state is not State.FINISHED:
            raise self._broken(f"the stream ended without Finished after {self._num_tokens()} tokens")

    def on_error(self, error: DiptychError) -> float:
        """Seconds to pause before the call may be opened again. Raises: `error` when it is final."""
        if self._state not in (State.WAITING, State.RESUMING):
            self._state = State.FAILED
            raise error
        try:
            return self._attempts.pause_after(error)
        except DiptychError:
            self._state = State.FAILED
            raise

    def result(self) -> Completion:
        """Raises: StreamBrokenError when the answer is not complete."""
        started, finished = self._started, self._finished
        if self._state is not State.FINISHED or started is None or finished is None:
            raise StreamBrokenError(f"there is no result: the stream is {self._state.value}, not finished")
        self._choice(0)
        choices = tuple(growing.choice(index, finished) for index, growing in sorted(self._choices.items()))
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
        )

    def _on_tokens(self, tokens: router_pb2.TokenDelta) -> Delta | None:
        growing = self._choice(tokens.choice)
        expected = growing.repeated_ids
        if tokens.offset != expected:
            kind = "a gap" if tokens.offset > expected else "a repeat"
            raise self._broken(f"{kind} in the tokens: offset {tokens.offset} came where {expected} was due")
        ids, text, logprobs = tuple(tokens.token_ids), tokens.text, tokens.logprobs
        known = len(growing.token_ids) - expected
        growing.repeated_ids += len(ids)
        growing.repeated_text += len(text)
        if known > 0 or growing.finished is not None:  # told again by a resumed stream
            again, ids = ids[:known], ids[known:]
            if list(again) != growing.token_ids[expected : expected + len(again)]:
                raise self._broken(f"the resumed answer has other tokens from {expected} on than before")
            text = text[max(0, len(text) - (growing.repeated_text - growing.text_size)) :]
            if not ids and not text:
                return None
            if growing.finished is not None:
                raise self._broken(f"tokens of choice {tokens.choice} came after its end")
        offset = len(growing.token_ids)
        given = tuple(logprobs_from(entry) for entry in logprobs[len(logprobs) - len(ids) :]) if logprobs else ()
        growing.token_ids.extend(ids)
        growing.texts.append(text)
        growing.text_size += len(text)
        growing.logprobs.extend(given)
        return Delta(offset, ids, text, tokens.choice, given)

    def _choice(self, index: int) -> _Growing:
        return self._choices.setdefault(index, _Growing())

    def _num_tokens(self) -> int:
        return sum(len(growing.token_ids) for growing in self._choices.values())

    def _broken(self, message: str) -> StreamBrokenError:
        self._state = State.FAILED
        return StreamBrokenError(f"{message} (request {self.request_id or 'not started'})")
