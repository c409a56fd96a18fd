from __future__ import annotations

import math
import statistics
from random import Random

import pytest

from diptych.common.errors import ConfigError
from diptych.loadtest.workloads import sizes
from diptych.loadtest.workloads.items import read_jsonl, sessions_of, write_jsonl
from diptych.loadtest.workloads.schedule import ClosedLoop, OpenLoop, arrivals
from diptych.loadtest.workloads.workload import GENERATED, WorkloadSpec, generate, parse_tenants


@pytest.mark.parametrize(
    ("text", "mean", "tolerance"),
    [
        ("300", 300, 0),
        ("uniform:100,300", 200, 5),
        ("lognormal:200,0.5", 200 * math.exp(0.125), 8),
        ("exp:50", 50, 3),
        ("choice:10,30", 20, 1),
    ],
)
def test_distributions_have_their_mean(text, mean, tolerance):
    drawn = sizes.parse("input_len", text)
    rng = Random(1)
    assert statistics.mean(drawn.draw(rng) for _ in range(4000)) == pytest.approx(mean, abs=tolerance or 1e-9)


def test_bounds_clip_and_tokens_are_whole_and_at_least_one():
    rng = Random(1)
    drawn = sizes.parse("input_len", "lognormal:64,1.5,min=10,max=100")
    values = [drawn.draw_tokens(rng) for _ in range(500)]
    assert min(values) == 10
    assert max(values) == 100
    assert sizes.parse("x", "0").draw_tokens(rng) == 1


@pytest.mark.parametrize(
    "text", ["", "a", "uniform:1", "uniform:9,1", "nope:3", "lognormal:0,1", "fixed:-1", "5,mox=3", "exp:inf"]
)
def test_a_bad_distribution_names_its_field(text):
    with pytest.raises(ConfigError, match="output_len"):
        sizes.parse("output_len", text)


@pytest.mark.parametrize("kind", GENERATED)
@pytest.mark.parametrize("form", ["ids", "text", "messages"])
def test_every_kind_is_the_same_again_from_its_seed_and_round_trips(kind, form, tmp_path):
    spec = WorkloadSpec(
        kind=kind, num_requests=12, prefix_len=32, form=form, cancel_rate=0.3, tenants=(("a", 1.0), ("b", 2.0))
    )
    items = generate(spec)
    assert items == generate(spec)
    assert len(items) == 12
    assert [item.index for item in items] == list(range(12))
    write_jsonl(tmp_path / "items.jsonl", items)
    assert read_jsonl(tmp_path / "items.jsonl") == items
    assert all(sum(map(bool, (item.token_ids, item.text, item.messages))) == 1 for item in items)


def test_seeds_differ_and_ids_are_exact():
    spec = WorkloadSpec(num_requests=5, input_len=sizes.parse("x", "uniform:5,50"), vocab=(100, 200))
    items = generate(spec)
    assert [len(item.token_ids) for item in items] == [item.input_tokens for item in items]
    assert all(100 <= token < 200 for item in items for token in item.token_ids)
    other = generate(WorkloadSpec(num_requests=5, input_len=spec.input_len, vocab=(100, 200), seed=1))
    assert items != other


def test_shared_prefixes_are_shared():
    items = generate(WorkloadSpec(kind="shared-prefix", num_requests=30, prefix_len=64, num_prefixes=3))
    assert len({item.token_ids[:64] for item in items}) == 3
    assert len({item.token_ids for item in items}) == 30


def test_conversations_follow_in_turns_with_think_time():
    items = generate(WorkloadSpec(kind="conversation", num_requests=8, turns=4, think_time=sizes.fixed(2.0)))
    sessions = sessions_of(items)
    assert [len(turns) for turns in sessions.values()] == [4, 4]
    first, *later = next(iter(sessions.values()))
    assert (first.follows, first.delay_s) == (False, 0.0)
    assert all(item.follows and item.delay_s == 2.0 for item in later)


def test_questions_share_their_document():
    items = generate(WorkloadSpec(kind="longdoc", num_requests=8, turns=4, document_len=sizes.fixed(100)))
    assert len({item.token_ids[:100] for item in items}) == 2


def test_cancellations_and_tenants_at_their_rates():
    items = generate(WorkloadSpec(num_requests=2000, cancel_rate=0.25, tenants=parse_tenants("gold:3,free:1")))
    left = [item for item in items if item.cancel_after_tokens is not None]
    assert len(left) / 2000 == pytest.approx(0.25, abs=0.03)
    assert all(1 <= item.cancel_after_tokens < item.output_tokens for item in left)
    assert sum(item.tenant == "gold" for item in items) / 2000 == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("text", ["a:x", ":1", "a:0"])
def test_bad_tenants(text):
    with pytest.raises(ConfigError, match="tenants"):
        parse_tenants(text)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)])
def test_gaps_have_the_rate_and_the_burstiness(burstiness, variation):
    times = arrivals(OpenLoop(10.0, burstiness), 20_000, Random(3))
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert times[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.06, abs=0.001)


@pytest.mark.parametrize(("first", "last"), [(2.0, 18.0), (18.0, 2.0)])
def test_a_ramp_changes_the_rate_over_the_run(first, last):
    times = arrivals(OpenLoop(first, math.inf, ramp_to=last), 1000, Random(1))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(100.0, rel=0.02)
    early = sum(at < 10 for at in times) / 10
    late = sum(at >= 90 for at in times) / 10
    assert early == pytest.approx(first + (last - first) * 0.05, rel=0.15)
    assert late == pytest.approx(last - (last - first) * 0.05, rel=0.15)


def test_all_at_once_and_bad_loops():
    assert arrivals(OpenLoop(math.inf), 3, Random(0)) == [0.0] * 3
    for make in (
        lambda: OpenLoop(0.0),
        lambda: OpenLoop(1.0, 0.0),
        lambda: OpenLoop(math.inf, ramp_to=2.0),
        lambda: ClosedLoop(0),
    ):
        with pytest.raises(ConfigError):
            make()
