"""The cluster in one router's view, as plain values for JSON: workers, pairs, placements. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from diptych.common.store.worker_record import WorkerLoad
from diptych.router.cluster.breaker import Breakers
from diptych.router.cluster.members import Member
from diptych.router.placement.index import BlockIndex
from diptych.router.placement.pulls import break_evens
from diptych.router.placement.recent import Decision
from diptych.router.placement.reservations import Reservations
from diptych.router.placement.rollout import OTHER_GROUP
from diptych.router.placement.worker_arrays import ClusterSnapshot

if TYPE_CHECKING:
    from diptych.router.cluster.worker_link import WorkerLink


def cluster_status(
    members: Sequence[Member[WorkerLink]],
    *,
    view: ClusterSnapshot,
    index: BlockIndex,
    untracked_workers: Mapping[str, str],
    degraded: str,
    policy: str,
    breakers: Breakers,
    reservations: Reservations,
    decisions: Sequence[Decision],
    now: float,
) -> dict[str, Any]:
    """The status. `view`: the usable workers, the reasons against the others, and the incompatible pairs. `decisions`:
    placements that the tenant may see, latest first."""
    loads = {member.record.worker_id: member.record.load for member in members}
    workers = [
        {
            **_record(member, loads),
            "age_s": round(now - member.read_at, 3),
            "silent_s": round(member.link.silent_s, 3),
            "why_not": view.unusable.get(member.record.worker_id, ""),
            "untracked_workers": untracked_workers.get(member.record.worker_id, ""),
            "breaker": breakers.state(member.record.worker_id, now).value,
            "index_mode": index.mode(member.record.worker_id).value,
            "known_blocks": index.num_blocks(member.record.worker_id),
            "pending_tokens": reservations.tokens(member.record.worker_id),
            "pending_requests": reservations.requests(member.record.worker_id),
        }
        for member in sorted(members, key=lambda member: (member.record.role != "prefill", member.record.worker_id))
    ]
    pairs = [
        {"prefill": p, "decode": d, "why": list(why)}
        for (p, d), why in view.incompatible.items()
        if list(why) != [OTHER_GROUP]
    ]
    return {
        "policy": policy,
        "degraded": degraded,
        "workers": workers,
        "incompatible": pairs,
        "placements": [_placement(decision, now) for decision in decisions],
    }


def _record(member: Member[WorkerLink], loads: Mapping[str, WorkerLoad]) -> dict[str, Any]:
    record, load = member.record, member.record.load
    return {
        "id": record.worker_id,
        "incarnation": record.incarnation,
        "role": record.role,
        "address": record.address,
        "state": record.state,
        "pid": record.pid,
        "model": record.model,
        "num_blocks": record.num_blocks,
        "block_size": record.block_size,
        "kv_bytes_per_token": record.kv_bytes_per_token,
        "max_num_seqs": record.max_num_seqs,
        "tensor_parallel": record.tensor_parallel,
        "pipeline": record.pipeline,
        "nodes": record.nodes,
        "kv_usage": load.kv_usage,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "waiting_prompt_tokens": load.waiting_prompt_tokens,
        "prefill_tokens_per_s": load.prefill_tokens_per_s,
        "decode_step_s": load.decode_step_s,
        "link_bytes_per_s": dict(load.link_bytes_per_s),
        "pull_pays_from_tokens": break_evens(record, loads),
        "gpu": None if load.gpu is None else msgspec.structs.asdict(load.gpu),
    }


def _placement(decision: Decision, now: float) -> dict[str, Any]:
    trace = decision.trace
    placement, facts = trace.placement, trace.facts
    chosen = placement.chosen.prefill if placement is not None else None
    return {
        "request_id": decision.request_id,
        "label": decision.label,
        "outcome": decision.outcome,
        "age_s": round(now - decision.arrived, 3),
        "prompt_tokens": decision.prompt_tokens,
        "prefill": facts.prefill if facts is not None else (chosen.worker_id if chosen is not None else ""),
        "decode": placement.decode.worker_id if placement is not None else "",
        "local": facts.local_prefill if facts is not None else bool(placement is not None and placement.local_prefill),
        "ttft_s": trace.ttft_s,
        "predicted_ttft_s": trace.predicted_ttft_s,
        "cached_tokens": trace.cached_tokens,
        "kv_bytes": facts.kv_bytes if facts is not None else 0,
        "transport": facts.transport if facts is not None else "",
        "notes": list(trace.notes) + (list(facts.notes) if facts is not None else []),
    }
