"""The engine's settings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diptych.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine.

    Args:
        num_blocks: KV blocks of the pool; at most what the runner has.
        max_num_seqs: sequences that run or wait for remote KV at one time.
        max_num_batched_tokens: tokens of one step.
        max_step_time_s: caps a step's prefill chunk from the measured rate; None: only the token budget counts.
        initial_prefill_tokens_per_s: the first guess of that rate.
        slab_quota_per_peer: packed and not yet settled slabs that one decode peer may hold.
        check_invariants: walk the whole block pool after every step (tests).
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_step_time_s: float | None = 0.5
    initial_prefill_tokens_per_s: float = 150.0
    enable_prefix_caching: bool = True
    slab_quota_per_peer: int = 4
    check_invariants: bool = False

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "slab_quota_per_peer"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(name, value, "must be an integer of at least 1")
        limit = self.max_step_time_s
        if limit is not None and not (math.isfinite(limit) and limit > 0):
            raise ConfigError("max_step_time_s", limit, "must be a positive number of seconds, or None for no limit")
        rate = self.initial_prefill_tokens_per_s
        if not (math.isfinite(rate) and rate > 0):
            raise ConfigError("initial_prefill_tokens_per_s", rate, "must be a positive number")
