"""Facts about one remote prefill."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.rpc.v1 import types_pb2


@dataclass(slots=True)
class RemotePrefillFacts:
    """For the explanation."""

    prefill_pid: int = 0
    converted: str = ""
    """How its KV was converted; empty: no conversion."""
    regrouped: str = ""
    """From which ranks to which it was put together; empty: rank by rank."""
    path: str = ""
    """Path of its slabs, for example "nixl:shm"."""
    cached_tokens: int = 0
    kept_tokens: int = 0
    """Of these, those that a claim has kept."""
    kv_bytes: int = 0
    kv_ranges: int = 0
    kv_ranges_overlapped: int = 0
    queue_s: float = 0.0
    """From the call until prefill started."""
    compute_s: float = 0.0
    """Compute time reported by prefill."""
    pulled: types_pb2.KvPull | None = None
    """What prefill took from another worker first."""
    tiers: list[types_pb2.TierTokens] = field(default_factory=list)
    """Of the cached tokens, those from lower tiers."""
