"""Settings of one worker process, prefill or decode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from diptych.common.addresses import is_loopback
from diptych.common.checkpoint.modes import CHANGED, VERIFY_MODES
from diptych.common.degrees import Degrees
from diptych.common.errors import ConfigError
from diptych.common.kv_format import COMPUTE_DTYPES, KV_CACHE_DTYPES, SAME_DTYPE
from diptych.common.tiers import TIER_EVICTIONS
from diptych.engine.config import GRAMMAR_BACKENDS, POLICIES, PREEMPTION_MODES, EngineConfig
from diptych.engine.overlap import MODES as OVERLAP_MODES
from diptych.kvtransfer.disk.store_address import StoreAddress
from diptych.kvtransfer.wrappers import ciphers
from diptych.worker.degrees import (
    MASTER_PORT,
    check_degrees,
    check_devices,
    check_master,
    check_master_port,
    check_nodes,
)
from diptych.worker.role_spec import DECODE, ROLES

T = TypeVar("T")
AUTO = "auto"
BACKENDS = (AUTO, "native", "torch", "triton")
_ENGINE = EngineConfig(num_blocks=1)
"""Source of the defaults of the engine's settings."""
MOST: Mapping[str, int] = {
    "block_size": 4096,
    "num_blocks": 2**31 - 1,
    "num_host_blocks": 2**31 - 1,
    "max_model_len": 2**31 - 1,
    "max_num_seqs": 65_536,
    "max_num_batched_tokens": 1 << 24,
    "max_mixed_prefill_tokens": 1 << 24,
    "long_prefill_token_threshold": 2**31 - 1,
    "threads": 1024,
    "slab_bytes": 1 << 30,
    "num_slabs": 65_536,
    "num_second_slabs": 65_536,
    "kv_memory_bytes": 1 << 50,
    "disk_kv_bytes": 1 << 60,
    "max_queue": 1 << 20,
    "max_loras": 256,
    "max_lora_rank": 64,
    "max_cpu_loras": 1024,
}
"""Larger numbers are typing errors: tables and tensors have 32-bit indexes."""


def check_lora(enable_lora: bool, max_loras: int, max_cpu_loras: int, lora_dir: tuple[str, ...]) -> None:
    """Raises: ConfigError for settings of adapters that do not fit together."""
    if "" in lora_dir:
        raise ConfigError("lora_dir", lora_dir, "must name folders")
    if enable_lora and not lora_dir:
        raise ConfigError("lora_dir", "", "must be set with enable_lora: adapters are loaded from these folders only")
    if lora_dir and not enable_lora:
        raise ConfigError("lora_dir", ", ".join(lora_dir), "needs enable_lora")
    if max_cpu_loras < max_loras:
        raise ConfigError("max_cpu_loras", max_cpu_loras, f"must be at least max_loras={max_loras}")


def model_folder(model: str) -> Path:
    """That of the setting. Raises: ConfigError for one that is none."""
    folder = Path(model)
    if not model or not folder.is_dir():
        raise ConfigError("model", model, "must be a local Hugging Face folder")
    return folder


def lora_folders(folders: Sequence[str]) -> tuple[Path, ...]:
    """Those of the setting. Raises: ConfigError for one that is none."""
    paths = tuple(Path(folder).expanduser().absolute() for folder in folders)
    for path in paths:
        if not path.is_dir():
            raise ConfigError("lora_dir", str(path), "is no folder")
    return paths


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of one worker process. Flat, so that every field is a flag.

    Args:
        model: local Hugging Face folder.
        served_model_name: the name clients use; empty: the folder's name.
        role: "prefill" or "decode": at the start; see WorkerRuntime.set_role.
        worker_id: unique in the cluster; a restart keeps it, with a new incarnation.
        host: interface of the gRPC server and, unless kv_host is set, of the KV transport. Use a private one: neither
            authenticates callers.
        port: of the gRPC server; 0: any free one.
        cluster_ca: PEM file with the CA for mTLS on every gRPC connection between routers and workers.
        cluster_cert: PEM file with this worker's certificate for it, which names the host of the worker's address, or
            cluster_tls_name.
        cluster_key: PEM file with the key of cluster_cert.
        cluster_tls_name: name that a peer's certificate must hold, if a pool with dynamic addresses shares one.
        insecure: allow other machines to reach this worker without mTLS.
        advertise_host: address of the gRPC server for peers; empty: host.
        kv_host: address of the interface of KV transfers, also for peers; empty: host.
        metrics_host: interface of /metrics, for Prometheus.
        metrics_port: port of /metrics; not set: off; 0: any free one.
        client_port: port for clients with a router's tickets (decode only); no port: off; 0: any free one.
        client_host: interface of client_port; empty: host.
        client_advertise_host: host of the address that clients get for client_port; empty: as for peers.
        client_tls_cert: PEM file with the certificate of client_port; if set, the port uses TLS only.
        client_tls_key: PEM file with the key of client_tls_cert.
        redis_url: empty: no store; routers cannot find the worker.
        redis_ca: PEM file with the authority of Redis's certificate, for rediss:// and rediss+sentinel://; empty: the system's.
        redis_cert: PEM file with our certificate, where Redis asks for one.
        redis_key: PEM file with the key of redis_cert.
        cluster: name of the cluster, a prefix of its keys in the store: several may share one.
        secret_file: the cluster secret, from which keys are derived.
        device: cpu or cuda.
        dtype: of weights and computation: float32, float16, bfloat16, or auto: on a GPU the checkpoint's, on a CPU
            float32.
        kv_cache_dtype: of the KV cache: auto (dtype), or with a scale for each token and head: fp8_e4m3, fp8_e5m2 or int8.
            Workers of a pair need the same.
        backend: kernels: native (C, compiled at the first start; CPU), torch, triton (GPU), or auto: by the device; on
            a CPU native if available, else torch with a warning.
        batch_invariant: a request's tokens are the same to the bit alone and beside others, from any cache, in chunks of
            any size, on prefill and decode; slower on a GPU. Workers of a pair must agree.
        num_blocks: KV blocks; 0: as many as fit into kv_memory_bytes.
        kv_memory_bytes: KV pool, of all ranks together; 0: on a GPU by gpu_memory_utilization, else a share of the memory free
            at start.
        gpu_memory_utilization: share of the GPU's memory for this worker's weights, steps, staging ring and KV
            together; of each rank's GPU.
        block_size: tokens per KV block.
        max_model_len: prompt and answer together, in tokens; 0: the model's.
        max_num_seqs: requests that run at once; 0: by the device (64 on a CPU, 256 on a GPU).
        max_num_batched_tokens: of one step; 0: by the device (512 on a CPU, 4,096 on a GPU).
        max_step_time_s: bound on a step's prefill; 0: only max_num_batched_tokens bounds it; not set: by the device
            (0.5 on a CPU, 0 on a GPU).
        mixed_step_time_s: the same for a step in which sequences decode; prompts get at least as long as decoding
            takes, and longer while more than 2 s of them wait. 0: as for any other step; not set: by the device (0.05
            on a CPU, 0 on a GPU).
        max_mixed_prefill_tokens: prompt tokens of a step in which sequences decode; 0: by the device (512 on a GPU, where
            such a step is one graph; on a CPU only time bounds them).
        threads: torch threads; of several ranks together.
        tensor_parallel_size: ranks that divide each layer's heads and columns among themselves; each is a process, on a GPU of
            its own.
        pipeline_parallel_size: stages that divide the layers among themselves; each has tensor_parallel_size ranks.
        devices: the GPU of each rank of this host, as indices among those that CUDA shows: 0,1; two ranks may share one. Empty:
            the first ones.
        nnodes: hosts that the ranks are divided among. This worker is node 0 and has the first ones; each of the others runs
            `diptych rank`.
        master_addr: address of this host at which the others join, of a private network; with nnodes only. Not set:
            MASTER_ADDR.
        master_port: port for that; the one after it is used, too. Not set: MASTER_PORT, or 29500.
        join_timeout_s: until all hosts have joined.
        rank_silence_s: seconds without a sign of life of any rank, while a step runs, after which the worker gives up.
        enable_prefix_caching: keep the KV of computed blocks, for later prompts that begin alike.
        scheduling_policy: sojourn (no prompt later than under equal shares), fcfs, priority, sjf (shortest job first,
            with aging) or fair (tokens by tenant).
        long_prefill_token_threshold: most prompt tokens of one request in one step; 0: no limit.
        tenant_cache_share: share of the pool for one tenant's cached blocks.
        steps_ahead: on a GPU, launch a decode step before the last one's tokens are read.
        claim_share: share of the pool, and of each tier below, that requests may claim by cache_ttl_s, cache_priority and
            sessions; 0: none.
        num_host_blocks: KV blocks in host memory for evicted and swapped-out blocks; 0: none.
        disk_kv_dir: folder for files of KV blocks, which outlive the worker: each worker has a folder of its own in it; empty:
            none. Whoever may read it can read prompts from it.
        disk_kv_bytes: of these files, at most; of a store, of the blocks in it that this worker knows.
        kv_store: instead of a folder, a store of blocks that all workers with the same model share: mooncake://HOST:PORT of a
            master, with ?protocol=, device=, metadata=, host= (this worker's address) and segment_bytes= (of its memory) if
            need be. Whoever may use the store can read prompts from it, and change answers.
        tier_eviction: which blocks leave host memory and files first: lru (used longest ago), or value (those whose reuse is
            least probable, by what was seen).
        preemption_mode: auto (by measured cost), recompute or swap.
        enable_lora: serve LoRA adapters beside the model.
        max_loras: adapters on the device: those of one step.
        max_lora_rank: the largest rank of an adapter, up to 64; each place on the device has room for it.
        max_cpu_loras: adapters in host memory; the one used longest ago leaves first.
        lora_dir: folders that adapters are loaded from, and all folders in them; comma-separated, or the flag several times.
        lora_load_timeout_s: for one load of an adapter, and for the requests that wait for it.
        grammar_backend: of structured output: auto (xgrammar, and llguidance for what xgrammar would only approximate),
            xgrammar, llguidance, or none, which rejects requests with a grammar.
        grammar_time_cap_s: CPU seconds for compiling one grammar; on a busy machine it may take six times as long.
        grammar_warm_up: import the grammar libraries and start a process that compiles grammars before readiness, instead
            of at the first grammar.
        transport: ucx, nixl, ipc (GPUs of one host), ucx-gpu (GPU memory over UCX), auto (the best that passes its
            self-test) or inproc (tests); empty: by the device (ucx on a CPU, auto on a GPU).
        require_transport: fail at the start unless the self-test found exactly this path, for example ucx:tcp.
        kv_encryption: cipher of KV between workers, with keys from the cluster secret: off, aes-gcm or chacha20-poly1305. Both
            workers of a pair need the same; not with ipc and ucx-gpu.
        slab_bytes: size of a slab of the staging ring, from which peers read KV; 0: by the device (4 MiB on a CPU; on a
            GPU the KV of 2,048 tokens).
        num_slabs: slabs of the staging ring; 0: by the device (8 on a CPU; on a GPU up to 16, within 8% of its memory).
        num_second_slabs: slabs of the ring for what this role does seldom: a decode worker publishes KV from them, a prefill
            worker reads into them. After a change of role they are what it mostly uses. 0: by the device (8
            on a CPU, where unused ones take no memory; 2 on a GPU).
        slab_lease_s: how long a packed slab waits for decode.
        read_base_s: deadline of a KV read, in addition to the time for its bytes.
        max_queue: requests held at once, running and waiting; more are rejected.
        lease_s: how long the worker stays in the store without a heartbeat.
        heartbeat_s: pause between two renewals of the worker's lease in the store.
        stall_bound_s: a step longer than this makes the worker NOT_SERVING.
        drain_s: seconds that running requests may continue after SIGTERM.
        detach_s: how long a decode worker goes on with an answer whose router is gone, for another router to continue, and
            keeps one that has ended; 0: it cancels such answers at once.
        handshake_timeout_s: for a peer's answer to GetInfo.
        leg_silence_s: seconds without a message after which decode gives up a prefill worker, which sends three times
            as often. The same on both sides.
        kv_overlap: whether prefill sends ranges, and layers of the last one, while later ones are computed: on, off, or
            auto, which sends those worth it by the measured rate of the link and cost of a message.
        allow_kv_conversion: decode accepts KV of prefill workers with another block size, KV dtype or order of heads,
            and converts it; such answers say so. With another dtype, tokens may differ from those of a single worker.
        verify_weights: hash the model's files changed (at a start where size, mtime or inode of one differ from the last
            start's) or always; what differs from the folder's own diptych-manifest.json is never served.
        verify_checksum: False only in tests.
        fault_corrupt_every: tests: flip a byte of every n-th received slab.
        fault_step_gates: tests: a folder where a file with this worker's name holds its steps, see worker.step_gate;
            empty: none.
        check_invariants: tests: walk the whole block pool after every step.
    """

    model: str = ""
    served_model_name: str = ""
    role: str = "decode"
    worker_id: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    cluster_ca: str = ""
    cluster_cert: str = ""
    cluster_key: str = ""
    cluster_tls_name: str = ""
    insecure: bool = False
    advertise_host: str = ""
    kv_host: str = ""
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    client_port: int | None = None
    client_host: str = ""
    client_advertise_host: str = ""
    client_tls_cert: str = ""
    client_tls_key: str = ""
    redis_url: str = ""
    redis_ca: str = ""
    redis_cert: str = ""
    redis_key: str = ""
    cluster: str = "diptych"
    secret_file: str = ""
    device: str = "cpu"
    dtype: str = AUTO
    kv_cache_dtype: str = SAME_DTYPE
    backend: str = AUTO
    batch_invariant: bool = False
    num_blocks: int = 0
    kv_memory_bytes: int = 0
    gpu_memory_utilization: float = 0.9
    block_size: int = _ENGINE.block_size
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_step_time_s: float | None = None
    mixed_step_time_s: float | None = None
    max_mixed_prefill_tokens: int = 0
    threads: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    devices: str = ""
    nnodes: int = 1
    master_addr: str = field(default="", metadata={"variable": "MASTER_ADDR", "with": "nnodes"})
    master_port: int = field(default=MASTER_PORT, metadata={"variable": "MASTER_PORT", "with": "nnodes"})
    join_timeout_s: float = 600.0
    rank_silence_s: float = 3.0
    enable_prefix_caching: bool = _ENGINE.enable_prefix_caching
    steps_ahead: bool = _ENGINE.steps_ahead
    scheduling_policy: str = _ENGINE.scheduling_policy
    long_prefill_token_threshold: int = _ENGINE.long_prefill_token_threshold
    tenant_cache_share: float = _ENGINE.tenant_cache_share
    claim_share: float = _ENGINE.claim_share
    num_host_blocks: int = _ENGINE.num_host_blocks
    disk_kv_dir: str = ""
    disk_kv_bytes: int = 16 << 30
    kv_store: str = ""
    tier_eviction: str = _ENGINE.tier_eviction
    preemption_mode: str = _ENGINE.preemption_mode
    enable_lora: bool = False
    max_loras: int = 8
    max_lora_rank: int = 16
    max_cpu_loras: int = 64
    lora_dir: tuple[str, ...] = ()
    lora_load_timeout_s: float = 30.0
    grammar_backend: str = "auto"
    grammar_time_cap_s: float = 5.0
    grammar_warm_up: bool = True
    transport: str = ""
    require_transport: str = ""
    kv_encryption: str = ciphers.OFF
    slab_bytes: int = 0
    num_slabs: int = 0
    num_second_slabs: int = 0
    slab_lease_s: float = 30.0
    read_base_s: float = 10.0
    max_queue: int = 512
    lease_s: float = 5.0
    heartbeat_s: float = 0.5
    stall_bound_s: float = 10.0
    drain_s: float = 30.0
    detach_s: float = 10.0
    handshake_timeout_s: float = 2.0
    leg_silence_s: float = 3.0
    kv_overlap: str = "auto"
    allow_kv_conversion: bool = False
    verify_weights: str = CHANGED
    verify_checksum: bool = True
    fault_corrupt_every: int = 0
    fault_step_gates: str = ""
    check_invariants: bool = False

    def __post_init__(self) -> None:
        self.check_role(self.role)
        if self.worker_id in (".", ".."):
            raise ConfigError("worker_id", self.worker_id, "is no name: folders are called by it")
        for name in ("port", "metrics_port", "client_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65_535:
                raise ConfigError(name, getattr(self, name), "must be between 0 and 65535")
        if self.client_port is not None and DECODE not in ROLES[self.role].services:
            raise ConfigError("client_port", self.client_port, "only decode workers serve clients")
        if self.client_port is not None and not self.secret_file:
            raise ConfigError("secret_file", "", "must be set: it verifies the tickets of client_port")
        if bool(self.client_tls_cert) != bool(self.client_tls_key):
            name = "client_tls_key" if self.client_tls_cert else "client_tls_cert"
            raise ConfigError(name, "", "must be set too: TLS needs a certificate and its key")
        for name in ("block_size", "threads", "max_queue", "max_loras", "max_lora_rank", "max_cpu_loras"):
            if not getattr(self, name) >= 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise ConfigError(name, getattr(self, name), f"must be at most {most}")
        for name, known in (
            ("scheduling_policy", POLICIES),
            ("preemption_mode", PREEMPTION_MODES),
            ("tier_eviction", TIER_EVICTIONS),
            ("dtype", (AUTO, *COMPUTE_DTYPES)),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("backend", BACKENDS),
            ("kv_overlap", OVERLAP_MODES),
            ("grammar_backend", GRAMMAR_BACKENDS),
            ("verify_weights", VERIFY_MODES),
            ("kv_encryption", ciphers.MODES),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(name, getattr(self, name), f"must be one of {', '.join(known)}")
        if self.kv_store:
            StoreAddress.parse(self.kv_store)
            if self.disk_kv_dir:
                raise ConfigError("kv_store", self.kv_store, "replaces disk_kv_dir: set one of the two")
        if self.preemption_mode == "swap" and not self.num_host_blocks:
            raise ConfigError("preemption_mode", "swap", "needs a host tier: set num_host_blocks")
        check_lora(self.enable_lora, self.max_loras, self.max_cpu_loras, self.lora_dir)
        check_degrees(self.tensor_parallel_size, self.pipeline_parallel_size)
        check_nodes(self.nnodes, self.degrees)
        check_master_port(self.master_port)
        if self.nnodes > 1:
            check_master(self.master_addr, secured=self.insecure or bool(self.cluster_cert))
        check_devices(self.devices, self.degrees.num_ranks // self.nnodes, self.device)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError("gpu_memory_utilization", self.gpu_memory_utilization, "must be above 0 and at most 1")
        if not 0.0 < self.tenant_cache_share <= 1.0:
            raise ConfigError("tenant_cache_share", self.tenant_cache_share, "must be above 0 and at most 1")
        if not 0.0 <= self.claim_share <= 1.0:
            raise ConfigError("claim_share", self.claim_share, "must be 0 to 1")
        for name in (
            "long_prefill_token_threshold",
            "num_host_blocks",
            "disk_kv_bytes",
            "num_blocks",
            "kv_memory_bytes",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_mixed_prefill_tokens",
            "max_step_time_s",
            "mixed_step_time_s",
            "slab_bytes",
            "num_slabs",
            "num_second_slabs",
            "drain_s",
            "detach_s",
            "fault_corrupt_every",
        ):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise ConfigError(name, getattr(self, name), "must be 0 or more")
        for name in (
            "slab_lease_s", "read_base_s", "lease_s", "heartbeat_s", "stall_bound_s", "handshake_timeout_s",
            "leg_silence_s", "grammar_time_cap_s", "lora_load_timeout_s", "rank_silence_s",
            "join_timeout_s",
        ):  # fmt: skip
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(name, getattr(self, name), "must be a positive number of seconds")
        if not (is_loopback(self.host) or self.insecure or self.cluster_cert):
            rule = (
                "other machines can reach it: set cluster_ca, cluster_cert and cluster_key, or --insecure if you must"
            )
            raise ConfigError("host", self.host, rule)
        if self.max_model_len == 1:
            raise ConfigError("max_model_len", 1, "must be at least 2, a prompt and an answer of a token each, or 0")
        if self.heartbeat_s >= self.lease_s:
            raise ConfigError("heartbeat_s", self.heartbeat_s, f"must be below lease_s={self.lease_s}")

    def check_role(self, role: str) -> None:
        """Raises: ConfigError when a worker with these settings cannot have the role."""
        if role not in ROLES:
            raise ConfigError("role", role, f"must be {' or '.join(ROLES)}")
        if ROLES[role].publishes and is_loopback(self.effective_kv_host) and not is_loopback(self.advertised_host):
            raise ConfigError(
                "kv_host",
                self.effective_kv_host,
                f"peers on other hosts get {self.advertised_host}, and cannot read KV from a loopback address: name one "
                "of this host",
            )

    def options(self, kind: type[T], **other: Any) -> T:
        """`kind`, a dataclass of options: each field from `other`, else the setting of the same name, else its default. So a
        setting reaches a package by a field of its name there. Raises: ConfigError, and TypeError for a field without a value."""
        mine = {field.name for field in fields(self)}
        shared = [field.name for field in fields(kind) if field.name in mine - other.keys()]  # type: ignore[arg-type]
        return kind(**{name: getattr(self, name) for name in shared}, **other)

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.tensor_parallel_size, self.pipeline_parallel_size)

    @property
    def kv_device(self) -> str:
        """Where this process packs and unpacks KV: KV of several ranks passes through host memory."""
        return self.device if self.degrees.num_ranks == 1 else "cpu"

    @property
    def advertised_host(self) -> str:
        return self.advertise_host or self.host

    @property
    def effective_kv_host(self) -> str:
        return self.kv_host or self.host

    @property
    def effective_worker_id(self) -> str:
        return self.worker_id or f"{self.role}-0"

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.model).name
