"""What a request's adapter costs at each worker. Pure.

    unusable     the worker takes no adapters, or none of this rank
    0 ms         it has the adapter, or requests of this router bring it there already
    a load       it reads the files first
    a wait       beside that, where other adapters use all of its slots: until the last request of one of them has ended

A worker that has the adapter wins while its queue is no longer than a load elsewhere: requests stay with the holders, and
spread when these are busy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diptych.common.store.worker_record import WorkerRecord

LOAD_MS = 30.0
"""Of a load, whatever its size: opening the files, checking them, and the step that installs them."""
LOAD_BYTES_PER_S = 500e6
SLOT_WAIT_MS = 1000.0
"""Expected wait for a slot: the router knows only the limits of the answers that run."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AdapterNeed:
    """The adapter that a request needs. `rank`: its largest; `num_bytes`: of its tensors."""

    adapter_id: str
    rank: int
    num_bytes: int


Running = Callable[[WorkerRecord], Collection[str]]
"""Ids whose requests run at a worker, or were placed there."""


def why_not(record: WorkerRecord, need: AdapterNeed) -> str:
    """Why the worker cannot serve the adapter, or ""."""
    if not record.max_loras:
        return "takes no adapters (it runs without --enable-lora)"
    if need.rank > record.max_lora_rank:
        return f"takes adapters of rank {record.max_lora_rank} at most (--max-lora-rank), this one has {need.rank}"
    return ""


def has_slot(record: WorkerRecord, need: AdapterNeed, running: Collection[str]) -> bool:
    """Whether a request of the adapter would run beside the others at once."""
    return need.adapter_id in running or len(running) < record.max_loras


def adapter_ms(records: Sequence[WorkerRecord], need: AdapterNeed, running: Running) -> Floats:
    """[workers]: the cost in milliseconds; infinite at those that cannot serve it."""
    costs = np.zeros(len(records), np.float64)
    load_ms = LOAD_MS + 1000.0 * need.num_bytes / LOAD_BYTES_PER_S
    for i, record in enumerate(records):
        if why_not(record, need):
            costs[i] = np.inf
            continue
        there = running(record)
        if need.adapter_id not in there and need.adapter_id not in record.load.adapters:
            costs[i] = load_ms
        if not has_slot(record, need, there):
            costs[i] += SLOT_WAIT_MS
    return costs
