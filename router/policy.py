"""Where a request runs: the (prefill, decode) pair with the least cost in milliseconds. Pure.

    cost(P, D) = queue(P) + uncached tokens on P / prefill rate(P) + bytes to move / link(P, D) + decode load(D)
    cost(D)    = queue(D) + uncached tokens on D / prefill rate(D) + stall of D's sequences     + decode load(D)

P's hit saves compute, D's hit saves bytes. Local prefill on D is a candidate only when few tokens are uncached there, or
when no prefill worker is usable: an idle cluster still disaggregates.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diptych.common.worker_record import WorkerRecord

DEFAULT_PREFILL_TOKENS_PER_S = 200.0
DEFAULT_DECODE_STEP_S = 0.03
DEFAULT_LINK_BYTES_PER_S = 400e6
HANDOFF_MS = 5.0
"""Fixed price of a hand-off: a call to prefill, the announcements, the acknowledgements."""
LOCAL_BIAS_MS = 1.0
_TIE_FRACTION, _TIE_MS = 0.02, 0.5


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker that may be placed on, as the router knows it now.

    Args:
        hit_tokens: leading prompt tokens in its cache, already capped to what may be used.
        pending_tokens: prompt tokens this router placed on it that are not known to be computed.
        pending_requests: requests this router placed on it that have not ended.
        reported_at: when the record was read, on the caller's clock.
    """

    record: WorkerRecord
    hit_tokens: int = 0
    pending_tokens: int = 0
    pending_requests: int = 0
    reported_at: float = 0.0

    @property
    def worker_id(self) -> str:
        return self.record.worker_id


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """Usable workers, and what keeps pairs (prefill id, decode id) apart. `unusable`: worker id -> why."""

    prefill: tuple[WorkerView, ...]
    decode: tuple[WorkerView, ...]
    incompatible: Mapping[tuple[str, str], Sequence[str]] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Args:
    wants_kv: False when prefill's first token is the whole answer (max_tokens = 1): no KV is moved.
    local_prefill_max_tokens: 0: never local while a prefill worker is usable.
    allow_local_fallback: compute on decode, whatever the length, when no prefill worker is usable.
    """

    num_prompt_tokens: int
    local_prefill_max_tokens: int
    wants_kv: bool = True
    allow_local_fallback: bool = True


@dataclass(frozen=True, slots=True)
class Terms:
    """What one candidate was charged; `prefill` is None for local prefill on `decode`."""

    prefill: WorkerView | None
    decode: WorkerView
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_load_ms: float
    stall_ms: float

    @property
    def total_ms(self) -> float:
        return self.queue_ms + self.prefill_ms + self.transfer_ms + self.decode_load_ms + self.stall_ms

    @property
    def pending(self) -> int:
        return self.decode.pending_requests + (self.prefill.pending_requests if self.prefill is not None else 0)


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill`: in the order in which to try them; empty when none is usable. `candidates`: cheapest first."""

    chosen: Terms
    prefill: tuple[WorkerView, ...]
    candidates: tuple[Terms, ...]
    notes: tuple[str, ...] = ()

    @property
    def decode(self) -> WorkerView:
        return self.chosen.decode

    @property
    def local_prefill(self) -> bool:
        return self.chosen.prefill is None


@dataclass(frozen=True, slots=True)
class Rejected:
    """Nobody can serve it; `reasons` for a human."""

    reasons: tuple[str, ...]


def usable_hit_tokens(hit_blocks: int, block_size: int, num_prompt_tokens: int) -> int:
    """Tokens of a hit that may be used: the last prompt token is always computed."""
    return block_size * min(hit_blocks, max(0, num_prompt_tokens - 1) // block_size)


def choose_placement(
    request: PlacementRequest, snapshot: ClusterSnapshot, now: float, rng: random.Random
) -> Placement | Rejected:
    """The cheapest candidate; near-equal ones are drawn by power of two choices over pending placements."""
    rates = _Rates(snapshot)
    candidates: list[Terms] = []
    notes: list[str] = []
    for decode in snapshot.decode:
        partners = [p for p in snapshot.prefill if not snapshot.incompatible.get((p.worker_id, decode.worker_id))]
        candidates += [_remote_terms(request, p, decode, rates, now) for p in partners]
        few = request.num_prompt_tokens - decode.hit_tokens <= request.local_prefill_max_tokens
        if few or (not partners and request.allow_local_fallback):
            candidates.append(_local_terms(request, decode, rates, now))
    if not candidates:
        return Rejected(tuple(_why_nobody(snapshot)))
    candidates.sort(key=lambda terms: (terms.total_ms, terms.prefill is not None))
    chosen = _draw(
        [terms for terms in candidates if terms.prefill is None or not _holds_all(request, terms.decode)], rng
    )
    order = [terms.prefill for terms in candidates if terms.decode is chosen.decode and terms.prefill is not None]
    if chosen.prefill is not None:
        order.remove(chosen.prefill)
        order.insert(0, chosen.prefill)
    elif not order:
        notes.append("no usable prefill worker: local prefill")
    return Placement(chosen, tuple(order), tuple(candidates), tuple(notes))


def _holds_all(request: PlacementRequest, decode: WorkerView) -> bool:
    """All of the prompt that a cache can hold lies on this decode worker, which may compute the rest (less than a block):
    no prefill worker is needed, whatever the two rates, measured on other lengths, say about so few tokens."""
    left = request.num_prompt_tokens - decode.hit_tokens
    return 0 < left <= min(decode.record.block_size, request.local_prefill_max_tokens) and decode.hit_tokens > 0


def _draw(candidates: Sequence[Terms], rng: random.Random) -> Terms:
    best = candidates[0]
    limit = best.total_ms + max(_TIE_MS, best.total_ms * _TIE_FRACTION)
    ties = [
        terms for terms in candidates if terms.total_ms <= limit and (terms.prefill is None) == (best.prefill is None)
    ]
    if len(ties) == 1:
        return best
    first, second = rng.sample(ties, 2)
    return min(first, second, key=lambda terms: (terms.pending, terms.total_ms))


class _Rates:
    """Measured rates, else the mean of the worker's own kind, else a default."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self._prefill = {
            role: _mean([w.record.load.prefill_tokens_per_s for w in views], DEFAULT_PREFILL_TOKENS_PER_S)
            for role, views in (("prefill", snapshot.prefill), ("decode", snapshot.decode))
        }
        self._step = _mean([w.record.load.decode_step_s for w in snapshot.decode], DEFAULT_DECODE_STEP_S)
        links = [rate for w in snapshot.decode for rate in w.record.load.link_bytes_per_s.values()]
        self._link = _mean(links, DEFAULT_LINK_BYTES_PER_S)

    def prefill(self, worker: WorkerView) -> float:
        return worker.record.load.prefill_tokens_per_s or self._prefill[worker.record.role]

    def step(self, worker: WorkerView) -> float:
        return worker.record.load.decode_step_s or self._step

    def link(self, prefill: WorkerView, decode: WorkerView) -> float:
        return decode.record.load.link_bytes_per_s.get(prefill.worker_id, 0.0) or self._link


def _mean(values: Sequence[float], default: float) -> float:
    measured = [value for value in values if value > 0]
    return sum(measured) / len(measured) if measured else default


def _queue_ms(worker: WorkerView, rate: float, now: float) -> float:
    """What waits there: reported, less what was computed since, or placed by us, whichever is more (the report includes
    our own placements as soon as it is younger than they are)."""
    reported = worker.record.load.waiting_prompt_tokens - rate * max(0.0, now - worker.reported_at)
    return 1000.0 * max(reported, worker.pending_tokens, 0.0) / rate


def _num_sequences(decode: WorkerView) -> int:
    load = decode.record.load
    return max(load.num_running + load.num_waiting, decode.pending_requests)


def _decode_load_ms(decode: WorkerView, rates: _Rates) -> float:
    return 1000.0 * rates.step(decode) * _num_sequences(decode)


def _remote_terms(
    request: PlacementRequest, prefill: WorkerView, decode: WorkerView, rates: _Rates, now: float
) -> Terms:
    rate = rates.prefill(prefill)
    num_moved = request.num_prompt_tokens - decode.hit_tokens if request.wants_kv else 0
    size_bytes = num_moved * decode.record.kv_bytes_per_token
    return Terms(
        prefill,
        decode,
        queue_ms=_queue_ms(prefill, rate, now),
        prefill_ms=1000.0 * (request.num_prompt_tokens - prefill.hit_tokens) / rate,
        transfer_ms=HANDOFF_MS + 1000.0 * size_bytes / rates.link(prefill, decode),
        decode_load_ms=_decode_load_ms(decode, rates),
        stall_ms=0.0,
    )


def _local_terms(request: PlacementRequest, decode: WorkerView, rates: _Rates, now: float) -> Terms:
    rate = rates.prefill(decode)
    prefill_ms = 1000.0 * (request.num_prompt_tokens - decode.hit_tokens) / rate
    return Terms(
        None,
        decode,
        queue_ms=_queue_ms(decode, rate, now),
        prefill_ms=prefill_ms,
        transfer_ms=0.0,
        decode_load_ms=_decode_load_ms(decode, rates),
        stall_ms=prefill_ms * _num_sequences(decode) + LOCAL_BIAS_MS,
    )


def _why_nobody(snapshot: ClusterSnapshot) -> list[str]:
    reasons = [f"{worker_id}: {why}" for worker_id, why in sorted(snapshot.unusable.items())]
    for (prefill, decode), differences in sorted(snapshot.incompatible.items()):
        if differences:
            reasons.append(f"{prefill} and {decode} do not fit: {'; '.join(differences)}")
    if not snapshot.decode:
        reasons.insert(0, "no usable decode worker")
    elif not snapshot.prefill:
        reasons.insert(0, "no usable prefill worker")
    return reasons
