"""Statistics, audits and dumps of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from diptych.common.tiers import DISK, HOST, TierDump


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """free + running + cached + reserved == total. cached: in the prefix cache and not used by a request
    (evictable)."""

    total: int
    free: int
    running: int
    cached: int
    reserved: int


@dataclass(frozen=True, slots=True)
class EngineAudit:
    blocks: BlockCounts
    attempts: dict[str, int]
    """Number of attempts by state name."""
    slabs_held: int
    """Granted slabs that the step thread holds unused."""
    violations: tuple[str, ...] = ()
    more_blocks: tuple[BlockCounts, ...] = ()
    """Of the KV groups behind the first one."""


@dataclass(frozen=True, slots=True)
class CacheDump:
    epoch: int
    tiers: tuple[TierDump, ...]
    """By tier, as in common/tiers.py."""


AGE_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
    *(10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
"""Upper ends of the buckets of `Ages`."""


@dataclass(frozen=True, slots=True)
class Ages:
    """How often a time fell into each bucket; the last one has no upper end. `sum_s`: of all."""

    buckets: tuple[int, ...] = (0,) * (len(AGE_BUCKETS_S) + 1)
    sum_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BlockAgeStats:
    """Of blocks of the prefix cache: from entering it to eviction; of that, since the last request gave it back; and
    from being given back to the next hit."""

    lifetime: Ages = Ages()
    idle_before_evict: Ages = Ages()
    reuse_gap: Ages = Ages()


@dataclass(frozen=True, slots=True)
class TierStats:
    """A tier of KV blocks that this engine has.

    Args:
        used_bytes: in use: of the first tier by requests and the cache; num_bytes: its size.
        hit_tokens: prompt tokens whose KV was there, and in no nearer tier.
        evicted_blocks: to make room for others.
        dropped_blocks: that did not get into it in time.
        errors: (reason, blocks) that could not be written, or were not what they should be.
        served_tokens: whose KV other workers were offered from there.
    """

    name: str
    used_bytes: int
    num_bytes: int
    hit_tokens: int = 0
    evicted_blocks: int = 0
    dropped_blocks: int = 0
    errors: tuple[tuple[str, int], ...] = ()
    served_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ClaimStats:
    """Claims on cached blocks of the first KV group (engine.sched.cache.retention). In blocks; of the whole run, but
    for `by_rank`."""

    by_rank: tuple[tuple[int, int], ...] = ()
    """(rank of the tenant, blocks that are claimed now)."""
    made: int = 0
    expired: int = 0
    evicted: int = 0
    """Given up under pressure: everything unclaimed was evicted before."""
    over_share: int = 0
    """Given up since all claims together exceeded their share of the pool."""
    closed: int = 0
    """Ended with their session."""
    kept: int = 0
    """Hits on blocks that an eviction had passed over for their claim: one that was idle for less time was evicted."""


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """Of LoRA adapters.

    Args:
        resident: ids, in slots of the runner.
        running: (id, sequences that compute with it or wait for their KV).
        installs, evictions: into slots, and out of them for others, so far.
    """

    resident: tuple[str, ...] = ()
    running: tuple[tuple[str, int], ...] = ()
    installs: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot that any thread may read without a round trip to the step thread."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_remote: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    steps_ahead: int = 0
    """Of those, launched before the one before them had landed."""
    not_ahead: tuple[tuple[str, int], ...] = ()
    """On a device: (why, how often) a step waited for the last one's tokens."""
    busy_since: float | None = None
    """When the step that is now being computed began (monotonic); None when idle. Progress = steps rises or this is
    None."""
    prefill_tokens_per_s: float = 0.0
    """Measured online; 0.0: nothing measured yet."""
    decode_step_s: float = 0.0
    prompt_step_s: float = 0.0
    """Of a step that computes prompts."""
    poll_interval_s: float = 0.0
    """While it is busy: the interval at which the step thread looks for commands of pulls, which wait so long at most. That of a
    layer or a few where the runner reports layers, else of a step."""
    waiting_prompt_tokens: int = 0
    """Prompt tokens that are queued and not computed yet."""
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    computed_tokens_total: int = 0
    """Tokens of prompts (and of preempted requests) that were computed here, chunk by chunk."""
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    swaps_total: int = 0
    """Preemptions whose KV went to a lower tier; the others are computed again."""
    refetches_total: int = 0
    """Preempted requests that went back to a prefill worker."""
    restored_tokens_total: int = 0
    """Tokens whose KV came back from a lower tier's prefix cache."""
    pulled_tokens_total: int = 0
    """Tokens whose KV came into the prefix cache from another worker's."""
    tier_usage: tuple[tuple[str, float], ...] = ()
    """Part of each lower tier that is in use."""
    tiers: tuple[TierStats, ...] = ()
    """Those that this engine has, nearest first."""
    copy_bytes_per_s: float = 0.0
    """Between the pool and the tier that it swaps to, measured online."""
    disk_bytes_per_s: float = 0.0
    """From files into the pool, measured online."""
    block_ages: BlockAgeStats = BlockAgeStats()
    claims: ClaimStats = ClaimStats()
    adapters: AdapterStats = AdapterStats()
    alive: bool = True
    """False: the step thread has ended (a bug in it, or close); nothing will be answered but refusals. Not ready."""

    @property
    def tier_bytes_per_s(self) -> Mapping[str, float]:
        """Measured rates of copies to the pool, of each lower tier that has one."""
        return {HOST: self.copy_bytes_per_s, DISK: self.disk_bytes_per_s}
