"""Request, result and candidate costs of a placement. The values are immutable by convention: frozen classes would
triple the cost of creating them, several times a request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

from diptych.common.store.worker_record import WorkerRecord
from diptych.router.placement.adapters import AdapterNeed
from diptych.router.placement.pulls import PlannedPull


@dataclass(slots=True)
class WorkerView:
    """A usable worker in the router's current view.

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
    """What to place.

    Args:
        needs_kv: False when prefill's first token is the whole answer (max_tokens = 1): no KV is transferred.
        local_prefill_max_tokens: 0: never local while a prefill worker is usable.
        allow_local_fallback: compute on decode, for any length, when no prefill worker is usable.
        group: group of workers, see router/placement/rollout.py.
        colocated_margin: compute on decode, for any length, if that is expected to be cheaper than every pair by more
            than this part of its cost and COLOCATED_SLACK_MS; infinite: never.
        affinity: the session or prefix, for the session affinity policy.
        tenant: workers compute prompts in equal shares by tenant.
        request_fields: later sampling parameters that it sets: decode must announce them.
        adapter: None: the base model answers.
    """

    num_prompt_tokens: int
    local_prefill_max_tokens: int
    needs_kv: bool = True
    allow_local_fallback: bool = True
    colocated_margin: float = math.inf
    affinity: bytes = b""
    group: str = "stable"
    tenant: str = ""
    request_fields: frozenset[str] = frozenset()
    adapter: AdapterNeed | None = None


@dataclass(slots=True)
class Terms:
    """The cost of one candidate; `prefill` is None for local prefill on `decode`. `adapter_ms`: see adapters.py, of both
    workers."""

    prefill: WorkerView | None
    decode: WorkerView
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_load_ms: float
    stall_ms: float
    pull: PlannedPull | None = None
    """By the worker that computes the prompt; prefill_ms has its time."""
    adapter_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        return (
            self.queue_ms + self.prefill_ms + self.transfer_ms + self.decode_load_ms + self.stall_ms + self.adapter_ms
        )

    @property
    def ttft_ms(self) -> float:
        """Predicted time to the first token, which is sent as soon as prefill knows it: it does not wait for KV."""
        return self.queue_ms + self.prefill_ms + self.adapter_ms

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that need no compute: those cached on decode, and of the rest those cached on prefill."""
        pulled = self.pull.num_tokens if self.pull is not None else 0
        return max(self.decode.hit_tokens, pulled, self.prefill.hit_tokens if self.prefill is not None else 0)

    @property
    def computed_from(self) -> int:
        """Leading prompt tokens that the worker which computes the prompt need not compute."""
        computes = self.prefill or self.decode
        return computes.hit_tokens if self.pull is None else self.pull.num_tokens


@dataclass(frozen=True, slots=True)
class WorkerName:
    """What remains of a worker's record in a placement of the past."""

    worker_id: str


class Views(Protocol):
    """See ClusterSnapshot."""

    def view(self, index: int) -> WorkerView: ...

    def record(self, index: int) -> WorkerRecord: ...


@dataclass(slots=True)
class Placement:
    """The choice and its inputs; details are computed on demand.

    Args:
        order: indexes of the prefill workers in the order in which to try them; empty when none is usable.
        best: the cheapest candidates, cheapest first (None: all of them).
        policy: name of the policy.
        colocated: decode computes the prompt, for any length, because every pair would cost more than the margin.
    """

    chosen: Terms
    snapshot: Views = field(repr=False, compare=False)
    order: tuple[int, ...]
    best: Callable[[int | None], list[Terms]] = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()
    policy: str = "cost"
    colocated: bool = False

    def without_records(self, most: int) -> Placement:
        """For an explanation, with the `most` cheapest candidates and the chosen one: of a request that has ended, the records
        of all workers as they were then would be kept only for this."""
        terms = self.best(most)
        if self.chosen not in terms:
            terms[-1:] = [self.chosen]
        holders = {
            one.pull.holder: self.snapshot.record(one.pull.holder).worker_id for one in terms if one.pull is not None
        }
        kept = [_without_records(one) for one in terms]
        return Placement(
            kept[terms.index(self.chosen)], _Names(holders), (), lambda most: kept[:most], self.notes, self.policy,
            self.colocated,
        )  # fmt: skip

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
class _Names:
    """See Views: names of some workers, by index."""

    names: dict[int, str]

    def view(self, index: int) -> WorkerView:
        return WorkerView(self.record(index))

    def record(self, index: int) -> WorkerRecord:
        return cast(WorkerRecord, WorkerName(self.names[index]))


def _without_records(terms: Terms) -> Terms:
    def named(view: WorkerView) -> WorkerView:
        return WorkerView(cast(WorkerRecord, WorkerName(view.worker_id)), view.hit_tokens, view.tier_tokens)

    prefill = None if terms.prefill is None else named(terms.prefill)
    return Terms(
        prefill, named(terms.decode), terms.queue_ms, terms.prefill_ms, terms.transfer_ms, terms.decode_load_ms,
        terms.stall_ms, terms.pull, terms.adapter_ms,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rejected:
    """No worker can serve the request; `reasons` in words."""

    reasons: tuple[str, ...]


def usable_hit_tokens(hit_blocks: int, block_size: int, num_prompt_tokens: int) -> int:
    """Tokens of a hit that may be used: the last prompt token is always computed."""
    return block_size * min(hit_blocks, max(0, num_prompt_tokens - 1) // block_size)
