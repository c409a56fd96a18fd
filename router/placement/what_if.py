"""Placement on hypothetical pools of workers. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from diptych.common.errors import InvalidRequestError, NoWorkerError
from diptych.common.store.worker_record import WorkerLoad, WorkerRecord
from diptych.router.placement.types import WorkerView
from diptych.router.placement.worker_arrays import ClusterSnapshot

MAX_POOL = 256
_POOL = re.compile(r"([0-9]{1,3})P([0-9]{1,3})D", re.IGNORECASE)


def parse_pool(text: str) -> tuple[int, int]:
    """ "4P2D" -> (4, 2). Raises: InvalidRequestError."""
    match = _POOL.fullmatch(text.strip())
    counts = (int(match[1]), int(match[2])) if match else (0, 0)
    if not match or counts[1] < 1 or max(counts) > MAX_POOL:
        raise InvalidRequestError(
            f'pool must be like "4P4D", with at most {MAX_POOL} of each and one D or more', param="pool"
        )
    return counts


def pool_snapshot(pool: str, records: Sequence[WorkerRecord], now: float) -> ClusterSnapshot:
    """Idle workers with empty caches and the rates measured by the real workers of their role. Raises:
    InvalidRequestError; NoWorkerError when no worker provides the model's facts."""
    num_prefill, num_decode = parse_pool(pool)
    if not records:
        raise NoWorkerError("no worker provides the model's facts", retry_after_s=1.0)
    return ClusterSnapshot.of(
        _clones("prefill", num_prefill, records, now), _clones("decode", num_decode, records, now)
    )


def _clones(role: str, count: int, records: Sequence[WorkerRecord], now: float) -> list[WorkerView]:
    same = [record for record in records if record.role == role]
    # With slots for adapters, if any has them: a question about an adapter is about such a pool.
    pattern = max(same or records, key=lambda record: (record.max_lora_rank, record.max_loras))
    load = WorkerLoad(
        prefill_tokens_per_s=_mean([record.load.prefill_tokens_per_s for record in same or records]),
        decode_step_s=_mean([record.load.decode_step_s for record in same or records]),
    )
    links = _mean([rate for record in records for rate in record.load.link_bytes_per_s.values()])
    if role == "decode" and links:
        names = [f"prefill-{i}" for i in range(MAX_POOL)]
        load = msgspec.structs.replace(load, link_bytes_per_s=dict.fromkeys(names, links))
    return [
        WorkerView(
            msgspec.structs.replace(pattern, worker_id=f"{role}-{i}", role=role, incarnation="what-if", load=load),
            reported_at=now,
        )
        for i in range(count)
    ]


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else 0.0
