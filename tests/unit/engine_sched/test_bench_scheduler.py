"""The bench itself: that it measures what it says, not how fast this machine is."""

from __future__ import annotations

import pytest

from diptych.bench.engine.scheduler import measure_waste, time_steps


def test_every_step_holds_all_sequences():
    row = time_steps(8, 20)
    assert row.num_running == 8
    assert row.cpu_us > 0
    assert 0 < row.wall_us <= row.wall_p95_us


def test_little_kv_is_allocated_and_not_used():
    assert measure_waste((16, 1024), (16, 64), 20).mean_share < 0.04
    for block_size in (8, 16):  # nothing is allocated but what half-filled last blocks must take
        waste = measure_waste((16, 256), (16, 128), 40, block_size)
        assert waste.mean_share == pytest.approx(waste.floor, abs=0.004)
