"""Errors for an unreachable router: the system's reason, without gRPC's addresses and file names."""

import pytest

from diptych.client import Client, RetryPolicy, UnreachableError
from diptych.client.wire import _plain


@pytest.mark.parametrize(
    ("details", "reported"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: "
            "connect: Connection refused (111)",
            "Connection refused",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.1:5: No route to host (113)",
            "No route to host",
        ),
        ("Socket closed", "Socket closed"),
        ("", ""),
    ],
)
def test_reasons(details: str, reported: str) -> None:
    assert _plain(details) == reported


def test_no_router_listens() -> None:
    with (
        Client("127.0.0.1:1", retry=RetryPolicy(max_tries=1)) as client,
        pytest.raises(UnreachableError, match=r"^the router at 127.0.0.1:1 cannot be reached: Connection refused$"),
    ):
        client.list_models(timeout_s=60.0)
