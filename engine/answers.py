"""What the step thread answers when it is asked, and its snapshot that anybody reads. `engine.messages` names them too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """free + running + cached + reserved == total. cached: in the prefix cache and held by nobody (evictable)."""

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


@dataclass(frozen=True, slots=True)
class CacheDump:
    epoch: int
    sequence: int
    keys: tuple[bytes, ...]
    host_sequence: int = 0
    host_keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot that is read without asking the step thread."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_remote: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    busy_since: float | None = None
    """When the step that is now being computed began (monotonic); None when idle. Progress = steps rises or this is None."""
    prefill_tokens_per_s: float = 0.0
    """Measured online; 0.0: nothing measured yet."""
    decode_step_s: float = 0.0
    waiting_prompt_tokens: int = 0
    """Prompt tokens that are queued and not computed yet."""
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    computed_tokens_total: int = 0
    """Tokens of prompts (and of preempted requests) that were computed here, chunk by chunk."""
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    swaps_total: int = 0
    """Preemptions whose KV went to the host tier; the others are computed again."""
    refetches_total: int = 0
    """Preempted requests that went back to a prefill worker."""
    restored_tokens_total: int = 0
    """Tokens whose KV came back from the host tier's prefix cache."""
    host_usage: float = 0.0
    copy_bytes_per_s: float = 0.0
    """Between the pool and the host tier, measured online."""
    alive: bool = True
    """False: the step thread has ended (a bug in it, or close); nothing will be answered but refusals. Not ready."""
