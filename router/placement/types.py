"""What a placement is: the question, the answer, and what each candidate was charged. Values only: nobody changes one once it is
made (they are not frozen because that would triple what making them costs, several times a request)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from diptych.common.worker_record import WorkerRecord


@dataclass(slots=True)
class WorkerView:
    """A worker that may be placed on, as the router knows it now.

    Args:
        hit_tokens: leading prompt tokens in its cache, already capped to what may be used.
        tier_tokens: those of them that are copied from a lower tier first, by its name.
        pending_tokens: prompt tokens that routers placed on it and that are not known to be computed.
        pending_requests: requests that routers placed on it and that have not ended.
        reported_at: when the record was read, on the caller's clock.
    """

    record: WorkerRecord
    hit_tokens: int = 0
    tier_tokens: tuple[tuple[str, int], ...] = ()
    pending_tokens: int = 0
    pending_requests: int = 0
    reported_at: float = 0.0

    @property
    def worker_id(self) -> str:
        return self.record.worker_id


@dataclass(slots=True)
class PlacementRequest:
    """Args:
    wants_kv: False when prefill's first token is the whole answer (max_tokens = 1): no KV is moved.
    local_prefill_max_tokens: 0: never local while a prefill worker is usable.
    allow_local_fallback: compute on decode, whatever the length, when no prefill worker is usable.
    group: of workers that may be taken, see router/placement/rollout.py.
    colocated_margin: compute on decode, whatever the length, where that is expected to be cheaper than every prefill worker by
        more than this part of its own cost and COLOCATED_SLACK_MS; infinite: never.
    affinity: names the session or prefix, for the policy that keeps those together.
    """

    num_prompt_tokens: int
    local_prefill_max_tokens: int
    wants_kv: bool = True
    allow_local_fallback: bool = True
    colocated_margin: float = math.inf
    affinity: bytes = b""
    group: str = "stable"


@dataclass(slots=True)
class Terms:
    """What one candidate was charged; `prefill` is None for local prefill on `decode`."""

    prefill: WorkerView | None
    decode: WorkerView
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_load_ms: float
    stall_ms: float

    @property
    def total_ms(self) -> float:
        return self.queue_ms + self.prefill_ms + self.transfer_ms + self.decode_load_ms + self.stall_ms

    @property
    def ttft_ms(self) -> float:
        """Predicted time to the first token: what stands before prefill's sampling, the hand-off's fixed price included."""
        return self.queue_ms + self.prefill_ms

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that nobody would have to compute: what decode has, and of the rest what prefill has."""
        return max(self.decode.hit_tokens, self.prefill.hit_tokens if self.prefill is not None else 0)


class Views(Protocol):
    """See ClusterSnapshot."""

    def view(self, index: int) -> WorkerView: ...

    def record(self, index: int) -> WorkerRecord: ...


@dataclass(slots=True)
class Placement:
    """The choice and all that it was chosen from; what is only looked at is made on demand.

    Args:
        order: indexes of the prefill workers in the order in which to try them; empty when none is usable.
        best: the cheapest candidates, cheapest first (None: all of them).
        policy: name of the policy that chose.
        colocated: decode computes the prompt, however long, because every pair would cost more than the margin.
    """

    chosen: Terms
    snapshot: Views = field(repr=False, compare=False)
    order: tuple[int, ...]
    best: Callable[[int | None], list[Terms]] = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()
    policy: str = "cost"
    colocated: bool = False

    @property
    def prefill(self) -> tuple[WorkerView, ...]:
        """The workers of `order`."""
        return tuple(self.snapshot.view(i) for i in self.order)

    @property
    def candidates(self) -> list[Terms]:
        return self.best(None)

    @property
    def decode(self) -> WorkerView:
        return self.chosen.decode

    @property
    def local_prefill(self) -> bool:
        return self.chosen.prefill is None


@dataclass(frozen=True, slots=True)
class Rejected:
    """Nobody can serve it; `reasons` for a human."""

    reasons: tuple[str, ...]


def usable_hit_tokens(hit_blocks: int, block_size: int, num_prompt_tokens: int) -> int:
    """Tokens of a hit that may be used: the last prompt token is always computed."""
    return block_size * min(hit_blocks, max(0, num_prompt_tokens - 1) // block_size)
