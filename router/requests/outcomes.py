"""Records the outcome of an attempt for the breakers of its workers. It decides nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from diptych.common.errors import RequestCancelledError
from diptych.router.placement.types import Placement
from diptych.rpc.v1 import decode_pb2


class OutcomeSink(Protocol):
    """See Cluster."""

    def on_outcome(self, worker_id: str, reason: str) -> None: ...


def record_outcome(
    cluster: OutcomeSink,
    placement: Placement,
    *,
    reason: str,
    prefill: str = "",
    faults: Sequence[decode_pb2.PrefillFault] = (),
) -> None:
    """Record an attempt's end.

    Args:
        reason: of the error that ended it, "" on success.
        prefill: the worker that computed the prompt, if known.
        faults: prefill workers that decode gave up.
    """
    for fault in faults:
        cluster.on_outcome(fault.worker_id, fault.reason)
    if faults and reason == faults[-1].reason:
        reason = RequestCancelledError.reason  # decode only reports prefill's failure
    decode = placement.decode.worker_id
    cluster.on_outcome(decode, reason)
    if prefill and prefill != decode:
        cluster.on_outcome(prefill, "")
    chosen = placement.chosen.prefill
    failed = {fault.worker_id for fault in faults} | {prefill}
    if chosen is not None and chosen.worker_id not in failed:
        cluster.on_outcome(chosen.worker_id, RequestCancelledError.reason)
