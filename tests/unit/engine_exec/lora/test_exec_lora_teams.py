"""Rows of one adapter, wherever they stand in a step, are in teams that the compiled kernels compute together."""

from __future__ import annotations

import numpy as np
import pytest

from diptych.engine.exec.native.lora import teams_of
from diptych.kernels.native.api import LORA_ROWS


def naive_teams(adapters):
    teams = []
    for slot in sorted(set(adapters) - {-1}):
        rows = [row for row, one in enumerate(adapters) if one == slot]
        for first in range(0, len(rows), LORA_ROWS):
            some = rows[first : first + LORA_ROWS]
            teams.append([slot, len(some), *some, *[0] * (LORA_ROWS - len(some))])
    return teams


@pytest.mark.parametrize("count", [1, 2, LORA_ROWS, LORA_ROWS + 1, 30])
def test_every_row_with_an_adapter_is_in_one_team_of_its_slot(count):
    rng = np.random.default_rng(count)
    for most in (0, 1, 7):
        adapters = rng.integers(-1, most + 1, count).astype(np.int32)
        teams = teams_of(adapters)
        assert (teams.tolist() if teams is not None else []) == naive_teams(adapters.tolist())


def test_there_are_none_without_adapters():
    assert teams_of(np.full(5, -1, dtype=np.int32)) is None
