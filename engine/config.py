"""The engine's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from diptych.common.errors import ConfigError
from diptych.common.tiers import DEVICE, DISK, HOST, TIER_EVICTIONS

POLICIES = ("sojourn", "fcfs", "priority", "sjf", "fair")
PREEMPTION_MODES = ("auto", "recompute", "swap")
GRAMMAR_BACKENDS = ("auto", "xgrammar", "llguidance", "none")
"""Of structured output. auto: xgrammar, and llguidance for JSON schemas that xgrammar would not follow to the letter.
none: requests with a grammar are refused."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Their defaults are the workers' too (worker.config takes them from here).

    Args:
        num_blocks: KV blocks of the pool; at most what the runner has.
        max_num_seqs: sequences that run or wait for remote KV at one time.
        max_num_batched_tokens: tokens of one step.
        max_step_time_s: caps a step's prefill chunk from the measured rate; None: only the token budget counts.
        mixed_step_time_s: caps it where sequences decode in the same step and wait for it, but lets prompts have as
            long as their step takes alone; None: as any other step.
        max_mixed_prefill_tokens: prompt tokens of a step in which sequences decode; 0: as of any other step.
        initial_prefill_tokens_per_s: the first guess of that rate.
        long_prefill_token_threshold: prompt tokens of one request in one step; 0: no such cap.
        scheduling_policy: sojourn, fcfs, priority, sjf or fair; see engine.sched.batching.policies.
        sjf_aging_tokens_per_s: under sjf, the work that a second of waiting outweighs.
        tenant_cache_share: part of the pool that one tenant's cached blocks may take.
        claim_share: part of each tier that requests may claim, see engine.sched.cache.retention; 0: claims have no effect.
        num_host_blocks: slots of the host tier; at most what the runner has.
        num_disk_blocks: blocks in files; needs a BlockStore.
        tier_eviction: which blocks leave these two first, see engine.sched.cache.eviction.
        preemption_mode: auto (by measured cost), recompute or swap (recompute where the host tier is full).
        initial_copy_bytes_per_s: the first guess of the rate between pool and host tier.
        slab_quota_per_peer: packed and not yet settled slabs that one decode peer may hold.
        steps_ahead: launch a step before the last one's tokens are read, where the runner has a device for it.
        check_invariants: walk the whole block pool and every queue after every step (tests).
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_step_time_s: float | None = 0.5
    mixed_step_time_s: float | None = 0.05
    max_mixed_prefill_tokens: int = 0
    initial_prefill_tokens_per_s: float = 150.0
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "sojourn"
    sjf_aging_tokens_per_s: float = 50.0
    tenant_cache_share: float = 1.0
    claim_share: float = 0.25
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    tier_eviction: str = "lru"
    preemption_mode: str = "auto"
    initial_copy_bytes_per_s: float = 4e9
    slab_quota_per_peer: int = 4
    steps_ahead: bool = True
    check_invariants: bool = False

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "slab_quota_per_peer"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(name, value, "must be an integer of at least 1")
        for name in ("long_prefill_token_threshold", "max_mixed_prefill_tokens", "num_host_blocks", "num_disk_blocks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(name, value, "must be an integer of at least 0")
        for name, known in (
            ("scheduling_policy", POLICIES),
            ("preemption_mode", PREEMPTION_MODES),
            ("tier_eviction", TIER_EVICTIONS),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(name, getattr(self, name), f"must be one of {', '.join(known)}")
        if self.preemption_mode == "swap" and not self.num_host_blocks:
            raise ConfigError("preemption_mode", "swap", "needs a host tier: set num_host_blocks")
        if not 0.0 < self.tenant_cache_share <= 1.0:
            raise ConfigError("tenant_cache_share", self.tenant_cache_share, "must be above 0 and at most 1")
        if not 0.0 <= self.claim_share <= 1.0:
            raise ConfigError("claim_share", self.claim_share, "must be 0 to 1")
        for name in ("sjf_aging_tokens_per_s", "initial_copy_bytes_per_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(name, getattr(self, name), "must be a positive number")
        for name in ("max_step_time_s", "mixed_step_time_s"):
            limit = getattr(self, name)
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                raise ConfigError(name, limit, "must be a positive number of seconds, or None for no limit")
        rate = self.initial_prefill_tokens_per_s
        if not (math.isfinite(rate) and rate > 0):
            raise ConfigError("initial_prefill_tokens_per_s", rate, "must be a positive number")

    @property
    def tier_blocks(self) -> Mapping[str, int]:
        """Blocks of each tier, by its name in common.tiers: the only place where a tier meets its setting."""
        return {DEVICE: self.num_blocks, HOST: self.num_host_blocks, DISK: self.num_disk_blocks}
