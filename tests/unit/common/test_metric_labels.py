"""Series carry role and worker of their process, for any scraper."""

from __future__ import annotations

from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from diptych.common.observe.metrics import Metrics


def two_series() -> Metrics:
    metrics = Metrics()
    metrics.counter("things", "Things", ["kind"]).labels("a").inc()
    metrics.histogram("seconds", "Seconds", [1.0]).observe(0.5)
    metrics.identify({"role": "decode", "worker": "decode-0"})
    return metrics


def test_every_sample_carries_role_and_worker() -> None:
    samples = [s for family in text_string_to_metric_families(two_series().expose().decode()) for s in family.samples]
    assert {(s.labels["role"], s.labels["worker"]) for s in samples} == {("decode", "decode-0")}
    assert {s.labels.get("kind") for s in samples if s.name == "diptych_things_total"} == {"a"}
    assert {s.labels["le"] for s in samples if s.name.endswith("_bucket")} == {"1.0", "+Inf"}


def test_a_samples_own_label_wins() -> None:
    metrics = Metrics()
    metrics.gauge("followed", "Of another worker", ["worker"]).labels("prefill-1").set(1)
    metrics.identify({"role": "router", "worker": "router-a"})
    assert b'diptych_followed{role="router",worker="prefill-1"} 1.0' in metrics.expose()


def test_a_scrape_of_some_names_is_labelled_too() -> None:
    some = two_series().exposed.restricted_registry(["diptych_things_total"])
    text = generate_latest(some).decode()
    assert 'diptych_things_total{kind="a",role="decode",worker="decode-0"} 1.0' in text
    assert "seconds" not in text


def test_the_registry_itself_is_read_without_them() -> None:
    assert two_series().totals() == {"things": {"a": 1.0}}
