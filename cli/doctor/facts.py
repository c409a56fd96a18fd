"""Input of `diptych doctor`: a cluster at two points in time, as plain values. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

UNLIMITED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Host:
    """See worker/host_facts.py. `clock_ahead_s`: relative to this machine's clock, with an error of at most
    `clock_error_s`."""

    hostname: str = ""
    cpus: int = 1
    load_1m: float = 0.0
    open_files: int = 0
    max_open_files: int = UNLIMITED
    memlock_bytes: int = UNLIMITED
    shm_bytes: int = 0
    shm_free_bytes: int = 0
    rdma_devices: tuple[str, ...] = ()
    rdma_missing: tuple[str, ...] = ()
    clock_ahead_s: float = 0.0
    clock_error_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A worker's GPU, since the worker started; None: it does not report this.

    Args:
        observed_s, busy_s, throttled_s: seconds: observed; with a kernel; with clocks held down, by reason.
        nvlinks: active links. nvlink_bytes: over them, both directions.
    """

    uuid: str = ""
    observed_s: float = 0.0
    busy_s: float = 0.0
    throttled_s: Mapping[str, float] = field(default_factory=dict)
    sm_clock_hz: float | None = None
    max_sm_clock_hz: float | None = None
    nvlinks: int | None = None
    nvlink_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker.

    Args:
        error: why it could not be queried; then everything from `path` on has its default.
        bytes_per_s: of the transport, from its self-test or measured since.
        links: decode: measured bytes/s by prefill worker.
        before, after: the engine's numbers by name, at the two points in time.
        settings: those that affect throughput, by name.
        gpu_before, gpu: its GPU, at the two points in time; None: there is none, or NVML does not answer.
        swap_from_tokens: tokens from which swapping is cheaper than recomputing; None: unknown or no host tier.
    """

    id: str
    role: str
    address: str = ""
    error: str = ""
    path: str = ""
    bytes_per_s: float = 0.0
    links: Mapping[str, float] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    host: Host = field(default_factory=Host)
    violations: tuple[str, ...] = ()
    slabs_total: int = 0
    slabs_quarantined: int = 0
    kv_bytes_per_token: int = 0
    swap_from_tokens: float | None = None
    gpu_before: Gpu | None = None
    gpu: Gpu | None = None

    def now(self, name: str) -> float:
        return self.after.get(name, 0.0)

    def rise(self, name: str) -> float:
        """Increase between the two points in time."""
        return self.after.get(name, 0.0) - self.before.get(name, 0.0)

    def setting(self, name: str, default: int) -> int:
        try:
            return int(float(self.settings.get(name, "")))
        except ValueError:
            return default

    @property
    def num_ranks(self) -> int:
        return self.setting("tensor_parallel_size", 1) * self.setting("pipeline_parallel_size", 1)

    @property
    def num_nodes(self) -> int:
        return max(1, self.setting("nnodes", 1))

    @property
    def ranks_here(self) -> int:
        """Those on the host of the worker's process."""
        return self.num_ranks // self.num_nodes

    @property
    def on_gpu(self) -> bool:
        return self.settings.get("device", "cpu").startswith("cuda")


@dataclass(frozen=True, slots=True)
class Facts:
    """A cluster at two points in time. `status`: the router's /status.json. `workers`: none where router and worker are one
    process. `interval_s`: seconds between the two points."""

    status: Mapping[str, Any]
    workers: Sequence[Worker]
    interval_s: float = 3.0

    @property
    def answering(self) -> list[Worker]:
        """Workers that answered."""
        return [worker for worker in self.workers if not worker.error]

    def of(self, role: str) -> list[Worker]:
        return [worker for worker in self.answering if worker.role == role]

    def total(self, name: str, role: str | None = None) -> float:
        return sum(worker.now(name) for worker in self.answering if role in (None, worker.role))

    def stage(self, name: str, quantile: str = "p50") -> float | None:
        """Seconds of one stage of the last requests; None: there was no request."""
        value = self.status.get("stages", {}).get(name, {}).get(quantile)
        return None if value is None else float(value)

    def samples(self, name: str) -> int:
        """How many of the last requests had this stage."""
        return int(self.status.get("stages", {}).get(name, {}).get("count", 0))

    def counter(self, name: str) -> dict[str, float]:
        """A counter of the router by label."""
        return dict(self.status.get("counters", {}).get(name, {}))

    @property
    def one_process(self) -> bool:
        """Router and worker are one process (`diptych serve`), whose worker no one else may call."""
        return bool(self.status.get("one_process"))

    @property
    def cluster(self) -> Mapping[str, Any]:
        return self.status.get("cluster") or {}
