"""Settings of `diptych serve`: one model, one process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diptych.common.addresses import loopback_beside
from diptych.common.degrees import Degrees
from diptych.common.errors import ConfigError
from diptych.router.config import RouterConfig, absolute_modules
from diptych.worker.config import AUTO, WorkerConfig

WORKER_ID = "local"
_WORKER = WorkerConfig()
"""Source of the defaults of a worker's settings."""
_ALWAYS_LOCAL = 2**31 - 1
_OF_HOSTS = ("cluster_ca", "cluster_cert", "cluster_key", "cluster_tls_name")


@dataclass(frozen=True)
class ServeConfig:
    """A router and a worker that computes prompts itself, in one process, without Redis.

    Args:
        model: a local Hugging Face folder, a GGUF file or a hub id; "" is the default model, fetched and converted once.
        served_model_name: the name clients use; "": the model's name.
        host: interface of the two servers.
        http_port: of the OpenAI API, the status page and /metrics of the router.
        grpc_port: of the SDK.
        metrics_host: interface of the worker's /metrics.
        metrics_port: port of the worker's /metrics; not set: off; 0: any free one.
        keys_file: API keys made by `diptych keys`.
        access_log: one log line per request: id, label, tenant, workers, tokens, times.
        cors_origins: web pages from there (scheme://host[:port], or "*" for all) may call the API from a browser.
        unknown_fields: of a body: "ignore" names them in the response header x-diptych-warning, "refuse" rejects them
            with 400.
        tls_cert: PEM file with the certificate of both servers; if set, clients must use TLS.
        tls_key: PEM file with the key of tls_cert.
        insecure: allow a `host` that other machines can reach without keys or TLS, and a `master_addr` without cluster_cert.
        device: cpu or cuda.
        dtype: of weights and computation: float32, float16, bfloat16, or auto: on a GPU the checkpoint's, on a CPU
            float32.
        kv_cache_dtype: of the KV cache: auto (dtype), or with a scale for each token and head: fp8_e4m3, fp8_e5m2 or int8.
        batch_invariant: a request's tokens are the same to the bit alone and beside others, from any cache, in chunks of
            any size; slower on a GPU.
        num_blocks: KV blocks; 0: as many as fit into kv_memory_bytes.
        kv_memory_bytes: KV pool, of all ranks together; 0: on a GPU by gpu_memory_utilization, else a share of the memory free
            at start.
        gpu_memory_utilization: share of the GPU's memory for weights, steps and KV together; of each rank's GPU.
        block_size: tokens per KV block.
        max_model_len: prompt and answer together, in tokens; 0: the model's.
        max_num_seqs: requests that run at once; 0: by the device (64 on a CPU, 256 on a GPU).
        max_num_batched_tokens: of one step; 0: by the device (512 on a CPU, 4,096 on a GPU).
        max_step_time_s: bound on a step's prefill; 0: only max_num_batched_tokens bounds it; not set: by the device
            (0.5 on a CPU, 0 on a GPU).
        mixed_step_time_s: the same for a step in which sequences decode; 0: as for any other step; not set: by the
            device (0.05 on a CPU, 0 on a GPU).
        max_mixed_prefill_tokens: prompt tokens of a step in which sequences decode; 0: by the device (512 on a GPU; on a CPU
            only time bounds them).
        enable_prefix_caching: keep the KV of computed blocks, for later prompts that begin alike.
        threads: torch threads; of several ranks together.
        tensor_parallel_size: ranks that divide each layer's heads and columns among themselves; each is a process, on a GPU of
            its own.
        pipeline_parallel_size: stages that divide the layers among themselves; each has tensor_parallel_size ranks.
        devices: the GPU of each rank of this host, as indices among those that CUDA shows: 0,1; two ranks may share one. Empty:
            the first ones.
        nnodes: hosts that the ranks are divided among. This server is node 0; each of the others runs `diptych rank`.
        master_addr: address of this host at which the others join, of a private network; with nnodes only. Not set:
            MASTER_ADDR.
        master_port: port for that; the one after it is used, too. Not set: MASTER_PORT, or 29500.
        join_timeout_s: until all hosts have joined.
        secret_file: the secret that all hosts have; with nnodes only.
        cluster_ca: PEM file with the CA for mTLS between the hosts.
        cluster_cert: PEM file with this host's certificate for it.
        cluster_key: PEM file with the key of cluster_cert.
        cluster_tls_name: name that all their certificates hold.
        rank_silence_s: seconds without a sign of life of any rank, while a step runs, after which the server gives up.
        scheduling_policy: sojourn (no request later than under equal shares), fcfs, priority, sjf or fair.
        enable_lora: serve LoRA adapters beside the model.
        max_loras: adapters on the device: those of one step.
        max_lora_rank: the largest rank of an adapter, up to 64.
        max_cpu_loras: adapters in host memory; the one used longest ago leaves first.
        lora_dir: folders that adapters are loaded from, and all folders in them; comma-separated, or the flag several times.
        lora_modules: NAME=FOLDER of adapters to load at the start, from these folders, or {"name": ..., "path": ...};
            comma-separated, or several flags.
        lora_load_timeout_s: for one load of an adapter, and for the requests that wait for it.
        tool_call_parser: hermes, llama3-json, mistral or a plug-in's name; "auto" chooses by the chat template, "none"
            rejects tools.
        reasoning_parser: "think" splits <think>...</think> from answers; "auto" chooses by the chat template, "none"
            does not.
        generation_config: "auto" takes sampling defaults from the model's generation_config.json, "none" does not.
        grammar_backend: auto, xgrammar, llguidance or none.
        grammar_warm_up: import the grammar libraries and start a process that compiles grammars before readiness, instead
            of at the first grammar.
        verify_weights: hash the model's files changed (where size, mtime or inode differ from the last start's) or always.
        drain_s: seconds that running requests may continue after SIGTERM.
    """

    model: str = ""
    served_model_name: str = ""
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 50050
    metrics_host: str = _WORKER.metrics_host
    metrics_port: int | None = None
    keys_file: Path | None = None
    access_log: bool = True
    cors_origins: tuple[str, ...] = ()
    unknown_fields: str = "ignore"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    device: str = "cpu"
    dtype: str = AUTO
    kv_cache_dtype: str = _WORKER.kv_cache_dtype
    batch_invariant: bool = _WORKER.batch_invariant
    num_blocks: int = 0
    kv_memory_bytes: int = 0
    gpu_memory_utilization: float = _WORKER.gpu_memory_utilization
    block_size: int = _WORKER.block_size
    max_model_len: int = 0
    max_num_seqs: int = _WORKER.max_num_seqs
    max_num_batched_tokens: int = _WORKER.max_num_batched_tokens
    max_step_time_s: float | None = _WORKER.max_step_time_s
    mixed_step_time_s: float | None = _WORKER.mixed_step_time_s
    max_mixed_prefill_tokens: int = _WORKER.max_mixed_prefill_tokens
    enable_prefix_caching: bool = _WORKER.enable_prefix_caching
    threads: int = 1
    tensor_parallel_size: int = _WORKER.tensor_parallel_size
    pipeline_parallel_size: int = _WORKER.pipeline_parallel_size
    devices: str = _WORKER.devices
    nnodes: int = _WORKER.nnodes
    master_addr: str = field(default="", metadata={"variable": "MASTER_ADDR", "with": "nnodes"})
    master_port: int = field(default=_WORKER.master_port, metadata={"variable": "MASTER_PORT", "with": "nnodes"})
    join_timeout_s: float = _WORKER.join_timeout_s
    secret_file: str = ""
    cluster_ca: str = ""
    cluster_cert: str = ""
    cluster_key: str = ""
    cluster_tls_name: str = ""
    rank_silence_s: float = _WORKER.rank_silence_s
    scheduling_policy: str = _WORKER.scheduling_policy
    enable_lora: bool = _WORKER.enable_lora
    max_loras: int = _WORKER.max_loras
    max_lora_rank: int = _WORKER.max_lora_rank
    max_cpu_loras: int = _WORKER.max_cpu_loras
    lora_dir: tuple[str, ...] = ()
    lora_modules: tuple[str, ...] = ()
    lora_load_timeout_s: float = _WORKER.lora_load_timeout_s
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    generation_config: str = "auto"
    grammar_backend: str = "auto"
    grammar_warm_up: bool = True
    verify_weights: str = _WORKER.verify_weights
    drain_s: float = 10.0

    def __post_init__(self) -> None:
        self.parts(model="", name="", secret_file="")
        if self.http_port == self.grpc_port != 0:
            raise ConfigError("grpc_port", self.grpc_port, "must differ from http_port")
        if self.metrics_port and self.metrics_port in (self.http_port, self.grpc_port):
            raise ConfigError("metrics_port", self.metrics_port, "must differ from http_port and grpc_port")
        if self.nnodes > 1 and not self.secret_file:
            raise ConfigError("secret_file", "", "is needed with nnodes: all hosts have the same one")
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("lora_modules", ", ".join(self.lora_modules), "needs enable_lora")

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.tensor_parallel_size, self.pipeline_parallel_size)

    def parts(self, *, model: str, name: str, secret_file: str) -> tuple[RouterConfig, WorkerConfig]:
        """Settings of router and worker. Raises: ConfigError naming the field."""
        own: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        own |= {"model": model, "served_model_name": name, "secret_file": secret_file}
        if self.nnodes == 1:  # what is said to the parts of a cluster, in variables, is not meant for this process
            own |= dict.fromkeys(_OF_HOSTS, "")

        def known(cls: type) -> dict[str, Any]:
            names = {field.name for field in dataclasses.fields(cls)}
            return {key: value for key, value in own.items() if key in names}

        router = RouterConfig(
            **known(RouterConfig)
            | {
                "max_model_len": self.max_model_len or None,
                "local_prefill_max_tokens": _ALWAYS_LOCAL,
                "require_prefill": False,
                "lora_modules": absolute_modules(self.lora_modules),
            }
        )
        inside = {
            "host": loopback_beside(self.host),
            "insecure": self.insecure and self.nnodes > 1,
            "role": "decode",
            "worker_id": WORKER_ID,
            "transport": "inproc",
        }
        return router, WorkerConfig(**known(WorkerConfig) | inside)
