"""The processes of a local cluster, and their command lines."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from diptych.cli.up import embedded_redis
from diptych.cli.up.config import UpConfig
from diptych.cli.up.gpus import GpuAssignment
from diptych.cli.up.processes import free_port
from diptych.cli.up.run_folder import RunFolder
from diptych.cli.up.supervisor import ChildSpec
from diptych.common.addresses import host_port, loopback_beside, reachable
from diptych.common.errors import ConfigError
from diptych.common.secret import create_secret
from diptych.router.config import absolute_modules

WORKER_DRAIN_S = 1.0
"""Seconds that running requests get when a local cluster is stopped."""
# Router and workers are stopped together (a draining router waits for streams that the workers end), Redis after them.
_SERVING_GROUP, _REDIS_GROUP = range(2)


def diptych_command() -> list[str]:
    """The command line tool of this interpreter; -P keeps the current folder off sys.path."""
    return [sys.executable, "-P", "-m", "diptych.cli"]


def own_name(spec: str, folder: Path) -> str:
    """The default name of a served model: its hub id, else its folder's name (a hub snapshot's folder is named by a
    hash)."""
    is_hub_id = "/" in spec and not Path(spec).expanduser().exists()
    return spec if is_hub_id else folder.name


@dataclass(slots=True)
class ClusterPlan:
    config: UpConfig
    folder: RunFolder
    model_folder: Path
    model_name: str
    threads: int
    assignments: Mapping[str, GpuAssignment] = field(default_factory=dict)
    """Worker name -> its GPUs; empty on a CPU."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Child name -> address of its latest start."""
    metrics: dict[str, str] = field(default_factory=dict)
    """Worker name -> address of /metrics of its latest start."""

    def __post_init__(self) -> None:
        if not self.config.redis_url:
            embedded_redis.check_socket(self.folder.redis_socket)

    @property
    def loopback(self) -> str:
        """Listen address of the workers: loopback of the router's family, the only one that this host may
        have."""
        return loopback_beside(self.config.host)

    @property
    def redis_url(self) -> str:
        return self.config.redis_url or f"unix://{quote(str(self.folder.redis_socket))}"

    @property
    def secret_file(self) -> Path:
        # Absolute: the children run in the run folder.
        given = self.config.secret_file
        return self.folder.secret if given is None else given.expanduser().absolute()

    @property
    def probe_host(self) -> str:
        """Address at which this process reaches the router."""
        return reachable(self.config.host)

    @property
    def http_url(self) -> str:
        scheme = "http" if self.config.tls_cert is None else "https"
        return f"{scheme}://{host_port(self.probe_host, self.config.http_port)}"

    @property
    def grpc_address(self) -> str:
        return host_port(self.probe_host, self.config.grpc_port)

    @property
    def tls_files(self) -> dict[str, str]:
        """Files for the run folder's state."""
        files = _files(self.config, "tls_cert", "cluster_ca", "cluster_cert", "cluster_key")
        return {name.replace("-", "_"): str(file) for name, file in files.items()}

    def make_secret(self) -> None:
        """Where there is none. Raises: ConfigError."""
        try:
            create_secret(self.secret_file)
        except OSError as error:
            raise ConfigError("secret_file", str(self.secret_file), f"cannot be written: {error.strerror}") from None

    def redis_spec(self) -> ChildSpec:
        self.addresses["redis"] = str(self.folder.redis_socket)

        def command() -> list[str]:
            return embedded_redis.server_command(self.folder.redis_socket, self.folder.logs)

        return ChildSpec("redis", "redis", command, self._log("redis"), _REDIS_GROUP)

    def worker_specs(self) -> list[ChildSpec]:
        prefill = [self._worker(f"prefill-{i}", "prefill") for i in range(self.config.prefill_workers)]
        decode = [self._worker(f"decode-{i}", "decode") for i in range(self.config.decode_workers)]
        return [*prefill, *decode]

    def router_spec(self) -> ChildSpec:
        config = self.config
        self.addresses["router"] = self.http_url

        def command() -> list[str]:
            flags: dict[str, object] = {
                "host": config.host,
                "http-port": config.http_port,
                "grpc-port": config.grpc_port,
                "router-processes": config.router_processes if config.router_processes > 1 else None,
                "max-model-len": config.max_model_len,
                "local-prefill-max-tokens": config.local_prefill_max_tokens,
                **_files(config, "keys_file", "tls_cert", "tls_key"),
            }
            insecure = ["--insecure"] if config.insecure else []
            modules = [f"--lora-modules={entry}" for entry in absolute_modules(config.lora_modules)]
            more = shlex.split(config.router_args)
            return [*diptych_command(), "router", *self._common_flags(), *_flags(flags), *modules, *insecure, *more]

        return ChildSpec("router", "router", command, self._log("router"), _SERVING_GROUP, self._private)

    def _worker(self, name: str, role: str) -> ChildSpec:
        config = self.config
        assignment = self.assignments.get(name)
        env = self._private
        degrees = config.degrees(role)
        if assignment is not None:
            env |= {"CUDA_VISIBLE_DEVICES": ",".join(assignment.visible), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

        def command() -> list[str]:
            host = self.loopback
            port = free_port(host)
            self.addresses[name] = host_port(host, port)
            metrics_port = free_port(host)
            self.metrics[name] = host_port(host, metrics_port)
            flags: dict[str, object] = {
                "worker-id": name,
                "host": host,
                "port": port,
                "metrics-host": host,
                "metrics-port": metrics_port,
                "transport": config.transport or self._transport(),
                "kv-encryption": config.kv_encryption,
                "kv-store": config.kv_store,
                "block-size": config.block_size,
                "num-blocks": config.num_blocks,
                "max-model-len": config.max_model_len,
                "max-num-seqs": config.max_num_seqs,
                "max-num-batched-tokens": config.max_num_batched_tokens,
                "max-step-time-s": config.max_step_time_s,
                "dtype": config.dtype,
                "kv-cache-dtype": config.kv_cache_dtype,
                "device": config.device,
                "threads": config.threads_per_worker or self.threads * degrees.num_ranks,
                "verify-weights": config.verify_weights,
                "drain-s": WORKER_DRAIN_S,
            }
            if role == "decode":
                flags["client-port"] = 0
            flags |= _files(config, "disk_kv_dir")
            if assignment is not None:
                flags["gpu-memory-utilization"] = assignment.share
            if degrees.num_ranks > 1:
                flags["tensor-parallel-size"] = degrees.tensor_parallel
                flags["pipeline-parallel-size"] = degrees.pipeline
                if assignment is not None:
                    flags["devices"] = assignment.devices
            invariant = ["--batch-invariant"] if config.batch_invariant else []
            more = shlex.split(config.worker_args)
            own = [*_flags(flags), *invariant, *_lora_flags(config)]
            return [*diptych_command(), role, *self._common_flags(), *own, *more]

        return ChildSpec(name, role, command, self._log(name), _SERVING_GROUP, env)

    def _transport(self) -> str:
        """Workers that share one GPU can only connect by CUDA IPC within it; "auto" expects the peer on another GPU. Where one
        has several ranks, whose KV goes through host memory, so does that of its peers."""
        if not self.assignments:
            return ""
        # Imported here: they take numpy, which a plan without GPUs does without.
        if any(len(assignment.gpus) > 1 for assignment in self.assignments.values()):
            from diptych.worker.defaults import CPU

            return str(CPU["transport"])
        if len({assignment.visible for assignment in self.assignments.values()}) > 1:
            return ""
        from diptych.kvtransfer.fabric.registry import transport_for_a_shared_gpu

        return transport_for_a_shared_gpu()

    @property
    def _private(self) -> dict[str, str]:
        """Settings in the environment, where other users of the machine do not see them: the URL may hold a password."""
        return {"DIPTYCH_REDIS_URL": self.redis_url}

    def _common_flags(self) -> list[str]:
        flags = {
            "model": self.model_folder,
            "served-model-name": self.model_name,
            "secret-file": self.secret_file,
            **_files(self.config, "cluster_ca", "cluster_cert", "cluster_key", "redis_ca", "redis_cert", "redis_key"),
        }
        return ["--verbose", *_flags(flags)]  # their logs start with the settings

    def _log(self, name: str) -> Path:
        return self.folder.logs / f"{name}.log"


def _files(config: UpConfig, *names: str) -> dict[str, Path]:
    """Flags of given files; absolute, since the children run in the run folder."""
    given: dict[str, Path | None] = {name: getattr(config, name) for name in names}
    return {name.replace("_", "-"): file.expanduser().absolute() for name, file in given.items() if file is not None}


def _lora_flags(config: UpConfig) -> list[str]:
    """The worker's. Folders are absolute, since the children run in the run folder."""
    if not config.enable_lora:
        return []
    names = ("max-loras", "max-lora-rank", "max-cpu-loras")
    flags = _flags({name: getattr(config, name.replace("-", "_")) for name in names})
    folders = [str(Path(folder).expanduser().absolute()) for folder in config.lora_dir]
    return ["--enable-lora", *flags, *(f"--lora-dir={folder}" for folder in folders)]


def _flags(values: Mapping[str, object]) -> list[str]:
    """Flags of the settings that are set; 0 and "" mean the worker's default."""
    unset_when_zero = {"num-blocks", "max-model-len", "max-num-seqs", "max-num-batched-tokens"}
    found: list[str] = []
    for name, value in values.items():
        if value in ("", None) or (name in unset_when_zero and value == 0):
            continue
        found += [f"--{name}", str(value)]
    return found
