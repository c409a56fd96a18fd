"""Scheduling policies: the order of waiting requests, and which running one is preempted first. Pure; a class for each
policy.

    sojourn   by the time at which the prompt would be finished if all prompts were computed at once, in equal shares
    fcfs      by arrival
    priority  the lowest number first; takes blocks and sequence slots from running requests with a higher number
    sjf       the least work first; work minus a credit for waiting, so that nothing starves
    fair      the tenant that received the fewest tokens first; within a tenant by arrival

`order` is fixed while a request waits, so queues stay sorted. A preempted request (`returned`) goes before others of
its class. `rank` orders running requests: the last one is preempted first. The rank is fixed for a request's whole
life, so the first one always continues, and every request eventually becomes the first."""

from __future__ import annotations

from diptych.common.equal_shares import EqualShares
from diptych.engine.sched.requests.request import Request

Key = tuple[float, ...]

OUTPUT_WEIGHT = 2.0
"""Weight of an output token against a prompt token: it takes a whole step of its sequence (Sheng et al., 2024)."""


class Policy:
    """First come, first served, and the base of the others."""

    preempts = False
    """Running requests of a worse class may be preempted for a waiting one."""

    charges = False
    """Whether `charge` is called."""

    passes = False
    """A waiting prompt may be computed before one that has begun (see `due`), and one that fits before one that does
    not."""

    def group(self, request: Request) -> str:
        """Requests of one group are ordered among themselves, groups by `share`."""
        return ""

    def share(self, group: str, first: Request) -> float:
        """The group with the least goes first. `first`: of the group."""
        return 0.0

    def due(self, request: Request) -> float:
        """Orders prompts that have begun and those that wait; used only with `passes`."""
        return 0.0

    def order(self, request: Request) -> Key:
        return (not request.returned, request.arrival, request.choice)

    def rank(self, request: Request) -> Key:
        return (request.arrival, request.choice)

    def outranks(self, waiting: Request, running: Request) -> bool:
        """`running` may be preempted for `waiting`; used only with `preempts`."""
        return False

    def entered(self, request: Request) -> None:
        """The request was added to the engine."""

    def waits(self, request: Request, num_tokens: int) -> None:
        """It is about to wait, for the first time or again. Args: num_tokens: what must be computed for it."""

    def left(self, request: Request) -> None: ...

    def admitted(self, request: Request, num_saved: int) -> None:
        """It was admitted. Args: num_saved: tokens that need not be computed, of those that `waits` was given."""

    def idle(self) -> None:
        """There is no prompt to compute."""

    def computed(self, num_prompt: int) -> None:
        """Prompt tokens were computed, of any request."""

    def charge(self, request: Request, num_prompt: int, num_outputs: int) -> None:
        """Tokens that were computed for it."""


class FairSojourn(Policy):
    """No prompt is finished later than if all were computed at once, in equal shares by tenant and then by request. So
    a short prompt does not wait for a long one, and a long one does not starve."""

    passes = True

    def __init__(self) -> None:
        self._shares = EqualShares()

    def group(self, request: Request) -> str:
        return request.tenant

    def share(self, group: str, first: Request) -> float:
        return self._shares.due(first.attempt)

    def order(self, request: Request) -> Key:
        return (self._shares.end(request.attempt), request.arrival, request.choice)

    def due(self, request: Request) -> float:
        return self._shares.due(request.attempt)

    def waits(self, request: Request, num_tokens: int) -> None:
        self._shares.add(request.attempt, request.tenant, num_tokens)

    def left(self, request: Request) -> None:
        if request.num_computed + 1 >= request.num_tokens:
            self._shares.forget(request.attempt)
        else:
            self._shares.remove(request.attempt)

    def admitted(self, request: Request, num_saved: int) -> None:
        self._shares.less(request.attempt, num_saved)

    def computed(self, num_prompt: int) -> None:
        self._shares.computed(num_prompt)

    def idle(self) -> None:
        self._shares.clear()


class Priority(Policy):
    preempts = True

    def order(self, request: Request) -> Key:
        return (request.priority, not request.returned, request.arrival, request.choice)

    def rank(self, request: Request) -> Key:
        return (request.priority, request.arrival, request.choice)

    def outranks(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority


class ShortestJobFirst(Policy):
    """Args: aging_tokens_per_s: work that a second of waiting outweighs.

    All waiting requests age at the same rate, so comparing work - age equals comparing work + aging * time of arrival,
    which does not change."""

    def __init__(self, aging_tokens_per_s: float) -> None:
        self._aging = aging_tokens_per_s

    def order(self, request: Request) -> Key:
        work = request.max_tokens_total + self._aging * request.arrived_at
        return (not request.returned, work, request.arrival, request.choice)


class FairShare(Policy):
    """Virtual token counters. A tenant that returns from a pause starts level with the least served active one, so that
    a pause earns no credit."""

    charges = True

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._active: dict[str, int] = {}

    def group(self, request: Request) -> str:
        return request.tenant

    def share(self, group: str, first: Request) -> float:
        return self._served.get(group, 0.0)

    def entered(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._active:
            floor = min((self._served[t] for t in self._active), default=0.0)
            if not self._active:
                self._served.clear()  # no other tenant to compare with
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def left(self, request: Request) -> None:
        self._active[request.tenant] -= 1
        if not self._active[request.tenant]:
            del self._active[request.tenant]

    def charge(self, request: Request, num_prompt: int, num_outputs: int) -> None:
        self._served[request.tenant] += num_prompt + OUTPUT_WEIGHT * num_outputs


def make_policy(name: str, *, sjf_aging_tokens_per_s: float) -> Policy:
    match name:
        case "sojourn":
            return FairSojourn()
        case "fcfs":
            return Policy()
        case "priority":
            return Priority()
        case "sjf":
            return ShortestJobFirst(sjf_aging_tokens_per_s)
        case "fair":
            return FairShare()
    raise ValueError(f"no policy is called {name!r}")
