"""PREFILL: from computed to packed to handed over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diptych.common.errors import DiptychError
from diptych.engine.messages import PrefillComplete, RangePacked
from diptych.engine.sched.packing import PackJob
from diptych.engine.sched.request import Request, State

if TYPE_CHECKING:
    from diptych.engine.sched.scheduler import Scheduler


def computed(scheduler: Scheduler, request: Request) -> None:
    """Nothing is left to compute; what is left to pack keeps its blocks."""
    del scheduler.prefilling[request.attempt]
    request.move(State.PACKING)
    _complete_if_packed(scheduler, request)


def packed(scheduler: Scheduler, job: PackJob, checksum: int) -> None:
    """A job of `packing.next_job` was copied."""
    scheduler.packing.packed(job)
    request, grant = job.request, job.grant
    size_bytes = job.num_tokens * scheduler.limits.kv_bytes_per_token
    first_layer = num_layers = 0
    if job.layers is not None:
        first_layer, num_layers = job.layers.start, len(job.layers)
        size_bytes = size_bytes * num_layers // scheduler.limits.num_layers
    scheduler.events.append(
        RangePacked(
            request.attempt, grant.slab, grant.generation, job.first_token, job.num_tokens, size_bytes, checksum,
            first_layer, num_layers,
        )
    )  # fmt: skip
    _complete_if_packed(scheduler, request)


def pack_failed(scheduler: Scheduler, job: PackJob, error: DiptychError) -> None:
    scheduler.packing.give_back(job)
    scheduler.fail(job.request, error)


def _complete_if_packed(scheduler: Scheduler, request: Request) -> None:
    if request.state is not State.PACKING or (request.want_kv and request.packed_until < request.kv_target):
        return
    scheduler.end(request, State.FINISHED_HANDED_OFF)
    scheduler.groups.pop(request.attempt, None)
    scheduler.events.append(PrefillComplete(request.attempt, request.compute_s))
