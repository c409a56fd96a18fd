from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.store.interface import KvEvent
from diptych.common.tiers import TierDump
from diptych.router.placement.block_table import BlockTable, as_keys, to_bytes
from diptych.router.placement.index import BlockIndex, IndexMode


def key(number):
    return blake2b(b"%d" % number, digest_size=16).digest()


def keys(*numbers):
    return tuple(key(number) for number in numbers)


def stored(sequence, *numbers, epoch=0, incarnation="a"):
    return KvEvent(incarnation, epoch, sequence, "stored", keys(*numbers))


def evicted(sequence, *numbers, epoch=0):
    return KvEvent("a", epoch, sequence, "evicted", keys(*numbers))


def fresh(max_blocks=1000):
    index = BlockIndex(max_blocks)
    index.register("w", "a", 0, 0)
    return index


def test_a_worker_that_stored_nothing_is_known_exactly():
    index = fresh()
    assert index.mode("w") is IndexMode.EXACT
    index.apply("w", stored(1, 1, 2))
    index.apply("w", stored(2, 3))
    assert index.hit_blocks("w", keys(1, 2, 3, 4)) == 3
    assert index.hit_blocks("w", keys(2, 3)) == 2
    assert index.hit_blocks("w", keys(9, 1)) == 0
    index.apply("w", evicted(3, 2))
    assert index.hit_blocks("w", keys(1, 2, 3)) == 1


def test_a_gap_asks_for_a_snapshot_and_replays_what_came_meanwhile():
    index = fresh()
    index.apply("w", stored(1, 1))
    index.apply("w", stored(3, 3))
    assert index.mode("w") is IndexMode.STALE
    assert index.needs_snapshot() == ["w"]
    index.apply("w", stored(4, 4))
    index.apply("w", stored(5, 5))
    index.load_snapshot("w", "a", epoch=0, tiers=[TierDump(4, keys(1, 2, 3, 4))])
    assert index.mode("w") is IndexMode.EXACT
    assert index.hit_blocks("w", keys(1, 2, 3, 4, 5)) == 5


def test_a_snapshot_older_than_the_gap_asks_again():
    index = fresh()
    index.apply("w", stored(5, 5))
    index.load_snapshot("w", "a", epoch=0, tiers=[TierDump(2, keys(1))])
    assert index.mode("w") is IndexMode.STALE
    assert index.hit_blocks("w", keys(1)) == 1
    index.load_snapshot("w", "a", epoch=0, tiers=[TierDump(4, keys(1, 2))])
    assert index.mode("w") is IndexMode.EXACT
    assert index.hit_blocks("w", keys(1, 2, 5)) == 3


def test_repeats_are_ignored():
    index = fresh()
    for event in (stored(1, 1), evicted(2, 1), stored(1, 1), evicted(2, 1)):
        index.apply("w", event)
    assert index.mode("w") is IndexMode.EXACT
    assert index.num_blocks("w") == 0


def test_cleared_opens_an_epoch_and_heals_a_gap():
    index = fresh()
    index.apply("w", stored(1, 1))
    index.apply("w", stored(7, 7))
    index.apply("w", KvEvent("a", 1, 0, "cleared"))
    assert index.mode("w") is IndexMode.EXACT
    assert index.num_blocks("w") == 0
    index.apply("w", stored(1, 5, epoch=1))
    index.apply("w", stored(2, 1, epoch=0))  # late, of the former epoch
    assert index.hit_blocks("w", keys(5)) == 1
    assert index.hit_blocks("w", keys(1)) == 0


def test_events_of_a_newer_epoch_without_cleared_are_a_gap():
    index = fresh()
    index.apply("w", stored(1, 1, epoch=3))
    assert index.mode("w") is IndexMode.STALE


def test_another_incarnation_starts_from_nothing_and_zombies_are_ignored():
    index = fresh()
    index.apply("w", stored(1, 1))
    index.register("w", "b", 0, 4)
    assert index.mode("w") is IndexMode.GUESS
    assert index.hit_blocks("w", keys(1)) == 0
    index.apply("w", stored(2, 2, incarnation="a"))
    index.load_snapshot("w", "a", epoch=0, tiers=[TierDump(9, keys(2))])
    assert index.num_blocks("w") == 0
    index.load_snapshot("w", "b", epoch=0, tiers=[TierDump(4, keys(3))])
    assert index.mode("w") is IndexMode.EXACT


def test_a_lease_ahead_of_the_index_is_noticed():
    index = fresh()
    assert not index.is_behind("w", 0, 0)
    assert index.is_behind("w", 0, 3)
    index.mark_stale("w")
    assert index.needs_snapshot() == ["w"]


def test_unknown_workers_are_harmless():
    index = BlockIndex()
    index.apply("x", stored(1, 1))
    index.forget("x")
    assert index.mode("x") is IndexMode.GUESS
    assert index.hit_blocks("x", keys(1)) == 0


def host(kind, sequence, *numbers, epoch=0):
    return KvEvent("a", epoch, sequence, kind, keys(*numbers), "host")


def test_the_host_tier_has_events_of_its_own_and_counts_for_less():
    index = fresh()
    index.apply_all("w", [stored(1, 1, 2, 3), host("stored", 1, 2, 3, 4), evicted(2, 2, 3)])
    assert index.hit_blocks("w", keys(1, 2, 3, 4, 5)) == 4
    runs = index.runs(as_keys(keys(1, 2, 3, 4, 5)))
    assert (runs.blocks[index.column("w")], runs.lower_blocks[0][index.column("w")]) == (4, 3)
    assert index.num_blocks("w") == 4
    index.apply("w", host("evicted", 2, 2))
    assert index.hit_blocks("w", keys(1, 2, 3, 4)) == 1
    index.apply("w", host("stored", 9, 7))  # a hole in the host tier only
    assert index.mode("w") is IndexMode.STALE
    index.apply("w", stored(3, 2))
    assert index.hit_blocks("w", keys(1, 2, 3, 4)) == 4
    index.load_snapshot("w", "a", epoch=0, tiers=[TierDump(3, keys(1, 2)), TierDump(8, keys(3))])
    assert index.mode("w") is IndexMode.EXACT
    assert index.keys_of("w", 1) == set(keys(3, 7))
    index.apply("w", KvEvent("a", 1, 0, "cleared"))
    assert index.num_blocks("w") == 0
    assert index.mode("w") is IndexMode.EXACT


def test_a_host_tier_behind_its_lease_is_noticed():
    index = fresh()
    assert index.is_behind("w", 0, 0, 2)
    index.register("v", "a", 0, 0, 3)
    assert index.mode("v") is IndexMode.GUESS


def test_one_lookup_answers_for_all_workers():
    index = BlockIndex()
    chain = [key(i) for i in range(300)]
    for i in range(130):  # more workers than bits in a word
        index.register(f"w{i}", "a", 0, 0)
        index.apply(f"w{i}", KvEvent("a", 0, 1, "stored", tuple(chain[: 2 * i])))
    runs = index.runs(as_keys(chain))
    assert [int(runs.blocks[index.column(f"w{i}")]) for i in range(130)] == [2 * i for i in range(130)]
    assert runs.lower_blocks is None
    index.forget("w77")
    index.register("new", "a", 0, 0)
    assert index.column("new") is not None
    assert index.hit_blocks("new", chain) == 0
    assert index.hit_blocks("w78", chain) == 156


def test_memory_is_bounded_and_the_least_lately_used_goes_first():
    index = fresh(max_blocks=16)
    index.apply("w", stored(1, *range(14)))
    for _ in range(4):
        assert index.hit_blocks("w", keys(0, 1, 2)) == 3
    index.apply("w", stored(2, *range(14, 20)))
    assert index.num_blocks("w") == 14
    assert index.mode("w") is IndexMode.STALE
    assert index.hit_blocks("w", keys(0, 1, 2)) == 3
    assert index.hit_blocks("w", keys(*range(14, 20))) == 6
    index.register("v", "a", 0, 0)
    assert index.num_blocks("w") == 7


def test_a_busy_worker_pushes_out_only_its_own():
    index = BlockIndex(max_blocks=4000)
    for name in "wxyz":
        index.register(name, "a", 0, 0)
    hot = keys(*range(900_000, 900_004))
    sequences = dict.fromkeys("wxyz", 0)
    hits = 0
    for step in range(3000):
        name = "w" if step % 10 else "xyz"[step // 10 % 3]
        sequences[name] += 1
        prompt = keys(*range(4 * step, 4 * step + 4))
        index.apply(name, KvEvent("a", 0, sequences[name], "stored", hot + prompt if step < 30 else prompt))
        if step >= 30:
            hits += index.hit_blocks(name, hot) == 4
    assert hits == 2970
    assert all(index.num_blocks(name) > 350 for name in "xyz")
    assert 0 < index.num_blocks("w") <= 1000
    assert index.num_keys <= 4000
    assert index.nbytes < 4000 * 100


def test_keys_that_are_not_spread_are_dropped_not_grown_for():
    table = BlockTable()
    table.add(as_keys([i.to_bytes(16, "big") for i in range(100)]), 0)  # all in few buckets
    assert table.num_dropped > 0
    assert table.nbytes < 100_000


def test_the_table_grows_and_keeps_what_it_holds():
    table, random = BlockTable(max_keys=2000), np.random.default_rng(1)
    truth = [set() for _ in range(3)]
    for _ in range(60):
        column = int(random.integers(3))
        some = to_bytes(random.integers(0, 2**62, (50, 2)).astype(np.uint64))
        table.add(as_keys(some), column)
        truth[column].update(some)
        gone = sorted(truth[column])[:10]
        table.remove(as_keys(gone), column)
        truth[column].difference_update(gone)
    for column in range(3):
        assert set(to_bytes(table.keys_of(column))) == truth[column]
        assert table.counts[0, column] == len(truth[column])
    assert table.num_keys == sum(map(len, truth))
    table.clear(1)
    assert table.num_keys == len(truth[0]) + len(truth[2])


def test_no_addition_pays_for_a_doubling():
    """A table that grows under small additions splits few buckets at a time, and answers rightly in between."""
    table, random = BlockTable(max_keys=60_000), np.random.default_rng(2)
    most = 0
    for _ in range(500):
        before = table.nbytes
        keys = random.integers(0, 2**63, (100, 2)).astype(np.uint64)
        table.add(keys, 3)
        most = max(most, table.nbytes - before)
        assert table.runs(keys).blocks[3] == 100
    assert table.num_keys == 50_000
    assert table.num_dropped == 0
    assert most < table.nbytes / 100
    assert table.nbytes / table.num_keys < 100


def test_a_key_whose_two_buckets_are_one_does_not_end_a_run():
    table = BlockTable()
    keys = np.random.default_rng(3).integers(0, 2**63, (10, 2)).astype(np.uint64)
    keys[4, 1] = keys[4, 0]
    table.add(keys, 0)
    assert table.runs(keys).blocks[0] == 10
    table.remove(keys[6:7], 0)
    assert table.runs(keys).blocks[0] == 6


@pytest.mark.parametrize("together", [1, 7, 1000])
def test_five_percent_of_the_events_dropped_doubled_or_reordered(together):
    """For any batches: a lease reveals a lost tail, a gap requests a snapshot, and then the index is exact."""
    chance = np.random.default_rng(together)
    worker, index = Worker(), fresh(100_000)
    wire = []
    for _ in range(1000):
        kind = ("stored", "stored", "evicted")[chance.integers(3)] if chance.random() > 0.002 else "cleared"
        event = worker.do(kind, [int(number) for number in chance.integers(0, 500, 4)])
        fate = chance.random()
        if fate > 0.05:
            wire.append(event)
        if fate > 0.95:
            wire.append(event)
        if 0.05 < fate < 0.10 and len(wire) > 1:
            wire[-1], wire[-2] = wire[-2], wire[-1]
        if len(wire) >= together:
            index.apply_all("w", wire)
            wire = []
            if index.needs_snapshot() and chance.random() < 0.1:
                index.load_snapshot("w", "a", epoch=worker.epoch, tiers=[TierDump(worker.sequence, tuple(worker.held))])
    index.apply_all("w", wire)
    if index.is_behind("w", worker.epoch, worker.sequence):
        index.mark_stale("w")
    if index.needs_snapshot():
        index.load_snapshot("w", "a", epoch=worker.epoch, tiers=[TierDump(worker.sequence, tuple(worker.held))])
    assert index.mode("w") is IndexMode.EXACT
    assert index.keys_of("w") == set(worker.held)


class Worker:
    """The reference: a cache and the events it emits."""

    def __init__(self):
        self.epoch = self.sequence = 0
        self.held = {}

    def do(self, kind, numbers):
        if kind == "cleared":
            self.epoch, self.sequence, self.held = self.epoch + 1, 0, {}
            return KvEvent("a", self.epoch, 0, "cleared")
        self.sequence += 1
        for number in numbers:
            if kind == "stored":
                self.held[key(number)] = None
            else:
                self.held.pop(key(number), None)
        return KvEvent("a", self.epoch, self.sequence, kind, keys(*numbers))


_steps = st.lists(
    st.tuples(
        st.sampled_from(["stored", "stored", "stored", "evicted", "cleared"]),
        st.lists(st.integers(0, 12), min_size=1, max_size=4),
    ),
    max_size=40,
)


@settings(deadline=None)  # no machine is too busy for it
@given(_steps, st.randoms(use_true_random=False))
def test_dropped_doubled_and_reordered_events_end_in_the_truth(steps, chance):
    worker, index = Worker(), fresh()
    wire = []
    for kind, numbers in steps:
        event = worker.do(kind, numbers)
        fate = chance.random()
        if fate > 0.2:
            wire.append(event)
        if fate > 0.9:
            wire.insert(chance.randrange(len(wire) + 1), event)
        if chance.random() < 0.2 and len(wire) > 1:
            wire[-1], wire[-2] = wire[-2], wire[-1]
        if chance.random() < 0.3:
            while wire:
                index.apply("w", wire.pop(0))
            # EXACT is a promise, up to the tail that did not arrive yet
            if index.mode("w") is IndexMode.EXACT and not index.is_behind("w", worker.epoch, worker.sequence):
                assert index.keys_of("w") == set(worker.held)
    for event in wire:
        index.apply("w", event)
    if index.is_behind("w", worker.epoch, worker.sequence):
        index.mark_stale("w")
    if index.needs_snapshot():
        index.load_snapshot("w", "a", epoch=worker.epoch, tiers=[TierDump(worker.sequence, tuple(worker.held))])
    assert index.mode("w") is IndexMode.EXACT
    assert index.keys_of("w") == set(worker.held)
