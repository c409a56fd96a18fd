"""Canary and shadow: groups of workers, and their shares of requests."""

from __future__ import annotations

import pytest

from diptych.common.errors import ConfigError
from diptych.router.config import RouterConfig
from diptych.router.placement.rollout import CANARY, SHADOW, STABLE, Groups, Rollout

ROLLOUT = Rollout(("canary-*", "d9"), 0.2, ("shadow-*",), 0.5)


@pytest.mark.parametrize(
    ("worker", "group"),
    [("canary-p0", CANARY), ("d9", CANARY), ("d90", STABLE), ("shadow-d0", SHADOW), ("decode-0", STABLE)],
)
def test_a_worker_belongs_to_one_group(worker: str, group: str) -> None:
    assert ROLLOUT.group_of(worker) == group


def test_a_share_of_the_requests_goes_to_the_canary_and_the_choice_stays() -> None:
    names = [f"req-{i}" for i in range(5000)]
    chosen = [ROLLOUT.choose(name) for name in names]
    assert chosen == [ROLLOUT.choose(name) for name in names]
    assert 0.18 < chosen.count(CANARY) / len(names) < 0.22
    shadowed = [ROLLOUT.is_shadowed(name) for name in names]
    assert 0.47 < sum(shadowed) / len(names) < 0.53
    both = sum(s and c == CANARY for s, c in zip(shadowed, chosen, strict=True))
    assert 0.08 < both / len(names) < 0.12, "the two draws are independent"


def test_shares_at_the_ends() -> None:
    names = [f"req-{i}" for i in range(200)]
    assert {Rollout(("x",), 0.0).choose(name) for name in names} == {STABLE}
    assert {Rollout(("x",), 1.0).choose(name) for name in names} == {CANARY}
    assert not Rollout().on


@pytest.mark.parametrize(
    ("field", "values"), [("canary_share", {"canary_share": 1.5}), ("shadow_share", {"shadow_share": 0.1})]
)
def test_a_share_that_makes_no_sense_is_refused(field: str, values: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(**values)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_groups_are_never_paired_nor_served_by_others() -> None:
    groups = Groups(ROLLOUT)
    assert groups.apart("canary-p0", "decode-0")
    assert not groups.apart("canary-p0", "d9")
    groups.refresh([("d9", "i"), ("decode-0", "i"), ("shadow-d0", "i")])
    assert groups.others(STABLE) == {("d9", "i"), ("shadow-d0", "i")}
    assert groups.others(CANARY) == {("decode-0", "i"), ("shadow-d0", "i")}
    plain = Groups(Rollout())
    plain.refresh([("d9", "i")])
    assert plain.others(STABLE) == frozenset()
