"""Pure decisions of decode: where a prompt is computed, and what follows when a remote prefill fails.

choose_route        after Admitted, when the number of uncached tokens is known
next_after_failure  after a failed remote prefill: next candidate, local prefill, or give up, by the failure policy
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from diptych.common.adapters.load_errors import without_details
from diptych.common.errors import (
    DiptychError,
    InvalidRequestError,
    NoWorkerError,
    PromptTooLongError,
    RequestCancelledError,
)
from diptych.worker.reads.block_pulls import KvSource
from diptych.worker.refs import WorkerRef


class FailurePolicy(Enum):
    """What to do when the worker that computes the prompt is lost."""

    FAIL = "fail"
    RECOMPUTE = "recompute"
    RETRY = "retry"
    """Try the next candidate, then recompute. The default."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The router's decision. `prefill` holds the choice first, then the spares. Sources: where the prefill worker, and this one,
    may take leading blocks from."""

    decode: WorkerRef
    prefill: tuple[WorkerRef, ...]
    local_prefill: bool
    local_prefill_max_tokens: int
    prefill_source: KvSource | None = None
    decode_source: KvSource | None = None


@dataclass(frozen=True, slots=True)
class Local:
    note: str = ""


@dataclass(frozen=True, slots=True)
class Remote:
    candidates: tuple[WorkerRef, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class GiveUp:
    error: DiptychError


def choose_route(placement: Placement, num_uncached: int, policy: FailurePolicy) -> Local | Remote | GiveUp:
    """Decide where the prompt is computed. With a limit of 0 always remotely, if there is a candidate.

    Args:
        num_uncached: prompt tokens not in decode's cache; at least 1, since the last prompt token is always computed
            where the first token is sampled.
    """
    limit = placement.local_prefill_max_tokens
    within_limit = 0 < num_uncached <= limit
    if placement.local_prefill and within_limit:
        return Local()
    if placement.prefill:
        if placement.local_prefill:
            return Remote(placement.prefill, f"local prefill overruled: {num_uncached} tokens uncached, limit {limit}")
        return Remote(placement.prefill)
    if within_limit:
        return Local("no prefill worker: local prefill")
    if policy is FailurePolicy.FAIL:
        return GiveUp(NoWorkerError("no prefill worker is usable and the request's policy forbids local prefill"))
    return Local(f"no prefill worker: local prefill of {num_uncached} tokens, limit {limit}")


def most_own_tokens(placement: Placement, num_tokens: int) -> int:
    """Tokens of a request of `num_tokens` that decode will compute itself at most, whatever it has cached."""
    if not placement.prefill:
        return num_tokens
    return placement.local_prefill_max_tokens if placement.local_prefill else 0


def next_after_failure(
    policy: FailurePolicy, failed: WorkerRef, error: DiptychError, rest: tuple[WorkerRef, ...]
) -> Local | Remote | GiveUp:
    """Decide what follows a failed remote prefill. `rest`: untried candidates.

    An invalid request is invalid everywhere and not retried. But a prompt that is too long for a prefill worker's pool
    is computed here: this worker has accepted it.
    """
    faulty = isinstance(error, (InvalidRequestError, RequestCancelledError)) and not isinstance(
        error, PromptTooLongError
    )
    if policy is FailurePolicy.FAIL or faulty:
        return GiveUp(error)
    what = f"prefill {failed.worker_id} failed ({error.reason}: {without_details(error).message})"
    if policy is FailurePolicy.RETRY and rest:
        return Remote(rest, f"{what}: trying {rest[0].worker_id}")
    return Local(f"{what}: local prefill")
