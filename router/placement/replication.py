"""Replication of a hot prefix to a second worker before queues build up. Pure.

    each placement on a hit -> load of the prefix (share of a holder's time, decaying) -> above the bound, per holder
    -> this one request goes to a worker without it, which pulls it from a holder -> pause until the copy is known

One request at a time creates a copy, and the next not before PAUSE_S: a hot prefix spreads step by step, without a
herd. A copy is a pull (pulls.py), never computed: where no pull is made, there is no copy.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from diptych.router.placement.cost import CHEAPEST, Choice, Costs
from diptych.router.placement.worker_arrays import Bools

BOUND = 0.5
"""Share of a holder's time for requests with one prefix."""
PAUSE_S = 1.0
_FADE_S = 2.0
_MAX_PREFIXES = 4096
LEAST_TOKENS = 128
"""A shorter hit is not worth a copy."""


@dataclass(slots=True)
class _PrefixLoad:
    busy_s: float = 0.0
    at: float = 0.0
    copied_at: float = -math.inf


@dataclass(slots=True)
class Replication:
    """Decides when a prefix gets another copy. `bound`: share of one holder's time above which a prefix gets another
    holder. `num_copies`: counted by the caller, when one is made."""

    bound: float = BOUND
    num_copies: int = 0
    _prefixes: OrderedDict[bytes, _PrefixLoad] = field(default_factory=OrderedDict)

    def on_placed(self, prefix: bytes, busy_s: float, num_holders: int, now: float) -> float:
        """Record a request with this prefix that takes `busy_s` of a holder. Returns the load per holder if this
        request should create a copy if it can, else 0.0."""
        heat = self._prefixes.setdefault(prefix, _PrefixLoad(at=now))
        self._prefixes.move_to_end(prefix)
        if len(self._prefixes) > _MAX_PREFIXES:
            self._prefixes.popitem(last=False)
        heat.busy_s = heat.busy_s * math.exp((heat.at - now) / _FADE_S) + busy_s
        heat.at = now
        load = heat.busy_s / _FADE_S / num_holders
        if load <= self.bound or now - heat.copied_at < PAUSE_S:
            return 0.0
        heat.copied_at = now
        return load


@dataclass(slots=True)
class ExcludeHolders:
    """The cheapest pair whose prefill worker is not a holder ([P]); if there is none, the cheapest."""

    holders: Bools
    name: str = CHEAPEST.name

    def pick(self, costs: Costs, rng: random.Random) -> Choice:
        remote = np.where(self.holders[:, None], np.inf, costs.remote)
        if not np.isfinite(remote).any():
            return CHEAPEST.pick(costs, rng)
        p, d = divmod(int(remote.argmin()), remote.shape[1])
        return p, d
