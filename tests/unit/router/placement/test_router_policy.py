import random
from functools import partial

import msgspec
import pytest

from diptych.common.kv_format import windowed_format
from diptych.common.tiers import TierState
from diptych.router.placement.cost import COLOCATED_SLACK_MS, TOKENS_LEFT, choose_placement
from diptych.router.placement.policies import policy_by_name
from diptych.router.placement.types import Placement, PlacementRequest, Rejected, WorkerView, usable_hit_tokens
from diptych.router.placement.worker_arrays import HANDOFF_MS, ClusterSnapshot
from diptych_tests.records import worker_view

NOW = 100.0


worker = partial(worker_view, reported_at=NOW)


def choose(prefill, decode, n=200, local=64, incompatible=None, seed=0, **request):
    snapshot = ClusterSnapshot.of(prefill, decode, incompatible)
    return choose_placement(PlacementRequest(n, local, **request), snapshot, NOW, random.Random(seed))


def pair(placement):
    assert isinstance(placement, Placement)
    prefill = placement.chosen.prefill
    return (prefill.worker_id if prefill else None, placement.decode.worker_id)


@pytest.mark.parametrize(
    ("prefill", "decode", "n", "local", "expected"),
    [
        pytest.param([worker("p0")], [worker("d0")], 200, 64, ("p0", "d0"), id="idle: disaggregated"),
        pytest.param([worker("p0")], [worker("d0")], 64, 64, (None, "d0"), id="short: local"),
        pytest.param([worker("p0")], [worker("d0")], 65, 64, ("p0", "d0"), id="one more: remote"),
        pytest.param([worker("p0")], [worker("d0")], 5, 0, ("p0", "d0"), id="0: never local"),
        pytest.param([worker("p0")], [worker("d0", hit=192)], 200, 64, (None, "d0"), id="cached on decode: local"),
        pytest.param(
            [worker("p0", hit=192)],
            [worker("d0", hit=192, prefill_tokens_per_s=5.0)],
            200,
            64,
            (None, "d0"),
            id="all blocks cached on decode: no prefill worker, whatever the rates",
        ),
        pytest.param([worker("p0")], [worker("d0", hit=192)], 200, 0, ("p0", "d0"), id="cached, but local is off"),
        pytest.param(
            [worker("p0"), worker("p1", hit=160)],
            [worker("d0")],
            200,
            64,
            ("p1", "d0"),
            id="hit on prefill saves compute",
        ),
        pytest.param(
            [worker("p0")],
            [worker("d0"), worker("d1", hit=112)],
            200,
            64,
            ("p0", "d1"),
            id="hit on decode saves bytes",
        ),
        pytest.param(
            [worker("p0", waiting_prompt_tokens=500), worker("p1")], [worker("d0")], 200, 64, ("p1", "d0"), id="queue"
        ),
        pytest.param([worker("p0", pending=500), worker("p1")], [worker("d0")], 200, 64, ("p1", "d0"), id="pending"),
        pytest.param(
            [worker("p0", hit=192, waiting_prompt_tokens=1000), worker("p1")],
            [worker("d0")],
            200,
            64,
            ("p1", "d0"),
            id="a hit behind a long queue loses",
        ),
        pytest.param(
            [worker("p0")], [worker("d0", num_running=6), worker("d1")], 200, 64, ("p0", "d1"), id="decode load"
        ),
        pytest.param(
            [worker("p0")], [worker("d0", requests=6), worker("d1")], 200, 64, ("p0", "d1"), id="decode pending"
        ),
        pytest.param(
            [worker("p0")],
            [worker("d0", num_running=1, kv_usage=0.95), worker("d1", num_running=6, kv_usage=0.8)],
            200,
            64,
            ("p0", "d1"),
            id="few sequences, and no KV blocks for the prompt",
        ),
        pytest.param(
            [worker("p0")],
            [worker("d0", num_running=1, kv_usage=0.87), worker("d1", num_running=6, kv_usage=0.8)],
            200,
            64,
            ("p0", "d0"),
            id="just enough KV blocks",
        ),
        pytest.param(
            [worker("p0")],
            [worker("d0", hit=144, num_running=1, kv_usage=0.95), worker("d1", num_running=6, kv_usage=0.8)],
            200,
            0,
            ("p0", "d0"),
            id="what decode has cached needs no KV blocks",
        ),
        pytest.param(
            [worker("p0")],
            [worker("d0", num_running=1, kv_usage=0.95), worker("d1", num_running=8, kv_usage=0.95)],
            200,
            64,
            ("p0", "d1"),
            id="no KV blocks anywhere: where a sequence ends sooner",
        ),
        pytest.param(
            [worker("p0", prefill_tokens_per_s=50.0), worker("p1", prefill_tokens_per_s=400.0)],
            [worker("d0")],
            200,
            64,
            ("p1", "d0"),
            id="the faster one",
        ),
        pytest.param(
            [worker("p0"), worker("p1")],
            [worker("d0", link_bytes_per_s={"p0": 1e6, "p1": 1e9})],
            200,
            64,
            ("p1", "d0"),
            id="the better link",
        ),
        pytest.param([], [worker("d0")], 2000, 64, (None, "d0"), id="nobody to prefill: local, whatever the length"),
        pytest.param([], [worker("d0")], 2000, 0, (None, "d0"), id="nobody to prefill, local off: still served"),
    ],
)
def test_choice(prefill, decode, n, local, expected):
    assert pair(choose(prefill, decode, n, local)) == expected


def test_busy_decode_does_not_stall_its_sequences():
    assert pair(choose([worker("p0")], [worker("d0", num_running=8)], n=60)) == ("p0", "d0")


def test_a_wait_for_kv_blocks_is_part_of_the_decode_load_and_said():
    full = worker("d0", num_running=1, kv_usage=0.95)
    placement = choose([worker("p0")], [full])
    assert placement.chosen.decode_load_ms == pytest.approx(30.0 + 30.0 * TOKENS_LEFT)
    assert any("lacks KV blocks" in note for note in placement.notes)
    # the prompt has as many tokens as are in use: it waits until all of them are free
    assert choose([worker("p0")], [full], n=1600).chosen.decode_load_ms == pytest.approx(30.0 + 30.0 * TOKENS_LEFT)
    one_token = choose([worker("p0")], [full], needs_kv=False)
    assert one_token.chosen.decode_load_ms == pytest.approx(30.0)
    assert not one_token.notes


def test_incompatible_pairs_are_never_placed():
    bad = {("p0", "d0"): ["block_size: prefill 16, decode 32"]}
    workers = [worker("p0"), worker("p1", waiting_prompt_tokens=9000)], [worker("d0")]
    placement = choose(*workers, incompatible=bad)
    assert pair(placement) == ("p1", "d0")
    assert [view.worker_id for view in placement.prefill] == ["p1"]
    alone = choose([worker("p0")], [worker("d0")], incompatible=bad, allow_local_fallback=False)
    assert isinstance(alone, Rejected)
    assert "block_size: prefill 16, decode 32" in " ".join(alone.reasons)
    assert pair(choose([worker("p0")], [worker("d0")], incompatible=bad)) == (None, "d0")


def test_rejected_says_why():
    snapshot = ClusterSnapshot.of((worker("p0"),), (), unusable={"d0": "does not answer"})
    answer = choose_placement(PlacementRequest(10, 64), snapshot, NOW, random.Random(0))
    assert answer == Rejected(("no usable decode worker", "d0: does not answer"))
    no_prefill = choose([], [worker("d0")], allow_local_fallback=False)
    assert no_prefill == Rejected(("no usable prefill worker",))


def test_terms_add_up_and_every_candidate_is_there():
    placement = choose([worker("p0", hit=96), worker("p1")], [worker("d0", hit=160), worker("d1")])
    assert len(placement.candidates) == 5  # four pairs, and local on d0 where 40 tokens are uncached
    by_pair = {(t.prefill.worker_id if t.prefill else None, t.decode.worker_id): t for t in placement.candidates}
    terms = by_pair["p0", "d0"]
    assert terms.prefill_ms == pytest.approx(1040.0)
    assert terms.transfer_ms == pytest.approx(5.0 + 40 * 50_000 / 400e6 * 1000)
    assert terms.total_ms == pytest.approx(terms.prefill_ms + terms.transfer_ms)
    assert by_pair[None, "d0"].prefill_ms == pytest.approx(400.0)
    assert [t.total_ms for t in placement.candidates] == sorted(t.total_ms for t in placement.candidates)


def test_no_kv_is_charged_when_the_first_token_is_the_answer():
    assert choose([worker("p0")], [worker("d0")], needs_kv=False).chosen.transfer_ms == 5.0


def test_spares_are_in_order_of_cost():
    prefill = [worker(f"p{i}", waiting_prompt_tokens=100 * (3 - i)) for i in range(4)]
    assert [view.worker_id for view in choose(prefill, [worker("d0")]).prefill] == ["p3", "p2", "p1", "p0"]


def test_nothing_measured_still_places():
    blank = {"prefill_tokens_per_s": 0.0, "decode_step_s": 0.0}
    assert pair(choose([worker("p0", **blank)], [worker("d0", **blank)])) == ("p0", "d0")


def test_reported_queue_drains_with_time():
    old = worker("p0", waiting_prompt_tokens=100)
    snapshot = ClusterSnapshot.of((old,), (worker("d0"),))
    later = choose_placement(PlacementRequest(200, 64), snapshot, NOW + 1.0, random.Random(0))
    assert later.chosen.queue_ms == 0.0


def test_ties_are_spread_and_prefer_fewer_pending():
    idle = [worker(f"p{i}") for i in range(4)]
    chosen = {pair(choose(idle, [worker("d0")], seed=seed))[0] for seed in range(50)}
    assert chosen == {"p0", "p1", "p2", "p3"}
    # near-equal in cost, but one has many placements pending: it wins no draw
    busy = [worker("p0", requests=5), worker("p1")]
    assert {pair(choose(busy, [worker("d0")], seed=seed))[0] for seed in range(20)} == {"p1"}


@pytest.mark.parametrize(
    ("blocks", "n", "expected"),
    [(0, 10, 0), (1, 16, 0), (1, 17, 16), (9, 32, 16), (9, 33, 32), (9, 1, 0), (2, 100, 32)],
)
def test_the_last_token_is_always_computed(blocks, n, expected):
    assert usable_hit_tokens(blocks, 16, n) == expected


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_hit_in_a_lower_tier_is_charged_the_copy_back(tier):
    measured = msgspec.structs.replace(worker("p0").record, tiers=(TierState(tier, bytes_per_s=2e9),))
    far = WorkerView(measured, 192, ((tier, 192),), reported_at=NOW)
    placement = choose([far, worker("p1", hit=176)], [worker("d0")])
    by_id = {terms.prefill.worker_id: terms for terms in placement.candidates}
    assert by_id["p0"].prefill_ms == pytest.approx(80.0 + 192 * 50_000 / 2e9 * 1000)
    assert pair(placement) == ("p0", "d0")
    slow = msgspec.structs.replace(worker("p0").record, tiers=(TierState(tier, bytes_per_s=1e7),))
    slow = WorkerView(slow, 192, ((tier, 192),), reported_at=NOW)
    assert pair(choose([slow, worker("p1", hit=176)], [worker("d0")])) == ("p1", "d0")
    # A tier without a measured rate saves nothing, and other workers' rates say nothing of it.
    silent = WorkerView(worker("p0").record, 192, ((tier, 192),), reported_at=NOW)
    placement = choose([silent, WorkerView(measured, 0, reported_at=NOW)], [worker("d0")])
    first, second = (terms.prefill_ms for terms in placement.candidates if terms.prefill is not None)
    assert first == pytest.approx(second)


def test_workers_that_had_this_request_already_are_barred():
    whole = ClusterSnapshot.of([worker("p0")], [worker("d0"), worker("d1", num_running=50)])
    barred = ClusterSnapshot(whole.fleet, whole.loads, (0,))
    request = PlacementRequest(200, 64)
    assert pair(choose_placement(request, barred, NOW, random.Random(0))) == ("p0", "d1")
    assert [view.worker_id for view in barred.decode] == ["d1"]
    assert barred.unusable == {"d0": "had this request already"}
    nobody = ClusterSnapshot(whole.fleet, whole.loads, (0, 1))
    assert isinstance(choose_placement(request, nobody, NOW, random.Random(0)), Rejected)


def test_disaggregating_never_costs_more_than_the_margin_over_colocated():
    rng = random.Random(4)
    colocated = 0
    for seed in range(300):
        prefill = [worker(f"p{i}", pending=rng.choice([0, 200, 5000])) for i in range(2)]
        decode = [worker(f"d{i}", num_running=rng.choice([0, 1, 8])) for i in range(2)]
        placement = choose(prefill, decode, n=400, seed=seed, colocated_margin=1.0)
        alone = min(
            1000.0 * 400 / 100.0 * (1 + d.record.load.num_running) + 30.0 * d.record.load.num_running + 1.0
            for d in decode
        )
        assert placement.chosen.total_ms <= 2.0 * alone + COLOCATED_SLACK_MS + 1e-6
        if placement.local_prefill:
            colocated += 1
            assert "colocated" in placement.notes[0]
            assert placement.chosen in placement.candidates
    assert 0 < colocated < 300


@pytest.mark.parametrize("changes", [{"local": 0}, {"allow_local_fallback": False}, {"colocated_margin": float("inf")}])
def test_a_request_that_excludes_colocated_is_never_colocated(changes):
    placement = choose([worker("p0", pending=10**6)], [worker("d0")], n=400, **({"colocated_margin": 1.0} | changes))
    assert pair(placement) == ("p0", "d0")


def test_the_rule_of_short_prompts_says_that_it_was_that():
    local = choose([worker("p0")], [worker("d0", hit=160)], n=200)
    assert local.notes == ("local prefill: 40 tokens of at most 64 (local_prefill_max_tokens), cheaper on decode",)
    assert choose([worker("p0")], [worker("d0")], n=200).notes == ()
    assert choose([], [worker("d0")], n=10).notes == ("no usable prefill worker: local prefill",)


def test_a_local_prefill_that_costs_more_is_not_called_cheaper():
    slow = worker("d0", hit=192, prefill_tokens_per_s=5.0)
    held = choose([worker("p0", hit=192)], [slow], n=200)
    remote = next(terms for terms in held.candidates if terms.prefill)
    assert held.chosen.total_ms > remote.total_ms
    assert held.notes == (
        "local prefill: decode holds all but the last 8 tokens (at most a block), no prefill worker is asked",
    )
    snapshot = ClusterSnapshot.of([worker("p0")], [worker("d0", hit=160, prefill_tokens_per_s=5.0)])
    drawn = choose_placement(
        PlacementRequest(200, 64), snapshot, NOW, random.Random(0), policy=policy_by_name("round-robin")
    )
    assert drawn.notes == ("local prefill: 40 tokens of at most 64 (local_prefill_max_tokens), allowed on decode",)


def test_a_short_prompt_does_not_wait_for_a_long_one():
    """Item 2.2: a long prompt, placed or reported, is before a short one for no longer than the short one takes."""
    for busy in (worker("p0", pending=6000, requests=1), worker("p0", waiting_prompt_tokens=6000, num_waiting=1)):
        placement = choose([busy], [worker("d0", num_running=8)], n=200)
        assert pair(placement) == ("p0", "d0")
        assert placement.chosen.queue_ms == placement.chosen.prefill_ms == 2000.0
        assert choose([busy], [worker("d0", num_running=8)], n=9000).chosen.queue_ms == 60_000.0
    busy = worker("p0", pending=6000, requests=1, prompt_step_s=0.5)  # it ends the step that runs first
    assert choose([busy], [worker("d0", num_running=8)], n=200).chosen.queue_ms == 2500.0
    assert pair(choose([busy], [worker("d0")], n=10)) == (None, "d0")
    assert choose([worker("p0", prompt_step_s=0.5)], [worker("d0")], n=200).chosen.queue_ms == 0.0


@pytest.mark.parametrize("tokens", [5, 100, 511, 512, 4096])
def test_kv_of_a_window_is_charged_up_to_the_window(tokens):
    kv = windowed_format([512] * 5 + [0], 4, 64, block_size=16, dtype="bfloat16")
    charge = kv.charge
    record = msgspec.structs.replace(
        worker("d0", link_bytes_per_s={"p0": 1e9}).record,
        kv_bytes_per_token=charge.bytes_per_token, kv_windows=charge.windows,
    )  # fmt: skip
    plain = msgspec.structs.replace(record, worker_id="d1", kv_bytes_per_token=kv.bytes_per_token, kv_windows=())
    placement = choose(
        [worker("p0")], [WorkerView(record, reported_at=NOW), WorkerView(plain, reported_at=NOW)], n=tokens, local=0
    )
    by_id = {terms.decode.worker_id: terms.transfer_ms - HANDOFF_MS for terms in placement.candidates}
    assert by_id["d0"] == pytest.approx(1000.0 * kv.transfer_bytes(0, tokens) / 1e9)
    assert by_id["d1"] == pytest.approx(1000.0 * tokens * kv.bytes_per_token / 1e9)
