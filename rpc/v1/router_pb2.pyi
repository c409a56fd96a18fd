from diptych.rpc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolChoice(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_CHOICE_UNSPECIFIED: _ClassVar[ToolChoice]
    TOOL_CHOICE_NONE: _ClassVar[ToolChoice]
    TOOL_CHOICE_AUTO: _ClassVar[ToolChoice]
    TOOL_CHOICE_REQUIRED: _ClassVar[ToolChoice]

class FailurePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_POLICY_UNSPECIFIED: _ClassVar[FailurePolicy]
    FAILURE_POLICY_FAIL: _ClassVar[FailurePolicy]
    FAILURE_POLICY_RECOMPUTE: _ClassVar[FailurePolicy]
    FAILURE_POLICY_RETRY: _ClassVar[FailurePolicy]
TOOL_CHOICE_UNSPECIFIED: ToolChoice
TOOL_CHOICE_NONE: ToolChoice
TOOL_CHOICE_AUTO: ToolChoice
TOOL_CHOICE_REQUIRED: ToolChoice
FAILURE_POLICY_UNSPECIFIED: FailurePolicy
FAILURE_POLICY_FAIL: FailurePolicy
FAILURE_POLICY_RECOMPUTE: FailurePolicy
FAILURE_POLICY_RETRY: FailurePolicy

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "model", "versions", "stable", "canary", "canary_share", "previous")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    STABLE_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    CANARY_SHARE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    versions: _containers.RepeatedCompositeFieldContainer[AdapterVersion]
    stable: int
    canary: int
    canary_share: float
    previous: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[AdapterVersion, _Mapping]]] = ..., stable: _Optional[int] = ..., canary: _Optional[int] = ..., canary_share: _Optional[float] = ..., previous: _Optional[int] = ...) -> None: ...

class AdapterVersion(_message.Message):
    __slots__ = ("number", "id", "folder", "rank", "num_bytes", "created", "other_base")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    OTHER_BASE_FIELD_NUMBER: _ClassVar[int]
    number: int
    id: str
    folder: str
    rank: int
    num_bytes: int
    created: int
    other_base: str
    def __init__(self, number: _Optional[int] = ..., id: _Optional[str] = ..., folder: _Optional[str] = ..., rank: _Optional[int] = ..., num_bytes: _Optional[int] = ..., created: _Optional[int] = ..., other_base: _Optional[str] = ...) -> None: ...

class AddAdapterRequest(_message.Message):
    __slots__ = ("name", "folder", "model", "in_place", "canary_share")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    CANARY_SHARE_FIELD_NUMBER: _ClassVar[int]
    name: str
    folder: str
    model: str
    in_place: bool
    canary_share: float
    def __init__(self, name: _Optional[str] = ..., folder: _Optional[str] = ..., model: _Optional[str] = ..., in_place: _Optional[bool] = ..., canary_share: _Optional[float] = ...) -> None: ...

class RemoveAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RouteAdapterRequest(_message.Message):
    __slots__ = ("name", "canary", "promote", "roll_back")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    PROMOTE_FIELD_NUMBER: _ClassVar[int]
    ROLL_BACK_FIELD_NUMBER: _ClassVar[int]
    name: str
    canary: AdapterCanary
    promote: AdapterPromotion
    roll_back: AdapterRollback
    def __init__(self, name: _Optional[str] = ..., canary: _Optional[_Union[AdapterCanary, _Mapping]] = ..., promote: _Optional[_Union[AdapterPromotion, _Mapping]] = ..., roll_back: _Optional[_Union[AdapterRollback, _Mapping]] = ...) -> None: ...

class AdapterCanary(_message.Message):
    __slots__ = ("version", "share")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    version: int
    share: float
    def __init__(self, version: _Optional[int] = ..., share: _Optional[float] = ...) -> None: ...

class AdapterPromotion(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdapterRollback(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class MoveRequest(_message.Message):
    __slots__ = ("request_id", "to")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    to: str
    def __init__(self, request_id: _Optional[str] = ..., to: _Optional[str] = ...) -> None: ...

class MoveResponse(_message.Message):
    __slots__ = ("before", "after", "num_tokens")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    before: str
    after: str
    num_tokens: int
    def __init__(self, before: _Optional[str] = ..., after: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class PlaceRequest(_message.Message):
    __slots__ = ("id", "request", "remaining_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    id: int
    request: GenerateRequest
    remaining_s: float
    def __init__(self, id: _Optional[int] = ..., request: _Optional[_Union[GenerateRequest, _Mapping]] = ..., remaining_s: _Optional[float] = ...) -> None: ...

class Placed(_message.Message):
    __slots__ = ("request_id", "model", "prompt_tokens", "attempt", "address", "tls", "ticket", "seed", "explanation", "adapter", "adapter_version")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt_tokens: int
    attempt: str
    address: str
    tls: bool
    ticket: bytes
    seed: int
    explanation: _types_pb2.Explanation
    adapter: str
    adapter_version: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., attempt: _Optional[str] = ..., address: _Optional[str] = ..., tls: _Optional[bool] = ..., ticket: _Optional[bytes] = ..., seed: _Optional[int] = ..., explanation: _Optional[_Union[_types_pb2.Explanation, _Mapping]] = ..., adapter: _Optional[str] = ..., adapter_version: _Optional[int] = ...) -> None: ...

class PlaceReply(_message.Message):
    __slots__ = ("id", "placed", "failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: int
    placed: Placed
    failure: _types_pb2.Failure
    def __init__(self, id: _Optional[int] = ..., placed: _Optional[_Union[Placed, _Mapping]] = ..., failure: _Optional[_Union[_types_pb2.Failure, _Mapping]] = ...) -> None: ...

class PlacementsRequest(_message.Message):
    __slots__ = ("places", "withdrawn")
    PLACES_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    places: _containers.RepeatedCompositeFieldContainer[PlaceRequest]
    withdrawn: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, places: _Optional[_Iterable[_Union[PlaceRequest, _Mapping]]] = ..., withdrawn: _Optional[_Iterable[int]] = ...) -> None: ...

class PlacementsResponse(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[PlaceReply]
    def __init__(self, replies: _Optional[_Iterable[_Union[PlaceReply, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("explanation", "outcome", "label", "prompt_tokens", "age_s")
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    explanation: _types_pb2.Explanation
    outcome: str
    label: str
    prompt_tokens: int
    age_s: float
    def __init__(self, explanation: _Optional[_Union[_types_pb2.Explanation, _Mapping]] = ..., outcome: _Optional[str] = ..., label: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class WhatIfRequest(_message.Message):
    __slots__ = ("request", "pool")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    request: GenerateRequest
    pool: str
    def __init__(self, request: _Optional[_Union[GenerateRequest, _Mapping]] = ..., pool: _Optional[str] = ...) -> None: ...

class WhatIfResponse(_message.Message):
    __slots__ = ("explanation", "prompt_tokens")
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    explanation: _types_pb2.Explanation
    prompt_tokens: int
    def __init__(self, explanation: _Optional[_Union[_types_pb2.Explanation, _Mapping]] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "reasoning", "tool_call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    reasoning: str
    tool_call_id: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., reasoning: _Optional[str] = ..., tool_call_id: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ..., strict: _Optional[bool] = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenIdsInput(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "prompt", "token_ids", "chat", "sampling", "request_id", "explain", "local_prefill_max_tokens", "failure_policy", "idempotency_key", "resume_after", "resume_id", "tools", "tool_choice", "tool_name", "single_tool_call", "split", "priority", "cache_ttl_s", "cache_priority", "session_id", "prefetch", "adapter", "adapter_version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_POLICY_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    RESUME_AFTER_FIELD_NUMBER: _ClassVar[int]
    RESUME_ID_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOOL_NAME_FIELD_NUMBER: _ClassVar[int]
    SINGLE_TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    token_ids: TokenIdsInput
    chat: ChatInput
    sampling: _types_pb2.SamplingParams
    request_id: str
    explain: bool
    local_prefill_max_tokens: int
    failure_policy: FailurePolicy
    idempotency_key: str
    resume_after: TokenIdsInput
    resume_id: str
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: ToolChoice
    tool_name: str
    single_tool_call: bool
    split: bool
    priority: int
    cache_ttl_s: float
    cache_priority: int
    session_id: str
    prefetch: bool
    adapter: str
    adapter_version: int
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIdsInput, _Mapping]] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., request_id: _Optional[str] = ..., explain: _Optional[bool] = ..., local_prefill_max_tokens: _Optional[int] = ..., failure_policy: _Optional[_Union[FailurePolicy, str]] = ..., idempotency_key: _Optional[str] = ..., resume_after: _Optional[_Union[TokenIdsInput, _Mapping]] = ..., resume_id: _Optional[str] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[_Union[ToolChoice, str]] = ..., tool_name: _Optional[str] = ..., single_tool_call: _Optional[bool] = ..., split: _Optional[bool] = ..., priority: _Optional[int] = ..., cache_ttl_s: _Optional[float] = ..., cache_priority: _Optional[int] = ..., session_id: _Optional[str] = ..., prefetch: _Optional[bool] = ..., adapter: _Optional[str] = ..., adapter_version: _Optional[int] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("freed_tokens", "unreached")
    FREED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_FIELD_NUMBER: _ClassVar[int]
    freed_tokens: int
    unreached: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, freed_tokens: _Optional[int] = ..., unreached: _Optional[_Iterable[str]] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("content", "reasoning", "call_start", "call_arguments")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    CALL_START_FIELD_NUMBER: _ClassVar[int]
    CALL_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    content: str
    reasoning: str
    call_start: CallStart
    call_arguments: CallArguments
    def __init__(self, content: _Optional[str] = ..., reasoning: _Optional[str] = ..., call_start: _Optional[_Union[CallStart, _Mapping]] = ..., call_arguments: _Optional[_Union[CallArguments, _Mapping]] = ...) -> None: ...

class CallStart(_message.Message):
    __slots__ = ("index", "id", "name")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class CallArguments(_message.Message):
    __slots__ = ("index", "text")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "model", "prompt_tokens", "seed", "resume_ref", "adapter", "adapter_version")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RESUME_REF_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt_tokens: int
    seed: int
    resume_ref: str
    adapter: str
    adapter_version: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., resume_ref: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_version: _Optional[int] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("offset", "token_ids", "text", "choice", "logprobs")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    choice: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    def __init__(self, offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., choice: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "stop_string", "stop_token_id", "usage", "explanation")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _types_pb2.FinishReason
    stop_string: str
    stop_token_id: int
    usage: _types_pb2.Usage
    explanation: _types_pb2.Explanation
    def __init__(self, finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., explanation: _Optional[_Union[_types_pb2.Explanation, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "tokens", "finished", "choice_finished", "prompt_logprobs", "pieces")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    started: Started
    tokens: TokenDelta
    finished: Finished
    choice_finished: _types_pb2.ChoiceFinished
    prompt_logprobs: _types_pb2.PromptLogprobs
    pieces: _containers.RepeatedCompositeFieldContainer[Piece]
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., tokens: _Optional[_Union[TokenDelta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., choice_finished: _Optional[_Union[_types_pb2.ChoiceFinished, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_types_pb2.PromptLogprobs, _Mapping]] = ..., pieces: _Optional[_Iterable[_Union[Piece, _Mapping]]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Model(_message.Message):
    __slots__ = ("id", "max_model_len", "created", "parent")
    ID_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    id: str
    max_model_len: int
    created: int
    parent: str
    def __init__(self, id: _Optional[str] = ..., max_model_len: _Optional[int] = ..., created: _Optional[int] = ..., parent: _Optional[str] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...
