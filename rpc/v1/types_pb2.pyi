from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOPPING_UNSPECIFIED: _ClassVar[EarlyStopping]
    EARLY_STOPPING_ON: _ClassVar[EarlyStopping]
    EARLY_STOPPING_NEVER: _ClassVar[EarlyStopping]

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_KIND_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_SCHEMA: _ClassVar[GrammarKind]
    GRAMMAR_KIND_REGEX: _ClassVar[GrammarKind]
    GRAMMAR_KIND_CHOICE: _ClassVar[GrammarKind]
    GRAMMAR_KIND_EBNF: _ClassVar[GrammarKind]
    GRAMMAR_KIND_TAGS: _ClassVar[GrammarKind]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
EARLY_STOPPING_UNSPECIFIED: EarlyStopping
EARLY_STOPPING_ON: EarlyStopping
EARLY_STOPPING_NEVER: EarlyStopping
GRAMMAR_KIND_UNSPECIFIED: GrammarKind
GRAMMAR_KIND_JSON_SCHEMA: GrammarKind
GRAMMAR_KIND_REGEX: GrammarKind
GRAMMAR_KIND_CHOICE: GrammarKind
GRAMMAR_KIND_EBNF: GrammarKind
GRAMMAR_KIND_TAGS: GrammarKind
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "max_tokens", "ignore_eos", "stop_token_ids", "stop", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_word_ids", "min_tokens", "include_stop_str_in_output", "n", "best_of", "logprobs", "prompt_logprobs", "bad_words", "grammar", "beam_width", "length_penalty", "early_stopping")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_word_ids: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    min_tokens: int
    include_stop_str_in_output: bool
    n: int
    best_of: int
    logprobs: int
    prompt_logprobs: int
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    grammar: Grammar
    beam_width: int
    length_penalty: float
    early_stopping: EarlyStopping
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_word_ids: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., include_stop_str_in_output: _Optional[bool] = ..., n: _Optional[int] = ..., best_of: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., bad_words: _Optional[_Iterable[str]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., beam_width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "source", "free_until", "compact")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FREE_UNTIL_FIELD_NUMBER: _ClassVar[int]
    COMPACT_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    source: str
    free_until: str
    compact: bool
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., source: _Optional[str] = ..., free_until: _Optional[str] = ..., compact: _Optional[bool] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "top_token_ids", "top_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_token", "logprobs")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, first_token: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class ChoiceFinished(_message.Message):
    __slots__ = ("choice", "finish_reason", "stop_string", "stop_token_id", "completion_tokens")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    finish_reason: FinishReason
    stop_string: str
    stop_token_id: int
    completion_tokens: int
    def __init__(self, choice: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "reason", "message", "param", "retryable", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    param: str
    retryable: bool
    retry_after_s: float
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., retryable: _Optional[bool] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class WorkerRef(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class PlacementTerms(_message.Message):
    __slots__ = ("prefill_worker_id", "decode_worker_id", "queue_ms", "prefill_ms", "transfer_ms", "decode_load_ms", "stall_ms", "total_ms", "prefill_hit_tokens", "decode_hit_tokens", "chosen", "prefill_tiers", "decode_tiers", "pull", "adapter_ms")
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    STALL_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TIERS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TIERS_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_MS_FIELD_NUMBER: _ClassVar[int]
    prefill_worker_id: str
    decode_worker_id: str
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_load_ms: float
    stall_ms: float
    total_ms: float
    prefill_hit_tokens: int
    decode_hit_tokens: int
    chosen: bool
    prefill_tiers: _containers.RepeatedCompositeFieldContainer[TierTokens]
    decode_tiers: _containers.RepeatedCompositeFieldContainer[TierTokens]
    pull: PullTerms
    adapter_ms: float
    def __init__(self, prefill_worker_id: _Optional[str] = ..., decode_worker_id: _Optional[str] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., decode_load_ms: _Optional[float] = ..., stall_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., prefill_hit_tokens: _Optional[int] = ..., decode_hit_tokens: _Optional[int] = ..., chosen: _Optional[bool] = ..., prefill_tiers: _Optional[_Iterable[_Union[TierTokens, _Mapping]]] = ..., decode_tiers: _Optional[_Iterable[_Union[TierTokens, _Mapping]]] = ..., pull: _Optional[_Union[PullTerms, _Mapping]] = ..., adapter_ms: _Optional[float] = ...) -> None: ...

class PullTerms(_message.Message):
    __slots__ = ("holder", "first_token", "num_tokens", "pull_ms", "compute_ms", "pays_from_tokens")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PULL_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    PAYS_FROM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    holder: str
    first_token: int
    num_tokens: int
    pull_ms: float
    compute_ms: float
    pays_from_tokens: float
    def __init__(self, holder: _Optional[str] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., pull_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., pays_from_tokens: _Optional[float] = ...) -> None: ...

class TierTokens(_message.Message):
    __slots__ = ("tier", "tokens")
    TIER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    tokens: int
    def __init__(self, tier: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class RequestAttempt(_message.Message):
    __slots__ = ("decode", "prefill", "submitted_s", "num_tokens", "failure")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_S_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    decode: str
    prefill: str
    submitted_s: float
    num_tokens: int
    failure: str
    def __init__(self, decode: _Optional[str] = ..., prefill: _Optional[str] = ..., submitted_s: _Optional[float] = ..., num_tokens: _Optional[int] = ..., failure: _Optional[str] = ...) -> None: ...

class CacheClaim(_message.Message):
    __slots__ = ("ttl_s", "priority", "session", "rank")
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ttl_s: float
    priority: int
    session: bytes
    rank: int
    def __init__(self, ttl_s: _Optional[float] = ..., priority: _Optional[int] = ..., session: _Optional[bytes] = ..., rank: _Optional[int] = ...) -> None: ...

class CacheClaimReport(_message.Message):
    __slots__ = ("ttl_s", "requested_ttl_s", "priority", "session_id", "kept_tokens_prefill", "kept_tokens_decode")
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_TTL_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_PREFILL_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_DECODE_FIELD_NUMBER: _ClassVar[int]
    ttl_s: float
    requested_ttl_s: float
    priority: int
    session_id: str
    kept_tokens_prefill: int
    kept_tokens_decode: int
    def __init__(self, ttl_s: _Optional[float] = ..., requested_ttl_s: _Optional[float] = ..., priority: _Optional[int] = ..., session_id: _Optional[str] = ..., kept_tokens_prefill: _Optional[int] = ..., kept_tokens_decode: _Optional[int] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("prefill", "decode", "transport", "kv_bytes", "cached_tokens_prefill", "cached_tokens_decode", "kv_ranges", "kv_ranges_overlapped", "local_prefill", "index_mode", "notes", "candidates", "request_id", "prefill_pid", "decode_pid", "reserved_s", "first_token_s", "kv_complete_s", "policy", "predicted_ttft_s", "ttft_s", "predicted_cached_tokens", "cached_tokens", "total_s", "longest_gap_s", "prefill_queue_s", "prefill_compute_s", "backend", "attempts", "pulls", "cached_tiers_prefill", "cached_tiers_decode", "claim", "adapter")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_PREFILL_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_DECODE_FIELD_NUMBER: _ClassVar[int]
    KV_RANGES_FIELD_NUMBER: _ClassVar[int]
    KV_RANGES_OVERLAPPED_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    INDEX_MODE_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PID_FIELD_NUMBER: _ClassVar[int]
    DECODE_PID_FIELD_NUMBER: _ClassVar[int]
    RESERVED_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    KV_COMPLETE_S_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    LONGEST_GAP_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TIERS_PREFILL_FIELD_NUMBER: _ClassVar[int]
    CACHED_TIERS_DECODE_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    prefill: str
    decode: str
    transport: str
    kv_bytes: int
    cached_tokens_prefill: int
    cached_tokens_decode: int
    kv_ranges: int
    kv_ranges_overlapped: int
    local_prefill: bool
    index_mode: str
    notes: _containers.RepeatedScalarFieldContainer[str]
    candidates: _containers.RepeatedCompositeFieldContainer[PlacementTerms]
    request_id: str
    prefill_pid: int
    decode_pid: int
    reserved_s: float
    first_token_s: float
    kv_complete_s: float
    policy: str
    predicted_ttft_s: float
    ttft_s: float
    predicted_cached_tokens: int
    cached_tokens: int
    total_s: float
    longest_gap_s: float
    prefill_queue_s: float
    prefill_compute_s: float
    backend: str
    attempts: _containers.RepeatedCompositeFieldContainer[RequestAttempt]
    pulls: _containers.RepeatedCompositeFieldContainer[KvPull]
    cached_tiers_prefill: _containers.RepeatedCompositeFieldContainer[TierTokens]
    cached_tiers_decode: _containers.RepeatedCompositeFieldContainer[TierTokens]
    claim: CacheClaimReport
    adapter: AdapterReport
    def __init__(self, prefill: _Optional[str] = ..., decode: _Optional[str] = ..., transport: _Optional[str] = ..., kv_bytes: _Optional[int] = ..., cached_tokens_prefill: _Optional[int] = ..., cached_tokens_decode: _Optional[int] = ..., kv_ranges: _Optional[int] = ..., kv_ranges_overlapped: _Optional[int] = ..., local_prefill: _Optional[bool] = ..., index_mode: _Optional[str] = ..., notes: _Optional[_Iterable[str]] = ..., candidates: _Optional[_Iterable[_Union[PlacementTerms, _Mapping]]] = ..., request_id: _Optional[str] = ..., prefill_pid: _Optional[int] = ..., decode_pid: _Optional[int] = ..., reserved_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., kv_complete_s: _Optional[float] = ..., policy: _Optional[str] = ..., predicted_ttft_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., predicted_cached_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., total_s: _Optional[float] = ..., longest_gap_s: _Optional[float] = ..., prefill_queue_s: _Optional[float] = ..., prefill_compute_s: _Optional[float] = ..., backend: _Optional[str] = ..., attempts: _Optional[_Iterable[_Union[RequestAttempt, _Mapping]]] = ..., pulls: _Optional[_Iterable[_Union[KvPull, _Mapping]]] = ..., cached_tiers_prefill: _Optional[_Iterable[_Union[TierTokens, _Mapping]]] = ..., cached_tiers_decode: _Optional[_Iterable[_Union[TierTokens, _Mapping]]] = ..., claim: _Optional[_Union[CacheClaimReport, _Mapping]] = ..., adapter: _Optional[_Union[AdapterReport, _Mapping]] = ...) -> None: ...

class AdapterReport(_message.Message):
    __slots__ = ("name", "version", "id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    id: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., id: _Optional[str] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("holder", "num_tokens", "compute_s")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    holder: WorkerRef
    num_tokens: int
    compute_s: float
    def __init__(self, holder: _Optional[_Union[WorkerRef, _Mapping]] = ..., num_tokens: _Optional[int] = ..., compute_s: _Optional[float] = ...) -> None: ...

class KvPull(_message.Message):
    __slots__ = ("reader", "holder", "first_token", "num_tokens", "kv_bytes", "duration_s", "note", "other_bits", "source_tiers")
    READER_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    OTHER_BITS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TIERS_FIELD_NUMBER: _ClassVar[int]
    reader: str
    holder: str
    first_token: int
    num_tokens: int
    kv_bytes: int
    duration_s: float
    note: str
    other_bits: bool
    source_tiers: _containers.RepeatedCompositeFieldContainer[TierTokens]
    def __init__(self, reader: _Optional[str] = ..., holder: _Optional[str] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., duration_s: _Optional[float] = ..., note: _Optional[str] = ..., other_bits: _Optional[bool] = ..., source_tiers: _Optional[_Iterable[_Union[TierTokens, _Mapping]]] = ...) -> None: ...
