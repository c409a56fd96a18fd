"""The usable workers as arrays: `WorkerArrays` changes with leases, `RequestLoads` with every request. Pure.

Arrays over workers have the prefill workers first, then the decode workers, so that common parts are computed at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from diptych.common.store.worker_record import WorkerRecord
from diptych.common.tiers import LOWER_TIERS
from diptych.router.placement.adapters import Running
from diptych.router.placement.pulls import PullLinks
from diptych.router.placement.types import WorkerView

DEFAULT_PREFILL_TOKENS_PER_S = 200.0
DEFAULT_DECODE_STEP_S = 0.03
DEFAULT_LINK_BYTES_PER_S = 400e6
HANDOFF_MS = 5.0
"""Fixed cost of a hand-off: a call to prefill, the announcements, the acknowledgements."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Lease = tuple[WorkerRecord, float]
"""A record and the time at which it was read."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerArrays:
    """P prefill and D decode workers.

    Args:
        records, reported_at: all P + D.
        token_ms: to compute a prompt token (not measured yet: the mean of the role, else a default).
        copy_token_ms: [lower tier, P + D], to copy a token's KV from this tier to the first.
        idle_at_ms: when what was reported as queued will have been computed.
        prompt_step_ms: a step that computes prompts.
        requests: reported as running or waiting, at least 1 where prompt tokens are reported.
        sequences, step_ms, block_size: [D]; reported as running or waiting; one decode step.
        pool_tokens, used_tokens: [D], tokens of KV that the pool holds; of these, in use or reserved as reported.
        least_pool, least_free: the smallest pool; the least that is free anywhere.
        fits: [P, D], whether KV may be transferred.
        all_fit, alone: whether that holds for all pairs; [D], whether it holds for no prefill worker.
        move_ms: [P, D], to transfer one token's KV, of the layers that keep every token.
        window_move_ms: (window, [P, D]) for each window that any worker has: the same of layers with that window.
        handoff_ms: [P, D], the fixed cost of a pair, infinite where KV may not be transferred.
        pulls: links between all workers; None: no worker takes KV from another one's cache.
        leaving: workers that drain, of which only the KV is used, and when each will be gone; nothing above counts them.
        incompatible, unusable: reasons in words, by pair of ids and by id.
    """

    num_prefill: int
    records: tuple[WorkerRecord, ...]
    reported_at: Floats
    token_ms: Floats
    copy_token_ms: Floats
    idle_at_ms: Floats
    prompt_step_ms: Floats
    requests: Floats
    sequences: Floats
    step_ms: Floats
    block_size: Ints
    pool_tokens: Floats
    used_tokens: Floats
    least_pool: float
    least_free: float
    fits: Bools
    all_fit: bool
    alone: Bools
    any_alone: bool
    move_ms: Floats
    window_move_ms: tuple[tuple[int, Floats], ...]
    handoff_ms: Floats
    pulls: PullLinks | None = None
    leaving: tuple[WorkerRecord, ...] = ()
    gone_at_ms: Floats = field(default_factory=lambda: np.empty(0))
    leaving_copy_token_ms: Floats = field(default_factory=lambda: np.empty((len(LOWER_TIERS), 0)))
    incompatible: Mapping[tuple[str, str], Sequence[str]] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_decode(self) -> int:
        return len(self.records) - self.num_prefill

    def prompt_tokens_per_s(self) -> dict[str, float]:
        """Measured prompt tokens per second of each prefill worker (without any: each decode worker), by id; empty:
        none is measured."""
        side = slice(0, self.num_prefill) if self.num_prefill else slice(0, None)
        records = self.records[side]
        if not any(record.load.prefill_tokens_per_s for record in records):
            return {}
        return {r.worker_id: 1000.0 / float(ms) for r, ms in zip(records, self.token_ms[side], strict=True)}

    @staticmethod
    def of(
        prefill: Sequence[Lease],
        decode: Sequence[Lease],
        incompatible: Mapping[tuple[str, str], Sequence[str]] | None = None,
        unusable: Mapping[str, str] | None = None,
        *,
        pulls: bool = True,
        leaving: Sequence[Lease] = (),
    ) -> WorkerArrays:
        incompatible = incompatible or {}
        leases = [*prefill, *decode]
        records = tuple(record for record, _ in leases)
        reported_at = np.array([at for _, at in leases], np.float64)
        token_ms = np.concatenate([_token_ms(prefill), _token_ms(decode)])
        waiting = np.array([record.load.waiting_prompt_tokens for record in records], np.float64)
        fits = _fits(prefill, decode, incompatible)
        alone: Bools = ~np.logical_or.reduce(fits, axis=0)
        requests = np.array([record.load.num_running + record.load.num_waiting for record in records], np.float64)
        sequences = requests[len(prefill) :].copy()
        np.maximum(requests, waiting > 0, out=requests)
        also_hold = tuple(record for record, _ in leaving)
        on_decode = [record for record, _ in decode]
        pool_tokens = np.array([r.num_blocks * r.block_size for r in on_decode], np.float64)
        used_tokens = pool_tokens * np.array([r.load.kv_usage for r in on_decode], np.float64)
        return WorkerArrays(
            num_prefill=len(prefill),
            records=records,
            reported_at=reported_at,
            token_ms=token_ms,
            copy_token_ms=_copy_token_ms(records, token_ms),
            idle_at_ms=1000.0 * reported_at + waiting * token_ms,
            prompt_step_ms=1000.0 * np.array([record.load.prompt_step_s for record in records], np.float64),
            requests=requests,
            sequences=sequences,
            step_ms=1000.0 * _measured([r.load.decode_step_s for r in on_decode], DEFAULT_DECODE_STEP_S),
            block_size=np.array([r.block_size for r in on_decode], np.int64),
            pool_tokens=pool_tokens,
            used_tokens=used_tokens,
            least_pool=float(pool_tokens.min(initial=np.inf)),
            least_free=float((pool_tokens - used_tokens).min(initial=np.inf)),
            fits=fits,
            all_fit=bool(fits.all()),
            alone=alone,
            any_alone=bool(alone.any()),
            move_ms=_move_ms(prefill, decode, [record.kv_bytes_per_token for record in on_decode]),
            window_move_ms=tuple(
                (window, _move_ms(prefill, decode, [dict(record.kv_windows).get(window, 0) for record in on_decode]))
                for window in sorted({window for record in on_decode for window, _ in record.kv_windows})
            ),
            handoff_ms=np.where(fits, HANDOFF_MS, np.inf),
            pulls=PullLinks.of(records, also_hold) if pulls else None,
            leaving=also_hold,
            gone_at_ms=1000.0 * np.array([at + record.leaves_in_s for record, at in leaving], np.float64),
            leaving_copy_token_ms=_copy_token_ms(also_hold, _token_ms(leaving)),
            incompatible=dict(incompatible),
            unusable=dict(unusable or {}),
        )


def _token_ms(leases: Sequence[Lease]) -> Floats:
    return 1000.0 / _measured([lease[0].load.prefill_tokens_per_s for lease in leases], DEFAULT_PREFILL_TOKENS_PER_S)


def _copy_token_ms(records: Sequence[WorkerRecord], token_ms: Floats) -> Floats:
    """By lower tier and worker. Where the worker reports no rate, its blocks there cost as much as computing them."""
    rates = [{tier.name: tier.bytes_per_s for tier in record.tiers} for record in records]
    table = [
        [
            1000.0 * record.kv_bytes_per_token / rate if (rate := own.get(tier.name, 0.0)) else float(compute_ms)
            for record, own, compute_ms in zip(records, rates, token_ms, strict=True)
        ]
        for tier in LOWER_TIERS
    ]
    return np.array(table, np.float64).reshape(len(LOWER_TIERS), len(records))


def _measured(values: Sequence[float], default: float) -> Floats:
    array = np.array(values, np.float64)
    known = array[array > 0]
    array[array <= 0] = known.mean() if len(known) else default
    return array


def _fits(
    prefill: Sequence[Lease], decode: Sequence[Lease], incompatible: Mapping[tuple[str, str], Sequence[str]]
) -> Bools:
    fits = np.ones((len(prefill), len(decode)), np.bool_)
    if any(incompatible.values()):
        for p, (one, _) in enumerate(prefill):
            for d, (other, _) in enumerate(decode):
                fits[p, d] = not incompatible.get((one.worker_id, other.worker_id))
    return fits


def _move_ms(prefill: Sequence[Lease], decode: Sequence[Lease], bytes_per_token: Sequence[int]) -> Floats:
    measured = [rate for record, _ in decode for rate in record.load.link_bytes_per_s.values() if rate > 0]
    mean = sum(measured) / len(measured) if measured else DEFAULT_LINK_BYTES_PER_S
    table = np.empty((len(prefill), len(decode)), np.float64)
    for d, (record, _) in enumerate(decode):
        links = record.load.link_bytes_per_s
        table[:, d] = 1000.0 * bytes_per_token[d] / mean
        for p, (other, _) in enumerate(prefill):
            if rate := links.get(other.worker_id, 0.0):
                table[p, d] = 1000.0 * bytes_per_token[d] / rate
    return table


def _by_tier(tokens: Ints) -> tuple[tuple[str, int], ...]:
    return tuple((tier.name, int(count)) for tier, count in zip(LOWER_TIERS, tokens, strict=True) if count)


@dataclass(slots=True, eq=False)
class RequestLoads:
    """The load and hits of each of the P + D workers for this request; see WorkerView. None: no hits.

    Args:
        later_tokens: of the pending tokens, how many are computed after this request, because of its tenant's share;
            None: no other tenant's are pending.
        kv_tokens: [D], tokens of KV of this router's requests, see Reservation; None: not known.
        leaving_hits, leaving_lower: as the first two, of the workers that leave.
    """

    hit_tokens: Ints | None
    lower_tokens: Ints | None
    """[lower tier, P + D]"""
    pending_tokens: Ints
    pending_requests: Ints
    later_tokens: Floats | None = None
    kv_tokens: Ints | None = None
    leaving_hits: Ints | None = None
    leaving_lower: Ints | None = None


def _hits(views: Sequence[WorkerView]) -> tuple[Ints, Ints]:
    """Hit tokens, and those of them by lower tier."""
    lower = [[dict(view.tier_tokens).get(tier.name, 0) for view in views] for tier in LOWER_TIERS]
    return np.array([view.hit_tokens for view in views], np.int64), np.array(lower, np.int64)


def _reported(record: WorkerRecord) -> Collection[str]:
    return [adapter_id for adapter_id, count in record.load.adapters.items() if count]


@dataclass(slots=True, eq=False)
class ClusterSnapshot:
    """The cluster's state for one placement. `barred`: indexes (0 to D - 1) of decode workers that had this
    request already. `running`: see adapters.py."""

    fleet: WorkerArrays
    loads: RequestLoads
    barred: tuple[int, ...] = ()
    running: Running = _reported

    @staticmethod
    def of(
        prefill: Sequence[WorkerView],
        decode: Sequence[WorkerView],
        incompatible: Mapping[tuple[str, str], Sequence[str]] | None = None,
        unusable: Mapping[str, str] | None = None,
        leaving: Sequence[WorkerView] = (),
    ) -> ClusterSnapshot:
        one, other, gone = ([(view.record, view.reported_at) for view in views] for views in (prefill, decode, leaving))
        views = [*prefill, *decode]
        loads = RequestLoads(
            *_hits(views),
            np.array([view.pending_tokens for view in views], np.int64),
            np.array([view.pending_requests for view in views], np.int64),
        )
        loads.leaving_hits, loads.leaving_lower = _hits(leaving)
        return ClusterSnapshot(WorkerArrays.of(one, other, incompatible, unusable, leaving=gone), loads)

    @property
    def prefill(self) -> tuple[WorkerView, ...]:
        return tuple(self.view(i) for i in range(self.fleet.num_prefill))

    @property
    def decode(self) -> tuple[WorkerView, ...]:
        first = self.fleet.num_prefill
        return tuple(self.view(first + i) for i in range(self.fleet.num_decode) if i not in self.barred)

    @property
    def unusable(self) -> dict[str, str]:
        barred = {self.fleet.records[self.fleet.num_prefill + i].worker_id for i in self.barred}
        return {**self.fleet.unusable, **dict.fromkeys(barred, "had this request already")}

    @property
    def incompatible(self) -> Mapping[tuple[str, str], Sequence[str]]:
        return self.fleet.incompatible

    def record(self, index: int) -> WorkerRecord:
        """`index`: 0 to P + D - 1, or of a worker that leaves, behind these."""
        records = self.fleet.records
        return records[index] if index < len(records) else self.fleet.leaving[index - len(records)]

    def view(self, index: int) -> WorkerView:
        """`index`: 0 to P + D - 1."""
        loads = self.loads
        return WorkerView(
            self.fleet.records[index],
            0 if loads.hit_tokens is None else int(loads.hit_tokens[index]),
            () if loads.lower_tokens is None else _by_tier(loads.lower_tokens[:, index]),
            int(loads.pending_tokens[index]),
            int(loads.pending_requests[index]),
            float(self.fleet.reported_at[index]),
        )
