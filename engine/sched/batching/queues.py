"""Requests that wait for admission, in the order of the policy."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from itertools import chain

from diptych.engine.messages import KvMode
from diptych.engine.sched.batching.policies import Key, Policy
from diptych.engine.sched.requests.request import Request, State


class _Sorted:
    """One sorted list for each group. The keys are unique, so no two requests are compared."""

    def __init__(self, policy: Policy, stuck: Callable[[], Collection[str]]) -> None:
        self._policy, self._stuck = policy, stuck
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

    def head(self, passed: Collection[str] = ()) -> tuple[float, Key, Request] | None:
        best: tuple[float, Key, Request] | None = None
        stuck = self._stuck()
        for group, waiting in self._groups.items():
            entry: tuple[Key, Request] | None = waiting[0]
            if passed or stuck:
                entry = next((e for e in waiting if e[1].adapter not in stuck and e[1].attempt not in passed), None)
            if entry is None:
                continue
            key, request = entry
            share = self._policy.share(group, request)
            if best is None or (share, key) < best[:2]:
                best = (share, key, request)
        return best


class WaitingQueues:
    """Owns the waiting requests. REMOTE ones have a queue of their own: they compute nothing when they are admitted.

    Args:
        cached: how many of a request's tokens are in a cache now.
        stuck: adapters whose requests `head` leaves out.
    """

    def __init__(
        self,
        policy: Policy,
        cached: Callable[[Request], int] = lambda _: 0,
        stuck: Callable[[], Collection[str]] = lambda: (),
    ) -> None:
        self._policy = policy
        self._cached = cached
        self._compute = _Sorted(policy, stuck)
        self._remote = _Sorted(policy, stuck)
        self.num_tokens_to_compute = 0
        """Tokens of all requests here that will be computed on this worker, before any cache hit."""
        self._expected: dict[str, int] = {}
        """By attempt: the tokens to compute that the policy counts on."""
        self._counted: dict[str, int] = {}
        """By attempt: its part of num_tokens_to_compute. An admission changes `num_computed` before the request is
        removed."""

    def __len__(self) -> int:
        return len(self._compute) + len(self._remote)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._compute, self._remote)

    def push(self, request: Request) -> None:
        if self._policy.passes:
            self._expected[request.attempt] = to_compute = self._to_compute(request)
            self._policy.waits(request, to_compute)
        if request.mode is KvMode.REMOTE and request.state is State.WAITING:
            self._remote.push(request)
        else:
            self._compute.push(request)
            count = self._counted[request.attempt] = request.num_tokens - request.num_computed
            self.num_tokens_to_compute += count

    def _to_compute(self, request: Request) -> int:
        return request.num_tokens - max(request.num_computed, self._cached(request))

    def admitted(self, request: Request) -> None:
        """As `remove`, of a request that has its blocks: computing begins at `num_computed`."""
        expected = self._expected.get(request.attempt, 0)
        self.remove(request)
        if self._policy.passes:
            left = request.num_tokens - request.num_computed
            self._policy.admitted(request, expected - left)

    def push_returned(self, request: Request) -> None:
        """It was preempted, or is computed here after all: it waits in front of others of its class."""
        request.returned = True
        self.push(request)

    def remove(self, request: Request) -> None:
        self._expected.pop(request.attempt, None)
        if request in self._remote:
            self._remote.remove(request)
            return
        self._compute.remove(request)
        self.num_tokens_to_compute -= self._counted.pop(request.attempt)

    def head(self, *, may_compute: bool, passed: Collection[str] = ()) -> Request | None:
        """The next request; without `may_compute`, among the REMOTE ones only. Args: passed: attempts that are
        skipped."""
        compute = self._compute.head(passed) if may_compute else None
        remote = self._remote.head(passed)
        if compute is None or (remote is not None and remote[:2] < compute[:2]):
            return remote[2] if remote is not None else None
        return compute[2]
