"""Settings of `diptych rank`: a host with ranks of a worker that runs on another one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from diptych.common.checkpoint.modes import CHANGED, VERIFY_MODES
from diptych.common.degrees import MOST_RANKS
from diptych.common.errors import ConfigError
from diptych.worker.degrees import MASTER_PORT, check_master, check_master_port, device_numbers


@dataclass(frozen=True, slots=True)
class RankConfig:
    """Settings of one host with ranks of a worker. The worker says everything that is not here.

    Args:
        master_addr: of the worker: its --master-addr, or a name of that address. Not set: MASTER_ADDR.
        master_port: of the worker. Not set: MASTER_PORT, or 29500.
        node_rank: this host's number, from 1 on: the worker is node 0. Not set: NODE_RANK.
        nnodes: hosts of the worker; if it is set (or NNODES is), the worker must have the same.
        model: the model's folder on this host; empty: the worker's path. Its content must be the worker's.
        tensor_parallel_size: if it is set, the worker must have the same.
        pipeline_parallel_size: likewise.
        devices: the GPU of each rank of this host, as indices among those that CUDA shows; empty: the first ones.
        threads: of each rank of this host; 0: as on the worker's.
        host: this host's address for the other ranks; empty: that from which the worker is reached.
        secret_file: the cluster secret, as the worker has it.
        cluster_ca: PEM file with the CA for mTLS, as of a worker.
        cluster_cert: PEM file with this host's certificate for it.
        cluster_key: PEM file with the key of cluster_cert.
        cluster_tls_name: name that the worker's certificate must hold; empty: master_addr.
        insecure: allow a worker on another machine without mTLS.
        join_timeout_s: until the worker answers.
        verify_weights: as of a worker: changed or always.
    """

    master_addr: str = field(default="", metadata={"variable": "MASTER_ADDR"})
    master_port: int = field(default=MASTER_PORT, metadata={"variable": "MASTER_PORT"})
    node_rank: int = field(default=0, metadata={"variable": "NODE_RANK"})
    nnodes: int = field(default=0, metadata={"variable": "NNODES"})
    model: str = ""
    tensor_parallel_size: int = 0
    pipeline_parallel_size: int = 0
    devices: str = ""
    threads: int = 0
    host: str = ""
    secret_file: str = ""
    cluster_ca: str = ""
    cluster_cert: str = ""
    cluster_key: str = ""
    cluster_tls_name: str = ""
    insecure: bool = False
    join_timeout_s: float = 600.0
    verify_weights: str = CHANGED

    def __post_init__(self) -> None:
        check_master_port(self.master_port)
        check_master(self.master_addr, secured=self.insecure or bool(self.cluster_cert))
        if not 1 <= self.node_rank < MOST_RANKS:
            rule = f"must be 1 to {MOST_RANKS - 1} (or NODE_RANK): node 0 is the worker, `diptych prefill` or `decode`"
            raise ConfigError("node_rank", self.node_rank, rule)
        for name in ("nnodes", "tensor_parallel_size", "pipeline_parallel_size"):
            if not 0 <= getattr(self, name) <= MOST_RANKS:
                raise ConfigError(name, getattr(self, name), f"must be 0 to {MOST_RANKS}")
        if self.nnodes and self.node_rank >= self.nnodes:
            raise ConfigError("node_rank", self.node_rank, f"must be below nnodes={self.nnodes}")
        if not 0 <= self.threads <= 1024:
            raise ConfigError("threads", self.threads, "must be 0 to 1024")
        device_numbers("devices", self.devices)
        if not 0 < self.join_timeout_s < math.inf:
            raise ConfigError("join_timeout_s", self.join_timeout_s, "must be a positive number of seconds")
        if self.verify_weights not in VERIFY_MODES:
            raise ConfigError("verify_weights", self.verify_weights, f"must be one of {', '.join(VERIFY_MODES)}")
        if not self.secret_file:
            raise ConfigError("secret_file", "", "is needed: this host proves to the worker that it has it")
