"""The last chunk of a PREFILL request goes out in groups of layers while it is computed, where that is predicted to win. Pure.

schedule -> LayerGroups(scheduler, out) -> the runner says after each layer how many are done -> `due` -> layer jobs
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diptych.engine.messages import KvMode
from diptych.engine.overlap import borders
from diptych.engine.sched.packing import PackJob
from diptych.engine.sched.request import Request
from diptych.engine.sched.step import SchedulerOutput

if TYPE_CHECKING:
    from diptych.engine.sched.scheduler import Scheduler


class LayerGroups:
    """Those of one step. False: nothing goes out early in it."""

    def __init__(self, scheduler: Scheduler, out: SchedulerOutput) -> None:
        self._scheduler = scheduler
        self._due: dict[int, list[Request]] = {}
        rate = scheduler.pace.prefill_tokens_per_s
        chunk_s = out.num_prefill_tokens / rate if rate else 0.0
        for request in out.requests[out.num_decode :]:
            if not _ends_here(request):
                continue
            layers, source = scheduler.limits.num_layers, request.source
            size_bytes = (request.kv_target - request.packed_until) * scheduler.limits.kv_bytes_per_token
            groups = scheduler.packing.overlap.num_groups(layers, size_bytes, chunk_s, source.link_bytes_per_s)
            for border in borders(layers, groups):
                self._due.setdefault(border, []).append(request)

    def __bool__(self) -> bool:
        return bool(self._due)

    def next_job(self, num_layers: int) -> PackJob | None:
        """After `num_layers` layers of the step: what goes out now. Ask again until None."""
        for request in self._due.get(num_layers, ()):
            job = self._scheduler.packing.layer_job(request, num_layers)
            if job is not None:
                return job
        return None

    def give_up(self, job: PackJob) -> None:
        """Packing failed. Its request is being computed and must not end before the step has: what is left is packed after it."""
        self._scheduler.packing.give_back(job)
        for requests in self._due.values():
            if job.request in requests:
                requests.remove(job.request)


def _ends_here(request: Request) -> bool:
    """This step computes the last of its KV, some of which is to be sent, to a peer that takes layers."""
    if request.mode is not KvMode.PREFILL or not request.want_kv or not request.source.layer_groups:
        return False
    seq = request.seq
    return seq.start + len(seq.token_ids) >= request.kv_target > request.packed_until
