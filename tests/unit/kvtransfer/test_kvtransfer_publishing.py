"""Prefill's ledger: each guard has a test that fails without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.kvtransfer.ledgers import publisher_ledger as pub
from diptych.kvtransfer.ledgers.ledger import DropPeer, IllegalMoveError, SlabState, SlabTable
from diptych.kvtransfer.slabs.handle import Refusal


@pytest.fixture
def ledger(publisher):
    made = publisher()
    made.on_event(pub.GrantAsked(), 0.0)
    yield made
    assert made.check() == []


def ask(handle, read_id=1, conn="d0#1", authentic=True):
    return pub.ReadAsked(conn, read_id, handle, authentic)


def published(ledger, handle, now=0.0, **changes):
    named = handle(**changes)
    assert ledger.on_event(pub.Published("d0", named), now) == []
    return named


def in_flight(ledger, handle, conn="d0#1", now=0.0, **changes):
    named = published(ledger, handle, now, **changes)
    assert isinstance(ledger.on_event(ask(named, conn=conn), now)[0], pub.Send)
    return named


def test_all_free_slabs_are_granted_once(publisher):
    ledger = publisher()
    assert [a.slab for a in ledger.on_event(pub.GrantAsked(), 0.0)] == [0, 1, 2]
    assert ledger.on_event(pub.GrantAsked(), 0.0) == []


def test_the_good_path(ledger, handle):
    named = published(ledger, handle)
    assert ledger.on_event(ask(named), 1.0) == [pub.Send("d0#1", 1, 0, 1, 1000)]
    assert ledger.on_event(pub.SendDone(0, 1, True), 1.0) == []
    assert ledger.counts().settled == 1
    assert ledger.on_event(pub.Acked(named, True), 1.0) == [pub.Settled("att-1", 0), pub.Grant(0, 2)]
    assert ledger.counts().free == 3


def test_an_acknowledgement_before_our_own_send_completed_waits_for_it(ledger, handle):
    named = in_flight(ledger, handle)
    assert ledger.on_event(pub.Acked(named, True), 0.0) == []
    assert ledger.counts().in_flight == 1
    assert pub.Grant(0, 2) in ledger.on_event(pub.SendDone(0, 1, True), 0.0)


@pytest.mark.parametrize(
    ("change", "authentic", "reason"),
    [
        ({"attempt": "att-2"}, False, Refusal.FORGED),
        ({"worker_id": "p9"}, True, Refusal.UNKNOWN),
        ({"incarnation": "life0"}, True, Refusal.STALE),
        ({"slab": 99}, True, Refusal.OUT_OF_RANGE),
        ({"size_bytes": 1 << 40}, True, Refusal.OUT_OF_RANGE),
        ({"layout_hash": 8}, True, Refusal.OUT_OF_RANGE),
        ({"generation": 2}, True, Refusal.STALE),
        ({"slab": 1}, True, Refusal.UNKNOWN),
    ],
)
def test_refused_handles(ledger, handle, change, authentic, reason):
    named = published(ledger, handle)
    assert ledger.on_event(ask(replace(named, **change), authentic=authentic), 0.0) == [pub.Refuse("d0#1", 1, reason)]
    assert ledger.counts().packed == 1
    assert ledger.refused[reason] == 1


def test_a_handle_is_used_once(ledger, handle):
    named = in_flight(ledger, handle)
    assert ledger.on_event(ask(named, 2), 0.0) == [pub.Refuse("d0#1", 2, Refusal.USED)]
    ledger.on_event(pub.SendDone(0, 1, True), 0.0)
    assert ledger.on_event(ask(named, 3), 0.0) == [pub.Refuse("d0#1", 3, Refusal.USED)]


def test_an_expired_handle_is_refused_even_before_the_sweep(ledger, handle):
    named = published(ledger, handle)
    assert ledger.on_event(ask(named), 5.0) == [pub.Refuse("d0#1", 1, Refusal.EXPIRED)]


def test_the_sweep_takes_back_unread_and_unacknowledged_slabs(ledger, handle):
    published(ledger, handle)
    in_flight(ledger, handle, slab=1)
    ledger.on_event(pub.SendDone(1, 1, True), 0.0)
    assert ledger.on_event(pub.Tick(), 4.9) == []
    actions = ledger.on_event(pub.Tick(), 5.0)
    assert [a for a in actions if isinstance(a, pub.Settled)] == [pub.Settled("att-1", 0), pub.Settled("att-1", 1)]
    assert ledger.counts().free == 3
    assert ledger.expired_requests == 1, "both slabs were one request's"


def test_a_send_that_outlives_its_lease_is_quarantined_until_it_completes(ledger, handle):
    in_flight(ledger, handle)
    assert ledger.on_event(pub.Tick(), 5.0) == [pub.Settled("att-1", 0), pub.PeerSilent("d0")]
    assert ledger.counts().quarantined == 1
    assert ledger.on_event(pub.SendDone(0, 1, False), 6.0) == [pub.Grant(0, 2)]


def test_a_quarantine_of_a_whole_lease_closes_the_endpoint(ledger, handle):
    in_flight(ledger, handle)
    ledger.on_event(pub.Tick(), 5.0)
    assert ledger.on_event(pub.Tick(), 9.9) == []
    (drop,) = ledger.on_event(pub.Tick(), 10.0)
    assert isinstance(drop, DropPeer)
    assert drop.peer == "d0#1"
    assert ledger.on_event(pub.PeerGone("d0#1"), 10.0) == [pub.Grant(0, 2)]


def test_release_is_eager_idempotent_and_leaves_a_running_send_alone(ledger, handle):
    published(ledger, handle)
    in_flight(ledger, handle, slab=1)
    published(ledger, handle, slab=2, attempt="other")
    assert ledger.on_event(pub.Released("att-1"), 0.0) == [pub.Grant(0, 2)]
    counts = ledger.counts()
    assert (counts.packed, counts.quarantined, counts.free) == (1, 1, 1)
    assert ledger.on_event(pub.Released("att-1"), 0.0) == []
    assert ledger.on_event(pub.SendDone(1, 1, True), 0.0) == [pub.Grant(1, 2)]


def test_beyond_the_quarantine_cap_the_pair_is_unusable_and_others_are_not(ledger, handle):
    for slab in (0, 1):
        in_flight(ledger, handle, slab=slab)
    ledger.on_event(pub.Released("att-1"), 0.0)
    named = published(ledger, handle, slab=2)
    assert ledger.on_event(ask(named, 7), 0.0) == [pub.Refuse("d0#1", 7, Refusal.UNUSABLE)]
    assert isinstance(ledger.on_event(ask(named, 8, conn="d1#2"), 0.0)[0], pub.Send)


def test_a_lost_peer_frees_what_it_was_reading_and_only_that(ledger, handle):
    in_flight(ledger, handle)
    in_flight(ledger, handle, slab=1, conn="d1#2")
    published(ledger, handle, slab=2)
    assert ledger.on_event(pub.PeerGone("d0#1"), 0.0) == [pub.Settled("att-1", 0), pub.Grant(0, 2)]
    counts = ledger.counts()
    assert (counts.in_flight, counts.packed) == (1, 1)


@pytest.mark.parametrize("authentic", [True, False])
def test_a_forged_or_stale_acknowledgement_frees_nothing(ledger, handle, authentic):
    named = in_flight(ledger, handle)
    ledger.on_event(pub.SendDone(0, 1, True), 0.0)
    other = replace(named, generation=2) if authentic else named
    assert ledger.on_event(pub.Acked(other, authentic), 0.0) == []
    assert ledger.counts().settled == 1


def test_a_late_send_completion_of_another_generation_is_ignored(ledger, handle):
    in_flight(ledger, handle)
    ledger.on_event(pub.PeerGone("d0#1"), 0.0)
    in_flight(ledger, handle, generation=2)
    assert ledger.on_event(pub.SendDone(0, 1, True), 0.0) == []
    assert ledger.counts().in_flight == 1


def test_publishing_a_slab_that_is_not_granted_changes_nothing(ledger, handle):
    published(ledger, handle)
    for named in (handle(), handle(generation=2), handle(slab=1, generation=9)):
        assert ledger.on_event(pub.Published("d0", named), 0.0) == [pub.Settled("att-1", named.slab)]
    assert ledger.rejected_publishes == 3
    assert ledger.counts().packed == 1


def test_a_returned_grant_is_granted_again_and_a_stale_return_is_not(ledger, handle):
    assert ledger.on_event(pub.GrantReturned(0, 1), 0.0) == [pub.Grant(0, 1)]
    assert ledger.on_event(pub.GrantReturned(0, 9), 0.0) == []


def test_an_illegal_move_names_the_moves_before_it():
    table = SlabTable(1)
    table.move(0, SlabState.PACKED, "published for att-7")
    with pytest.raises(IllegalMoveError, match="att-7"):
        table.move(0, SlabState.SETTLED, "nonsense")
    assert table.check() == []


def test_the_full_walk_sees_a_wrong_counter(publisher):
    ledger = publisher()
    ledger.table.slabs[0].state = SlabState.PACKED
    assert any("FREE" in sentence for sentence in ledger.check())


def lease_of(ledger, index=0):
    return ledger._outstanding[index].expires


@pytest.mark.parametrize("state", ["packed", "in_flight", "settled"])
def test_a_slab_that_is_still_wanted_outlives_its_lease(ledger, handle, state):
    """A slow link, or a ring that is busy with others: decode renews, and the slab stays."""
    named = published(ledger, handle) if state == "packed" else in_flight(ledger, handle)
    if state == "settled":
        ledger.on_event(pub.SendDone(0, 1, True), 0.0)
    lease = lease_of(ledger)
    for turn in range(1, 40):
        now = turn * lease / 4
        assert ledger.on_event(pub.Renewed(named, True), now) == []
        assert ledger.on_event(pub.Tick(), now) == []
    assert getattr(ledger.counts(), state) == 1
    assert ledger.on_event(pub.Tick(), now + lease)[0] == pub.Settled("att-1", 0)


def test_a_decode_worker_that_says_nothing_for_a_whole_lease_is_silent(ledger, handle):
    published(ledger, handle)
    published(ledger, handle, slab=1, attempt="other")
    actions = ledger.on_event(pub.Tick(), 5.0)
    assert [a for a in actions if isinstance(a, pub.PeerSilent)] == [pub.PeerSilent("d0")], "once, for both slabs"
    assert ledger.on_event(pub.Tick(), 10.0) == []


@pytest.mark.parametrize("word", [ask, lambda named: pub.Renewed(named, True), lambda named: pub.Acked(named, True)])
def test_a_message_about_any_slab_restarts_the_lease(ledger, handle, word):
    published(ledger, handle)
    other = published(ledger, handle, slab=1)
    published(ledger, handle, 3.0, slab=2)
    ledger.on_event(word(other), 2.0)
    assert not [a for a in ledger.on_event(pub.Tick(), 5.0) if isinstance(a, pub.PeerSilent)]
    assert pub.PeerSilent("d0") in ledger.on_event(pub.Tick(), 8.0)


def test_a_forged_word_and_one_of_another_worker_are_none(ledger, handle):
    published(ledger, handle)
    forged = published(ledger, handle, slab=1)
    theirs = handle(slab=2)
    ledger.on_event(pub.Published("d1", theirs), 0.0)
    for event in (pub.Renewed(forged, False), pub.Acked(forged, False), ask(forged, authentic=False)):
        ledger.on_event(event, 4.0)
    ledger.on_event(pub.Renewed(theirs, True), 4.0)
    silent = [a for a in ledger.on_event(pub.Tick(), 5.0) if isinstance(a, pub.PeerSilent)]
    assert silent == [pub.PeerSilent("d0")]


def test_only_its_own_running_lease_is_renewed(ledger, handle):
    named = published(ledger, handle)
    lease = lease_of(ledger)
    ledger.on_event(pub.Renewed(named, False), 1.0)
    ledger.on_event(pub.Renewed(replace(named, generation=2), True), 1.0)
    ledger.on_event(pub.Renewed(replace(named, slab=1), True), 1.0)
    assert lease_of(ledger) == lease
    ledger.on_event(pub.Renewed(named, True), lease)  # over, though the sweep has not come by
    assert lease_of(ledger) == lease
    assert ledger.on_event(ask(named), lease) == [pub.Refuse("d0#1", 1, Refusal.EXPIRED)]


def test_a_renewal_holds_nothing_that_was_released(ledger, handle):
    named = published(ledger, handle)
    ledger.on_event(pub.Released("att-1"), 1.0)
    ledger.on_event(pub.Renewed(named, True), 1.0)
    assert ledger.counts().free == 3
    flying = in_flight(ledger, handle, slab=1)
    ledger.on_event(pub.Released("att-1"), 1.0)
    before = lease_of(ledger, 1)
    ledger.on_event(pub.Renewed(flying, True), 2.0)
    assert ledger.counts().quarantined == 1
    assert lease_of(ledger, 1) == before
