"""What the processes of one router show as one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from diptych.common.observe.metrics import Metrics
from diptych.router.observe.live_series import LiveSeries
from diptych.router.processes.merge import merged_exposition, merged_status


def exposition(process: int, counts: dict[str, int], seconds: list[float]) -> bytes:
    metrics = Metrics()
    metrics.identify({"role": "router", "worker": f"router-{process}", "process": str(process)})
    counter = metrics.counter("errors", "By reason", ["reason"])
    for reason, count in counts.items():
        counter.labels(reason).inc(count)
    times = metrics.histogram("wait_seconds", "Waiting", (0.1, 1.0))
    for value in seconds:
        times.observe(value)
    if process:
        metrics.gauge("late", "Only some processes have it").set(process)
    return metrics.expose()


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.text(max_size=5).filter(lambda t: "\r" not in t), st.integers(0, 9), max_size=3),
            st.lists(st.floats(0, 2), max_size=3),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_every_sample_is_kept_and_every_family_is_there_once(parts: list[tuple[dict[str, int], list[float]]]) -> None:
    bodies = [exposition(number, *part) for number, part in enumerate(parts)]
    merged = merged_exposition(bodies)
    each = [samples(body) for body in bodies]
    assert samples(merged) == {name: value for one in each for name, value in one.items()}
    assert len(samples(merged)) == sum(map(len, each))
    kinds = [line for line in merged.decode().split("\n") if line.startswith("# TYPE ")]
    assert len(kinds) == len(set(kinds))


def test_one_process_shows_what_it_has() -> None:
    body = exposition(0, {"A": 1}, [0.5])
    assert merged_exposition([body]) == body


def status(live: LiveSeries, now: float, **changes: Any) -> dict[str, Any]:
    worker = {"id": "d0", "pending_tokens": 5, "pending_requests": 1, "kv_usage": 0.5}
    cluster = {"workers": [worker], "policy": "cost", "placements": [{"request_id": "a", "age_s": 2.0}]}
    return {
        "model": "m",
        "max_model_len": 8,
        "cluster": cluster,
        "more_models": [],
        "ready": True,
        "reasons": ["old"],
        "running": 1.0,
        "waiting": 0.0,
        "stages": live.stages(),
        "series": live.points(now),
        "counters": {"requests": {"": 2.0}, "request_errors": {"A": 1.0}},
        **changes,
    }


def test_sums_are_exact_and_quantiles_are_as_documented() -> None:
    one, other = LiveSeries(), LiveSeries()
    other.failed(8.0)
    for live, ttft, count in ((one, 0.1, 1), (other, 0.4, 3)):
        for _ in range(count):
            live.first_token(ttft, 10.0)
            live.finished(10.0)
            live.stage("queue", ttft)
        live.tokens(7, 10.0, ttft)
    placed = {
        "workers": [{"id": "d0", "pending_tokens": 7, "pending_requests": 2}, {"id": "unknown here"}],
        "placements": [{"request_id": "b", "age_s": 1.0}, {"request_id": "c", "age_s": 3.0}],
    }
    own = status(one, 11.0)
    before = copy.deepcopy(own)
    counters = {"requests": {"": 3.0}, "request_errors": {"B": 4.0}}
    merged = merged_status(own, [status(other, 11.0, running=4.0, cluster=placed, counters=counters)], 2)
    assert own == before
    assert (merged["running"], merged["waiting"], merged["reasons"]) == (5.0, 0.0, ["old"])
    assert merged["counters"] == {"requests": {"": 5.0}, "request_errors": {"A": 1.0, "B": 4.0}}
    assert [point["age_s"] for point in merged["series"]] == [3, 1]
    assert merged["series"][0]["failed"] == 1
    second = merged["series"][1]
    assert (second["tokens"], second["finished"], second["ttft_p95"]) == (14, 4, 0.4)
    assert second["ttft_p50"] == pytest.approx((0.1 + 3 * 0.4) / 4)
    assert second["itl_p50"] == pytest.approx(0.25)
    assert merged["stages"]["queue"] == {"count": 4, "p50": pytest.approx(0.325), "p95": 0.4}
    assert merged["stages"]["decode"] == {"count": 0, "p50": None, "p95": None}
    assert merged["processes"] == {"number": 2, "answering": 2}
    cluster = merged["cluster"]
    assert cluster["workers"] == [{"id": "d0", "pending_tokens": 12, "pending_requests": 3, "kv_usage": 0.5}]
    assert [one["request_id"] for one in cluster["placements"]] == ["b", "a", "c"]


def test_a_process_that_does_not_answer_is_named() -> None:
    merged = merged_status(status(LiveSeries(), 1.0), [], 3)
    assert merged["reasons"] == ["old", "2 of 3 router processes do not answer"]
    assert merged["processes"] == {"number": 3, "answering": 1}


def test_each_models_cluster_is_merged_with_its_own() -> None:
    def several(tokens: int) -> dict[str, Any]:
        worker = {"id": "x", "pending_tokens": tokens, "pending_requests": 0}
        more = {"model": "n", "max_model_len": 4, "cluster": {"workers": [worker], "placements": []}}
        return status(LiveSeries(), 1.0, more_models=[more])

    merged = merged_status(several(1), [several(20)], 2)
    assert merged["cluster"]["workers"][0]["pending_tokens"] == 10
    assert merged["more_models"][0]["cluster"]["workers"][0]["pending_tokens"] == 21
    assert merged["more_models"][0]["model"] == "n"
