"""Verification of placement tickets by their worker. Pure.

A ticket contains the worker's *ticket epoch* as last reported to its router; the worker accepts the current and the
previous epoch. So a ticket expires after one to two periods of the worker's clock, and no clocks are compared.
"""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.message import DecodeError

from diptych.common.errors import TicketRefusedError
from diptych.common.ticket import unseal
from diptych.rpc import convert
from diptych.rpc.v1 import decode_pb2

EPOCH_S = 30.0


class TicketVerifier:
    """Verifies and redeems tickets.

    Args:
        key: of the cluster's tickets.
        now: seconds on a monotonic clock.
        epoch_s: length of an epoch.
    """

    def __init__(self, key: bytes, *, now: Callable[[], float], epoch_s: float = EPOCH_S) -> None:
        self._key = key
        self._now = now
        self._epoch_s = epoch_s
        self._began = now()
        self._used: dict[int, set[str]] = {}

    @property
    def epoch(self) -> int:
        return 1 + int((self._now() - self._began) / self._epoch_s)

    @property
    def next_epoch_in_s(self) -> float:
        return self._epoch_s - (self._now() - self._began) % self._epoch_s

    def redeem(self, message: decode_pb2.Redeem) -> decode_pb2.Submit:
        """The signed submission, with the shorter of the two deadlines; once per ticket. Its worker is checked with the
        submission. Raises: TicketRefusedError; InvalidRequestError naming the deadline."""
        try:
            claims = decode_pb2.TicketClaims.FromString(unseal(self._key, message.ticket))
        except DecodeError:
            raise TicketRefusedError("the placement ticket's claims cannot be read", param="ticket") from None
        submit, now = claims.submit, self.epoch
        if submit.attempt != message.attempt:
            raise TicketRefusedError("the placement ticket is for another attempt", param="attempt")
        if not now - 1 <= claims.epoch <= now:
            raise TicketRefusedError("the placement ticket has expired", param="ticket")
        for epoch in [epoch for epoch in self._used if epoch < now - 1]:
            del self._used[epoch]
        used = self._used.setdefault(claims.epoch, set())
        if submit.attempt in used:
            raise TicketRefusedError("the placement ticket was used before", param="ticket")
        submit.remaining_s = min(submit.remaining_s, convert.check_remaining(message.remaining_s))
        used.add(submit.attempt)
        return submit
