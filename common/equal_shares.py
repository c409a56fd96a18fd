"""When each prompt would be computed under processor sharing: equal shares by tenant, and by request within a tenant.
Pure.

A server that computes the prompts one after the other, in the order of `due`, finishes each no later than under
sharing, except for a piece that cannot be interrupted (fair sojourn protocol, Friedman and Henderson 2003). So a short
prompt waits for about as many tokens of every other prompt as it has itself, and a long one never starves.

Virtual time counts tokens given to each tenant with pending prompts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Tenant:
    """One tenant with pending prompts.

    Args:
        level: tokens given to each of its requests; starts at the virtual time of arrival, so that it only grows.
        ends: (level at which a request is done, its name), sorted.
        total: sum of these levels.
    """

    level: float
    ends: list[tuple[float, str]] = field(default_factory=list)
    total: float = 0.0

    @property
    def left(self) -> float:
        return self.total - self.level * len(self.ends)


class EqualShares:
    """Requests are identified by unique names; unknown names are ignored."""

    def __init__(self) -> None:
        self._now = 0.0
        self._tenants: dict[str, _Tenant] = {}
        self._ends: dict[str, tuple[str, float]] = {}
        """(tenant, level at which it is done) of requests not done under sharing."""
        self._through: dict[str, float] = {}
        """Virtual time at which requests were done under sharing, while they may still have to be computed."""
        self._computed: set[str] = set()
        """Requests that are computed but not yet done under sharing."""

    def __len__(self) -> int:
        return len(self._ends) + len(self._through)

    def add(self, name: str, tenant: str, tokens: int) -> None:
        """Args: tokens: to be computed; replaces an earlier entry of this name."""
        self.remove(name)
        flow = self._tenants.setdefault(tenant, _Tenant(self._now))
        end = flow.level + max(1, tokens)
        insort(flow.ends, (end, name))
        flow.total += end
        self._ends[name] = (tenant, end)

    def remove(self, name: str) -> None:
        """The rest of the request need not be computed."""
        self._through.pop(name, None)
        self._computed.discard(name)
        known = self._ends.pop(name, None)
        if known is None:
            return
        tenant, end = known
        flow = self._tenants[tenant]
        del flow.ends[bisect_left(flow.ends, (end, name))]
        flow.total -= end
        if not flow.ends:
            del self._tenants[tenant]

    def forget(self, name: str) -> None:
        """The request was computed. Its share continues until it would be done under sharing."""
        self._through.pop(name, None)
        if name in self._ends:
            self._computed.add(name)

    def less(self, name: str, tokens: int) -> None:
        """`tokens` tokens of the request need not be computed."""
        known = self._ends.get(name)
        if known is None or tokens <= 0:
            return
        tenant, end = known
        flow = self._tenants[tenant]
        del flow.ends[bisect_left(flow.ends, (end, name))]
        flow.total -= end
        end = max(flow.level, end - tokens)
        insort(flow.ends, (end, name))
        flow.total += end
        self._ends[name] = (tenant, end)

    def clear(self) -> None:
        """Nothing is pending; the remaining entries were wrong estimates."""
        self._tenants.clear()
        self._ends.clear()
        self._computed.clear()

    def end(self, name: str) -> float:
        """Orders the requests of one tenant; constant while a request waits."""
        return self._ends[name][1] if name in self._ends else 0.0

    def due(self, name: str) -> float:
        """Virtual time at which the request is done, or will be if none arrives. Orders all requests."""
        known = self._ends.get(name)
        if known is None:
            return self._through.get(name, self._now)
        tenant, end = known
        flow = self._tenants[tenant]
        before = bisect_left(flow.ends, (end, name))
        level = flow.level
        own = sum(other for other, _ in flow.ends[:before]) - before * level
        return self._now + own + (len(flow.ends) - before) * (end - level)

    def before(self, tenant: str, tokens: int) -> float:
        """Tokens computed before a new request of the tenant is done under sharing, besides its own."""
        flow = self._tenants.get(tenant)
        own = 0.0
        if flow is not None:
            end = flow.level + tokens
            at = bisect_left(flow.ends, (end, ""))
            own = sum(other for other, _ in flow.ends[:at]) - at * flow.level + (len(flow.ends) - at) * tokens
        others = sum(min(other.left, own + tokens) for name, other in self._tenants.items() if name != tenant)
        return own + others

    def left(self, name: str) -> float:
        """Tokens of the request still to be computed."""
        known = self._ends.get(name)
        return 0.0 if known is None else known[1] - self._tenants[known[0]].level

    def computed(self, tokens: float) -> None:
        """`tokens` tokens were computed, of any request."""
        while tokens > 1e-9 and self._tenants:
            share = min(tokens / len(self._tenants), min(flow.left for flow in self._tenants.values()))
            tokens -= share * len(self._tenants)
            for tenant, flow in list(self._tenants.items()):
                self._give(flow, share)
                if not flow.ends:
                    del self._tenants[tenant]
            self._now += share

    def _give(self, flow: _Tenant, share: float) -> None:
        given = 0.0
        while flow.ends:
            end, name = flow.ends[0]
            need = (end - flow.level) * len(flow.ends)
            if need > share - given + 1e-6:
                flow.level += max(0.0, share - given) / len(flow.ends)
                return
            given += need
            flow.level = end
            flow.total -= end
            del flow.ends[0]
            del self._ends[name]
            if name in self._computed:
                self._computed.discard(name)
            else:
                self._through[name] = self._now + given
