"""The usable workers as arrays: `Fleet` holds what changes with a lease, `Loads` what changes with every request. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from diptych.common.worker_record import WorkerRecord
from diptych.router.placement import WorkerView

DEFAULT_PREFILL_TOKENS_PER_S = 200.0
DEFAULT_DECODE_STEP_S = 0.03
DEFAULT_LINK_BYTES_PER_S = 400e6
DEFAULT_HOST_BYTES_PER_S = 2e9

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """One role's workers, index by index.

    Args:
        token_ms: to compute a prompt token, as measured (0.0 measured: the mean of the role, else a default).
        host_token_ms: to copy a token's KV back from the host tier.
        waiting_tokens: reported as queued at `reported_at`.
        sequences: reported as running or waiting.
        step_ms: one decode step.
    """

    records: tuple[WorkerRecord, ...]
    reported_at: Floats
    token_ms: Floats
    host_token_ms: Floats
    waiting_tokens: Floats
    sequences: Floats
    step_ms: Floats
    block_size: Ints

    def __len__(self) -> int:
        return len(self.records)


@dataclass(frozen=True, slots=True, eq=False)
class Fleet:
    """Args:
    fits: [P, D], whether KV may cross.
    move_ms: [P, D], to move one token's KV.
    incompatible, unusable: for a human, by pair of ids and by id.
    """

    prefill: Pool
    decode: Pool
    fits: Bools
    move_ms: Floats
    incompatible: Mapping[tuple[str, str], Sequence[str]] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(
        prefill: Sequence[tuple[WorkerRecord, float]],
        decode: Sequence[tuple[WorkerRecord, float]],
        incompatible: Mapping[tuple[str, str], Sequence[str]] | None = None,
        unusable: Mapping[str, str] | None = None,
    ) -> Fleet:
        """`prefill`, `decode`: records and when they were read."""
        incompatible = incompatible or {}
        fits = np.ones((len(prefill), len(decode)), np.bool_)
        if any(incompatible.values()):
            for p, (one, _) in enumerate(prefill):
                for d, (other, _) in enumerate(decode):
                    fits[p, d] = not incompatible.get((one.worker_id, other.worker_id))
        return Fleet(
            _pool(prefill), _pool(decode), fits, _move_ms(prefill, decode), dict(incompatible), dict(unusable or {})
        )


def _pool(workers: Sequence[tuple[WorkerRecord, float]]) -> Pool:
    records = tuple(record for record, _ in workers)
    loads = [record.load for record in records]
    rates = _measured([load.prefill_tokens_per_s for load in loads], DEFAULT_PREFILL_TOKENS_PER_S)
    return Pool(
        records,
        reported_at=np.array([at for _, at in workers], np.float64),
        token_ms=1000.0 / rates,
        host_token_ms=1000.0
        * np.array([record.kv_bytes_per_token for record in records], np.float64)
        / _measured([load.host_bytes_per_s for load in loads], DEFAULT_HOST_BYTES_PER_S),
        waiting_tokens=np.array([load.waiting_prompt_tokens for load in loads], np.float64),
        sequences=np.array([load.num_running + load.num_waiting for load in loads], np.float64),
        step_ms=1000.0 * _measured([load.decode_step_s for load in loads], DEFAULT_DECODE_STEP_S),
        block_size=np.array([record.block_size for record in records], np.int64),
    )


def _move_ms(prefill: Sequence[tuple[WorkerRecord, float]], decode: Sequence[tuple[WorkerRecord, float]]) -> Floats:
    measured = [rate for record, _ in decode for rate in record.load.link_bytes_per_s.values() if rate > 0]
    mean = sum(measured) / len(measured) if measured else DEFAULT_LINK_BYTES_PER_S
    table = np.empty((len(prefill), len(decode)), np.float64)
    for d, (record, _) in enumerate(decode):
        links = record.load.link_bytes_per_s
        for p, (other, _) in enumerate(prefill):
            table[p, d] = 1000.0 * record.kv_bytes_per_token / (links.get(other.worker_id, 0.0) or mean)
    return table


def _measured(values: Sequence[float], default: float) -> Floats:
    array = np.array(values, np.float64)
    known = array[array > 0]
    array[array <= 0] = known.mean() if len(known) else default
    return array


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """What this request finds at each worker of a pool; see WorkerView."""

    hit_tokens: Ints
    host_tokens: Ints
    pending_tokens: Ints
    pending_requests: Ints


@dataclass(frozen=True, slots=True, eq=False)
class ClusterSnapshot:
    """Args:
    barred: indexes of decode workers that failed for this request.
    """

    fleet: Fleet
    prefill_loads: Loads
    decode_loads: Loads
    barred: tuple[int, ...] = ()

    @staticmethod
    def of(
        prefill: Sequence[WorkerView],
        decode: Sequence[WorkerView],
        incompatible: Mapping[tuple[str, str], Sequence[str]] | None = None,
        unusable: Mapping[str, str] | None = None,
    ) -> ClusterSnapshot:
        one, other = ([(view.record, view.reported_at) for view in views] for views in (prefill, decode))
        return ClusterSnapshot(Fleet.of(one, other, incompatible, unusable), _loads(prefill), _loads(decode))

    @property
    def prefill(self) -> tuple[WorkerView, ...]:
        return tuple(self.prefill_view(i) for i in range(len(self.fleet.prefill)))

    @property
    def decode(self) -> tuple[WorkerView, ...]:
        return tuple(self.decode_view(i) for i in range(len(self.fleet.decode)) if i not in self.barred)

    @property
    def unusable(self) -> dict[str, str]:
        barred = {self.fleet.decode.records[i].worker_id: "failed for this request" for i in self.barred}
        return {**self.fleet.unusable, **barred}

    @property
    def incompatible(self) -> Mapping[tuple[str, str], Sequence[str]]:
        return self.fleet.incompatible

    def prefill_view(self, index: int) -> WorkerView:
        return _view(self.fleet.prefill, self.prefill_loads, index)

    def decode_view(self, index: int) -> WorkerView:
        return _view(self.fleet.decode, self.decode_loads, index)


def _view(pool: Pool, loads: Loads, i: int) -> WorkerView:
    return WorkerView(
        pool.records[i],
        int(loads.hit_tokens[i]),
        int(loads.host_tokens[i]),
        int(loads.pending_tokens[i]),
        int(loads.pending_requests[i]),
        float(pool.reported_at[i]),
    )


def _loads(views: Sequence[WorkerView]) -> Loads:
    return Loads(
        np.array([view.hit_tokens for view in views], np.int64),
        np.array([view.host_tokens for view in views], np.int64),
        np.array([view.pending_tokens for view in views], np.int64),
        np.array([view.pending_requests for view in views], np.int64),
    )
