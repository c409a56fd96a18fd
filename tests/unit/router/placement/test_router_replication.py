import pytest

from diptych.bench.router.quality import summary
from diptych.bench.router.simulation import SimConfig, Simulation
from diptych.bench.router.trace import TraceConfig, make_trace
from diptych.router.placement.policies import policy_by_name
from diptych.router.placement.replication import BOUND, PAUSE_S, Replication


def test_a_prefix_below_its_bound_stays_and_one_above_is_copied_once_a_pause():
    calm, hot = Replication(), Replication()
    assert not any(calm.on_placed(b"x", 0.04, 1, i * 0.1) for i in range(200))  # 40% of the holder's time
    times = [i * 0.1 for i in range(200) if hot.on_placed(b"x", 0.09, 1, i * 0.1) > BOUND]
    assert times
    assert all(later - earlier >= PAUSE_S - 1e-9 for earlier, later in zip(times, times[1:], strict=False))
    assert hot.num_copies == len(times)


def test_more_holders_carry_more_and_other_prefixes_are_apart():
    shared = Replication()
    assert not any(shared.on_placed(b"x", 0.09, 2, i * 0.1) for i in range(200))
    apart = Replication()
    assert not any(apart.on_placed(bytes([i % 4]), 0.09, 1, i * 0.1) for i in range(200))


@pytest.fixture(scope="module")
def hot_trace():
    """One long system prompt, first rare and known to one holder; then suddenly more than half of its time."""
    config = TraceConfig(
        seed=5,
        duration_s=12.0,
        sessions_per_s=15.0,
        system_prompts=1,
        system_tokens=(8192, 8192),
        turns=(1, 1),
        question_tokens=(256, 512),
    )
    return [request for i, request in enumerate(make_trace(config)) if request.at > 6.0 or i % 15 == 0]


def test_a_hot_prefix_spreads_step_by_step_without_a_herd(hot_trace):
    found = {}
    for on in (False, True):
        simulation = Simulation(SimConfig(replication=on), policy_by_name("cost"), 1)
        copies = []
        placer = simulation._placer
        place = placer.place

        def watched(*arguments, place=place, copies=copies, simulation=simulation):
            placement = place(*arguments)
            if any("hot prefix" in note for note in placement.notes):
                copies.append((simulation.now, placement.chosen.prefill.worker_id))
            return placement

        placer.place = watched
        found[on] = summary(simulation.run(hot_trace)), copies
    (without, none), (with_copies, copies) = found[False], found[True]
    assert not none
    assert 1 <= len(copies) <= 3  # four prefill workers: at most one copy for each of the others
    assert len({worker for _, worker in copies}) == len(copies)
    assert all(b - a >= PAUSE_S for (a, _), (b, _) in zip(copies, copies[1:], strict=False))
    assert with_copies["hit_rate"] >= without["hit_rate"] - 0.01
    assert with_copies["ttft_p50_s"] < 0.8 * without["ttft_p50_s"]  # the request that creates the copy is slower
