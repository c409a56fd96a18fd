"""The figures of the hand-off's bench, from token times that are known."""

from __future__ import annotations

import pytest

from diptych.bench.kvtransfer.handoff import Prompts, Timeline, cross_over


def answer(exposed_s: float) -> Timeline:
    """First token after 1 s, steps of 20 ms."""
    second = 1.0 + 0.02 + exposed_s
    return Timeline((1.0, *(second + 0.02 * n for n in range(7))))


def test_exposed_is_the_first_gap_less_one_step() -> None:
    assert answer(0.5).exposed_s == pytest.approx(0.5)
    assert answer(0.5).step_s == pytest.approx(0.02)


def test_the_cross_over_is_where_overlap_wins_and_keeps_winning() -> None:
    found = {
        "on": {512: [answer(0.01)], 1024: [answer(0.03)], 2048: [answer(0.04)], 4096: [answer(0.05)]},
        "off": {512: [answer(0.02)], 1024: [answer(0.02)], 2048: [answer(0.1)], 4096: [answer(0.3)]},
    }
    assert cross_over(found) == 2048
    assert cross_over({"on": found["off"], "off": found["on"]}) is None
    assert cross_over({"on": {**found["on"], 4096: []}, "off": {**found["off"], 4096: []}}) == 2048


def test_no_two_prompts_begin_alike() -> None:
    prompts = Prompts(1)
    assert prompts.of(16).token_ids != prompts.of(16).token_ids
