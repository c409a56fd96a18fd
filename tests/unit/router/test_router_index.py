from hypothesis import given
from hypothesis import strategies as st

from diptych.common.store import KvEvent
from diptych.router.index import BlockIndex, IndexMode


def key(number):
    return number.to_bytes(16, "big")


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
    index.load_snapshot("w", "a", epoch=0, sequence=4, keys=keys(1, 2, 3, 4))
    assert index.mode("w") is IndexMode.EXACT
    assert index.hit_blocks("w", keys(1, 2, 3, 4, 5)) == 5


def test_a_snapshot_older_than_the_gap_asks_again():
    index = fresh()
    index.apply("w", stored(5, 5))
    index.load_snapshot("w", "a", epoch=0, sequence=2, keys=keys(1))
    assert index.mode("w") is IndexMode.STALE
    assert index.hit_blocks("w", keys(1)) == 1
    index.load_snapshot("w", "a", epoch=0, sequence=4, keys=keys(1, 2))
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
    index.load_snapshot("w", "a", epoch=0, sequence=9, keys=keys(2))
    assert index.num_blocks("w") == 0
    index.load_snapshot("w", "b", epoch=0, sequence=4, keys=keys(3))
    assert index.mode("w") is IndexMode.EXACT


def test_a_lease_ahead_of_the_index_is_noticed():
    index = fresh()
    assert not index.is_behind("w", 0, 0)
    assert index.is_behind("w", 0, 3)
    index.lose_track("w")
    assert index.needs_snapshot() == ["w"]


def test_unknown_workers_are_harmless():
    index = BlockIndex()
    index.apply("x", stored(1, 1))
    index.forget("x")
    assert index.mode("x") is IndexMode.GUESS
    assert index.hit_blocks("x", keys(1)) == 0


def test_memory_is_bounded_and_shared_fairly():
    index = fresh(max_blocks=10)
    index.apply("w", stored(1, *range(20)))
    assert index.num_blocks("w") == 10
    assert index.mode("w") is IndexMode.STALE
    assert index.hit_blocks("w", keys(*range(10, 20))) == 10  # the oldest went
    index.register("v", "a", 0, 0)
    assert index.num_blocks("w") == 5


class Worker:
    """The truth: a cache and the events it emits."""

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
                assert set(index._workers["w"].blocks) == set(worker.held)
    for event in wire:
        index.apply("w", event)
    if index.is_behind("w", worker.epoch, worker.sequence):
        index.lose_track("w")
    if index.needs_snapshot():
        index.load_snapshot("w", "a", epoch=worker.epoch, sequence=worker.sequence, keys=tuple(worker.held))
    assert index.mode("w") is IndexMode.EXACT
    assert set(index._workers["w"].blocks) == set(worker.held)
