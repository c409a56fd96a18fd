"""From a checked request and its placement to the message for decode. Pure."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from diptych.common.request import ADAPTER, ADAPTER_FOLDER, Prompt
from diptych.common.sampling import later_fields
from diptych.common.store.worker_record import WorkerRecord
from diptych.router.placement.adapters import AdapterNeed
from diptych.router.placement.cost import MAX_SPARES
from diptych.router.placement.types import Placement, PlacementRequest
from diptych.router.requests.messages import ValidatedRequest
from diptych.rpc.convert import claim_to_proto, prompt_fields, sampling_to_proto
from diptych.rpc.v1 import decode_pb2, router_pb2, types_pb2

COLOCATED_MARGIN = 1.0
"""A pair may be expected to cost at most twice the cheapest decode worker alone, plus a second."""
_MARGIN_S, _MARGIN_FRACTION = 0.05, 0.05


def prompt_so_far(request: ValidatedRequest) -> Prompt:
    """The prompt with the tokens that follow it already: their KV is needed as well, and a worker may hold it. (That of the
    last token is computed with the next one.)"""
    prompt, outputs = request.prompt, request.resume_after
    return msgspec.structs.replace(prompt, token_ids=(*prompt.token_ids, *outputs)) if outputs else prompt


def placement_request(request: ValidatedRequest) -> PlacementRequest:
    """The request's input to the placement."""
    return PlacementRequest(
        num_prompt_tokens=len(request.prompt.token_ids) + len(request.resume_after),
        local_prefill_max_tokens=request.local_prefill_max_tokens,
        needs_kv=request.sampling.max_tokens > 1,
        colocated_margin=COLOCATED_MARGIN,
        allow_local_fallback=request.failure_policy != router_pb2.FAILURE_POLICY_FAIL,
        group=request.group,
        tenant=request.tenant,
        request_fields=later_fields(request.sampling)
        | ({ADAPTER, ADAPTER_FOLDER} if request.prompt.adapter else set()),
        adapter=adapter_need(request),
    )


def adapter_need(request: ValidatedRequest) -> AdapterNeed | None:
    """What the request's adapter needs of a worker."""
    if request.adapter is None:
        return None
    version = request.adapter.version
    return AdapterNeed(version.adapter_id, version.rank, version.num_bytes)


def submit_of(
    request: ValidatedRequest,
    placement: Placement,
    attempt: str,
    left_s: float,
    traceparent: str = "",
    *,
    with_prompt: bool = True,
) -> decode_pb2.Submit:
    """The Submit message. `left_s`: until the request's deadline, above 0. Decode gets a little less, so that its typed
    end arrives before our timer. `with_prompt`: False: without its tokens."""
    record = placement.snapshot.record
    submit = decode_pb2.Submit(
        attempt=attempt,
        request_id=request.request_id,
        sampling=sampling_to_proto(request.sampling) if request.repeated is None else _repeated(request.repeated),
        placement=decode_pb2.Placement(
            decode=_ref(placement.decode.record),
            prefill=[_ref(record(index)) for index in placement.order[:MAX_SPARES]],
            local_prefill=placement.local_prefill,
            local_prefill_max_tokens=(
                len(request.prompt.token_ids) if placement.colocated else request.local_prefill_max_tokens
            ),
            **_sources(placement),
        ),
        remaining_s=left_s - min(_MARGIN_S, left_s * _MARGIN_FRACTION),
        priority=request.priority,
        claim=None if request.retention is None else claim_to_proto(request.retention.claim),
        output_token_ids=request.resume_after,
        failure_policy=request.failure_policy,  # type: ignore[arg-type]  # a number of that enum
        traceparent=traceparent,
        **prompt_fields(
            request.prompt,
            adapter_folder="" if request.adapter is None else request.adapter.version.folder,
            with_ids=with_prompt,
        ),
    )
    if request.repeated is not None:
        submit.sampling.seed = request.sampling.seed
    return submit


def _sources(placement: Placement) -> dict[str, types_pb2.KvSource]:
    """Where the worker that computes the prompt takes leading blocks from, by the name of the field."""
    pull = placement.chosen.pull
    if pull is None:
        return {}
    source = types_pb2.KvSource(
        holder=_ref(placement.snapshot.record(pull.holder)),
        num_tokens=pull.num_tokens,
        compute_s=pull.compute_ms / 1000.0,
    )
    return {"decode_source" if placement.local_prefill else "prefill_source": source}


def claims_of(request: ValidatedRequest, placement: Placement, attempt: str, left_s: float, epoch: int) -> bytes:
    """A TicketClaims, encoded. (Embedding a Submit message would copy it first.)"""
    packed = request.packed
    submit = submit_of(request, placement, attempt, left_s, request.traceparent, with_prompt=packed is None)
    body = submit.SerializeToString() + (b"" if packed is None else packed.as_prompt())
    return _SUBMIT + _size(len(body)) + body + decode_pb2.TicketClaims(epoch=epoch).SerializeToString()


_SUBMIT = bytes([decode_pb2.TicketClaims.SUBMIT_FIELD_NUMBER << 3 | 2])


def _size(number: int) -> bytes:
    """A length in protobuf's encoding."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_repeated = lru_cache(256)(sampling_to_proto)


def _ref(record: WorkerRecord) -> types_pb2.WorkerRef:
    return _made_ref(record.worker_id, record.incarnation, record.address)


@lru_cache(4096)
def _made_ref(worker_id: str, incarnation: str, address: str) -> types_pb2.WorkerRef:
    """Shared: embedding it copies it."""
    return types_pb2.WorkerRef(worker_id=worker_id, incarnation=incarnation, address=address)
