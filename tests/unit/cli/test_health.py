"""`diptych health`: what is refused before anything is asked."""

from __future__ import annotations

import pytest

from diptych.cli.health import why_unhealthy
from diptych.common.errors import ConfigError


@pytest.mark.parametrize("address", ["prefill-0", "ftp://prefill-0:21/x", "https://router:8000/health"])
def test_an_address_of_another_kind_is_named(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        why_unhealthy(address, timeout_s=1.0)
    assert caught.value.field == "address"
