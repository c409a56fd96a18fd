"""Cache-aware placement of public routers: a prefix tree of what was *sent* to each worker, without cache events.

Modelled on the published behaviour of such routers and their default thresholds: the worker with the longest matching
prefix gets the request if the match is long enough, else the one that was sent least; when the numbers of running
requests are too unequal, the least loaded gets it. Decode workers are chosen by power of two. Here the tree works on
blocks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from diptych.router.placement.cost import Choice, Costs

CACHE_THRESHOLD = 0.3
BALANCE_ABS, BALANCE_REL = 64, 1.5


class ApproximateTree:
    """The policy. `keys_of`: the block keys of a request, by its `affinity`."""

    name = "approximate-tree"

    def __init__(self, keys_of: Callable[[bytes], Sequence[bytes]]) -> None:
        self._keys_of = keys_of
        self._sent: dict[bytes, set[int]] = {}
        self._size: Counter[int] = Counter()

    def pick(self, costs: Costs, rng: random.Random) -> Choice:
        fleet = costs.snapshot.fleet
        first = fleet.num_prefill
        pending = costs.snapshot.loads.pending_requests
        drawn = rng.sample(range(fleet.num_decode), min(2, fleet.num_decode))
        d = min(drawn, key=lambda i: int(pending[first + i]))
        usable = np.flatnonzero(np.isfinite(costs.remote[:, d])).tolist()
        keys = self._keys_of(costs.request.affinity)
        p = self._prefill(usable, keys, [int(pending[i]) for i in range(first)])
        for key in keys:
            self._sent.setdefault(key, set()).add(p)
        self._size[p] += len(keys)
        return p, d

    def _prefill(self, usable: Sequence[int], keys: Sequence[bytes], running: Sequence[int]) -> int:
        loads = [running[i] for i in usable]
        if max(loads) - min(loads) > BALANCE_ABS and max(loads) > BALANCE_REL * min(loads):
            return min(usable, key=lambda i: running[i])
        matches = Counter({i: self._match(i, keys) for i in usable})
        best, length = matches.most_common(1)[0]
        if keys and length / len(keys) > CACHE_THRESHOLD:
            return best
        return min(usable, key=lambda i: self._size[i])

    def _match(self, worker: int, keys: Sequence[bytes]) -> int:
        for length, key in enumerate(keys):
            if worker not in self._sent.get(key, ()):
                return length
        return len(keys)
