from diptych.rpc.v1 import router_pb2 as _router_pb2
from diptych.rpc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TicketCommands(_message.Message):
    __slots__ = ("redeem", "cancel")
    REDEEM_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    redeem: _containers.RepeatedCompositeFieldContainer[Redeem]
    cancel: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, redeem: _Optional[_Iterable[_Union[Redeem, _Mapping]]] = ..., cancel: _Optional[_Iterable[str]] = ...) -> None: ...

class Redeem(_message.Message):
    __slots__ = ("attempt", "ticket", "remaining_s")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    ticket: bytes
    remaining_s: float
    def __init__(self, attempt: _Optional[str] = ..., ticket: _Optional[bytes] = ..., remaining_s: _Optional[float] = ...) -> None: ...

class TicketClaims(_message.Message):
    __slots__ = ("submit", "epoch")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    epoch: int
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class DirectEndpoint(_message.Message):
    __slots__ = ("address", "tls", "ticket_epoch")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    TICKET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    address: str
    tls: bool
    ticket_epoch: int
    def __init__(self, address: _Optional[str] = ..., tls: _Optional[bool] = ..., ticket_epoch: _Optional[int] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("submit", "cancel", "prepare", "resume")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    prepare: Prepare
    resume: Resume
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("attempt", "cache_salt")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    cache_salt: bytes
    def __init__(self, attempt: _Optional[str] = ..., cache_salt: _Optional[bytes] = ...) -> None: ...

class FindRequest(_message.Message):
    __slots__ = ("idempotency",)
    IDEMPOTENCY_FIELD_NUMBER: _ClassVar[int]
    idempotency: bytes
    def __init__(self, idempotency: _Optional[bytes] = ...) -> None: ...

class FindResponse(_message.Message):
    __slots__ = ("resume_ref",)
    RESUME_REF_FIELD_NUMBER: _ClassVar[int]
    resume_ref: str
    def __init__(self, resume_ref: _Optional[str] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("decode", "prefill", "local_prefill", "local_prefill_max_tokens", "prefill_source", "decode_source")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SOURCE_FIELD_NUMBER: _ClassVar[int]
    DECODE_SOURCE_FIELD_NUMBER: _ClassVar[int]
    decode: _types_pb2.WorkerRef
    prefill: _containers.RepeatedCompositeFieldContainer[_types_pb2.WorkerRef]
    local_prefill: bool
    local_prefill_max_tokens: int
    prefill_source: _types_pb2.KvSource
    decode_source: _types_pb2.KvSource
    def __init__(self, decode: _Optional[_Union[_types_pb2.WorkerRef, _Mapping]] = ..., prefill: _Optional[_Iterable[_Union[_types_pb2.WorkerRef, _Mapping]]] = ..., local_prefill: _Optional[bool] = ..., local_prefill_max_tokens: _Optional[int] = ..., prefill_source: _Optional[_Union[_types_pb2.KvSource, _Mapping]] = ..., decode_source: _Optional[_Union[_types_pb2.KvSource, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("attempt", "request_id", "prompt_token_ids", "sampling", "placement", "remaining_s", "cache_salt", "failure_policy", "adapter", "adapter_folder", "output_token_ids", "choice", "keep", "idempotency", "resume_ref", "claim", "traceparent", "priority")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_POLICY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FOLDER_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_FIELD_NUMBER: _ClassVar[int]
    RESUME_REF_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _types_pb2.SamplingParams
    placement: Placement
    remaining_s: float
    cache_salt: bytes
    failure_policy: _router_pb2.FailurePolicy
    adapter: str
    adapter_folder: str
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    choice: int
    keep: bool
    idempotency: bytes
    resume_ref: str
    claim: _types_pb2.CacheClaim
    traceparent: str
    priority: int
    def __init__(self, attempt: _Optional[str] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., remaining_s: _Optional[float] = ..., cache_salt: _Optional[bytes] = ..., failure_policy: _Optional[_Union[_router_pb2.FailurePolicy, str]] = ..., adapter: _Optional[str] = ..., adapter_folder: _Optional[str] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., choice: _Optional[int] = ..., keep: _Optional[bool] = ..., idempotency: _Optional[bytes] = ..., resume_ref: _Optional[str] = ..., claim: _Optional[_Union[_types_pb2.CacheClaim, _Mapping]] = ..., traceparent: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    def __init__(self, attempt: _Optional[str] = ...) -> None: ...

class StepBatch(_message.Message):
    __slots__ = ("events", "direct_endpoint", "ticket_status")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    DIRECT_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TICKET_STATUS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    direct_endpoint: DirectEndpoint
    ticket_status: _containers.RepeatedCompositeFieldContainer[TicketStatus]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., direct_endpoint: _Optional[_Union[DirectEndpoint, _Mapping]] = ..., ticket_status: _Optional[_Iterable[_Union[TicketStatus, _Mapping]]] = ...) -> None: ...

class TicketStatus(_message.Message):
    __slots__ = ("attempt", "first_token", "ended", "completion_tokens", "reason", "taken", "finished", "prefill_faults", "cached_tokens")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FAULTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    first_token: bool
    ended: bool
    completion_tokens: int
    reason: str
    taken: bool
    finished: _router_pb2.Finished
    prefill_faults: _containers.RepeatedCompositeFieldContainer[PrefillFault]
    cached_tokens: int
    def __init__(self, attempt: _Optional[str] = ..., first_token: _Optional[bool] = ..., ended: _Optional[bool] = ..., completion_tokens: _Optional[int] = ..., reason: _Optional[str] = ..., taken: _Optional[bool] = ..., finished: _Optional[_Union[_router_pb2.Finished, _Mapping]] = ..., prefill_faults: _Optional[_Iterable[_Union[PrefillFault, _Mapping]]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("attempt", "accepted", "tokens", "end", "choice_finished", "prompt_logprobs", "cached_tokens")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    accepted: Accepted
    tokens: _router_pb2.TokenDelta
    end: End
    choice_finished: _types_pb2.ChoiceFinished
    prompt_logprobs: _types_pb2.PromptLogprobs
    cached_tokens: int
    def __init__(self, attempt: _Optional[str] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., tokens: _Optional[_Union[_router_pb2.TokenDelta, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., choice_finished: _Optional[_Union[_types_pb2.ChoiceFinished, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_types_pb2.PromptLogprobs, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("grammar",)
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    grammar: _types_pb2.Grammar
    def __init__(self, grammar: _Optional[_Union[_types_pb2.Grammar, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillFault(_message.Message):
    __slots__ = ("worker_id", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    reason: str
    def __init__(self, worker_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("failure", "finished", "prefill_faults")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FAULTS_FIELD_NUMBER: _ClassVar[int]
    failure: _types_pb2.Failure
    finished: _router_pb2.Finished
    prefill_faults: _containers.RepeatedCompositeFieldContainer[PrefillFault]
    def __init__(self, failure: _Optional[_Union[_types_pb2.Failure, _Mapping]] = ..., finished: _Optional[_Union[_router_pb2.Finished, _Mapping]] = ..., prefill_faults: _Optional[_Iterable[_Union[PrefillFault, _Mapping]]] = ...) -> None: ...
