"""What one leg tells for the explanation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LegFacts:
    """For the explanation."""

    prefill_pid: int = 0
    converted: str = ""
    """How its KV was converted; empty: it lay as ours does."""
    path: str = ""
    """What its slabs came on, for example "nixl:shm"."""
    cached_tokens: int = 0
    kv_bytes: int = 0
    kv_ranges: int = 0
    kv_ranges_overlapped: int = 0
    queue_s: float = 0.0
    """From the call until prefill began."""
    compute_s: float = 0.0
    """What prefill says that its computing took."""
