from diptych.rpc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FetchRequest(_message.Message):
    __slots__ = ("attempt", "request_id", "block_keys", "cached_tokens", "source", "reader", "remaining_s", "ranks")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    request_id: str
    block_keys: bytes
    cached_tokens: int
    source: _types_pb2.WorkerRef
    reader: _types_pb2.WorkerRef
    remaining_s: float
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, attempt: _Optional[str] = ..., request_id: _Optional[str] = ..., block_keys: _Optional[bytes] = ..., cached_tokens: _Optional[int] = ..., source: _Optional[_Union[_types_pb2.WorkerRef, _Mapping]] = ..., reader: _Optional[_Union[_types_pb2.WorkerRef, _Mapping]] = ..., remaining_s: _Optional[float] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("attempt", "request_id", "prompt_token_ids", "output_token_ids", "sampling", "decode_cached_tokens", "want_kv", "prefill", "decode", "remaining_s", "cache_salt", "adapter", "adapter_folder", "first_token_mask", "priority", "layer_groups", "link_bytes_per_s", "reusable", "ranks", "source", "claim")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DECODE_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WANT_KV_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FOLDER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MASK_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    LAYER_GROUPS_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    REUSABLE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _types_pb2.SamplingParams
    decode_cached_tokens: int
    want_kv: bool
    prefill: _types_pb2.WorkerRef
    decode: _types_pb2.WorkerRef
    remaining_s: float
    cache_salt: bytes
    adapter: str
    adapter_folder: str
    first_token_mask: bytes
    priority: int
    layer_groups: bool
    link_bytes_per_s: float
    reusable: bool
    ranks: _containers.RepeatedScalarFieldContainer[int]
    source: _types_pb2.KvSource
    claim: _types_pb2.CacheClaim
    def __init__(self, attempt: _Optional[str] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., decode_cached_tokens: _Optional[int] = ..., want_kv: _Optional[bool] = ..., prefill: _Optional[_Union[_types_pb2.WorkerRef, _Mapping]] = ..., decode: _Optional[_Union[_types_pb2.WorkerRef, _Mapping]] = ..., remaining_s: _Optional[float] = ..., cache_salt: _Optional[bytes] = ..., adapter: _Optional[str] = ..., adapter_folder: _Optional[str] = ..., first_token_mask: _Optional[bytes] = ..., priority: _Optional[int] = ..., layer_groups: _Optional[bool] = ..., link_bytes_per_s: _Optional[float] = ..., reusable: _Optional[bool] = ..., ranks: _Optional[_Iterable[int]] = ..., source: _Optional[_Union[_types_pb2.KvSource, _Mapping]] = ..., claim: _Optional[_Union[_types_pb2.CacheClaim, _Mapping]] = ...) -> None: ...

class SlabHandle(_message.Message):
    __slots__ = ("worker_id", "incarnation", "attempt", "slab", "generation", "first_token", "num_tokens", "first_layer", "num_layers", "layout_hash", "size_bytes", "checksum", "expires_ns", "mac", "group", "part")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_NS_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    attempt: str
    slab: int
    generation: int
    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int
    layout_hash: int
    size_bytes: int
    checksum: int
    expires_ns: int
    mac: bytes
    group: int
    part: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., attempt: _Optional[str] = ..., slab: _Optional[int] = ..., generation: _Optional[int] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., layout_hash: _Optional[int] = ..., size_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., expires_ns: _Optional[int] = ..., mac: _Optional[bytes] = ..., group: _Optional[int] = ..., part: _Optional[int] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("cached_tokens", "pid", "pulled", "tiers", "kept_tokens")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    pid: int
    pulled: _types_pb2.KvPull
    tiers: _containers.RepeatedCompositeFieldContainer[_types_pb2.TierTokens]
    kept_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ..., pid: _Optional[int] = ..., pulled: _Optional[_Union[_types_pb2.KvPull, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[_types_pb2.TierTokens, _Mapping]]] = ..., kept_tokens: _Optional[int] = ...) -> None: ...

class Computed(_message.Message):
    __slots__ = ("first_token", "num_tokens", "handles")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    num_tokens: int
    handles: _containers.RepeatedCompositeFieldContainer[SlabHandle]
    def __init__(self, first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., handles: _Optional[_Iterable[_Union[SlabHandle, _Mapping]]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("choice", "token_id", "logprobs", "score")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_id: int
    logprobs: _types_pb2.TokenLogprobs
    score: float
    def __init__(self, choice: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_types_pb2.TokenLogprobs, _Mapping]] = ..., score: _Optional[float] = ...) -> None: ...

class ComputedFrom(_message.Message):
    __slots__ = ("num_tokens", "digest", "block_size")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    digest: bytes
    block_size: int
    def __init__(self, num_tokens: _Optional[int] = ..., digest: _Optional[bytes] = ..., block_size: _Optional[int] = ...) -> None: ...

class FirstTokens(_message.Message):
    __slots__ = ("tokens", "computed_from", "candidates", "num_ranges_overlapped", "compute_s")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FROM_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    NUM_RANGES_OVERLAPPED_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    computed_from: ComputedFrom
    candidates: _containers.RepeatedCompositeFieldContainer[FirstToken]
    num_ranges_overlapped: int
    compute_s: float
    def __init__(self, tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., computed_from: _Optional[_Union[ComputedFrom, _Mapping]] = ..., candidates: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., num_ranges_overlapped: _Optional[int] = ..., compute_s: _Optional[float] = ...) -> None: ...

class PrefillFinished(_message.Message):
    __slots__ = ("num_ranges",)
    NUM_RANGES_FIELD_NUMBER: _ClassVar[int]
    num_ranges: int
    def __init__(self, num_ranges: _Optional[int] = ...) -> None: ...

class PrefillAlive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("started", "computed", "first_tokens", "finished", "failure", "alive", "prompt_logprobs")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    started: PrefillStarted
    computed: Computed
    first_tokens: FirstTokens
    finished: PrefillFinished
    failure: _types_pb2.Failure
    alive: PrefillAlive
    prompt_logprobs: _types_pb2.PromptLogprobs
    def __init__(self, started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., computed: _Optional[_Union[Computed, _Mapping]] = ..., first_tokens: _Optional[_Union[FirstTokens, _Mapping]] = ..., finished: _Optional[_Union[PrefillFinished, _Mapping]] = ..., failure: _Optional[_Union[_types_pb2.Failure, _Mapping]] = ..., alive: _Optional[_Union[PrefillAlive, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_types_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...
