"""A Submit message after all checks; the rest of decode trusts it."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.errors import InvalidRequestError, PromptTooLongError
from diptych.common.request import CacheClaim, Prompt
from diptych.common.sampling import MAX_CHOICES, SamplingParams
from diptych.decode.admission import FailurePolicy, Placement
from diptych.rpc import convert
from diptych.rpc.v1 import decode_pb2, router_pb2, types_pb2
from diptych.worker.incoming import Limits, check_addressed
from diptych.worker.reads.block_pulls import KvSource, parse_source
from diptych.worker.refs import WorkerRef

MAX_ATTEMPT_ID = 128
MAX_CANDIDATES = 16
MAX_KEY_BYTES, MAX_REF_CHARS = 64, 1024
"""Of what an attempt is found by, and of what is found."""

_POLICIES = {
    router_pb2.FAILURE_POLICY_UNSPECIFIED: FailurePolicy.RETRY,
    router_pb2.FAILURE_POLICY_RETRY: FailurePolicy.RETRY,
    router_pb2.FAILURE_POLICY_RECOMPUTE: FailurePolicy.RECOMPUTE,
    router_pb2.FAILURE_POLICY_FAIL: FailurePolicy.FAIL,
}


@dataclass(frozen=True, slots=True)
class Submission:
    attempt: str
    request_id: str
    prompt: Prompt
    adapter_folder: str
    """Where the prompt's adapter is loaded from by a worker that lacks it; empty: nowhere."""
    sampling: SamplingParams
    placement: Placement
    remaining_s: float
    policy: FailurePolicy
    priority: int = 0
    traceparent: str = ""
    """The router's trace context."""
    output_token_ids: tuple[int, ...] = ()
    """Tokens that the client already has."""
    choice: int = 0
    """Which choice they are of."""
    claim: CacheClaim | None = None
    idempotency: bytes = b""
    resume_ref: str = ""
    """What another router finds by it."""


def parse_submit(message: decode_pb2.Submit, limits: Limits) -> Submission:
    """Check everything in the message. Raises: InvalidRequestError or PromptTooLongError naming the field;
    StaleReferenceError when the placement names another incarnation of this worker."""
    target = message.placement.decode
    check_addressed(message.attempt, target, limits, max_attempt_id=MAX_ATTEMPT_ID)
    num_prompt = len(message.prompt_token_ids)
    if num_prompt >= limits.max_model_len:
        raise PromptTooLongError(
            f"the prompt has {num_prompt} tokens; the context of {limits.max_model_len} needs room for one more",
            param="prompt",
        )
    prompt = convert.prompt_from_proto(message, vocab_size=limits.vocab_size)
    outputs = convert.check_token_ids(message.output_token_ids, vocab_size=limits.vocab_size, param="output_token_ids")
    sampling = convert.sampling_from_proto(message.sampling, vocab_size=limits.vocab_size)
    if message.choice and not (outputs and sampling.num_choices == 1 and message.choice < MAX_CHOICES):
        raise InvalidRequestError(
            f"choice={message.choice} must be below {MAX_CHOICES}, and continue after tokens of one choice",
            param="choice",
        )
    policy = _POLICIES.get(message.failure_policy)
    if policy is None:
        raise InvalidRequestError(f"failure_policy {message.failure_policy} is unknown", param="failure_policy")
    if len(message.placement.prefill) > MAX_CANDIDATES:
        raise InvalidRequestError(f"at most {MAX_CANDIDATES} prefill candidates", param="placement.prefill")
    if len(message.idempotency) > MAX_KEY_BYTES:
        raise InvalidRequestError(f"idempotency has more than {MAX_KEY_BYTES} bytes", param="idempotency")
    if len(message.resume_ref) > MAX_REF_CHARS:
        raise InvalidRequestError(f"resume_ref has more than {MAX_REF_CHARS} characters", param="resume_ref")
    return Submission(
        attempt=message.attempt,
        request_id=message.request_id,
        prompt=prompt,
        adapter_folder=convert.adapter_folder_from_proto(message),
        sampling=sampling,
        placement=Placement(
            decode=_ref(target),
            prefill=tuple(_ref(ref) for ref in message.placement.prefill),
            local_prefill=message.placement.local_prefill,
            local_prefill_max_tokens=message.placement.local_prefill_max_tokens,
            prefill_source=_source(message.placement, "prefill_source"),
            decode_source=_source(message.placement, "decode_source"),
        ),
        remaining_s=convert.check_remaining(message.remaining_s),
        priority=message.priority,
        traceparent=message.traceparent,
        policy=policy,
        output_token_ids=outputs,
        choice=message.choice,
        claim=convert.claim_from_proto(message),
        idempotency=message.idempotency,
        resume_ref=message.resume_ref,
    )


def _source(placement: decode_pb2.Placement, name: str) -> KvSource | None:
    return parse_source(getattr(placement, name), f"placement.{name}") if placement.HasField(name) else None


def _ref(message: types_pb2.WorkerRef) -> WorkerRef:
    if not (message.worker_id and message.incarnation and message.address):
        raise InvalidRequestError("a worker reference has no id, incarnation or address", param="placement")
    return WorkerRef(message.worker_id, message.incarnation, message.address)
