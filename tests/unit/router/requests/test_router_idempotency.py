"""Idempotency keys: one request at a time, none again after a good end, bounded."""

from __future__ import annotations

import pytest

from diptych.common.clock import FakeClock
from diptych.common.errors import DuplicateRequestError, OverloadedError
from diptych.router.requests.idempotency import IdempotencyKeys


def finish(keys: IdempotencyKeys, tenant: str, key: str, *, well: bool) -> None:
    with keys.running(tenant, key) as outcome:
        outcome.well = well


def test_a_key_runs_once_at_a_time_and_not_again_after_a_good_end() -> None:
    clock = FakeClock()
    keys = IdempotencyKeys(clock, window_s=10.0)
    with keys.running("t", "k") as outcome:
        with pytest.raises(DuplicateRequestError, match="runs"), keys.running("t", "k"):
            pass
        finish(keys, "other tenant", "k", well=True)
        outcome.well = True
    with pytest.raises(DuplicateRequestError, match="has succeeded"), keys.running("t", "k"):
        pass
    clock.advance(10.0)
    finish(keys, "t", "k", well=True)


def test_what_failed_or_was_left_may_be_tried_again() -> None:
    keys = IdempotencyKeys(FakeClock())
    finish(keys, "t", "k", well=False)
    with pytest.raises(RuntimeError), keys.running("t", "k"):
        raise RuntimeError
    finish(keys, "t", "k", well=True)


def test_an_empty_key_asks_for_nothing_and_the_memory_is_bounded() -> None:
    keys = IdempotencyKeys(FakeClock(), max_keys=3)
    for i in range(10):
        finish(keys, "t", "", well=True)
        finish(keys, "t", f"k{i}", well=True)
    assert len(keys) == 3
    finish(keys, "t", "k0", well=True)
    with (
        keys.running("t", "a"),
        keys.running("t", "b"),
        keys.running("t", "c"),
        pytest.raises(OverloadedError),
        keys.running("t", "d"),
    ):
        pass
