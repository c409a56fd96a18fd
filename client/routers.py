"""The routers of one client: which of them is asked now, and which one next when it fails. Pure.

the one in use --a call fails, or it does not serve--> the next that a health check finds SERVING, or the next
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diptych.common.errors import InvalidRequestError

HEALTH_TIMEOUT_S = 1.0
_SERVING = b"\x08\x01"
"""grpc.health.v1.HealthCheckResponse(status=SERVING), encoded: its package is not needed for one byte."""


class Routers:
    """The addresses. `given`: host:port of one router, or of several of the same cluster.

    Raises: InvalidRequestError for none.
    """

    def __init__(self, given: str | Sequence[str]) -> None:
        try:
            self.addresses = (given,) if isinstance(given, str) else tuple(dict.fromkeys(given))
        except TypeError:
            self.addresses = ()
        if not self.addresses or not all(isinstance(address, str) and address for address in self.addresses):
            raise InvalidRequestError("address must be host:port, or several of them", param="address")
        self.current = self.addresses[0]

    @property
    def several(self) -> bool:
        return len(self.addresses) > 1

    def in_order(self, failed: str) -> tuple[str, ...]:
        """The addresses after the one that failed, in turn, that one last."""
        at = self.addresses.index(failed) + 1
        return self.addresses[at:] + self.addresses[:at]

    def use(self, failed: str, address: str) -> None:
        """Use `address` from now on, unless another call has changed the one that failed meanwhile."""
        if self.current == failed:
            self.current = address


def is_serving(answer: bytes) -> bool:
    """Whether the answer of a health check says so."""
    return answer == _SERVING


def health_method(channel: Any) -> Any:
    """The call of a health check: takes b"" and returns bytes for `is_serving`."""
    return channel.unary_unary(
        "/grpc.health.v1.Health/Check", request_serializer=lambda _: b"", response_deserializer=lambda answer: answer
    )
