"""Series by adapter: of a bounded number of names, which end with the name."""

from __future__ import annotations

from diptych.common.observe.metrics import Metrics
from diptych.common.store.adapters import AdapterTable, ChosenAdapter, is_adapter_name
from diptych.router.observe.adapter_metrics import (
    FINISHED,
    MAX_NAMED,
    OTHER,
    AdapterMetrics,
    seen_counters,
    seen_exposition,
)
from diptych_tests.records import adapter_entry, adapter_version


def test_the_number_of_series_is_bounded_and_a_name_that_leaves_makes_room() -> None:
    metrics = Metrics()
    series = AdapterMetrics(metrics)
    names = [f"adapter-{i:03}" for i in range(MAX_NAMED + 10)]
    entries = {name: adapter_entry(name) for name in names}
    series.on_change(AdapterTable(1, entries))
    for name in (*names, "gone"):
        series.ended(ChosenAdapter(name, entries.get(name, entries[names[0]]).versions[0]), FINISHED, 3, 5)
    counted = metrics.totals()["adapter_requests"]
    assert len(counted) == MAX_NAMED + 1
    assert counted[f"{OTHER},finished"] == 11
    assert metrics.totals()["adapter_generation_tokens"][names[0]] == 5
    del entries[names[0]]
    series.on_change(AdapterTable(2, entries))
    assert f"{names[0]},finished" not in metrics.totals()["adapter_requests"]
    assert names[0] not in metrics.totals()["adapter_prompt_tokens"]
    series.ended(ChosenAdapter(names[-10], adapter_version(1)), "OVERLOADED")
    assert metrics.totals()["adapter_requests"][f"{names[-10]},OVERLOADED"] == 1
    assert metrics.value("adapters_registered") == MAX_NAMED + 9


def test_no_adapter_has_the_name_of_the_others() -> None:
    """One that was called `other` shared its series with all further ones, and every tenant saw them."""
    assert not is_adapter_name(OTHER)
    metrics = Metrics()
    series = AdapterMetrics(metrics)
    series.on_change(AdapterTable(1, {"other": adapter_entry("other")}))
    for name in ("other", "a stranger"):
        series.ended(ChosenAdapter(name, adapter_version()), FINISHED)
    assert metrics.totals()["adapter_requests"] == {"other,finished": 1.0, f"{OTHER},finished": 1.0}
    assert b'"other"' not in seen_exposition(metrics.expose(), lambda name: False)


def test_requests_of_a_canary_are_counted_apart() -> None:
    metrics = Metrics()
    series = AdapterMetrics(metrics)
    entry = adapter_entry("poems", "one", "two", canary=1, canary_share=0.5)
    series.on_change(AdapterTable(1, {"poems": entry}))
    for version in (*entry.versions, entry.versions[0]):
        series.ended(ChosenAdapter("poems", version), FINISHED)
    assert metrics.totals()["adapter_canary_requests"] == {"poems": 2}
    series.ended(None, FINISHED)
    assert metrics.totals()["adapter_requests"] == {"poems,finished": 3}


def test_a_reader_sees_the_series_of_adapters_that_it_may_use() -> None:
    metrics = Metrics()
    metrics.identify({"role": "router", "worker": "router-0"})
    of_adapters = AdapterMetrics(metrics)
    of_adapters.on_change(AdapterTable(1, {name: adapter_entry(name) for name in ("poems", "prose")}))
    for name in ("poems", "prose", "a stranger"):
        of_adapters.ended(ChosenAdapter(name, adapter_version()), FINISHED, 10, 5)
    whole = metrics.expose()
    assert seen_exposition(whole, lambda name: True) == whole
    seen = seen_exposition(whole, "prose".__eq__)
    assert b'adapter="prose"' in seen
    assert b'adapter="_other"' in seen
    assert b"poems" not in seen
    assert [line for line in whole.splitlines() if b"poems" not in line] == seen.splitlines(), "nothing else is missing"
    assert b"prose" not in seen_exposition(whole, lambda name: False)
    counters = seen_counters(metrics.totals() | {"errors": {"poems": 1.0}}, "prose".__eq__)
    assert counters["adapter_requests"] == {"prose,finished": 1.0, "_other,finished": 1.0}
    assert counters["adapter_prompt_tokens"] == {"prose": 10.0, "_other": 10.0}
    assert (counters["adapter_turns_refused"], counters["errors"]) == ({"": 0.0}, {"poems": 1.0})
