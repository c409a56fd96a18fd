"""Which computed ranges are sent early."""

from __future__ import annotations

import pytest

from diptych.common.errors import ConfigError
from diptych.kvtransfer.overlap import least_early_bytes


def test_auto_weighs_the_bytes_against_a_message() -> None:
    assert least_early_bytes("auto", 1e9, message_s=0.002) == 2_000_000
    assert least_early_bytes("auto", 1e8, message_s=0.002) == 200_000, "over a slower link smaller ranges are worth it"
    assert least_early_bytes("auto", 0.0) == 0, "nothing is known: nothing waits"
    assert least_early_bytes("on", 1e9) == 0
    assert least_early_bytes("off", 1e9) > 1 << 60
    with pytest.raises(ConfigError, match="kv_overlap"):
        least_early_bytes("sometimes", 1e9)
