"""When a prefix is copied to a second holder on purpose, before its queue says so. Pure.

    each placement on a hit -> load of the prefix (share of a holder's time, fading) -> above the bound, per holder
    -> this one request goes to a worker that does not hold it, and leaves a copy there -> pause until the copy is known

One request at a time makes a copy, and not the next before PAUSE_S: a hot prefix spreads step by step, without a herd.
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
"""Of a holder's time, taken by requests with one prefix."""
PAUSE_S = 1.0
_FADE_S = 2.0
_MAX_PREFIXES = 4096
LEAST_TOKENS = 128
"""A shorter hit is not worth a copy on purpose."""


@dataclass(slots=True)
class _Heat:
    busy_s: float = 0.0
    at: float = 0.0
    copied_at: float = -math.inf


@dataclass(slots=True)
class Replication:
    """Args:
    bound: share of one holder's time above which a prefix gets another holder.
    """

    bound: float = BOUND
    num_copies: int = 0
    _prefixes: OrderedDict[bytes, _Heat] = field(default_factory=OrderedDict)

    def on_placed(self, prefix: bytes, busy_s: float, num_holders: int, now: float) -> float:
        """A request with this prefix takes `busy_s` of a holder. Returns the load per holder when this one should rather make a
        copy, else 0.0."""
        heat = self._prefixes.setdefault(prefix, _Heat(at=now))
        self._prefixes.move_to_end(prefix)
        if len(self._prefixes) > _MAX_PREFIXES:
            self._prefixes.popitem(last=False)
        heat.busy_s = heat.busy_s * math.exp((heat.at - now) / _FADE_S) + busy_s
        heat.at = now
        load = heat.busy_s / _FADE_S / num_holders
        if load <= self.bound or now - heat.copied_at < PAUSE_S:
            return 0.0
        heat.copied_at = now
        self.num_copies += 1
        return load


@dataclass(slots=True)
class ExcludeHolders:
    """The cheapest pair whose prefill worker is none of the holders ([P]); where there is none, the cheapest."""

    holders: Bools
    name: str = CHEAPEST.name

    def pick(self, costs: Costs, rng: random.Random) -> Choice:
        remote = np.where(self.holders[:, None], np.inf, costs.remote)
        if not np.isfinite(remote).any():
            return CHEAPEST.pick(costs, rng)
        p, d = divmod(int(remote.argmin()), remote.shape[1])
        return p, d
