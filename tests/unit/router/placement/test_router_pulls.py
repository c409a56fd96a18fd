"""Where the KV of a prompt's beginning comes from: the plan, its costs, and what is sent to the workers."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.tiers import TierState
from diptych.router.placement.cost import choose_placement
from diptych.router.placement.pulls import (
    FIELD,
    FIXED_MS,
    LOWER_FIELD,
    MOST_OF_COMPUTE,
    PullLinks,
    break_evens,
    plan_pulls,
)
from diptych.router.placement.types import Placement, PlacementRequest, Rejected
from diptych.router.placement.worker_arrays import ClusterSnapshot
from diptych.worker import wire
from diptych_tests.records import worker_record, worker_view

NOW = 100.0
MB_PER_S = {"fast": 1e9, "slow": 1e6}


def view(name: str, hit: int = 0, *, able: bool = True, compat: str = "a", **load: Any):
    one = worker_view(name, hit, reported_at=NOW, **load)
    fields = (FIELD,) if able else ()
    one.record = msgspec.structs.replace(one.record, compat={"model_revision": compat}, request_fields=fields)
    return one


def choose(prefill, decode, n=1000, local=64, **request) -> Placement:
    snapshot = ClusterSnapshot.of(prefill, decode)
    placement = choose_placement(PlacementRequest(n, local, **request), snapshot, NOW, random.Random(0))
    assert isinstance(placement, Placement)
    return placement


def test_the_second_turn_is_taken_from_decode():
    placement = choose([view("p0", 320)], [view("d0", 800)])
    pull = placement.chosen.pull
    assert pull is not None
    assert placement.snapshot.record(pull.holder).worker_id == "d0"
    assert (pull.first_token, pull.num_tokens) == (320, 800)
    # 480 tokens of 50,000 bytes at 400 MB/s, and the fixed cost; computing at 100 tokens a second
    assert pull.pull_ms == pytest.approx(FIXED_MS + 480 * 50_000 / 400e6 * 1000)
    assert pull.compute_ms == pytest.approx(4800)
    assert placement.chosen.prefill_ms == pytest.approx(pull.pull_ms + 2000)
    assert placement.chosen.ttft_ms == pytest.approx(pull.pull_ms + 2000)
    assert (placement.chosen.cached_tokens, placement.chosen.computed_from) == (800, 800)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(view("p0", 320), view("d0", 800, able=False), id="a holder that serves none"),
        pytest.param(view("p0", 320, able=False), view("d0", 800), id="a reader that takes none"),
        pytest.param(view("p0", 320), view("d0", 800, compat="b"), id="another model"),
        pytest.param(view("p0", 800), view("d0", 800), id="nothing is lacking"),
        pytest.param(view("p0", 320, link_bytes_per_s={"d0": 1e6}), view("d0", 800), id="a link slower than computing"),
        pytest.param(
            view("p0", 784, prefill_tokens_per_s=1e5), view("d0", 800), id="too few tokens for the fixed cost"
        ),
        pytest.param(view("p0", 320, pull_overhead_s={"d0": 9.0}), view("d0", 800), id="a holder that was slow"),
    ],
)
def test_no_pull_is_made(prefill, decode):
    assert choose([prefill], [decode]).chosen.pull is None


def test_no_pull_where_it_is_switched_off():
    one, other = view("p0", 320), view("d0", 800)
    snapshot = ClusterSnapshot.of([one], [other])
    object.__setattr__(snapshot.fleet, "pulls", None)
    placement = choose_placement(PlacementRequest(1000, 64), snapshot, NOW, random.Random(0))
    assert isinstance(placement, Placement)
    assert placement.chosen.pull is None


def test_a_worker_without_the_prefix_wins_where_its_holder_is_busy():
    busy = view("p0", 800, waiting_prompt_tokens=4000, num_waiting=3)
    idle, holder = view("p1"), view("d0")
    without = choose([busy, view("p1", able=False)], [holder])
    assert without.chosen.prefill.worker_id == "p0"
    placement = choose([busy, idle], [holder])
    assert placement.chosen.prefill.worker_id == "p1"
    assert placement.snapshot.record(placement.chosen.pull.holder).worker_id == "p0"


def test_decode_takes_it_from_decode_and_computes_the_rest_itself():
    placement = choose([], [view("d0", 960, num_running=30), view("d1")], local=64)
    assert placement.local_prefill
    assert placement.decode.worker_id == "d1"
    assert placement.snapshot.record(placement.chosen.pull.holder).worker_id == "d0"


def test_a_worker_that_must_not_decode_the_request_may_hold_its_kv():
    """An operator moves it, say."""
    snapshot = ClusterSnapshot.of([view("p0")], [view("d0", 960), view("d1")])
    snapshot.barred = (0,)
    placement = choose_placement(PlacementRequest(1000, 64), snapshot, NOW, random.Random(0))
    assert isinstance(placement, Placement)
    assert placement.decode.worker_id == "d1"
    assert placement.snapshot.record(placement.chosen.pull.holder).worker_id == "d0"


def leaving(name: str, hit: int, seconds: float, **load: Any):
    one = view(name, hit, **load)
    one.record = msgspec.structs.replace(one.record, state="draining", leaves_in_s=seconds)
    return one


def place(prefill, decode, gone, n=1000, now=NOW) -> Placement:
    snapshot = ClusterSnapshot.of(prefill, decode, leaving=gone)
    placement = choose_placement(PlacementRequest(n, 0), snapshot, now, random.Random(0))
    assert isinstance(placement, Placement)
    return placement


@pytest.mark.parametrize("name", ["p9", "d9"])
def test_a_worker_that_drains_is_read_from_and_computes_nothing(name):
    placement = place([view("p0", 320)], [view("d0")], [leaving(name, 960, 30.0)])
    pull = placement.chosen.pull
    assert placement.snapshot.record(pull.holder).worker_id == name
    assert (pull.first_token, pull.num_tokens) == (320, 960)
    assert placement.notes == (f"KV is taken from {name}, which drains",)
    named = {(one.prefill and one.prefill.worker_id, one.decode.worker_id) for one in placement.candidates}
    assert named == {("p0", "d0")}
    assert placement.without_records(1).snapshot.record(pull.holder).worker_id == name


def test_it_is_read_from_while_the_read_ends_before_it_leaves():
    """10 ms, and 640 tokens of 50,000 bytes at 400 MB/s: 90 ms."""
    one, other = [view("p0", 320)], [view("d0")]
    gone = [leaving("d9", 960, 2.0)]
    assert place(one, other, gone, now=NOW + 1.9).chosen.pull is not None
    assert place(one, other, gone, now=NOW + 1.92).chosen.pull is None
    assert place(one, other, gone, now=NOW + 60.0).chosen.pull is None
    assert place(one, other, [leaving("d9", 960, 0.0)]).chosen.pull is None, "an older version serves nothing"


def test_of_as_much_the_worker_that_stays_is_read_from():
    gone = [leaving("d8", 800, 30.0), leaving("d9", 960, 30.0)]
    assert place([view("p0")], [view("d0", 960)], gone).notes == ()
    placement = place([view("p0")], [view("d0", 900)], gone)
    assert placement.snapshot.record(placement.chosen.pull.holder).worker_id == "d9"


def test_its_lower_tiers_are_read_at_the_cost_of_their_copy():
    def gone(**how: Any):
        one = in_tiers("d9", 960, {"host": 480}, **how)
        one.record = msgspec.structs.replace(one.record, state="draining", leaves_in_s=30.0)
        return one

    pull = place([view("p0", 320)], [view("d0")], [gone()]).chosen.pull
    assert pull.pull_ms == pytest.approx(FIXED_MS + 640 * 50_000 / 400e6 * 1000 + 480 * 50_000 / 1e9 * 1000)
    assert place([view("p0", 320)], [view("d0")], [gone(serves=False)]).chosen.pull.num_tokens == 480


def test_without_a_usable_worker_one_that_drains_helps_nobody():
    snapshot = ClusterSnapshot.of([], [], leaving=[leaving("d9", 960, 30.0)])
    assert isinstance(choose_placement(PlacementRequest(1000, 64), snapshot, NOW, random.Random(0)), Rejected)


def in_tiers(name: str, hit: int, lower: dict[str, int], *, serves: bool = True, rate: float = 1e9, **load: Any):
    """A holder with `hit` leading tokens, of them these in its lower tiers, which it reads at `rate` bytes a second."""
    one = view(name, hit, **load)
    one.tier_tokens = tuple(lower.items())
    tiers = tuple(TierState(tier, num_bytes=1 << 30, bytes_per_s=rate) for tier in lower)
    fields = (FIELD, LOWER_FIELD) if serves else (FIELD,)
    one.record = msgspec.structs.replace(one.record, request_fields=fields, tiers=tiers)
    return one


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_is_in_a_lower_tier_is_taken_at_the_cost_of_its_copy(tier):
    """480 of 960 tokens lie there, at 50,000 bytes each; the reader has the first 320."""
    placement = choose([view("p0", 320)], [in_tiers("d0", 960, {tier: 480})], local=0)
    pull = placement.chosen.pull
    assert (pull.first_token, pull.num_tokens) == (320, 960)
    moved_ms, copied_ms = 640 * 50_000 / 400e6 * 1000, 480 * 50_000 / 1e9 * 1000
    assert pull.pull_ms == pytest.approx(FIXED_MS + moved_ms + copied_ms)
    # of each further token: 0.8 x 10 ms, less 0.125 ms to move it and 0.05 ms to copy it
    assert pull.pays_from == pytest.approx(FIXED_MS / (8 - 0.125 - 0.05))


def test_of_what_a_reader_lacks_the_end_is_in_the_lower_tiers():
    """It has more than the holder's first tier: all that it takes is copied, and no more."""
    pull = choose([view("p0", 800)], [in_tiers("d0", 960, {"host": 320, "disk": 160})], local=0).chosen.pull
    assert pull.pull_ms == pytest.approx(FIXED_MS + 160 * 50_000 / 400e6 * 1000 + 160 * 50_000 / 1e9 * 1000)


@pytest.mark.parametrize(
    "holder",
    [
        pytest.param(in_tiers("d0", 960, {"host": 960}, serves=False), id="of a version that serves its first tier"),
        pytest.param(in_tiers("d0", 960, {"disk": 960}, rate=4e6), id="a disk slower than computing"),
        pytest.param(in_tiers("d0", 960, {"disk": 960}, rate=0.0), id="a disk that was not measured"),
    ],
)
def test_what_is_in_a_lower_tier_is_not_taken(holder):
    assert choose([view("p0")], [holder], local=0).chosen.pull is None


def test_what_an_older_holder_has_in_its_first_tier_is_taken():
    pull = choose([view("p0")], [in_tiers("d0", 960, {"host": 320}, serves=False)], local=0).chosen.pull
    assert (pull.first_token, pull.num_tokens) == (0, 640)


def test_a_first_tier_with_less_may_be_the_better_holder():
    slow = in_tiers("d1", 960, {"disk": 960}, rate=10e6)
    placement = choose([view("p0")], [view("d0", 900), slow], local=0)
    assert placement.snapshot.record(placement.chosen.pull.holder).worker_id == "d0"
    quick = in_tiers("d1", 960, {"disk": 960})
    placement = choose([view("p0")], [view("d0", 200), quick], local=0)
    assert placement.snapshot.record(placement.chosen.pull.holder).worker_id == "d1"


def test_workers_announce_the_field_by_this_name():
    assert (FIELD, LOWER_FIELD) == (wire.SOURCE, wire.SOURCE_TIERS)
    assert {FIELD, LOWER_FIELD} <= set(wire.REQUEST_FIELDS)


@given(
    rate=st.floats(1e6, 1e12),
    tokens_per_s=st.floats(10, 1e6),
    fixed_s=st.floats(0, 1),
    hits=st.lists(st.integers(0, 2000), min_size=2, max_size=2),
)
def test_a_pull_that_would_be_slower_is_never_made(rate, tokens_per_s, fixed_s, hits):
    """And it is made exactly from the printed number of tokens on."""
    reader = view(
        "p0", link_bytes_per_s={"d0": rate}, pull_overhead_s={"d0": fixed_s}, prefill_tokens_per_s=tokens_per_s
    )
    records = [reader.record, view("d0").record]
    links, token_ms = PullLinks.of(records), np.full(2, 1000.0 / tokens_per_s)
    planned = plan_pulls(links, token_ms, np.array(hits), None)
    pull = planned.of(0) if planned is not None else None
    pays_from, gain = links.pays_from(0, 1, 1000.0 / tokens_per_s), hits[1] - hits[0]
    if pull is None:
        assert gain <= 0 or gain <= pays_from * (1 + 1e-6)
    else:
        assert pull.pull_ms <= MOST_OF_COMPUTE * pull.compute_ms * (1 + 1e-6)
        assert gain >= pays_from * (1 - 1e-6)


def test_the_break_even_of_each_measured_link_is_shown():
    reader = view(
        "p0", link_bytes_per_s={"d0": 1e9, "d1": 1e6, "d2": 1e9}, pull_overhead_s={"d0": 0.5, "d1": 0.5, "d3": 0.5}
    )
    # 0.5 s / (0.8 x 10 ms - 50,000 bytes at 1 GB/s); d1 is slower than computing, d2 and d3 are not measured
    assert break_evens(reader.record, {}) == {"d0": 63, "d1": 0}
    busy = view("d0", num_running=3, poll_interval_s=2.0).record.load  # 2 s of the holder's polls
    assert break_evens(reader.record, {"d0": busy}) == {"d0": 252, "d1": 0}


def between(reader: dict[str, Any], holder: dict[str, Any]) -> float:
    """The fixed cost in ms of a pull from d0 to p0."""
    return float(PullLinks.of([view("p0", **reader).record, view("d0", **holder).record]).fixed_ms[0, 1])


BUSY = {"num_running": 2, "poll_interval_s": 0.02, "prompt_step_s": 0.5, "decode_step_s": 0.1}
OLDER = {**BUSY, "poll_interval_s": 0.0}


@pytest.mark.parametrize(
    ("reader", "holder", "fixed_ms"),
    [
        pytest.param({}, {}, FIXED_MS, id="both are idle"),
        pytest.param({**BUSY, "num_running": 0}, {**BUSY, "num_running": 0}, FIXED_MS, id="both were busy once"),
        pytest.param({}, BUSY, FIXED_MS + 20, id="one wait at the holder"),
        pytest.param(BUSY, {}, FIXED_MS + 40, id="two at the reader"),
        pytest.param({}, OLDER, FIXED_MS + 100, id="an older holder ends its step"),
        pytest.param({}, {**OLDER, "waiting_prompt_tokens": 9}, FIXED_MS + 500, id="and its step of prompts"),
        pytest.param({**BUSY, "pull_overhead_s": {"d0": 0.3}}, BUSY, 300, id="what was measured has the waits in it"),
        pytest.param({**BUSY, "pull_overhead_s": {"d0": 0.001}}, BUSY, 60, id="but was measured between idle ones"),
    ],
)
def test_the_waits_for_busy_engines_are_part_of_the_cost(reader, holder, fixed_ms):
    assert between(reader, holder) == pytest.approx(fixed_ms)


def test_a_pull_from_a_busy_holder_is_not_made_where_computing_is_faster():
    """48 tokens take 0.48 s to compute, and 6 ms to move."""
    assert choose([view("p0", 752)], [view("d0", 800)]).chosen.pull is not None
    assert choose([view("p0", 752)], [view("d0", 800, num_running=1, decode_step_s=0.5)]).chosen.pull is None
    polled = view("d0", 800, num_running=1, decode_step_s=0.5, poll_interval_s=0.02)
    assert choose([view("p0", 752)], [polled]).chosen.pull is not None


def test_a_link_is_known_by_its_own_measurements():
    records = [
        worker_record("p0", compat={"a": "b"}, request_fields=(FIELD,)),
        worker_record("d0", compat={"a": "b"}, request_fields=(FIELD,)),
    ]
    links = PullLinks.of(records)
    assert links.fixed_ms.tolist() == [[np.inf, FIXED_MS], [FIXED_MS, np.inf]]
    windowed = [msgspec.structs.replace(record, kv_windows=((64, 1000),)) for record in records]
    assert PullLinks.of(windowed).pull_ms(1, np.array([100, 0]))[0] == pytest.approx(
        FIXED_MS + (100 * 50_000 + 64 * 1000) / 400e6 * 1000
    )
