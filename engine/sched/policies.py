"""Whose turn it is: the order of the waiting, and who gives way when blocks run out. Pure; one small class a policy.

    sojourn   the prompt first that would be through first if all were computed at once, in equal shares
    fcfs      first come, first served
    priority  the lowest number first; may take blocks and places from running requests with a higher number
    sjf       the least work first, less what waiting has earned: nothing starves
    fair      the tenant first that got the fewest tokens so far; within a tenant first come, first served

`order` is fixed while a request waits, so queues stay sorted by themselves. Whoever was preempted (`returned`) goes before
others of its class. `rank` orders the running: the last one gives way first. Its order is fixed for a request's whole life,
so the first one always goes on and everybody is the first one day.
"""

from __future__ import annotations

from diptych.common.equal_shares import EqualShares
from diptych.engine.sched.request import Request

Key = tuple[float, ...]

OUTPUT_WEIGHT = 2.0
"""An output token takes a whole step of its sequence, a prompt token shares one with hundreds (Sheng et al., 2024)."""


class Policy:
    """First come, first served; the others override what they see differently."""

    preempts = False
    """A waiting request may take what a running one of a worse class holds."""

    charges = False
    """`charge` is to be called."""

    passes = False
    """A prompt that waits may go before one that has begun (see `due`), and one that fits before one that does not."""

    def group(self, request: Request) -> str:
        """Requests of one group are ordered among themselves, groups by `share`."""
        return ""

    def share(self, group: str, first: Request) -> float:
        """The group with the least goes first. `first`: of the group."""
        return 0.0

    def due(self, request: Request) -> float:
        """Orders prompts that have begun and those that wait; only asked when `passes`."""
        return 0.0

    def order(self, request: Request) -> Key:
        return (not request.returned, request.arrival, request.choice)

    def rank(self, request: Request) -> Key:
        return (request.arrival, request.choice)

    def outranks(self, waiting: Request, running: Request) -> bool:
        """`running` gives way to `waiting`; only asked when `preempts`."""
        return False

    def entered(self, request: Request) -> None:
        """The request came to the engine."""

    def waits(self, request: Request, num_tokens: int) -> None:
        """It is about to wait, for the first time or again. `num_tokens`: what is then to be computed for it."""

    def left(self, request: Request) -> None: ...

    def admitted(self, request: Request, num_saved: int) -> None:
        """It waits no longer. `num_saved`: less to be computed than it was to be."""

    def idle(self) -> None:
        """No prompt is there to be computed."""

    def computed(self, num_prompt: int) -> None:
        """Tokens of prompts that were computed, whosever they are."""

    def charge(self, request: Request, num_prompt: int, num_outputs: int) -> None:
        """Tokens that were computed for it."""


class FairSojourn(Policy):
    """Nobody is served later than if all prompts were computed at once, in equal shares by tenant and then by request; so a
    short prompt does not wait for a long one, and a long one does not starve."""

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

    All that wait age alike, so comparing work - age is comparing work + aging * time of arrival: no clock is needed later.
    """

    def __init__(self, aging_tokens_per_s: float) -> None:
        self._aging = aging_tokens_per_s

    def order(self, request: Request) -> Key:
        work = request.max_tokens_total + self._aging * request.arrived_at
        return (not request.returned, work, request.arrival, request.choice)


class FairShare(Policy):
    """Virtual token counters: a tenant that comes back from a pause starts where the least served active one stands, so that
    nobody saves up."""

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
                self._served.clear()  # nobody has anything to be compared with
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
