import contextlib
import random
from dataclasses import replace

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_text

from diptych.common.clock import FakeClock
from diptych.common.errors import InvalidRequestError, WorkerLostError
from diptych.common.observe.metrics import ITL_BUCKETS_S, TOKEN_BUCKETS, Metrics
from diptych.common.request import Prompt
from diptych.common.sampling import FinishReason, SamplingParams
from diptych.common.store.adapters import AdapterTable, ChosenAdapter
from diptych.router.observe.explain import RequestTrace
from diptych.router.observe.metrics import RequestTimer, RouterMetrics
from diptych.router.placement.types import Placement, Terms, WorkerView
from diptych.router.requests.messages import FinishedEvent, TokenEvent, UsageInfo, ValidatedRequest
from diptych.rpc.v1 import types_pb2
from diptych_tests.records import adapter_entry


def request(arrived):
    return ValidatedRequest("r", "", "m", Prompt((1, 2)), SamplingParams(4), False, 0, 0, arrived, arrived + 9)


@pytest.fixture
def clock():
    return FakeClock(10.0)


def trace(ttft_s, cached):
    view = WorkerView(None, hit_tokens=48)
    placement = Placement(Terms(view, WorkerView(None), 100.0, 200.0, 5.0, 0.0, 0.0), None, (), list)
    return RequestTrace("r", placement, waited_s=0.1, ttft_s=ttft_s, cached_tokens=cached)


def test_predictions_are_held_against_what_came():
    metrics = RouterMetrics()
    metrics.predictions(trace(ttft_s=0.7, cached=16))
    metrics.predictions(trace(ttft_s=0.3, cached=64))
    got = values(metrics)
    assert got["diptych_predicted_cached_tokens_total[]"] == 96
    assert got["diptych_predicted_cached_tokens_error_total[]"] == 32 + 16
    assert got["diptych_predicted_ttft_error_seconds_sum[]"] == pytest.approx(0.3 + 0.1)
    assert got["diptych_placement_regret_seconds_sum[]"] == pytest.approx(0.3)


def values(metrics):
    return {s.name + str(sorted(s.labels.items())): s.value for m in metrics.registry.collect() for s in m.samples}


def test_tokens_are_timed_one_by_one_whatever_the_chunks(clock):
    metrics = RouterMetrics()
    timer = RequestTimer(metrics, request(clock.now()), clock)
    clock.advance(0.2)
    timer.tokens(TokenEvent(0, (7,), "a"))
    clock.advance(0.3)
    timer.tokens(TokenEvent(1, (8, 9, 10), "bcd"))
    timer.tokens(TokenEvent(4, (), "!"))
    timer.finished(FinishedEvent(FinishReason.LENGTH, UsageInfo(2, 4, 0), "", None, None), 4096)
    timer.left()
    got = values(metrics)
    assert got["diptych_time_to_first_token_seconds_sum[]"] == pytest.approx(0.2)
    assert got["diptych_inter_token_latency_seconds_count[]"] == 3
    assert got["diptych_inter_token_latency_seconds_sum[]"] == pytest.approx(0.3)
    assert got["diptych_e2e_request_latency_seconds_sum[]"] == pytest.approx(0.5)
    assert got["diptych_generation_tokens_total[]"] == 4
    assert got["diptych_kv_transfer_bytes_total[]"] == 4096
    assert got["diptych_num_requests_running[]"] == 0


def test_every_series_moves(clock):
    down = [False]
    metrics = RouterMetrics(
        degraded=lambda: down[0],
        mode_degraded=lambda: down[0],
        kv_usage=lambda: float(down[0]),
        waiting_turn=lambda: float(down[0]),
        copies=lambda: float(down[0]),
        by_tenant=True,
    )
    before = values(metrics)
    down[0] = True
    done = RequestTimer(metrics, request(clock.now()), clock)
    done.tokens(TokenEvent(0, (7, 8), "ab", cached_tokens=16))
    done.finished(FinishedEvent(FinishReason.STOP, UsageInfo(20, 2, 16), "", None, None), 10)
    failed = RequestTimer(metrics, request(clock.now()), clock)
    failed.tokens(TokenEvent(0, (7,), "a"))
    failed.failed(WorkerLostError("x"))
    RequestTimer(metrics, request(clock.now()), clock).left()
    RequestTimer(metrics, request(clock.now()), clock)
    metrics.predictions(trace(ttft_s=0.7, cached=16))
    metrics.placements.labels("remote").inc()
    metrics.replacements.inc()
    metrics.moved("WORKER_LOST", 0.2)
    metrics.resumes.labels("attached").inc()
    metrics.tickets.labels("granted").inc()
    metrics.admission.labels("admitted").inc()
    metrics.judged(None)
    metrics.judged(True)
    metrics.tokenize.observe(0.002)
    with contextlib.suppress(InvalidRequestError), metrics.parsing():
        raise InvalidRequestError("not JSON")
    clock.advance(0.1)
    two = RequestTimer(metrics, request(clock.now()), clock)
    for offset in range(2):
        clock.advance(0.1)
        two.tokens(TokenEvent(offset, (7,), "a"))
    served = trace(ttft_s=0.7, cached=16)
    served.facts = types_pb2.Explanation(reserved_s=0.1, first_token_s=0.5, kv_complete_s=0.6, kv_bytes=9)
    metrics.split(served, 1.5)
    metrics.count_deviations(served, ["WORKER_LOST"])
    entry = adapter_entry("poems", "one", "two", canary=1, canary_share=0.5)
    metrics.adapters.on_change(AdapterTable(1, {"poems": entry}))
    metrics.adapters.ended(ChosenAdapter("poems", entry.versions[0]), "finished", 2, 2)
    metrics.adapters.refused.inc()
    after = values(metrics)
    moved = {name.partition("[")[0] for name, value in after.items() if before.get(name) != value}
    families = {m.name for m in metrics.registry.collect()}
    assert {f for f in families if not moved & {f, f + "_total", f + "_count"}} == set()
    assert after["diptych_request_errors_total[('reason', 'WORKER_LOST')]"] == 1
    assert after["diptych_request_errors_total[('reason', 'CLIENT_LEFT')]"] == 1
    assert b"# HELP diptych_degraded" in metrics.expose()


def test_where_the_time_went_is_added_up_from_one_clock_each():
    metrics = RouterMetrics()
    reported = trace(ttft_s=0.9, cached=0)  # waited 0.1 s at the router
    reported.facts = types_pb2.Explanation(
        reserved_s=0.05, prefill_queue_s=0.2, first_token_s=0.75, kv_complete_s=0.8, kv_bytes=4096
    )
    metrics.split(reported, 2.9)
    got = values(metrics)
    assert got["diptych_request_queue_time_seconds_sum[]"] == pytest.approx(0.1 + 0.05 + 0.2)
    assert got["diptych_request_prefill_time_seconds_sum[]"] == pytest.approx(0.75 - 0.05 - 0.2)
    assert got["diptych_request_transfer_time_seconds_sum[]"] == pytest.approx(0.05)
    assert got["diptych_request_decode_time_seconds_sum[]"] == pytest.approx(2.0)
    assert got["diptych_request_inference_time_seconds_sum[]"] == pytest.approx(2.9 - 0.35)
    assert metrics.live.stages()["queue"]["count"] == 1


@pytest.mark.parametrize(
    ("local", "faults", "to"),
    [
        (True, ["WORKER_LOST"], "local_prefill"),
        (False, ["TRANSFER_FAILED"], "other_prefill"),
        (True, [], "decode_cache"),
    ],
)
def test_a_fallback_is_counted_by_where_the_work_went(local, faults, to):
    metrics = RouterMetrics()
    reported = trace(ttft_s=0.9, cached=0)
    reported.facts = types_pb2.Explanation(local_prefill=local)
    metrics.count_deviations(reported, faults)
    got = values(metrics)
    assert got[f"diptych_fallbacks_total[('to', '{to}')]"] == 1
    assert all(got[f"diptych_prefill_faults_total[('reason', '{reason}')]"] == 1 for reason in faults)


def test_the_gap_to_the_second_token_is_measured_once_and_waiting_ends_with_the_first(clock):
    metrics = RouterMetrics()
    timer = RequestTimer(metrics, request(clock.now()), clock)
    assert values(metrics)["diptych_num_requests_waiting[]"] == 1
    for offset, pause in enumerate((0.2, 0.5, 0.01)):
        clock.advance(pause)
        timer.tokens(TokenEvent(offset, (7,), "a"))
    got = values(metrics)
    assert got["diptych_num_requests_waiting[]"] == 0
    assert got["diptych_first_to_second_token_seconds_sum[]"] == pytest.approx(0.5)
    assert got["diptych_first_to_second_token_seconds_count[]"] == 1
    RequestTimer(metrics, request(clock.now()), clock).left()
    assert values(metrics)["diptych_num_requests_waiting[]"] == 0


def test_tenants_have_series_only_where_that_was_asked_for(clock):
    plain, reported = RouterMetrics(), RouterMetrics(by_tenant=True)
    for metrics in (plain, reported):
        own = replace(request(clock.now()), tenant="acme")
        timer = RequestTimer(metrics, own, clock)
        timer.tokens(TokenEvent(0, (7, 8), "ab", cached_tokens=16))
        timer.finished(FinishedEvent(FinishReason.STOP, UsageInfo(20, 2, 16), "", None, None), 10)
        metrics.refused("QUOTA_EXCEEDED", "acme")
    assert b"acme" not in plain.expose()
    assert b"tenant" not in plain.expose()
    got = values(reported)
    assert got["diptych_tenant_requests_total[('outcome', 'QUOTA_EXCEEDED'), ('tenant', 'acme')]"] == 1
    assert got["diptych_tenant_requests_total[('outcome', 'finished'), ('tenant', 'acme')]"] == 1
    assert got["diptych_tenant_generation_tokens_total[('tenant', 'acme')]"] == 2
    assert got["diptych_tenant_prompt_tokens_cached_total[('tenant', 'acme')]"] == 16
    assert got["diptych_tenant_time_to_first_token_seconds_count[('tenant', 'acme')]"] == 1


def test_many_observations_at_once_are_as_many_single_ones():
    reported = []
    for many in (True, False):
        metrics = Metrics()
        histogram = metrics.histogram("x_seconds", "x", ITL_BUCKETS_S)
        for value, count in ((0.01, 3), (0.0100001, 2), (79.0, 1), (1e6, 4), (0.0, 5), (0.25, 8)):
            if many:
                histogram.observe(value, count)
            else:
                for _ in range(count):
                    histogram.observe(value)
        reported.append(
            [line for line in metrics.expose().decode().splitlines() if "bucket" in line or "count" in line]
        )
    assert reported[0] == reported[1]
    assert reported[0][-1].endswith(" 23.0")


def test_series_are_exposed_as_prometheus_clients_own():
    """All but the times at which theirs were created."""
    ours, theirs = Metrics(), CollectorRegistry()
    made = [
        (
            ours.counter("things", "Things", ["kind"]),
            ours.counter("plain", "Plain ones"),
            ours.histogram("x_seconds", "Times", (0.1, 1.0, 2.5), ["who"]),
            ours.histogram("y", "Sizes", TOKEN_BUCKETS),
        ),
        (
            prometheus_client.Counter("diptych_things", "Things", ["kind"], registry=theirs),
            prometheus_client.Counter("diptych_plain", "Plain ones", registry=theirs),
            prometheus_client.Histogram(
                "diptych_x_seconds", "Times", ["who"], buckets=(0.1, 1.0, 2.5), registry=theirs
            ),
            prometheus_client.Histogram("diptych_y", "Sizes", buckets=TOKEN_BUCKETS, registry=theirs),
        ),
    ]
    for things, plain, times, sizes in made:
        things.labels("a").inc()
        things.labels('"b"').inc(2)
        plain.inc()
        for value in (0.05, 0.1, 3.0):
            times.labels("me").observe(value)
        sizes.observe(1024)
    for form in (prometheus_client.generate_latest, openmetrics_text):
        lines = [line for line in form(theirs).decode().splitlines() if "_created" not in line]
        assert form(ours.registry).decode().splitlines() == lines
    assert made[0][1].value == 1
    with pytest.raises(ValueError, match="labels"):
        made[0][0].labels("a", "b")
    with pytest.raises(ValueError, match="labels"):
        made[0][2].observe(1.0)
    with pytest.raises(ValueError, match="Duplicated"):
        ours.counter("things", "Others")


def finished(prompt=2, completion=1, cached=0):
    return FinishedEvent(FinishReason.STOP, UsageInfo(prompt, completion, cached), "", None, None)


def with_choices(arrived, n, best_of=0):
    return replace(request(arrived), sampling=SamplingParams(4, n=n, best_of=best_of))


def test_the_gaps_between_tokens_are_those_of_each_choice(clock):
    """Issue 15, 4.10: with n > 1 the gap between two choices' tokens was taken for one between two tokens."""
    metrics = RouterMetrics()
    timer = RequestTimer(metrics, with_choices(clock.now(), 2), clock)
    for choice, after_s in ((0, 0.5), (1, 0.03), (0, 0.2), (1, 0.04), (0, 0.2), (1, 0.05)):
        clock.advance(after_s)
        timer.tokens(TokenEvent(0, (7,), "a", choice))
    timer.finished(finished(completion=6), 0)
    got = values(metrics)
    assert got["diptych_time_to_first_token_seconds_count[]"] == 1
    assert got["diptych_inter_token_latency_seconds_count[]"] == 4
    gaps = (0.03 + 0.2) + (0.2 + 0.04) + (0.04 + 0.2) + (0.2 + 0.05)
    assert got["diptych_inter_token_latency_seconds_sum[]"] == pytest.approx(gaps)
    assert sum(p["tokens"] for p in metrics.live.points(clock.now())) == 6


@pytest.mark.parametrize("seed", range(60))
def test_figures_add_up_however_requests_end(metric_laws, seed):
    """Issue 15, 4.10: tokens of requests that were left counted among the generated ones only."""
    rng, clock, metrics = random.Random(seed), FakeClock(10.0), RouterMetrics(by_tenant=True)
    running, more_choices = [], 0
    for number in range(rng.randint(1, 6)):
        n, resumed = rng.choice([(1, 0), (1, 2), (2, 0), (3, 0)])
        made = replace(with_choices(clock.now(), n), resume_after=(5,) * resumed, tenant=f"t{number % 2}")
        running.append((RequestTimer(metrics, made, clock), made, {}))
    while running:
        clock.advance(rng.uniform(0.0, 2.0))
        timer, made, sent = rng.choice(running)
        move = rng.choice(["tokens", "tokens", "tokens", "tokens", "finish", "fail", "leave"])
        if move == "tokens":
            choice, count = rng.randrange(made.sampling.n), rng.randint(0, 3)
            timer.tokens(TokenEvent(sent.get(choice, 0), (7,) * count, "a", choice, cached_tokens=0 if sent else 1))
            if count:
                more_choices += bool(sent) and choice not in sent
                sent[choice] = sent.get(choice, 0) + count
            if count and len(sent) == 1 and sent[choice] == count:
                metrics.predictions(RequestTrace("r", ttft_s=0.5))
            continue
        running.remove((timer, made, sent))
        if move == "finish" and (sent or made.resume_after):
            timer.finished(finished(completion=sum(sent.values()) + len(made.resume_after), cached=1), 10)
        if move == "fail":
            timer.failed(WorkerLostError("x"))
        timer.left()
    metrics.refused("QUOTA_EXCEEDED", "t0")
    figures = metric_laws.Figures.parse(metrics.expose().decode())
    found = metric_laws.check_router(figures, more_choices=more_choices)
    assert not [law for law in found if not law.startswith("answered with tokens")], found
    for kind in ("prompt", "generation", "prompt_cached"):
        name = {"prompt_cached": "prompt_tokens_cached_total"}.get(kind, f"{kind}_tokens_total")
        assert figures.total(f"tenant_{name}") == figures.total(name)
    assert figures.total("tenant_requests_total") == figures.total("requests_total")
    assert figures.total("tenant_time_to_first_token_seconds_count") == figures.total(
        "time_to_first_token_seconds_count"
    )


def test_tokens_of_choices_that_were_held_back_count_as_at_decode(clock, metric_laws):
    metrics = RouterMetrics()
    timer = RequestTimer(metrics, with_choices(clock.now(), 1, best_of=3), clock)
    timer.tokens(TokenEvent(0, (7, 8), "ab", cached_tokens=1))
    metrics.predictions(RequestTrace("r", ttft_s=0.5))
    timer.finished(finished(completion=6), 0)
    figures = metric_laws.Figures.parse(metrics.expose().decode())
    assert figures.total("generation_tokens_total") == figures.total("request_generation_tokens_sum") == 6
    assert not metric_laws.check_router(figures, more_choices=None)
