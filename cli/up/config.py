"""Settings of `diptych up`: one cluster on this machine."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from diptych.common.addresses import is_loopback
from diptych.common.checkpoint.modes import VERIFY_MODES
from diptych.common.degrees import MOST_RANKS, Degrees
from diptych.common.errors import ConfigError
from diptych.common.kv_format import COMPUTE_DTYPES, KV_CACHE_DTYPES
from diptych.kvtransfer.disk.store_address import StoreAddress
from diptych.kvtransfer.wrappers import ciphers
from diptych.router.config import MOST_PROCESSES, lora_modules
from diptych.worker.config import AUTO, MOST, WorkerConfig, check_lora
from diptych.worker.degrees import check_degrees, device_numbers
from diptych.worker.role_spec import ROLES

_WORKER = WorkerConfig()
"""Source of the defaults of a worker's settings."""
_OWN_FLAGS = {
    "router_args": ("--host", "--http-port", "--grpc-port"),
    "worker_args": ("--worker-id", "--host", "--port", "--metrics-host", "--metrics-port"),
}
"""Of routers and workers: where `up` looks for them. Given again there, it would wait for what does not come."""
_WORKERS_OWN = ("max_model_len", "num_blocks", "max_num_seqs", "max_num_batched_tokens")
"""as in kvtransfer.config, whose import would load numpy"""
DEVICES = ("cpu", "cuda")
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size")


@dataclass(frozen=True)
class UpConfig:
    """A cluster of local processes.

    Args:
        model: a local Hugging Face folder, a GGUF file or a hub id; "" is the default model, fetched and converted once.
        served_model_name: the name clients use; "": the model's name.
        host: interface of the router's two servers.
        http_port: of the OpenAI API, the status page and /metrics.
        grpc_port: of the SDK.
        router_processes: processes of the router, about one core each, behind the same two ports.
        prefill_workers: number of prefill processes.
        decode_workers: number of decode processes.
        local_prefill_max_tokens: decode computes prompts with at most this many uncached tokens itself; 0: never.
        max_model_len: prompt and answer together, in tokens; 0: the model's.
        block_size: tokens per KV block.
        max_num_seqs: requests that a worker runs at once; 0: the worker's default.
        max_num_batched_tokens: of one step of a worker; 0: the worker's default.
        max_step_time_s: bound on a step's prefill; 0: only max_num_batched_tokens bounds it; not set: the worker's
            default.
        dtype: of weights and computation: float32, float16, bfloat16, or auto: on GPUs the checkpoint's, on a CPU float32.
        kv_cache_dtype: of the KV cache: auto (dtype), or with a scale for each token and head: fp8_e4m3, fp8_e5m2 or int8.
        batch_invariant: a request's tokens are the same to the bit alone and beside others, from any cache, in chunks of
            any size, on any worker; slower on GPUs.
        enable_lora: serve LoRA adapters beside the model.
        max_loras: adapters on a worker's device: those of one step.
        max_lora_rank: the largest rank of an adapter, up to 64.
        max_cpu_loras: adapters in a worker's memory; the one used longest ago leaves first.
        lora_dir: folders that adapters are loaded from, and all folders in them; comma-separated, or the flag several times.
        lora_modules: NAME=FOLDER of adapters to load at the start, from these folders, or {"name": ..., "path": ...};
            comma-separated, or several flags.
        tensor_parallel_size: ranks of every worker, which divide each layer's heads and columns among themselves; each is a
            process, on a GPU of its own.
        pipeline_parallel_size: stages of every worker, which divide the layers; each has tensor_parallel_size ranks.
        prefill_tensor_parallel_size: tensor_parallel_size of prefill workers, where it is another; 0: the same.
        prefill_pipeline_parallel_size: pipeline_parallel_size of prefill workers; 0: the same.
        decode_tensor_parallel_size: tensor_parallel_size of decode workers; 0: the same.
        decode_pipeline_parallel_size: pipeline_parallel_size of decode workers; 0: the same.
        device: cpu or cuda; on cuda each rank of a worker gets one GPU; with fewer GPUs workers share memory.
        prefill_gpus: GPUs of the prefill workers, as indices among those that CUDA shows: 0 or 0,1; empty: automatic, with the
            best connection between the ranks of a worker.
        decode_gpus: GPUs of the decode workers, likewise; empty: automatic.
        keys_file: API keys made by `diptych keys`; the cluster's first request uses the one in DIPTYCH_API_KEY.
        tls_cert: PEM file with the certificate of both servers; if set, clients must use TLS.
        tls_key: PEM file with the key of tls_cert.
        cluster_ca: PEM file with the CA of the certificate for mTLS between router and workers.
        cluster_cert: PEM file with that certificate, of all processes; it names 127.0.0.1 (::1 where host is an IPv6
            address).
        cluster_key: PEM file with the key of cluster_cert.
        insecure: allow a `host` that other machines can reach without keys or TLS.
        redis_url: "" starts an embedded server.
        redis_ca: PEM file with the authority of Redis's certificate, for rediss:// and rediss+sentinel://; empty: the system's.
        redis_cert: PEM file with our certificate, where Redis asks for one.
        redis_key: PEM file with the key of redis_cert.
        secret_file: the cluster secret, written where the file is missing; None makes a new one for this run.
        disk_kv_dir: folder for files of KV blocks, which outlive the cluster and are used by the next one with the same
            secret_file; None: no such files.
        kv_store: instead of that folder, a store of blocks that all workers share, see `diptych decode`; empty: none.
        transport: of KV between the workers: ucx, nixl, ipc or ucx-gpu (GPUs), or auto: the best that passes its
            self-test; empty: ucx on a CPU, auto on GPUs.
        kv_encryption: cipher of KV between the workers: off, aes-gcm or chacha20-poly1305; not with ipc and ucx-gpu.
        num_blocks: KV blocks per worker; 0: by the memory that the worker finds.
        threads_per_worker: torch threads, of its ranks together; 0: one a rank while two workers share two cores, more on larger
            machines; affinity and a container's CPU quota count.
        verify_weights: hash the model's files changed (where size, mtime or inode differ from the last start's) or always.
        worker_args: further flags of `diptych prefill` and `diptych decode`, as one string.
        router_args: further flags of `diptych router`, as one string.
        startup_timeout_s: seconds from the first process started to the first token served.
    """

    model: str = ""
    served_model_name: str = ""
    host: str = "127.0.0.1"
    keys_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    cluster_ca: Path | None = None
    cluster_cert: Path | None = None
    cluster_key: Path | None = None
    insecure: bool = False
    http_port: int = 8000
    grpc_port: int = 50050
    redis_url: str = ""
    redis_ca: Path | None = None
    redis_cert: Path | None = None
    redis_key: Path | None = None
    secret_file: Path | None = None
    disk_kv_dir: Path | None = None
    kv_store: str = ""
    router_processes: int = 1
    prefill_workers: int = 1
    decode_workers: int = 1
    transport: str = ""
    kv_encryption: str = _WORKER.kv_encryption
    local_prefill_max_tokens: int = 64
    max_model_len: int = 0
    block_size: int = _WORKER.block_size
    num_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_step_time_s: float | None = _WORKER.max_step_time_s
    dtype: str = _WORKER.dtype
    kv_cache_dtype: str = _WORKER.kv_cache_dtype
    batch_invariant: bool = _WORKER.batch_invariant
    enable_lora: bool = _WORKER.enable_lora
    max_loras: int = _WORKER.max_loras
    max_lora_rank: int = _WORKER.max_lora_rank
    max_cpu_loras: int = _WORKER.max_cpu_loras
    lora_dir: tuple[str, ...] = ()
    lora_modules: tuple[str, ...] = ()
    tensor_parallel_size: int = _WORKER.tensor_parallel_size
    pipeline_parallel_size: int = _WORKER.pipeline_parallel_size
    prefill_tensor_parallel_size: int = 0
    prefill_pipeline_parallel_size: int = 0
    decode_tensor_parallel_size: int = 0
    decode_pipeline_parallel_size: int = 0
    device: str = "cpu"
    prefill_gpus: str = ""
    decode_gpus: str = ""
    threads_per_worker: int = 0
    verify_weights: str = _WORKER.verify_weights
    worker_args: str = ""
    router_args: str = ""
    startup_timeout_s: float = 180.0

    def __post_init__(self) -> None:
        for name in ("prefill_workers", "decode_workers"):
            if not 1 <= getattr(self, name) <= 64:
                raise ConfigError(name, getattr(self, name), "must be 1 to 64")
        if not 1 <= self.router_processes <= MOST_PROCESSES:
            raise ConfigError("router_processes", self.router_processes, f"must be 1 to {MOST_PROCESSES}")
        for name in ("http_port", "grpc_port"):
            if not 1 <= getattr(self, name) <= 65535:
                raise ConfigError(name, getattr(self, name), "must be 1 to 65535")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_key", self.tls_key, "tls_cert and tls_key must be set together")
        if not (is_loopback(self.host) or self.insecure or (self.keys_file and self.tls_cert)):
            rule = "other machines can reach it: set keys_file, tls_cert and tls_key, or --insecure if you must"
            raise ConfigError("host", self.host, rule)
        for name in ("redis_ca", "redis_cert", "redis_key"):
            if getattr(self, name) is not None and not self.redis_url.startswith("rediss"):
                raise ConfigError(name, str(getattr(self, name)), "needs a redis_url of rediss://")
        if self.kv_store:
            StoreAddress.parse(self.kv_store)
            if self.disk_kv_dir is not None:
                raise ConfigError("kv_store", self.kv_store, "replaces disk_kv_dir: set one of the two")
        for name in ("disk_kv_dir", "kv_store"):
            if getattr(self, name) and self.secret_file is None:
                rule = (
                    f"must be set with {name}: blocks are found under a secret, and without it each run has a new one"
                )
                raise ConfigError("secret_file", None, rule)
        if self.http_port == self.grpc_port:
            raise ConfigError("grpc_port", self.grpc_port, "must differ from http_port")
        for name in _WORKERS_OWN:
            if not 0 <= getattr(self, name) <= MOST[name]:
                raise ConfigError(name, getattr(self, name), f"must be 0 to {MOST[name]}")
        if self.max_model_len == 1:
            raise ConfigError("max_model_len", 1, "must be at least 2, a prompt and an answer of a token each, or 0")
        if not 1 <= self.block_size <= MOST["block_size"]:
            raise ConfigError("block_size", self.block_size, f"must be 1 to {MOST['block_size']}")
        if not 0 <= self.local_prefill_max_tokens < 2**31:
            raise ConfigError(
                "local_prefill_max_tokens", self.local_prefill_max_tokens, "must be 0 or more, below 2^31"
            )
        if not 0 <= self.threads_per_worker <= MOST["threads"]:
            raise ConfigError("threads_per_worker", self.threads_per_worker, f"must be 0 to {MOST['threads']}")
        if self.max_step_time_s is not None and self.max_step_time_s < 0:
            raise ConfigError("max_step_time_s", self.max_step_time_s, "must be 0 or more")
        for name, own in _OWN_FLAGS.items():
            try:
                words = shlex.split(getattr(self, name))
            except ValueError as error:
                raise ConfigError(name, getattr(self, name), f"cannot be split: {error}") from None
            for flag in (word.partition("=")[0] for word in words):
                if flag in own:
                    raise ConfigError(name, getattr(self, name), f"{flag} is chosen by `up` itself")
        for name, known in (
            ("dtype", (AUTO, *COMPUTE_DTYPES)),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("device", DEVICES),
            ("verify_weights", VERIFY_MODES),
            ("kv_encryption", ciphers.MODES),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(name, getattr(self, name), f"must be one of {', '.join(filter(None, known))}")
        for name in ("max_loras", "max_lora_rank", "max_cpu_loras"):
            if not 1 <= getattr(self, name) <= MOST[name]:
                raise ConfigError(name, getattr(self, name), f"must be 1 to {MOST[name]}")
        check_degrees(self.tensor_parallel_size, self.pipeline_parallel_size)
        for role in ROLES:
            for name in PARALLEL:
                if not 0 <= getattr(self, f"{role}_{name}") <= MOST_RANKS:
                    raise ConfigError(f"{role}_{name}", getattr(self, f"{role}_{name}"), f"must be 0 to {MOST_RANKS}")
            degrees = self.degrees(role)
            check_degrees(degrees.tensor_parallel, degrees.pipeline, f"{role}_")
        check_lora(self.enable_lora, self.max_loras, self.max_cpu_loras, self.lora_dir)
        if lora_modules(self.lora_modules) and not self.enable_lora:
            raise ConfigError("lora_modules", ", ".join(self.lora_modules), "needs enable_lora")
        if self.transport:
            # Imported here: it takes numpy, which other commands do without.
            from diptych.worker.ranks import check_transport

            check_transport(self.transport, self.device, max(self.degrees(role).num_ranks for role in ROLES))
        for name in ("prefill_gpus", "decode_gpus"):
            if self.gpu_numbers(name) and self.device != "cuda":
                raise ConfigError(name, getattr(self, name), "needs --device cuda")
        if not 0 < self.startup_timeout_s < 1e6:
            raise ConfigError("startup_timeout_s", self.startup_timeout_s, "must be above 0, and at most a few days")

    def gpu_numbers(self, name: str) -> tuple[int, ...]:
        """GPU numbers in prefill_gpus or decode_gpus. Raises: ConfigError."""
        return device_numbers(name, getattr(self, name))

    def degrees(self, role: str) -> Degrees:
        """Of each worker that begins with this role."""
        own = {name: getattr(self, f"{role}_{name}") or getattr(self, name) for name in PARALLEL}
        return Degrees(own["tensor_parallel_size"], own["pipeline_parallel_size"])

    def degree_setting(self, role: str, name: str) -> str:
        """The setting that decides about `name`, of PARALLEL, for this role."""
        return f"{role}_{name}" if getattr(self, f"{role}_{name}") else name

    @property
    def num_ranks(self) -> int:
        """Of all workers."""
        prefill, decode = self.degrees("prefill").num_ranks, self.degrees("decode").num_ranks
        return self.prefill_workers * prefill + self.decode_workers * decode

    @property
    def num_workers(self) -> int:
        return self.prefill_workers + self.decode_workers


def threads_for(config: UpConfig, cores: int, num_ranks: int = 1) -> int:
    """torch threads of a worker with so many ranks: the cores divided by all workers' ranks, at least one each; contended
    spinning threads are slower."""
    return config.threads_per_worker or max(1, cores // config.num_ranks) * num_ranks
