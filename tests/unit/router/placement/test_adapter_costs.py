"""What an adapter costs at a worker, and what that does to the placement."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from diptych.router.placement.adapters import LOAD_MS, SLOT_WAIT_MS, AdapterNeed, adapter_ms, has_slot, why_not
from diptych.router.placement.cost import candidate_costs, choose_placement
from diptych.router.placement.policies import POLICIES
from diptych.router.placement.types import Placement, PlacementRequest, Rejected, WorkerView
from diptych.router.placement.worker_arrays import ClusterSnapshot
from diptych_tests.records import worker_record, worker_view

NEED = AdapterNeed("a" * 32, 8, 5_000_000)
HOLDS: Mapping[str, int] = {NEED.adapter_id: 0}
LOAD = LOAD_MS + 10.0


def view(worker_id: str, *, max_loras: int = 2, max_lora_rank: int = 8, **load: Any) -> WorkerView:
    made = worker_view(worker_id, **load)
    record = worker_record(
        worker_id,
        incarnation=made.record.incarnation,
        load=made.record.load,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
    )
    return WorkerView(record, made.hit_tokens, (), made.pending_tokens, made.pending_requests)


def request(**changes: Any) -> PlacementRequest:
    return PlacementRequest(**({"num_prompt_tokens": 100, "local_prefill_max_tokens": 0, "adapter": NEED} | changes))


def placed(snapshot: ClusterSnapshot, policy: str = "cost", **changes: Any) -> Placement:
    answer = choose_placement(request(**changes), snapshot, 0.0, random.Random(1), POLICIES[policy]())
    assert isinstance(answer, Placement)
    return answer


def test_the_cost_is_a_load_and_the_wait_for_a_slot() -> None:
    records = [
        view("d0", adapters=HOLDS).record,
        view("d1").record,
        view("d2", adapters={"b" * 32: 1, "c" * 32: 2}).record,
        view("d3", adapters={"b" * 32: 1, "c" * 32: 1, NEED.adapter_id: 1}).record,
        view("d4", max_loras=0).record,
        view("d5", max_lora_rank=4).record,
    ]
    costs = adapter_ms(records, NEED, lambda record: [name for name, count in record.load.adapters.items() if count])
    assert costs.tolist() == [0.0, LOAD, LOAD + SLOT_WAIT_MS, 0.0, np.inf, np.inf]
    assert has_slot(records[0], NEED, {"b" * 32})
    assert not has_slot(records[0], NEED, {"b" * 32, "c" * 32})
    assert "--enable-lora" in why_not(records[4], NEED)
    assert why_not(records[5], NEED).endswith("this one has 8")
    assert not why_not(records[0], NEED)


def test_both_workers_of_a_pair_are_charged_and_the_terms_add_up() -> None:
    snapshot = ClusterSnapshot.of([view("p0"), view("p1", adapters=HOLDS)], [view("d0"), view("d1", adapters=HOLDS)])
    placement = placed(snapshot)
    assert (placement.chosen.prefill and placement.chosen.prefill.worker_id, placement.decode.worker_id) == ("p1", "d1")
    costs = {(t.prefill.worker_id, t.decode.worker_id): t for t in placement.candidates if t.prefill is not None}
    assert {pair: terms.adapter_ms for pair, terms in costs.items()} == {
        ("p1", "d1"): 0.0, ("p0", "d1"): LOAD, ("p1", "d0"): LOAD, ("p0", "d0"): 2 * LOAD,
    }  # fmt: skip
    table = candidate_costs(request(), snapshot, 0.0).remote
    for (p, d), terms in costs.items():
        assert terms.total_ms == pytest.approx(float(table[int(p[1]), int(d[1])]))
        assert terms.transfer_ms == pytest.approx(costs["p1", "d1"].transfer_ms)
    base = placed(snapshot, adapter=None)
    assert {terms.adapter_ms for terms in base.candidates} == {0.0}


def test_a_busy_holder_is_left_when_its_queue_costs_more_than_a_load() -> None:
    idle, holder = view("d0"), view("d1", adapters=HOLDS)
    pool = [view("p0", adapters=HOLDS)]
    assert placed(ClusterSnapshot.of(pool, [idle, holder])).decode.worker_id == "d1"
    busy = view("d1", adapters=HOLDS, num_running=3)
    assert placed(ClusterSnapshot.of(pool, [idle, busy])).decode.worker_id == "d0"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_and_no_spare_uses_a_worker_that_cannot_serve_it(policy: str) -> None:
    snapshot = ClusterSnapshot.of(
        [view("p0", max_loras=0), view("p1", pending=500), view("p2", max_lora_rank=4)],
        [view("d0", max_loras=0), view("d1", num_running=7), view("d2", max_lora_rank=4)],
    )
    placement = placed(snapshot, policy)
    assert placement.decode.worker_id == "d1"
    assert [worker.worker_id for worker in placement.prefill] == ["p1"]


def test_decode_computes_the_prompt_where_no_prefill_worker_takes_the_adapter() -> None:
    snapshot = ClusterSnapshot.of([view("p0", max_loras=0)], [view("d0"), view("d1", max_loras=0)])
    placement = placed(snapshot)
    assert placement.local_prefill
    assert (placement.decode.worker_id, placement.chosen.adapter_ms) == ("d0", LOAD)
    refused = choose_placement(request(allow_local_fallback=False), snapshot, 0.0, random.Random(1))
    assert isinstance(refused, Rejected)
    assert any("p0 takes no adapters" in reason for reason in refused.reasons)
    assert not placed(snapshot, adapter=None).local_prefill


def test_the_colocated_margin_counts_the_adapter_too() -> None:
    slow = [view("p0", adapters=HOLDS, prefill_tokens_per_s=1.0)]
    snapshot = ClusterSnapshot.of(slow, [view("d0", max_loras=0), view("d1", adapters=HOLDS)])
    placement = placed(snapshot, local_prefill_max_tokens=64, colocated_margin=1.0)
    assert (placement.colocated, placement.decode.worker_id) == (True, "d1")
