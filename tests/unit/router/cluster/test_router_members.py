from dataclasses import dataclass, field

import msgspec
import pytest

from diptych.common.block_identity import IdentityHeader, identity_facts
from diptych.common.store.worker_record import WorkerRecord
from diptych.router.cluster.compatibility import RouterCheck, pair_differences
from diptych.router.cluster.members import Members
from diptych.router.cluster.patience import Patience
from diptych_tests.records import worker_record

KEY = bytes(32)


@dataclass
class FakeLink:
    record: WorkerRecord
    silent_s: float = 0.0
    why: str = ""
    patience: Patience = field(default_factory=lambda: Patience(2.0))

    def why_not(self):
        return self.why or ("does not answer" if self.silent_s > 2.0 else "")


def record(worker_id="d0", incarnation="a", **changes):
    compat = identity_facts(IdentityHeader(KEY, "m1", "t1", "float32", 16))
    plain = {"incarnation": incarnation, "role": "decode", "compat": compat, "event_epoch": 3}
    return worker_record(worker_id, **(plain | changes))


@pytest.fixture
def members():
    return Members(FakeLink, lambda record: "", dead_s=2.0)


def test_a_life_begins_and_is_replaced(members):
    (first,), lost = members.on_records([record()], 0.0)
    assert lost == []
    assert members.on_records([record(num_blocks=5)], 1.0) == ([], [])
    assert (members.get("d0").record.num_blocks, members.get("d0").read_at) == (5, 1.0)
    (second,), lost = members.on_records([record(incarnation="b")], 2.0)
    assert lost == [first]
    assert members.all() == [second]


def test_17_6_another_role_is_another_member_and_no_loss(members):
    (first,), _ = members.on_records([record()], 0.0)
    (second,), lost = members.on_records([record(role="prefill")], 1.0)
    assert lost == [first]
    assert second.record.role == "prefill"
    assert members.left_gracefully(first, 1.0)
    _, lost = members.on_records([record(incarnation="b")], 2.0)
    assert not members.left_gracefully(lost[0], 2.0)


def test_a_lease_that_is_missing_for_a_moment_changes_nothing(members):
    members.on_records([record()], 0.0)
    members.on_records([], 1.0)
    member = members.get("d0")
    assert members.why_unplaceable(member, 1.5) == ""
    members.on_records([record()], 2.0)
    assert member.missing_since is None


def test_without_lease_an_answering_worker_stays_but_is_not_placed_on(members):
    members.on_records([record()], 0.0)
    assert members.on_records([], 1.0) == ([], [])
    assert members.on_records([], 9.0) == ([], [])
    assert members.why_unplaceable(members.get("d0"), 9.0) == "has no lease"
    assert members.given_up(9.0) == []
    members.get("d0").link.silent_s = 2.5
    assert len(members.given_up(9.0)) == 1
    assert len(members.on_records([], 10.0)[1]) == 1
    assert members.all() == []


def test_a_worker_that_drains_serves_its_kv_until_it_leaves(members):
    members.on_records([record(state="draining", leaves_in_s=30.0)], 100.0)
    member = members.get("d0")
    member.link.why = "reports that it is not serving"
    assert members.still_serves_kv(member, 129.0)
    assert members.why_unplaceable(member, 129.0) == "is draining"
    assert not members.still_serves_kv(member, 130.0)
    member.link.silent_s = 2.5
    assert not members.still_serves_kv(member, 101.0)
    member.link.silent_s = 0.0
    members.on_records([], 101.0)
    assert not members.still_serves_kv(member, 101.0), "it gave its lease up: it exits"
    members.on_records([record(state="draining")], 102.0)
    assert not members.still_serves_kv(member, 102.0), "an older version"
    members.on_records([record(leaves_in_s=30.0)], 103.0)
    assert not members.still_serves_kv(member, 103.0)


def quick(link):
    """Its probes have long been answered at once."""
    for _ in range(200):
        link.patience.on_answer(0.01)


def test_a_silent_worker_is_given_up_sooner_where_another_one_is_usable(members):
    members.on_records([record()], 0.0)
    link = members.get("d0").link
    quick(link)
    link.silent_s = 5.9
    assert members.given_up(0.0) == [], "nobody could take its answers"
    link.silent_s = 6.1
    assert members.given_up(0.0) == [members.get("d0")]
    members.on_records([record(), record("p0", role="prefill"), record("d1")], 1.0)
    link.silent_s = 2.1
    assert members.given_up(1.0) == [members.get("d0")]
    members.get("d1").link.silent_s = 2.1
    assert members.given_up(1.0) == [], "all are silent: the machine, or this router, is slow"
    members.get("d1").link.silent_s, members.get("d1").link.why = 0.0, "reports that it is not serving"
    assert members.given_up(1.0) == []


def test_a_worker_that_answers_slowly_is_waited_for_longer(members):
    members.on_records([record(), record("d1")], 0.0)
    link = members.get("d0").link
    link.silent_s = 5.9
    assert members.given_up(0.0) == [], "nobody knows yet that it is quick"
    quick(link)
    assert len(members.given_up(0.0)) == 1
    link.patience.on_answer(0.5)
    link.silent_s = 3.9
    assert members.given_up(0.0) == []
    link.silent_s = 4.1
    assert len(members.given_up(0.0)) == 1


def test_patience_has_bounds_and_forgets():
    patience = Patience(2.0)
    assert (patience.limit_s, patience.most_s) == (6.0, 6.0)
    for _ in range(110):  # half a minute at four probes a second
        patience.on_answer(0.01)
    assert patience.limit_s == 2.0
    patience.on_answer(20.0)
    assert patience.limit_s == 6.0


def test_draining_and_down_links_are_not_placed_on(members):
    members.on_records([record(state="draining")], 0.0)
    assert members.why_unplaceable(members.get("d0"), 0.0) == "is draining"
    members.on_records([record()], 0.0)
    members.get("d0").link.why = "its request stream is down"
    assert members.why_unplaceable(members.get("d0"), 0.0) == "its request stream is down"


def test_pairs_that_differ_say_how():
    a = {"block_size": "16", "kv_dtype": "float32"}
    assert pair_differences(a, dict(a)) == []
    assert pair_differences(a, {"block_size": "32"}) == [
        "block_size: prefill 16, decode 32",
        "kv_dtype: prefill float32, decode unset",
    ]


@pytest.mark.parametrize(
    ("check", "changes", "why"),
    [
        (RouterCheck("m1", "t1", KEY), {}, ""),
        (RouterCheck("", "t1", KEY), {}, ""),
        (RouterCheck("m2", "t1", KEY), {}, "model_revision: worker m1, router m2"),
        (RouterCheck("m1", "t2", KEY), {}, "tokenizer_revision: worker t1, router t2"),
        (RouterCheck("m1", "t1", b"x" * 32), {}, "block identity: worker"),
        (RouterCheck("m1", "t1", KEY), {"block_size": 32}, "block_size: lease 32, compat 16"),
    ],
)
def test_router_checks_a_worker(check, changes, why):
    for _ in range(2):  # the second answer is the remembered one
        assert check.why_not(record(**changes)).startswith(why)
        assert bool(check.why_not(record(**changes))) == bool(why)
        assert (check.header(record(**changes)) is None) == bool(why)


def test_a_lease_without_facts_is_refused():
    bare = msgspec.structs.replace(record(), compat={"tokenizer_revision": "t1"})
    assert "model_revision" in RouterCheck("", "t1", KEY).why_not(bare)


@pytest.mark.parametrize(
    ("leaves", "in_order"),
    [
        ("drains, and its lease ends", True),
        ("gives up its lease, then falls silent", True),
        ("falls silent, and its lease ends later", False),
        ("stalls, falls silent, and its lease ends later", False),
    ],
)
def test_5_4_a_worker_that_leaves_in_order_is_no_warning(members, leaves, in_order):
    (member,), _ = members.on_records([record()], 0.0)
    if leaves.startswith("drains"):
        members.on_records([record(state="draining")], 100.0)
    if leaves.startswith("stalls"):
        members.on_records([record(state="stalled")], 99.0)
        assert members.why_unplaceable(member, 99.0) == "is stalled"
    lease_ended_at = 100.0 if in_order else 105.0
    silent_since = 100.2 if in_order else 100.0
    members.on_records([], lease_ended_at)
    member.link.silent_s = 110.0 - silent_since
    _, lost = members.on_records([], 110.0)
    assert lost == [member]
    assert members.left_gracefully(member, 110.0) is in_order
