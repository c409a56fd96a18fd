"""Hits, charges and the choice of a pair in C, on arrays whose addresses are known; see placer.py and policy.py, which say the
same in numpy."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from diptych.router.fleet import ClusterSnapshot, Fleet, Loads
from diptych.router.native.library import CCosts, CDecision, CFleet, CLoads, CRequest, Library, address
from diptych.router.native.lookup import Found
from diptych.router.placement import PlacementRequest, Terms
from diptych.router.policy import MAX_SPARES, TIE_FRACTION, TIE_MS, Choice, Costs, candidate_costs, colocated
from diptych.router.reservations import Reservations

_FLOATS = ("token_ms", "host_token_ms", "idle_at_ms", "sequences", "step_ms", "move_ms", "handoff_ms")
_HITS, _HOST, _PENDING = 0, 1, slice(2, 4)
_ROW_BYTES = 8


class NativeCharges:
    """For one fleet. What a call returns is good until the next one; only `best`, which explanations ask for later, computes
    again from the snapshot, which stays as it was.

    Args:
        reserved: columns of the fleet's workers in `reservations`.
    """

    def __init__(self, library: Library, fleet: Fleet, reservations: Reservations, reserved: Any) -> None:
        self._library, self._reservations = library, reservations
        num, size = len(fleet.records), fleet.num_decode
        self._num = num
        self._found = np.zeros((4, num), np.int64)  # hits, host tier's, pending tokens, requests
        self._found_at = [address(self._found) + _ROW_BYTES * num * row for row in range(4)]
        self._reserved, self._reserved_at = reserved, address(reserved)
        self._loads: Loads | None = None
        self._kept = {name: np.ascontiguousarray(getattr(fleet, name), np.float64) for name in _FLOATS}
        self._kept["alone"] = np.ascontiguousarray(fleet.alone, np.uint8)
        self._kept["block_size"] = np.ascontiguousarray(fleet.block_size, np.int64)
        self.arrays = {name: np.empty(num, np.float64) for name in ("queue", "compute")}
        self.arrays.update({name: np.empty(size, np.float64) for name in ("sequences", "decode_load", "local")})
        self.arrays["remote"] = np.empty((fleet.num_prefill, size), np.float64)
        self.arrays["ties"] = np.empty(max(size, fleet.num_prefill * size), np.int64)
        self._c_fleet, self.computed = CFleet(), CCosts()
        for struct, arrays in ((self._c_fleet, self._kept), (self.computed, self.arrays)):
            for name, array in arrays.items():
                setattr(struct, name, address(array))
        self._c_fleet.num_prefill, self._c_fleet.num_decode = fleet.num_prefill, size
        self._c_fleet.any_alone = fleet.any_alone
        self._c_loads, self._c_request = CLoads(), CRequest()
        self._c_loads.pending_tokens, self._c_loads.pending_requests = self._found_at[2:]
        self._to_fleet, self._to_costs = ctypes.byref(self._c_fleet), ctypes.byref(self.computed)
        self._to_loads, self._to_request = ctypes.byref(self._c_loads), ctypes.byref(self._c_request)
        self._chosen = (ctypes.c_int64 * (2 + MAX_SPARES))()
        self._fleet, self._table_at = fleet, (0, 0)
        self._chance: tuple[float, float] | None = None
        structs = (self._c_fleet, self._c_loads, self._c_request, self.computed)
        self._decision = CDecision(
            0, self._reserved_at, 0, num, self._found_at[0], *map(ctypes.addressof, structs), TIE_MS, TIE_FRACTION,
            MAX_SPARES, ctypes.addressof(self._chosen),
        )  # fmt: skip
        self._to_decision = ctypes.byref(self._decision)
        self._barred: Any = None

    @property
    def hits_at(self) -> int:
        """Where the hits of a lookup are to be written, [P + D]."""
        return self._found_at[0]

    @property
    def host_at(self) -> int:
        return self._found_at[1]

    def clear_hits(self) -> None:
        self._found[:2] = 0

    def loads(self, found: Found) -> Loads:
        """What was looked up and what is reserved now, as values that stay."""
        table = self._reservations
        self._library.gather(table.address, table.width, self._reserved_at, self._num, self._found_at[2])
        hits, host, tokens, requests = self._found.copy()
        self._c_loads.hits = self._found_at[0] if found else None
        self._c_loads.host = self._found_at[1] if found is Found.HITS_WITH_HOST_TIER else None
        self._loads = Loads(
            hits if found else None, host if found is Found.HITS_WITH_HOST_TIER else None, tokens, requests
        )
        return self._loads

    def decide(
        self, found: Found, request: PlacementRequest, now: float, rng: random.Random
    ) -> tuple[Costs, Choice, Sequence[int]] | None:
        """What is charged, the pair that CheapestPair takes and the order of the prefill workers for it, in one call, where
        nobody is barred; None: nobody is a candidate."""
        table = self._reservations
        if (table.address, table.width) != self._table_at:
            self._table_at = self._decision.all, self._decision.width = table.address, table.width
        chance = self._chance or (rng.random(), rng.random())
        count = self._library.decide(
            self._to_decision, found, request.num_prompt_tokens, request.local_prefill_max_tokens, request.wants_kv,
            request.allow_local_fallback, 1000.0 * now, *chance,
        )  # fmt: skip
        self._chance = chance if count < 0 else None  # nothing was drawn
        if count < 0:
            return None
        hits, host, tokens, requests = self._found.copy()
        self._loads = Loads(
            hits if found else None, host if found is Found.HITS_WITH_HOST_TIER else None, tokens, requests
        )
        costs = NativeCosts(self, request, ClusterSnapshot(self._fleet, self._loads), now)
        p, d, *order = self._chosen[: 2 + count]
        return costs, (None if p < 0 else p, d), order

    def charge(self, request: PlacementRequest, snapshot: ClusterSnapshot, now: float) -> Costs:
        """See policy.candidate_costs. `snapshot`: of what `loads` returned last."""
        assert snapshot.loads is self._loads
        asked = self._c_request
        if snapshot.barred or asked.num_barred:
            self._barred = np.array(snapshot.barred, np.int64)
            asked.barred, asked.num_barred = address(self._barred), len(snapshot.barred)
        asked.num_tokens, asked.local_max = request.num_prompt_tokens, request.local_prefill_max_tokens
        asked.wants_kv, asked.may_fall_back = request.wants_kv, request.allow_local_fallback
        asked.now_ms = 1000.0 * now
        self._library.charge(self._to_fleet, self._to_loads, self._to_request, self._to_costs)
        return NativeCosts(self, request, snapshot, now)

    def draw(self, rng: random.Random) -> Choice:
        """See policy.CheapestPair."""
        chance, self._chance = self._chance or (rng.random(), rng.random()), None
        self._library.pick(
            self._to_fleet,
            self._to_loads,
            self._to_request,
            self._to_costs,
            TIE_MS,
            TIE_FRACTION,
            *chance,
            self._chosen,
        )
        p, d = self._chosen[:2]
        return None if p < 0 else p, d

    def order(self, d: int) -> Sequence[int]:
        found = self._library.order(self._to_fleet, self._to_costs, d, MAX_SPARES, self._chosen)
        return self._chosen[:found]


class NativeCosts(Costs):
    """The arrays are those of the charges."""

    __slots__ = ("_charges", "_least_local", "_now")

    def __init__(
        self, charges: NativeCharges, request: PlacementRequest, snapshot: ClusterSnapshot, now: float
    ) -> None:
        self._charges, self._now = charges, now
        self.request, self.snapshot = request, snapshot
        arrays, computed = charges.arrays, charges.computed
        self.remote, self.queue, self.compute = arrays["remote"], arrays["queue"], arrays["compute"]
        self.sequences, self.decode_load = arrays["sequences"], arrays["decode_load"]
        self.local = arrays["local"] if computed.has_local else None
        self.least_remote = computed.least_remote
        self._least_local: float = computed.least_local
        self.colocated = False

    @property
    def least_local(self) -> float:
        return self._least_local

    def draw(self, rng: random.Random) -> Choice:
        return self._charges.draw(rng)

    def order(self, d: int) -> Sequence[int]:
        return self._charges.order(d)

    def best(self, limit: int | None) -> list[Terms]:
        again = candidate_costs(self.request, self.snapshot, self._now)
        if self.colocated:
            colocated(again)
        return again.best(limit)
