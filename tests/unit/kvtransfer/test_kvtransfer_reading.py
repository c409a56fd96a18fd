"""Decode's ledger: each guard has a test that fails without it."""

from __future__ import annotations

import pytest

from diptych.common.errors import TransferError
from diptych.kvtransfer.ledgers import reader_ledger as rd
from diptych.kvtransfer.ledgers.ledger import DropPeer

BAD = TransferError("damaged")


@pytest.fixture
def ledger(reader):
    made = reader()
    yield made
    assert made.check() == []


def want(read_id, peer="p0", deadline=3.0):
    return rd.ReadWanted(read_id, peer, deadline)


def test_the_good_path(ledger):
    assert ledger.on_event(want(1), 0.0) == [rd.StartRead(1, 0)]
    assert ledger.awaited(1)
    assert ledger.on_event(rd.Received(1, None), 1.0) == [rd.Deliver(1, 0)]
    assert ledger.counts().settled == 1
    assert ledger.on_event(rd.Tick(), 99.0) == []  # what the engine holds has no deadline here
    assert ledger.on_event(rd.Finished(1), 2.0) == [rd.Acknowledge(1), rd.Forget(1)]
    assert ledger.counts().free == 3


def test_a_damaged_slab_is_free_at_once_and_prefill_is_notified(ledger):
    ledger.on_event(want(1), 0.0)
    assert ledger.on_event(rd.Received(1, BAD), 1.0) == [rd.FailRead(1, BAD), rd.Acknowledge(1), rd.Forget(1)]


def test_after_the_deadline_the_slab_is_quarantined_until_the_receive_completes(ledger):
    ledger.on_event(want(1), 0.0)
    (fail,) = ledger.on_event(rd.Tick(), 3.0)
    assert isinstance(fail, rd.FailRead)
    assert ledger.counts().quarantined == 1
    assert not ledger.awaited(1)
    assert ledger.on_event(rd.Tick(), 3.1) == []
    assert ledger.on_event(rd.Received(1, None), 4.0) == [rd.Acknowledge(1), rd.Forget(1)]
    assert ledger.counts().free == 3


def test_the_deadline_is_the_askers_alone(ledger):
    """One rule for a read's deadline, where it is asked for (worker.reads.link_rate); the ledger adds none of its own."""
    ledger.on_event(want(1, deadline=5000.0), 10.0)
    assert ledger.next_deadline() == 5000.0
    assert ledger.on_event(rd.Tick(), 4999.0) == []
    assert isinstance(ledger.on_event(rd.Tick(), 5000.0)[0], rd.FailRead)


def test_reads_wait_for_a_slab_and_a_busy_peer_does_not_stop_the_others(ledger):
    for read_id in (1, 2):
        assert ledger.on_event(want(read_id), 0.0) == [rd.StartRead(read_id, read_id - 1)]
    assert ledger.on_event(want(3), 0.0) == []  # p0 is at its quota of 2
    assert ledger.on_event(want(4, peer="p1"), 0.0) == [rd.StartRead(4, 2)]
    assert rd.StartRead(3, 0) in ledger.on_event(rd.Received(1, BAD), 0.0)


def test_a_waiting_read_has_its_deadline_too(ledger):
    for read_id in (1, 2, 3):
        ledger.on_event(want(read_id, deadline=3.0 if read_id == 3 else 9.0), 0.0)
    fail, acknowledge, forget = ledger.on_event(rd.Tick(), 3.0)
    assert isinstance(fail, rd.FailRead)
    assert (acknowledge, forget) == (rd.Acknowledge(3), rd.Forget(3))


def test_beyond_the_quarantine_cap_reads_of_that_pair_fail_at_once(ledger):
    for read_id in (1, 2):
        ledger.on_event(want(read_id), 0.0)
    ledger.on_event(rd.Tick(), 3.0)
    fail, _ = ledger.on_event(want(3), 3.0)
    assert isinstance(fail, rd.FailRead)
    assert "unusable" in str(fail.error)
    assert ledger.on_event(want(4, peer="p1", deadline=9.0), 3.0) == [rd.StartRead(4, 2)]
    ledger.on_event(rd.Received(1, None), 4.0)
    assert ledger.on_event(want(5, deadline=9.0), 4.0) == [rd.StartRead(5, 0)]  # it healed


def test_a_long_quarantine_closes_the_endpoint(ledger):
    ledger.on_event(want(1), 0.0)
    ledger.on_event(rd.Tick(), 3.0)
    assert ledger.on_event(rd.Tick(), 7.9) == []
    (drop,) = ledger.on_event(rd.Tick(), 8.0)
    assert isinstance(drop, DropPeer)
    assert ledger.on_event(rd.PeerGone("p0", "dropped"), 8.1) == [rd.Forget(1)]
    assert ledger.counts().free == 3


def test_a_lost_peer_fails_all_its_reads_and_keeps_what_is_verified(ledger):
    for read_id in (1, 2, 3):
        ledger.on_event(want(read_id, deadline=9.0), 0.0)
    ledger.on_event(rd.Received(1, None), 0.0)
    ledger.on_event(want(4, peer="p1", deadline=9.0), 0.0)
    failed = {
        a.read_id: str(a.error) for a in ledger.on_event(rd.PeerGone("p0", "killed"), 1.0) if isinstance(a, rd.FailRead)
    }
    assert set(failed) == {2, 3}
    assert all("peer lost" in text for text in failed.values())
    counts = ledger.counts()
    assert (counts.settled, counts.in_flight) == (1, 1)


def test_cancel_in_every_phase(ledger):
    for read_id in (1, 2, 3):
        ledger.on_event(want(read_id), 0.0)
    assert ledger.on_event(rd.Finished(3), 0.0) == [rd.Acknowledge(3), rd.Forget(3)]  # waited for a slab
    assert ledger.on_event(rd.Finished(2), 0.0) == []  # in flight: the network may still write
    assert ledger.counts().quarantined == 1
    ledger.on_event(rd.Received(1, None), 0.0)
    assert rd.Forget(1) in ledger.on_event(rd.Finished(1), 0.0)
    assert ledger.on_event(rd.Finished(1), 0.0) == []


def test_a_second_or_unknown_answer_changes_nothing(ledger):
    ledger.on_event(want(1), 0.0)
    ledger.on_event(rd.Received(1, None), 0.0)
    assert ledger.on_event(rd.Received(1, BAD), 0.0) == []
    assert ledger.on_event(rd.Received(77, None), 0.0) == []
    assert ledger.counts().settled == 1
