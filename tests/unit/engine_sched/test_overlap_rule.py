"""What is sent before its prompt is computed: ranges, and layers of the last one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.errors import ConfigError
from diptych.engine.overlap import MAX_GROUPS, Overlap, borders, exposed_s


def test_auto_weighs_a_ranges_bytes_against_a_message() -> None:
    auto = Overlap("auto", 1e9, message_s=0.002)
    assert auto.least_early_bytes() == 2_000_000
    assert auto.least_early_bytes(1e8) == 200_000, "what the peer measured of a slower link counts"
    assert Overlap("auto", 0.0, 0.002).least_early_bytes() == 0, "nothing is known: nothing waits"
    assert Overlap("on", 1e9, 0.002).least_early_bytes() == 0
    assert Overlap("off", 1e9, 0.002).least_early_bytes() > 1 << 60
    with pytest.raises(ConfigError, match="kv_overlap"):
        Overlap("sometimes")


def test_a_long_chunk_over_a_slow_link_goes_in_groups_and_a_short_one_in_one_piece() -> None:
    auto = Overlap("auto", 1e9, message_s=0.001)
    assert auto.num_groups(30, 24_000_000, chunk_s=0.5) > 1, "24 ms would be exposed"
    assert auto.num_groups(30, 1_000_000, chunk_s=0.02) == 1, "a millisecond is not worth a message"
    assert auto.num_groups(30, 1_000_000, chunk_s=0.02, link_bytes_per_s=1e7) > 1, "over this link it is 100 ms"


def test_groups_are_off_when_nothing_is_known_or_they_are_not_wanted() -> None:
    size = 50_000_000
    assert Overlap("auto", 1e8, 0.001).num_groups(30, size, 1.0) > 1
    assert Overlap("auto", 1e8, 0.001).num_groups(30, size, 0.0) == 1, "no step was measured yet"
    assert Overlap("auto", 0.0, 0.001).num_groups(30, size, 1.0) == 1, "no link was measured"
    assert Overlap("auto", 1e8, 0.001).num_groups(1, size, 1.0) == 1, "one layer cannot be cut"
    assert Overlap("off", 1e8, 0.001).num_groups(30, size, 1.0) == 1
    assert Overlap("on").num_groups(30, 1, 0.0) == 4
    assert Overlap("on").num_groups(2, 1, 0.0) == 2


RATES = st.floats(1e6, 1e11)
TIMES = st.floats(1e-5, 10.0)
SIZES = st.integers(1, 1 << 31)


@given(st.integers(1, 100), SIZES, TIMES, RATES, st.floats(1e-6, 0.1))
def test_what_is_chosen_is_never_predicted_to_lose(
    layers: int, size: int, chunk: float, rate: float, message: float
) -> None:
    chosen = Overlap("auto", rate, message).num_groups(layers, size, chunk)
    assert 1 <= chosen <= min(layers, MAX_GROUPS)
    whole, cut = exposed_s(1, size, chunk, rate, message), exposed_s(chosen, size, chunk, rate, message)
    assert cut <= whole
    assert chosen == 1 or whole - cut > message
    best = min(exposed_s(n, size, chunk, rate, message) for n in range(1, min(layers, MAX_GROUPS) + 1))
    assert chosen == 1 or cut == best


@given(SIZES, TIMES, RATES, st.floats(1e-6, 0.1))
def test_one_piece_exposes_its_bytes_and_a_message(size: int, chunk: float, rate: float, message: float) -> None:
    assert exposed_s(1, size, chunk, rate, message) == pytest.approx(size / rate + message, rel=1e-6, abs=1e-8)


def test_a_link_that_keeps_up_exposes_the_last_group_and_the_messages_cost() -> None:
    # 4 groups of 10 ms each beside a second of computing; three messages went out before the end.
    assert exposed_s(4, 40_000_000, 1.0, 1e9, 0.001) == pytest.approx(0.010 + 4 * 0.001)


def test_a_link_that_does_not_keep_up_is_busy_from_the_first_group_on() -> None:
    # The first group is ready after a quarter of a second; from then on 4 seconds of bytes and four messages.
    assert exposed_s(4, 4_000_000_000, 1.0, 1e9, 0.001) == pytest.approx(0.25 + 4.0 + 4 * 0.001 - 1.0)


@given(st.integers(1, 200), st.integers(1, MAX_GROUPS))
def test_borders_cut_the_layers_into_even_groups(layers: int, groups: int) -> None:
    groups = min(groups, layers)
    cuts = [0, *borders(layers, groups), layers]
    sizes = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
    assert len(sizes) == groups
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
