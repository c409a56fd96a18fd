"""The last chunk of a PREFILL request is sent in groups of layers while it is computed, where that is predicted to be
faster. Pure.

schedule -> LayerGroups(...) -> the runner reports after each layer how many are computed -> `next_job` -> layer jobs
"""

from __future__ import annotations

from diptych.engine.messages import KvMode
from diptych.engine.overlap import borders
from diptych.engine.sched.batching.step import SchedulerOutput
from diptych.engine.sched.handoff.packing import Packing, PackJob
from diptych.engine.sched.requests.request import Request


class LayerGroups:
    """Those of one step. False: nothing is sent early in it.

    Args:
        prefill_tokens_per_s: measured; 0.0: nothing is known yet.
        kv_bytes_per_token: over all `num_layers` layers.
    """

    def __init__(
        self,
        out: SchedulerOutput,
        packing: Packing,
        *,
        prefill_tokens_per_s: float,
        num_layers: int,
        kv_bytes_per_token: int,
    ) -> None:
        self._packing = packing
        self._due: dict[int, list[Request]] = {}
        if not packing.sends_layers:
            return
        chunk_s = out.num_prefill_tokens / prefill_tokens_per_s if prefill_tokens_per_s else 0.0
        for request in out.requests[out.num_decode :]:
            packed_until = packing.least_packed(request)
            if not _ends_here(request, packed_until):
                continue
            size_bytes = (request.kv_target - packed_until) * kv_bytes_per_token
            groups = packing.overlap.num_groups(num_layers, size_bytes, chunk_s, request.source.link_bytes_per_s)
            for border in borders(num_layers, groups):
                self._due.setdefault(border, []).append(request)

    def __bool__(self) -> bool:
        return bool(self._due)

    def next_job(self, num_layers: int) -> PackJob | None:
        """What to pack once `num_layers` layers of the step are computed; call again until None."""
        for request in self._due.get(num_layers, ()):
            job = self._packing.layer_job(request, num_layers)
            if job is not None:
                return job
        return None

    def give_up(self, job: PackJob) -> None:
        """Packing failed. The request is in the step that runs, so it must not end now: what is left is packed after
        the step."""
        self._packing.give_back(job)
        for requests in self._due.values():
            if job.request in requests:
                requests.remove(job.request)


def _ends_here(request: Request, packed_until: int) -> bool:
    """This step computes the last of its KV, some of which is to be sent, to a peer that accepts layers."""
    if request.mode is not KvMode.PREFILL or not request.want_kv or not request.source.layer_groups:
        return False
    seq = request.seq
    return seq.start + len(seq.token_ids) >= request.kv_target > packed_until
