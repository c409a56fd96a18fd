"""Requests that wait for admission, in the order in which the policy has them tried."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain

from diptych.engine.messages import KvMode
from diptych.engine.sched.policies import Key, Policy
from diptych.engine.sched.request import Request, State


class _Sorted:
    """One sorted list a group. The keys are unique, so no two requests are ever compared."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._groups: dict[str, list[tuple[Key, Request]]] = {}
        self._where: dict[str, tuple[str, Key]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, request: Request) -> bool:
        return request.attempt in self._where

    def push(self, request: Request) -> None:
        group, key = self._policy.group(request), self._policy.order(request)
        insort(self._groups.setdefault(group, []), (key, request), key=lambda entry: entry[0])
        self._where[request.attempt] = (group, key)

    def remove(self, request: Request) -> None:
        group, key = self._where.pop(request.attempt)
        waiting = self._groups[group]
        del waiting[bisect_left(waiting, key, key=lambda entry: entry[0])]
        if not waiting:
            del self._groups[group]

    def __iter__(self) -> Iterator[Request]:
        return (request for waiting in self._groups.values() for _, request in waiting)

    def head(self) -> tuple[float, Key, Request] | None:
        best: tuple[float, Key, Request] | None = None
        for group, waiting in self._groups.items():
            key, request = waiting[0]
            share = self._policy.share(group)
            if best is None or (share, key) < best[:2]:
                best = (share, key, request)
        return best


class WaitingQueues:
    """REMOTE requests compute nothing when they are admitted, so they can be walked apart."""

    def __init__(self, policy: Policy) -> None:
        self._compute = _Sorted(policy)
        self._remote = _Sorted(policy)
        self.num_tokens_to_compute = 0
        """Tokens of all requests here that will be computed on this worker, before any cache hit."""
        self._counted: dict[str, int] = {}
        """What each request added to it: an admission moves `num_computed` before the request leaves."""

    def __len__(self) -> int:
        return len(self._compute) + len(self._remote)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._compute, self._remote)

    def push(self, request: Request) -> None:
        if request.mode is KvMode.REMOTE and request.state is State.WAITING:
            self._remote.push(request)
        else:
            self._compute.push(request)
            count = self._counted[request.attempt] = request.num_tokens - request.num_computed
            self.num_tokens_to_compute += count

    def push_returned(self, request: Request) -> None:
        """It was preempted, or gave up on remote KV: it waits before others of its class."""
        request.returned = True
        self.push(request)

    def remove(self, request: Request) -> None:
        if request in self._remote:
            self._remote.remove(request)
            return
        self._compute.remove(request)
        self.num_tokens_to_compute -= self._counted.pop(request.attempt)

    def head(self, *, may_compute: bool) -> Request | None:
        """Who is next; without `may_compute`, among the REMOTE ones only."""
        compute = self._compute.head() if may_compute else None
        remote = self._remote.head()
        if compute is None or (remote is not None and remote[:2] < compute[:2]):
            return remote[2] if remote is not None else None
        return compute[2]
