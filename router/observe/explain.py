"""The explanation of an answer: decode's facts and the router's placement in one object. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.common.store.adapters import ChosenAdapter
from diptych.router.placement.index import IndexMode
from diptych.router.placement.pulls import PlannedPull
from diptych.router.placement.types import Placement, Terms, WorkerView
from diptych.router.requests.messages import Retention
from diptych.rpc.v1 import types_pb2

_MAX_CANDIDATES = 32
_KEPT_CANDIDATES = 8
"""Of a request that has ended."""


@dataclass(slots=True)
class RequestTrace:
    """The router's data about one request, filled while it runs.

    Args:
        notes: deviations from the plan at the router, before decode's notes.
        facts: decode's part, once it has ended well.
        ttft_s: from the request's arrival to its first token; 0.0: there was none.
        total_s: from its arrival to its end; 0.0: it runs.
        longest_gap_s: between two messages with tokens.
        submitted_s: from the request's arrival to the submit of its present attempt.
        lost: the attempts before, in order.
        retention: what the request claims of the caches.
        adapter: the version that answers.
    """

    request_id: str
    placement: Placement | None = None
    mode: IndexMode = IndexMode.GUESS
    waited_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    facts: types_pb2.Explanation | None = None
    cached_tokens: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0
    longest_gap_s: float = 0.0
    submitted_s: float = 0.0
    lost: list[types_pb2.RequestAttempt] = field(default_factory=list)
    tokens_at: float | None = None
    """When the last message with tokens came."""
    retention: Retention | None = None
    adapter: ChosenAdapter | None = None

    def settle(self) -> None:
        """The request has ended. Of its placement remains what an explanation shows."""
        if self.placement is not None:
            self.placement = self.placement.without_records(_KEPT_CANDIDATES)

    def on_facts(self, facts: types_pb2.Explanation) -> None:
        """The answer has ended well. Copied: a part of a message keeps all of it, with tokens and log probabilities."""
        self.facts = types_pb2.Explanation()
        self.facts.CopyFrom(facts)

    def on_tokens(self, now: float) -> None:
        """A message with tokens came."""
        if self.tokens_at is not None:
            self.longest_gap_s = max(self.longest_gap_s, now - self.tokens_at)
        self.tokens_at = now

    def on_lost(self, reason: str, num_tokens: int) -> None:
        """The present attempt failed after this many tokens, and another one will follow."""
        attempt = self._attempt()
        attempt.num_tokens, attempt.failure = num_tokens, reason
        self.lost.append(attempt)
        after = f" after {num_tokens} tokens" if num_tokens else ""
        self.notes.append(f"decode {attempt.decode} {reason}{after}: placed again")

    def _attempt(self) -> types_pb2.RequestAttempt:
        chosen = self.placement.chosen if self.placement is not None else None
        return types_pb2.RequestAttempt(
            decode=chosen.decode.worker_id if chosen is not None else "",
            prefill=chosen.prefill.worker_id if chosen is not None and chosen.prefill is not None else "",
            submitted_s=self.submitted_s,
        )

    @property
    def predicted_ttft_s(self) -> float:
        """From arrival: the time before the placement, and the placement's prediction."""
        return self.waited_s + self.placement.chosen.ttft_ms / 1000.0 if self.placement is not None else 0.0

    @property
    def predicted_cached_tokens(self) -> int:
        return self.placement.chosen.cached_tokens if self.placement is not None else 0

    def explanation(self) -> types_pb2.Explanation:
        whole = types_pb2.Explanation()
        if self.facts is not None:
            whole.CopyFrom(self.facts)
        whole.request_id = self.request_id
        placement = self.placement
        planned: Sequence[str] = placement.notes if placement is not None else ()
        decodes = list(whole.notes)
        del whole.notes[:]
        whole.notes.extend([*planned, *self.notes, *decodes])
        whole.ttft_s = self.ttft_s
        whole.total_s = self.total_s
        whole.longest_gap_s = self.longest_gap_s
        whole.cached_tokens = self.cached_tokens
        if placement is not None:
            whole.index_mode = self.mode.value
            whole.policy = placement.policy
            whole.predicted_ttft_s = self.predicted_ttft_s
            whole.predicted_cached_tokens = self.predicted_cached_tokens
            whole.candidates.extend(candidates_of(placement))
        if (retention := self.retention) is not None:
            claim = whole.claim
            claim.ttl_s, claim.priority = retention.claim.ttl_s, retention.claim.priority
            claim.requested_ttl_s, claim.session_id = retention.requested_ttl_s, retention.session_id
        if (adapter := self.adapter) is not None:
            report = whole.adapter
            report.name, report.version, report.id = adapter.name, adapter.version.number, adapter.adapter_id
        if self.lost:
            whole.attempts.extend(self.lost)
            if placement is not None:
                whole.attempts.append(self._attempt())
        return whole


def candidates_of(placement: Placement) -> list[types_pb2.PlacementTerms]:
    """The cheapest candidates, cheapest first, including the chosen one."""
    shown = placement.best(_MAX_CANDIDATES)
    if placement.chosen not in shown:
        shown[-1:] = [placement.chosen]
    return [_terms(placement, terms) for terms in shown]


def _tier_tokens(worker: WorkerView) -> list[types_pb2.TierTokens]:
    return [types_pb2.TierTokens(tier=tier, tokens=tokens) for tier, tokens in worker.tier_tokens]


def _terms(placement: Placement, terms: Terms) -> types_pb2.PlacementTerms:
    prefill = terms.prefill
    return types_pb2.PlacementTerms(
        prefill_worker_id=prefill.worker_id if prefill is not None else "",
        decode_worker_id=terms.decode.worker_id,
        queue_ms=terms.queue_ms,
        prefill_ms=terms.prefill_ms,
        transfer_ms=terms.transfer_ms,
        decode_load_ms=terms.decode_load_ms,
        stall_ms=terms.stall_ms,
        total_ms=terms.total_ms,
        prefill_hit_tokens=prefill.hit_tokens if prefill is not None else 0,
        decode_hit_tokens=terms.decode.hit_tokens,
        chosen=terms == placement.chosen,
        prefill_tiers=_tier_tokens(prefill) if prefill is not None else (),
        decode_tiers=_tier_tokens(terms.decode),
        pull=None if terms.pull is None else _pull(terms.pull, placement),
        adapter_ms=terms.adapter_ms,
    )


def _pull(pull: PlannedPull, placement: Placement) -> types_pb2.PullTerms:
    return types_pb2.PullTerms(
        holder=placement.snapshot.record(pull.holder).worker_id,
        first_token=pull.first_token,
        num_tokens=pull.num_tokens,
        pull_ms=pull.pull_ms,
        compute_ms=pull.compute_ms,
        pays_from_tokens=pull.pays_from,
    )
