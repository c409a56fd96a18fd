"""Whether a request whose attempt failed goes on as another attempt, and with what. Pure.

    an attempt was   before any token   in mid-answer
    refused          REPLACE, once      -               by a worker: stale, full, draining, too old
    lost             MOVE               MOVE            its worker died, stopped, drained, or is cut off
    anything else    FAIL               FAIL            it would fail on every worker, or the caller ended it

A refusal while the request moves is a part of that move. A move is not paid from the retry budget: it answers the loss of
a worker, not load, and each loss moves a request once. See docs/decisions/migration.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from diptych.common.errors import (
    DiptychError,
    IncompatibleWorkersError,
    NoWorkerError,
    OverloadedError,
    StaleReferenceError,
    WorkerLostError,
)
from diptych.common.sampling import SamplingParams
from diptych.router.requests.messages import ValidatedRequest

_IN_ALL = 4
REFUSALS = (StaleReferenceError, NoWorkerError, OverloadedError, IncompatibleWorkersError)


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

    def judge(
        self, error: DiptychError, *, accepted: bool, num_tokens: int, continuable: bool
    ) -> Verdict | MoveOutcome:
        """What follows the failure of an attempt; a MoveOutcome says why a lost one cannot move.

        Args:
            accepted: decode had accepted the attempt.
            num_tokens: tokens that the client has from this router.
            continuable: see `continuation`; only looked at with tokens.
        """
        if isinstance(error, WorkerLostError):
            if not self.allowed or not (self.limit or not num_tokens):
                return MoveOutcome.FORBIDDEN
            if not self.limit:
                return self._replace()
            if num_tokens and not continuable:
                return MoveOutcome.NOT_CONTINUABLE
            return self._move(num_tokens)
        if not self.allowed or not isinstance(error, REFUSALS):
            return Verdict.FAIL
        if self.total:
            return Verdict.FAIL if accepted else self._move(num_tokens)
        return Verdict.FAIL if num_tokens else self._replace()

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


def may_continue(sampling: SamplingParams) -> bool:
    """Whether an answer goes on from its tokens. Answers with several choices do not yet; those of best_of > n and beam
    search need not: no token of them is sent before their end, so that they are lost before their first token."""
    return sampling.num_choices == 1 and not sampling.beam_width


def continuation(request: ValidatedRequest, output_token_ids: Sequence[int]) -> ValidatedRequest:
    """The request of an attempt that continues after these tokens, which begin with its resume_after. Sampling state
    (draws, penalties, grammar, stop strings) follows from the tokens; prompt logprobs precede them and were sent."""
    if len(output_token_ids) == len(request.resume_after):
        return request
    sampling = request.sampling
    if sampling.prompt_logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=None)
    return replace(request, resume_after=tuple(output_token_ids), sampling=sampling, repeated=None)
