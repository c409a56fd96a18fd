from diptych.router.cluster.event_watch import EventWatch
from diptych.router.observe.explain import RequestTrace
from diptych.router.placement.index import IndexMode
from diptych.router.placement.recent import Decision, Decisions


def why(watch, now, num_events=0, lease_sequence=0, mode=IndexMode.EXACT):
    return watch.why("w", num_events=num_events, lease_sequence=lease_sequence, mode=mode, now=now)


def test_a_worker_that_computes_and_publishes_nothing_is_untracked():
    watch = EventWatch()
    assert why(watch, 0.0) == ""
    watch.computed("w", 1.0)
    watch.computed("w", 2.9)
    assert why(watch, 3.0) == ""
    assert why(watch, 3.1) == "publishes no cache events"
    assert why(watch, 3.2, num_events=1, lease_sequence=1) == ""
    watch.forget("w")
    assert why(watch, 9.0) == ""


def test_a_stream_that_never_brings_what_the_lease_speaks_of():
    watch = EventWatch()
    watch.resynced("w")
    assert why(watch, 1.0, lease_sequence=4) == ""
    watch.resynced("w")
    assert why(watch, 2.0, lease_sequence=4) == "its cache events do not arrive"
    assert why(watch, 2.0, num_events=1, lease_sequence=5) == ""


def test_an_index_that_stays_untrusted():
    watch = EventWatch()
    assert why(watch, 0.0, num_events=3, lease_sequence=3, mode=IndexMode.STALE) == ""
    assert "only as STALE for 11 s" in why(watch, 11.0, num_events=3, lease_sequence=3, mode=IndexMode.STALE)
    assert why(watch, 12.0, num_events=3, lease_sequence=3) == ""
    assert why(watch, 13.0, num_events=3, lease_sequence=3, mode=IndexMode.STALE) == ""


def decision(request_id, label=""):
    return Decision(request_id, label, 1, 0.0, b"", RequestTrace(request_id))


def test_decisions_are_found_by_id_and_label_and_bounded():
    decisions = Decisions(max_decisions=3)
    for i in range(5):
        decisions.add(decision(f"r{i}", "mine" if i % 2 else f"label {i}"))
    assert len(decisions) == 3
    assert decisions.get("r1") is None
    assert decisions.get("label 0") is None
    assert decisions.get("r4").request_id == "r4"
    assert decisions.get("mine").request_id == "r3"
    assert decisions.get("") is None
    decisions.add(decision("r5"))
    decisions.add(decision("r6"))
    assert decisions.get("mine") is None
