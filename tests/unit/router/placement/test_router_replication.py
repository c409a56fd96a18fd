import pytest

from diptych.bench.router.hot_prefix import hot_prompt
from diptych.bench.router.quality import summary
from diptych.bench.router.simulation import SimConfig, Simulation
from diptych.router.placement.policies import policy_by_name
from diptych.router.placement.replication import BOUND, PAUSE_S, Replication


def test_a_prefix_below_its_bound_stays_and_one_above_is_copied_once_a_pause():
    calm, hot = Replication(), Replication()
    assert not any(calm.on_placed(b"x", 0.04, 1, i * 0.1) for i in range(200))  # 40% of the holder's time
    times = [i * 0.1 for i in range(200) if hot.on_placed(b"x", 0.09, 1, i * 0.1) > BOUND]
    assert times
    assert all(later - earlier >= PAUSE_S - 1e-9 for earlier, later in zip(times, times[1:], strict=False))


def test_more_holders_carry_more_and_other_prefixes_are_apart():
    shared = Replication()
    assert not any(shared.on_placed(b"x", 0.09, 2, i * 0.1) for i in range(200))
    apart = Replication()
    assert not any(apart.on_placed(bytes([i % 4]), 0.09, 1, i * 0.1) for i in range(200))


@pytest.fixture(scope="module")
def hot_trace():
    """One long system prompt, first rare and known to one holder; then suddenly more than half of its time."""
    return hot_prompt(25, 1)


def copied(hot_trace, **settings):
    simulation = Simulation(SimConfig(**settings), policy_by_name("cost"), 1)
    copies, placer = [], simulation._placer
    place = placer.place

    def watched(*arguments):
        placement = place(*arguments)
        if any("hot prefix" in note for note in placement.notes):
            copies.append((simulation.now, placement.chosen))
        return placement

    placer.place = watched
    return summary(simulation.run(hot_trace)), copies, placer.num_copies


def test_a_copy_is_a_pull_and_raises_no_tail(hot_trace):
    without, none, count = copied(hot_trace, kv_pulls=True)
    assert (none, count) == ([], 0)
    with_copies, copies, count = copied(hot_trace, kv_pulls=True, replication=True)
    assert 1 <= len(copies) <= 3  # four prefill workers: at most one copy for each of the others
    assert count == len(copies)
    assert len({chosen.prefill.worker_id for _, chosen in copies}) == len(copies)
    assert all(chosen.pull is not None for _, chosen in copies)
    assert all(b - a >= PAUSE_S for (a, _), (b, _) in zip(copies, copies[1:], strict=False))
    assert with_copies["ttft_p99_s"] <= 1.05 * without["ttft_p99_s"]


def test_nothing_is_computed_for_a_copy(hot_trace):
    """Without pulls: the placements are those without copies."""
    assert copied(hot_trace, replication=True) == copied(hot_trace)
