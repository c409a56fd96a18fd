"""A worker's record in the store, as routers read it; values are parsed as untrusted."""

from __future__ import annotations

import msgspec

from diptych.common.tiers import TierState, sequences_of


class GpuLoad(msgspec.Struct, frozen=True):
    """A worker's GPU, at its last reading."""

    busy: float = 0.0
    """Share of the last sample in which a kernel ran, 0 to 1."""
    memory_usage: float = 0.0
    power_watts: float = 0.0
    sm_clock_hz: float = 0.0
    throttled: tuple[str, ...] = ()
    """Why its clocks are held down; empty: they are not."""


class WorkerLoad(msgspec.Struct, frozen=True):
    """Load and online-measured rates; 0.0: nothing measured yet."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_prompt_tokens: int = 0
    kv_usage: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    link_bytes_per_s: dict[str, float] = {}
    """Measured bytes/s of reads from each worker id."""
    pull_overhead_s: dict[str, float] = {}
    """Measured seconds of a pull from each worker id, beside the transfer of its bytes."""
    prompt_step_s: float = 0.0
    """Duration of a step that computes prompts, in seconds."""
    poll_interval_s: float = 0.0
    """While it is busy, how long a command of a pull waits for its engine at most; 0.0: an older version, where it waits for the
    running step."""
    gpu: GpuLoad | None = None
    """None: it computes on a CPU, or NVML does not answer."""
    adapters: dict[str, int] = {}
    """Id of each LoRA adapter that it has in memory -> requests that use it."""


class WorkerRecord(msgspec.Struct, frozen=True):
    """A worker under its lease. `compat` maps the Compat fields to strings (see common/compat.py)."""

    worker_id: str
    incarnation: str
    role: str  # "prefill" | "decode"
    address: str
    pid: int
    model: str
    compat: dict[str, str]
    kv_bytes_per_token: int
    """Of the layers that keep every token."""
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    event_epoch: int
    tiers: tuple[TierState, ...] = ()
    """Its tiers of KV blocks (common/tiers.py)."""
    state: str = "ready"
    """"ready", "stalled" (a step has been running for too long, see worker/liveness.py) or "draining"."""
    leaves_in_s: float = 0.0
    """While it drains: for how long it still serves reads of its KV; 0.0: it does not, as earlier versions."""
    load: WorkerLoad = WorkerLoad()
    kv_windows: tuple[tuple[int, int], ...] = ()
    """(window, bytes per token) of each group of layers that keep the last tokens only."""
    request_fields: tuple[str, ...] = ()
    """Fields of requests that it knows, later than the first version (worker/wire.py: REQUEST_FIELDS)."""
    max_loras: int = 0
    """LoRA adapters whose requests run in one step; 0: it serves none."""
    max_lora_rank: int = 0
    """The largest rank of an adapter that it serves."""
    tensor_parallel: int = 1
    """Ranks of each of its pipeline stages."""
    pipeline: int = 1
    """Its pipeline stages."""
    nodes: int = 1
    """Hosts that its ranks are on."""

    @property
    def event_sequences(self) -> tuple[int, ...]:
        """The last cache event of this epoch, by tier."""
        return sequences_of(self.tiers)
