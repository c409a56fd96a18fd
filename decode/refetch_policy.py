"""Where a preempted request gets its KV from: this worker, or a prefill worker. Pure, by measured times only.

here              the engine's estimate: copy back from the host tier, or recompute
a prefill worker  its queue + tokens / its prefill rate + bytes / the link's rate; not used if one of them is unknown
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.worker.refs import WorkerRef

_MIN_MEASURED_TOKENS = 16
"""Smaller prompts are mostly overhead: their rate does not predict larger ones."""


@dataclass(slots=True)
class _Measured:
    tokens_per_s: float
    queue_s: float


class PrefillRates:
    """Measurements of each prefill worker: exponentially weighted means. `alpha`: weight of the newest measurement."""

    def __init__(self, *, alpha: float = 0.3) -> None:
        self._alpha = alpha
        self._known: dict[str, _Measured] = {}

    def observe(self, worker_id: str, num_tokens: int, *, compute_s: float, queue_s: float) -> None:
        """A prompt was computed there. `num_tokens`: without the worker's cached tokens."""
        if num_tokens < _MIN_MEASURED_TOKENS or compute_s <= 0.0:
            return
        rate, known = num_tokens / compute_s, self._known.get(worker_id)
        if known is None:
            self._known[worker_id] = _Measured(rate, queue_s)
            return
        known.tokens_per_s += self._alpha * (rate - known.tokens_per_s)
        known.queue_s += self._alpha * (queue_s - known.queue_s)

    def compute_s(self, worker_id: str, num_tokens: int) -> float | None:
        """Predicted seconds until it has computed this many tokens; None: not measured."""
        known = self._known.get(worker_id)
        return None if known is None else known.queue_s + num_tokens / known.tokens_per_s


def refetch_time_s(
    rates: PrefillRates, link_bytes_per_s: float | None, worker_id: str, *, num_tokens: int, kv_bytes: int
) -> float | None:
    """Predicted seconds until the KV of `num_tokens` tokens is here again; None: unknown."""
    compute_s = rates.compute_s(worker_id, num_tokens)
    if compute_s is None or not link_bytes_per_s:
        return None
    return compute_s + kv_bytes / link_bytes_per_s


def choose_refetch_source(local_s: float, candidates: Sequence[tuple[WorkerRef, float | None]]) -> WorkerRef | None:
    """The fastest prefill worker that is faster than this one; None: this one."""
    known = [(seconds, i) for i, (_, seconds) in enumerate(candidates) if seconds is not None and seconds < local_s]
    return candidates[min(known)[1]][0] if known else None
