"""Whether a request whose attempt failed goes on as another attempt, and with what. Pure.

    an attempt was   before any token   in mid-answer
    refused          REPLACE, once      -               by a worker: stale, full, draining, too old
    lost             MOVE               MOVE            its worker died, stopped, drained, or is cut off
    moved            MOVE               MOVE            by an operator (MovedByOperatorError)
    anything else    FAIL               FAIL            it would fail on every worker, or the caller ended it

A refusal while the request moves is a part of that move. A move is not paid from the retry budget: it answers the loss of
a worker, not load, and each loss moves a request once. See docs/decisions/migration.md.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from diptych.common.errors import (
    DiptychError,
    IncompatibleWorkersError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    StaleReferenceError,
    WorkerLostError,
)
from diptych.router.requests.messages import ValidatedRequest

_IN_ALL = 4
_REFUSALS = (StaleReferenceError, NoWorkerError, OverloadedError, IncompatibleWorkersError)


def is_refusal(error: DiptychError, num_tokens: int) -> bool:
    """Whether a worker that ended an attempt with this error before it accepted it leaves the request to others. Where tokens
    exist, another worker has run the request, so it is not invalid: this worker's pool is smaller, or it is too slow to
    compile the grammar in time."""
    return isinstance(error, _REFUSALS) or (num_tokens > 0 and isinstance(error, InvalidRequestError))


class MovedByOperatorError(WorkerLostError):
    """Its worker has lost a request because an operator moves it."""

    reason = "MOVED_BY_OPERATOR"


class Verdict(Enum):
    FAIL = "fail"
    """The request ends with the error."""
    REPLACE = "replace"
    """A worker refused it: another one may take it, if the retry budget allows."""
    MOVE = "move"
    """Its worker is lost: it goes on elsewhere."""


class MoveOutcome(Enum):
    """Of a lost attempt, for the metric."""

    MOVED = "moved"
    NO_WORKER = "no_worker"
    ATTEMPTS = "attempts"
    """It was moved too often."""
    FORBIDDEN = "forbidden"
    """By the setting, or by the request's failure policy."""
    NOT_CONTINUABLE = "not_continuable"


@dataclass(slots=True)
class Moves:
    """The moves of one request.

    Args:
        limit: moves in a row without a new token: a request that kills its workers must not kill all. Four times as many in
            all. 0: a lost request is treated like a refused one, and not at all in mid-answer.
        allowed: the request's failure policy allows other workers.
        tokens_at_move: number of tokens when it was last moved.
    """

    limit: int
    allowed: bool = True
    num_replaced: int = 0
    total: int = 0
    in_a_row: int = 0
    tokens_at_move: int = -1
    planned: bool = False
    """An operator moved it, which does not count."""

    def judge(
        self, error: DiptychError, *, accepted: bool, num_tokens: int, continuable: bool
    ) -> Verdict | MoveOutcome:
        """What follows the failure of an attempt; a MoveOutcome says why a lost one cannot move.

        Args:
            accepted: decode had accepted the attempt.
            num_tokens: tokens that the client has from this router.
                continuable: see AnswerSoFar; only looked at with tokens.
        """
        if isinstance(error, MovedByOperatorError):
            self.planned = True
            return Verdict.MOVE
        if isinstance(error, WorkerLostError):
            if not self.allowed or not (self.limit or not num_tokens):
                return MoveOutcome.FORBIDDEN
            if not self.limit:
                return self._replace()
            if num_tokens and not continuable:
                return MoveOutcome.NOT_CONTINUABLE
            return self._move(num_tokens)
        if not self.allowed:
            return Verdict.FAIL
        if self.total or self.planned:
            return self._move(num_tokens) if not accepted and is_refusal(error, num_tokens) else Verdict.FAIL
        return self._replace() if not num_tokens and is_refusal(error, 0) else Verdict.FAIL

    def _replace(self) -> Verdict:
        if self.num_replaced:
            return Verdict.FAIL
        self.num_replaced += 1
        return Verdict.REPLACE

    def _move(self, num_tokens: int) -> Verdict | MoveOutcome:
        in_a_row = self.in_a_row if num_tokens == self.tokens_at_move else 0
        if in_a_row >= self.limit or self.total >= _IN_ALL * self.limit:
            return MoveOutcome.ATTEMPTS
        self.in_a_row, self.tokens_at_move = in_a_row + 1, num_tokens
        self.total += 1
        return Verdict.MOVE


class AnswerSoFar:
    """The token ids of an answer, by choice, as far as they arrived from the request's attempts."""

    def __init__(self, request: ValidatedRequest) -> None:
        sampling = request.sampling
        self._choices = range(sampling.num_choices)
        self._may_continue = sampling.num_choices == sampling.n and not sampling.beam_width
        self._outputs = {0: array("I", request.resume_after)} if self._may_continue else {}
        self._ended: set[int] = set()

    def extend(self, choice: int, token_ids: Sequence[int]) -> None:
        if self._may_continue:
            outputs = self._outputs.get(choice)
            if outputs is None:
                outputs = self._outputs[choice] = array("I")
            outputs.extend(token_ids)

    def end(self, choice: int) -> None:
        """One of several choices has ended."""
        self._ended.add(choice)

    @property
    def num_ended_tokens(self) -> int:
        """Tokens of the choices that have ended."""
        return sum(len(self._outputs[choice]) for choice in self._ended)

    @property
    def continuable(self) -> bool:
        """Whether other attempts can go on after these tokens: each choice from its own. Choices draw their first tokens
        together, so either all have one or none. Answers of best_of > n and beam search need not go on: no token of
        them is sent before their end, so that they are lost before their first token."""
        left = [choice for choice in self._choices if choice not in self._ended]
        return self._may_continue and bool(left) and all(self._outputs.get(choice) for choice in left)

    def continuations(self, request: ValidatedRequest) -> dict[int, ValidatedRequest]:
        """For each choice that goes on, the request that continues after its tokens: one choice, without the prompt
        logprobs, which precede them and were sent. Everything else that sampling depends on follows from the tokens."""
        sampling = request.sampling
        alone = replace(sampling, n=1, best_of=0, prompt_logprobs=None)
        return {
            choice: replace(request, resume_after=tuple(self._outputs[choice]), sampling=alone, repeated=None)
            for choice in self._choices
            if choice not in self._ended
        }
