import random
import subprocess
import sys
from collections import Counter

import pytest

from diptych.common.errors import ConfigError
from diptych.router.config import ADMISSION_MODES, PLACEMENT_POLICIES, RouterConfig
from diptych.router.fairness.admission import MODES
from diptych.router.placement.cost import choose_placement
from diptych.router.placement.policies import POLICIES, policy_by_name
from diptych.router.placement.types import Placement, PlacementRequest
from diptych.router.placement.worker_arrays import ClusterSnapshot
from diptych_tests.records import worker_view as worker


def choose(policy, prefill, decode, seed=0, local=0, affinity=b"", incompatible=None):
    snapshot = ClusterSnapshot.of(prefill, decode, incompatible)
    request = PlacementRequest(200, local, affinity=affinity)
    placement = choose_placement(request, snapshot, 0.0, random.Random(seed), policy)
    assert isinstance(placement, Placement)
    assert placement.policy == policy.name
    return placement


POOLS = [worker(f"p{i}") for i in range(3)], [worker(f"d{i}") for i in range(4)]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_places_on_what_fits(name):
    policy = policy_by_name(name)
    bad = {(f"p{i}", f"d{j}"): ["x"] for i in range(3) for j in range(4) if (i + j) % 2}
    for seed in range(20):
        placement = choose(policy, *POOLS, seed=seed, affinity=b"%d" % seed, incompatible=bad)
        chosen = placement.chosen
        assert (chosen.prefill.worker_id, chosen.decode.worker_id) not in bad
        assert placement.prefill[0] == chosen.prefill
        assert placement.candidates


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_computes_locally_where_that_is_allowed(name):
    assert choose(policy_by_name(name), *POOLS, local=500).local_prefill
    assert choose(policy_by_name(name), [], POOLS[1]).local_prefill


def test_round_robin_takes_turns():
    policy = policy_by_name("round-robin")
    placements = [choose(policy, *POOLS).chosen for _ in range(12)]
    assert [terms.decode.worker_id for terms in placements[:5]] == ["d0", "d1", "d2", "d3", "d0"]
    assert Counter(terms.prefill.worker_id for terms in placements) == {"p0": 4, "p1": 4, "p2": 4}


def test_random_covers_every_worker():
    policy = policy_by_name("random")
    pairs = {
        (terms.prefill.worker_id, terms.decode.worker_id)
        for terms in (choose(policy, *POOLS, seed=seed).chosen for seed in range(200))
    }
    assert len(pairs) == 12


@pytest.mark.parametrize("name", ["least-loaded", "power-of-two"])
def test_load_decides(name):
    prefill = [worker("p0", pending=500), worker("p1")]
    decode = [worker("d0", num_running=7), worker("d1")]
    for seed in range(10):
        chosen = choose(policy_by_name(name), prefill, decode, seed=seed).chosen
        assert (chosen.prefill.worker_id, chosen.decode.worker_id) == ("p1", "d1")


def test_sessions_stay_and_a_worker_that_leaves_moves_only_its_own():
    policy = policy_by_name("session-affinity")
    sessions = [b"session %d" % i for i in range(60)]

    def where(decode):
        return [choose(policy, POOLS[0], decode, affinity=session).decode.worker_id for session in sessions]

    before, again, after = where(POOLS[1]), where(POOLS[1]), where(POOLS[1][:3])
    assert before == again
    assert len(set(before)) == 4
    assert [new for old, new in zip(before, after, strict=True) if old != "d3"] == [
        old for old in before if old != "d3"
    ]


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ConfigError, match="placement_policy"):
        policy_by_name("best")


def test_the_settings_know_every_name_before_anything_is_loaded():
    """Drill: a wrong name was found when the router had started already."""
    assert tuple(POLICIES) == PLACEMENT_POLICIES
    assert set(ADMISSION_MODES) == set(MODES)
    for field, known in (("placement_policy", PLACEMENT_POLICIES), ("admission", ADMISSION_MODES)):
        with pytest.raises(ConfigError, match=f"must be one of {', '.join(known)}") as error:
            RouterConfig(**{field: "best"})
        assert error.value.field == field
        for name in known:
            RouterConfig(**{field: name})
    code = "import sys, diptych.router.config; print({'numpy', 'diptych.router.placement.policies'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert ran.stdout.strip() == "set()"
