"""Requests that wait for admission, in the order in which they are tried."""

from __future__ import annotations

from bisect import insort

from diptych.engine.messages import KvMode
from diptych.engine.sched.request import Request


class WaitingQueues:
    """Preempted requests (and those that gave up on remote KV) first, oldest first; then the others by arrival.

    REMOTE ones compute nothing when they are admitted, so they can be walked apart.
    """

    def __init__(self) -> None:
        self._returned: list[Request] = []
        self._compute: dict[str, Request] = {}
        self._remote: dict[str, Request] = {}
        self.num_tokens_to_compute = 0
        """Tokens of all requests here that will be computed on this worker, before any cache hit."""

    def __len__(self) -> int:
        return len(self._returned) + len(self._compute) + len(self._remote)

    def push(self, request: Request) -> None:
        if request.mode is KvMode.REMOTE:
            self._remote[request.attempt] = request
        else:
            self._compute[request.attempt] = request
            self.num_tokens_to_compute += len(request.token_ids)

    def push_returned(self, request: Request) -> None:
        insort(self._returned, request, key=lambda r: r.arrival)
        self.num_tokens_to_compute += len(request.token_ids)

    def remove(self, request: Request) -> None:
        if self._remote.pop(request.attempt, None) is not None:
            return
        if self._compute.pop(request.attempt, None) is None:
            self._returned.remove(request)
        self.num_tokens_to_compute -= len(request.token_ids)

    def head(self, *, may_compute: bool) -> Request | None:
        """Who is next; without `may_compute`, among the REMOTE ones only."""
        compute: Request | None = None
        if may_compute:
            compute = self._returned[0] if self._returned else next(iter(self._compute.values()), None)
        remote = next(iter(self._remote.values()), None)
        if compute is None or (remote is not None and not self._returned and remote.arrival < compute.arrival):
            return remote
        return compute
