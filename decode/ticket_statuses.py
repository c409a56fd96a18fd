"""Statuses of clients' tickets, kept for routers whose stream broke: the next one begins with what they missed. Pure."""

from __future__ import annotations

from collections import deque

from diptych.rpc.v1 import decode_pb2

KEPT_S = 15.0
"""After the last status; routers wait for a broken stream not quite as long."""
MAX_ENDED = 4096


class TicketStatuses:
    """Of the tickets that run, and of those that ended a short while ago. `now`: seconds on a monotonic clock."""

    def __init__(self) -> None:
        self._running: dict[str, decode_pb2.TicketStatus] = {}
        self._ended: deque[tuple[float, decode_pb2.TicketStatus]] = deque(maxlen=MAX_ENDED)

    def add(self, status: decode_pb2.TicketStatus, now: float) -> None:
        whole = self._running.setdefault(status.attempt, decode_pb2.TicketStatus())
        whole.MergeFrom(status)
        if status.ended:
            self._ended.append((now, self._running.pop(status.attempt)))
            self._forget(now)

    def recent(self, now: float) -> list[decode_pb2.TicketStatus]:
        """One for each ticket: everything that was reported of it."""
        self._forget(now)
        return [*self._running.values(), *(status for _, status in self._ended)]

    def _forget(self, now: float) -> None:
        while self._ended and now - self._ended[0][0] > KEPT_S:
            self._ended.popleft()
