"""From a checked request and its placement to what decode is sent. Pure."""

from __future__ import annotations

from functools import lru_cache

from diptych.router.messages import PreparedRequest
from diptych.router.placement import Placement, PlacementRequest, WorkerView
from diptych.rpc.convert import sampling_to_proto
from diptych.rpc.v1 import decode_pb2, router_pb2, types_pb2

COLOCATED_MARGIN = 1.0
"""A pair is expected to cost at most twice what the cheapest decode worker alone would, and a second."""
_MAX_SPARES = 8
_MARGIN_S, _MARGIN_FRACTION = 0.05, 0.05


def wish_of(request: PreparedRequest) -> PlacementRequest:
    """What the request asks of a placement."""
    return PlacementRequest(
        num_prompt_tokens=len(request.prompt_token_ids),
        local_prefill_max_tokens=request.local_prefill_max_tokens,
        wants_kv=request.sampling.max_tokens > 1,
        colocated_margin=COLOCATED_MARGIN,
        allow_local_fallback=request.failure_policy != router_pb2.FAILURE_POLICY_FAIL,
        group=request.group,
    )


def submit_of(
    request: PreparedRequest, placement: Placement, attempt: str, left_s: float, traceparent: str = ""
) -> decode_pb2.Submit:
    """`left_s`: until the request's deadline, above 0. Decode gets a little less, so that its typed end arrives before our own
    timer."""
    return decode_pb2.Submit(
        attempt=attempt,
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=_sampling_of(request),
        placement=decode_pb2.Placement(
            decode=_ref(placement.decode),
            prefill=[_ref(view) for view in placement.prefill[:_MAX_SPARES]],
            local_prefill=placement.local_prefill,
            local_prefill_max_tokens=(
                len(request.prompt_token_ids) if placement.colocated else request.local_prefill_max_tokens
            ),
        ),
        remaining_s=left_s - min(_MARGIN_S, left_s * _MARGIN_FRACTION),
        cache_salt=request.cache_salt,
        priority=request.priority,
        output_token_ids=request.resume_after,
        failure_policy=request.failure_policy,  # type: ignore[arg-type]  # a number of that enum
        traceparent=traceparent,
    )


def _sampling_of(request: PreparedRequest) -> types_pb2.SamplingParams:
    if request.repeated is None:
        return sampling_to_proto(request.sampling)
    sampling = types_pb2.SamplingParams()
    sampling.CopyFrom(_repeated(request.repeated))
    sampling.seed = request.sampling.seed
    return sampling


_repeated = lru_cache(256)(sampling_to_proto)


def _ref(view: WorkerView) -> types_pb2.WorkerRef:
    record = view.record
    return types_pb2.WorkerRef(worker_id=record.worker_id, incarnation=record.incarnation, address=record.address)
