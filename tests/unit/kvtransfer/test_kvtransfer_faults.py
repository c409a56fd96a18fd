"""Both sides over an in-process transport that misbehaves, on a clock that stands still."""

from __future__ import annotations

from dataclasses import replace

from diptych.common.errors import StaleReferenceError, TransferError


def slabs(pair):
    return pair.p.counts(), pair.d.counts()


def test_a_slab_crosses_and_both_rings_are_free_again(pair):
    pair.want(1, pair.publish(fill=7))
    pair.step()
    assert pair.payload(1) == b"\7" * 1000
    pair.d.finish(1, pair.clock.now())
    pair.step()
    assert pair.settled == [("att-1", 2)]
    assert all(side.free == side.total for side in slabs(pair))
    assert (pair.p.bytes_sent, pair.d.bytes_received) == (1000, 1000)


def test_corrupted_payload_is_an_error_and_costs_no_slab(pair):
    pair.d_wire.corrupt_next()
    pair.want(1, pair.publish())
    pair.step()
    assert isinstance(pair.failed[1], TransferError)
    assert "checksum" in str(pair.failed[1])
    assert not pair.delivered
    pair.step()
    assert all(side.free == side.total for side in slabs(pair))


def test_dropped_request_ends_at_the_deadline_and_at_the_lease(pair):
    pair.d_wire.drop_next("read")
    pair.want(1, pair.publish())
    pair.step()
    assert not pair.failed
    pair.step(3.0)
    assert "deadline" in str(pair.failed[1])
    assert pair.d.counts().quarantined == 1
    pair.step(5.0)
    assert pair.p.counts().free == 3  # the slab lease
    pair.step()
    assert pair.d.counts().free == 3  # quarantine ended by closing the endpoint


def test_late_answer_lands_in_quarantine_and_frees_the_slab(pair):
    pair.d_wire.hold("receive")
    pair.want(1, pair.publish())
    pair.step()
    pair.step(3.0)
    assert pair.d.counts().quarantined == 1
    pair.d_wire.release("receive")
    pair.step()
    assert not pair.delivered
    assert all(side.free == side.total for side in slabs(pair))


def test_doubled_request_is_refused_the_second_time_and_changes_nothing(pair):
    pair.d_wire.duplicate_next("read")
    pair.want(1, pair.publish(fill=9))
    pair.step()
    assert pair.payload(1) == b"\x09" * 1000
    assert not pair.failed
    pair.d.finish(1, pair.clock.now())
    pair.step()
    assert all(side.free == side.total for side in slabs(pair))


def test_doubled_receive_and_doubled_note_change_nothing(pair):
    pair.d_wire.duplicate_next("receive")
    pair.d_wire.duplicate_next("note")
    pair.want(1, pair.publish())
    pair.step()
    pair.d.finish(1, pair.clock.now())
    pair.step()
    assert len(pair.settled) == 1
    assert all(side.free == side.total for side in slabs(pair))


def test_lost_acknowledgement_costs_one_lease(pair):
    pair.d_wire.drop_next("note")
    pair.want(1, pair.publish())
    pair.step()
    pair.d.finish(1, pair.clock.now())
    pair.step()
    assert pair.p.counts().settled == 1
    pair.step(5.0)
    assert pair.p.counts().free == 3
    assert pair.settled == [("att-1", 2)]


def test_a_handle_that_is_used_twice_or_forged_or_of_another_life(pair):
    named = pair.publish()
    pair.want(1, replace(named, attempt="att-2"))
    pair.want(2, replace(named, incarnation="life0"))
    pair.want(3, replace(named, layout_hash=1))
    pair.want(4, replace(named, size_bytes=1 << 30))
    pair.want(5, named)
    pair.want(6, named)
    pair.step()
    assert "FORGED" in str(pair.failed[1])
    assert isinstance(pair.failed[2], StaleReferenceError)
    assert "layout" in str(pair.failed[3])
    assert isinstance(pair.failed[4], TransferError)
    assert 5 in pair.delivered
    assert "USED" in str(pair.failed[6])
    pair.d.finish(5, pair.clock.now())
    pair.step()
    assert all(side.free == side.total for side in slabs(pair))


def test_a_released_attempt_cannot_be_read(pair):
    named = pair.publish()
    pair.p.release("att-1", pair.clock.now())
    pair.want(1, named)
    pair.step()
    assert isinstance(pair.failed[1], StaleReferenceError)


def test_garbage_requests_and_notes_are_refused_or_dropped(pair):
    pair.want(1, pair.publish())
    pair.step()
    key = "p0@life1"
    pair.d_wire.notify(key, b"garbage")
    pair.d_wire.read(key, 99, b"garbage", pair.d_ring.message(1, 1000))
    pair.step()
    assert pair.p.counts().settled == 1


def test_a_peer_that_goes_away_fails_its_reads_and_frees_both_rings(pair):
    pair.p_wire.hold("request")
    for read_id in (1, 2):
        pair.want(read_id, pair.publish())
    pair.step()
    pair.p_wire.close()
    pair.step()
    assert all("peer lost" in str(pair.failed[read_id]) for read_id in (1, 2))
    assert pair.d.counts().free == 3


def test_a_read_right_after_the_loss_does_not_die_of_the_old_news(pair):
    pair.want(1, pair.publish())
    pair.step()
    pair.d.finish(1, pair.clock.now())
    named = pair.publish(fill=3)
    pair.d.forget("p0@life1", pair.clock.now())
    pair.want(2, named)
    assert "peer lost" in str(pair.failed[2])
    pair.step()
    pair.want(3, named)
    pair.step()
    assert pair.payload(3) == b"\3" * 1000
    pair.d.finish(3, pair.clock.now())
    pair.step()


def test_a_thousand_waiting_reads_of_a_lost_peer_all_fail(pair):
    pair.p_wire.hold("request")
    named = pair.publish()
    for read_id in range(1, 1001):
        pair.want(read_id, named)
    pair.step()
    pair.p_wire.close()
    pair.step()
    assert len(pair.failed) == 1000
    assert pair.d.counts().free == 3


def test_a_renewed_slab_is_read_long_after_its_lease(pair):
    """One decode worker reads slab after slab over a slow link: the last one waits for several leases."""
    pair.want(1, pair.publish(fill=1))
    pair.step()
    late = pair.publish(fill=2)
    forgotten = pair.publish(fill=3)
    lease_s = pair.p._ledger._outstanding[late.slab].expires - pair.clock.now()
    for _ in range(12):
        pair.clock.advance(0.4 * lease_s)
        pair.d.renew("p0@life1", late, pair.clock.now())
        pair.step()
        pair.p.tick(pair.clock.now())
    pair.want(2, late)
    pair.want(3, forgotten)
    pair.step()
    assert pair.payload(2) == bytes([2]) * 1000
    assert isinstance(pair.failed[3], StaleReferenceError)
