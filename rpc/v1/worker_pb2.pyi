from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]

class KvKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_KIND_UNSPECIFIED: _ClassVar[KvKind]
    KV_KIND_FULL: _ClassVar[KvKind]
    KV_KIND_WINDOW: _ClassVar[KvKind]
    KV_KIND_LATENT: _ClassVar[KvKind]
    KV_KIND_RECURRENT: _ClassVar[KvKind]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
KV_KIND_UNSPECIFIED: KvKind
KV_KIND_FULL: KvKind
KV_KIND_WINDOW: KvKind
KV_KIND_LATENT: KvKind
KV_KIND_RECURRENT: KvKind

class KvGroup(_message.Message):
    __slots__ = ("kind", "layers", "heads", "dims", "dtype", "block_size", "window", "scale_dtype", "part_dtypes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    DIMS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SCALE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    PART_DTYPES_FIELD_NUMBER: _ClassVar[int]
    kind: KvKind
    layers: _containers.RepeatedScalarFieldContainer[int]
    heads: int
    dims: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    block_size: int
    window: int
    scale_dtype: str
    part_dtypes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[_Union[KvKind, str]] = ..., layers: _Optional[_Iterable[int]] = ..., heads: _Optional[int] = ..., dims: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., window: _Optional[int] = ..., scale_dtype: _Optional[str] = ..., part_dtypes: _Optional[_Iterable[str]] = ...) -> None: ...

class KvFormat(_message.Message):
    __slots__ = ("groups", "shard_rank", "shard_degree", "order")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SHARD_RANK_FIELD_NUMBER: _ClassVar[int]
    SHARD_DEGREE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[KvGroup]
    shard_rank: int
    shard_degree: int
    order: str
    def __init__(self, groups: _Optional[_Iterable[_Union[KvGroup, _Mapping]]] = ..., shard_rank: _Optional[int] = ..., shard_degree: _Optional[int] = ..., order: _Optional[str] = ...) -> None: ...

class Compat(_message.Message):
    __slots__ = ("model", "model_revision", "tokenizer_revision", "attention_version", "sampler_version", "protocol_version", "block_identity_golden", "kv", "compute_dtype", "method", "backend", "kv_parts", "batch_invariant", "kv_encryption")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_REVISION_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDENTITY_GOLDEN_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    KV_PARTS_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    KV_ENCRYPTION_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_revision: str
    tokenizer_revision: str
    attention_version: str
    sampler_version: str
    protocol_version: int
    block_identity_golden: bytes
    kv: KvFormat
    compute_dtype: str
    method: str
    backend: str
    kv_parts: _containers.RepeatedCompositeFieldContainer[KvFormat]
    batch_invariant: bool
    kv_encryption: str
    def __init__(self, model: _Optional[str] = ..., model_revision: _Optional[str] = ..., tokenizer_revision: _Optional[str] = ..., attention_version: _Optional[str] = ..., sampler_version: _Optional[str] = ..., protocol_version: _Optional[int] = ..., block_identity_golden: _Optional[bytes] = ..., kv: _Optional[_Union[KvFormat, _Mapping]] = ..., compute_dtype: _Optional[str] = ..., method: _Optional[str] = ..., backend: _Optional[str] = ..., kv_parts: _Optional[_Iterable[_Union[KvFormat, _Mapping]]] = ..., batch_invariant: _Optional[bool] = ..., kv_encryption: _Optional[str] = ...) -> None: ...

class KvAddress(_message.Message):
    __slots__ = ("transport", "host", "port", "blob")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    transport: str
    host: str
    port: int
    blob: bytes
    def __init__(self, transport: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., blob: _Optional[bytes] = ...) -> None: ...

class ReleaseSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class ReleaseSessionResponse(_message.Message):
    __slots__ = ("freed_tokens",)
    FREED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    freed_tokens: int
    def __init__(self, freed_tokens: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("folder", "expected_id")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ID_FIELD_NUMBER: _ClassVar[int]
    folder: str
    expected_id: str
    def __init__(self, folder: _Optional[str] = ..., expected_id: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("id", "rank", "num_bytes", "base_model")
    ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    id: str
    rank: int
    num_bytes: int
    base_model: str
    def __init__(self, id: _Optional[str] = ..., rank: _Optional[int] = ..., num_bytes: _Optional[int] = ..., base_model: _Optional[str] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("found", "num_requests")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    found: bool
    num_requests: int
    def __init__(self, found: _Optional[bool] = ..., num_requests: _Optional[int] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "pid", "compat", "kv_address", "num_blocks", "max_model_len", "max_num_seqs", "transport_path", "transport_bytes_per_s", "version", "services", "request_fields", "max_loras", "max_lora_rank")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    COMPAT_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_PATH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELDS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: WorkerRole
    pid: int
    compat: Compat
    kv_address: KvAddress
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    transport_path: str
    transport_bytes_per_s: float
    version: str
    services: _containers.RepeatedScalarFieldContainer[str]
    request_fields: _containers.RepeatedScalarFieldContainer[str]
    max_loras: int
    max_lora_rank: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., pid: _Optional[int] = ..., compat: _Optional[_Union[Compat, _Mapping]] = ..., kv_address: _Optional[_Union[KvAddress, _Mapping]] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., transport_path: _Optional[str] = ..., transport_bytes_per_s: _Optional[float] = ..., version: _Optional[str] = ..., services: _Optional[_Iterable[str]] = ..., request_fields: _Optional[_Iterable[str]] = ..., max_loras: _Optional[int] = ..., max_lora_rank: _Optional[int] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "force")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: WorkerRole
    force: bool
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., force: _Optional[bool] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("previous",)
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    previous: WorkerRole
    def __init__(self, previous: _Optional[_Union[WorkerRole, str]] = ...) -> None: ...

class PreemptionCost(_message.Message):
    __slots__ = ("prefill_tokens_per_s", "copy_bytes_per_s", "kv_bytes_per_token", "swap_from_tokens", "tiers")
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    COPY_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SWAP_FROM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    prefill_tokens_per_s: float
    copy_bytes_per_s: float
    kv_bytes_per_token: int
    swap_from_tokens: float
    tiers: _containers.RepeatedCompositeFieldContainer[KvTier]
    def __init__(self, prefill_tokens_per_s: _Optional[float] = ..., copy_bytes_per_s: _Optional[float] = ..., kv_bytes_per_token: _Optional[int] = ..., swap_from_tokens: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[KvTier, _Mapping]]] = ...) -> None: ...

class KvTier(_message.Message):
    __slots__ = ("name", "num_bytes", "bytes_per_s", "eviction")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    EVICTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_bytes: int
    bytes_per_s: float
    eviction: str
    def __init__(self, name: _Optional[str] = ..., num_bytes: _Optional[int] = ..., bytes_per_s: _Optional[float] = ..., eviction: _Optional[str] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("full",)
    FULL_FIELD_NUMBER: _ClassVar[int]
    full: bool
    def __init__(self, full: _Optional[bool] = ...) -> None: ...

class BlockCounts(_message.Message):
    __slots__ = ("total", "free", "running", "cached", "reserved")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    running: int
    cached: int
    reserved: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., running: _Optional[int] = ..., cached: _Optional[int] = ..., reserved: _Optional[int] = ...) -> None: ...

class SlabCounts(_message.Message):
    __slots__ = ("total", "free", "packed", "in_flight", "settled", "quarantined")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    packed: int
    in_flight: int
    settled: int
    quarantined: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., packed: _Optional[int] = ..., in_flight: _Optional[int] = ..., settled: _Optional[int] = ..., quarantined: _Optional[int] = ...) -> None: ...

class AuditResponse(_message.Message):
    __slots__ = ("blocks", "slabs", "attempts", "violations", "kv_bytes_sent", "kv_bytes_received", "steps", "more_blocks")
    class AttemptsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MORE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: BlockCounts
    slabs: SlabCounts
    attempts: _containers.ScalarMap[str, int]
    violations: _containers.RepeatedScalarFieldContainer[str]
    kv_bytes_sent: int
    kv_bytes_received: int
    steps: int
    more_blocks: _containers.RepeatedCompositeFieldContainer[BlockCounts]
    def __init__(self, blocks: _Optional[_Union[BlockCounts, _Mapping]] = ..., slabs: _Optional[_Union[SlabCounts, _Mapping]] = ..., attempts: _Optional[_Mapping[str, int]] = ..., violations: _Optional[_Iterable[str]] = ..., kv_bytes_sent: _Optional[int] = ..., kv_bytes_received: _Optional[int] = ..., steps: _Optional[int] = ..., more_blocks: _Optional[_Iterable[_Union[BlockCounts, _Mapping]]] = ...) -> None: ...

class DumpBlocksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DumpBlocksResponse(_message.Message):
    __slots__ = ("epoch", "tiers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierBlocks]
    def __init__(self, epoch: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierBlocks, _Mapping]]] = ...) -> None: ...

class TierBlocks(_message.Message):
    __slots__ = ("tier", "sequence", "block_keys")
    TIER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    sequence: int
    block_keys: bytes
    def __init__(self, tier: _Optional[str] = ..., sequence: _Optional[int] = ..., block_keys: _Optional[bytes] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HostFacts(_message.Message):
    __slots__ = ("wall_clock_s", "cpus", "load_1m", "open_files", "max_open_files", "memlock_bytes", "shm_bytes", "shm_free_bytes", "rdma_devices", "rdma_missing", "hostname")
    WALL_CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    LOAD_1M_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    MAX_OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    MEMLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHM_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RDMA_DEVICES_FIELD_NUMBER: _ClassVar[int]
    RDMA_MISSING_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    wall_clock_s: float
    cpus: int
    load_1m: float
    open_files: int
    max_open_files: int
    memlock_bytes: int
    shm_bytes: int
    shm_free_bytes: int
    rdma_devices: _containers.RepeatedScalarFieldContainer[str]
    rdma_missing: _containers.RepeatedScalarFieldContainer[str]
    hostname: str
    def __init__(self, wall_clock_s: _Optional[float] = ..., cpus: _Optional[int] = ..., load_1m: _Optional[float] = ..., open_files: _Optional[int] = ..., max_open_files: _Optional[int] = ..., memlock_bytes: _Optional[int] = ..., shm_bytes: _Optional[int] = ..., shm_free_bytes: _Optional[int] = ..., rdma_devices: _Optional[_Iterable[str]] = ..., rdma_missing: _Optional[_Iterable[str]] = ..., hostname: _Optional[str] = ...) -> None: ...

class GpuFacts(_message.Message):
    __slots__ = ("name", "observed_s", "busy_s", "throttled_s", "power_watts", "power_limit_watts", "sm_clock_hz", "max_sm_clock_hz", "memory_used_bytes", "memory_total_bytes", "nvlinks", "nvlink_sent_bytes", "nvlink_received_bytes", "uuid")
    class ThrottledSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_S_FIELD_NUMBER: _ClassVar[int]
    POWER_WATTS_FIELD_NUMBER: _ClassVar[int]
    POWER_LIMIT_WATTS_FIELD_NUMBER: _ClassVar[int]
    SM_CLOCK_HZ_FIELD_NUMBER: _ClassVar[int]
    MAX_SM_CLOCK_HZ_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVLINKS_FIELD_NUMBER: _ClassVar[int]
    NVLINK_SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVLINK_RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    name: str
    observed_s: float
    busy_s: float
    throttled_s: _containers.ScalarMap[str, float]
    power_watts: float
    power_limit_watts: float
    sm_clock_hz: float
    max_sm_clock_hz: float
    memory_used_bytes: int
    memory_total_bytes: int
    nvlinks: int
    nvlink_sent_bytes: int
    nvlink_received_bytes: int
    uuid: str
    def __init__(self, name: _Optional[str] = ..., observed_s: _Optional[float] = ..., busy_s: _Optional[float] = ..., throttled_s: _Optional[_Mapping[str, float]] = ..., power_watts: _Optional[float] = ..., power_limit_watts: _Optional[float] = ..., sm_clock_hz: _Optional[float] = ..., max_sm_clock_hz: _Optional[float] = ..., memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., nvlinks: _Optional[int] = ..., nvlink_sent_bytes: _Optional[int] = ..., nvlink_received_bytes: _Optional[int] = ..., uuid: _Optional[str] = ...) -> None: ...

class ResidentAdapter(_message.Message):
    __slots__ = ("id", "rank", "num_bytes", "num_requests")
    ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    rank: int
    num_bytes: int
    num_requests: int
    def __init__(self, id: _Optional[str] = ..., rank: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_requests: _Optional[int] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("engine", "host", "transport_path", "transport_bytes_per_s", "link_bytes_per_s", "metrics_address", "settings", "uptime_s", "preemption", "gpu", "adapters")
    class EngineEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class LinkBytesPerSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_PATH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    engine: _containers.ScalarMap[str, float]
    host: HostFacts
    transport_path: str
    transport_bytes_per_s: float
    link_bytes_per_s: _containers.ScalarMap[str, float]
    metrics_address: str
    settings: _containers.ScalarMap[str, str]
    uptime_s: float
    preemption: PreemptionCost
    gpu: GpuFacts
    adapters: _containers.RepeatedCompositeFieldContainer[ResidentAdapter]
    def __init__(self, engine: _Optional[_Mapping[str, float]] = ..., host: _Optional[_Union[HostFacts, _Mapping]] = ..., transport_path: _Optional[str] = ..., transport_bytes_per_s: _Optional[float] = ..., link_bytes_per_s: _Optional[_Mapping[str, float]] = ..., metrics_address: _Optional[str] = ..., settings: _Optional[_Mapping[str, str]] = ..., uptime_s: _Optional[float] = ..., preemption: _Optional[_Union[PreemptionCost, _Mapping]] = ..., gpu: _Optional[_Union[GpuFacts, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[ResidentAdapter, _Mapping]]] = ...) -> None: ...
