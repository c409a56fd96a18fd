"""Which LoRA adapters are in the runner's slots, and which request may run with its adapter.

    KeepAdapter -> known --a request needs it, a slot is free--> being installed, in parts, before steps --> resident
    resident --a request is admitted--> pinned --the last one with it leaves--> resident --another one takes its slot--> known
    DropAdapter -> refused to new requests --the last request that names it ends--> forgotten

A request pins its adapter's slot from its admission until it ends, is preempted or computes no more: so what runs always has its
slot. A request whose adapter gets no slot stays where it waits, and those behind it go on, with one exception: its adapter claims
the slot that has the fewest requests, and no request of a later rank (a younger one; under the priority policy also one of less
importance) is admitted to that slot, but for those that waited already when the slot was given to its adapter, so many of them
as a turn has. So one installation serves several requests, the slot becomes free, and no adapter waits forever. A free slot is
one without pins; of those the ones go first whose adapter no live request names, then the one that was used the longest ago.

Sequences that decode wait for what is installed before their step: only so many bytes are. The request waits until its adapter is
there as a whole. Where nothing decodes, it is installed at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from diptych.common.errors import InvalidRequestError
from diptych.engine.sched.requests.request import Request
from diptych.engine.stats import AdapterStats
from diptych.engine.step_messages import Install, LoadedAdapter

Rank = tuple[float, ...]
"""Of a request, see Policy.rank."""


@dataclass(slots=True)
class _Slot:
    adapter: str = ""
    pins: int = 0
    last_arrival: int = 0
    """When the slot was given to the adapter: who had arrived may run in its turn."""
    turn_left: int = 0
    """Requests that may run in this turn past others' claims."""
    used_at: int = 0
    """Number of the last event that changed its pins."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """The adapter `adapter` gets the slot next; `rank`: of the first request that lacked it."""

    adapter: str
    attempt: str
    rank: Rank


class AdapterSlots:
    """One thread only; no torch, no I/O.

    Args:
        num_slots: of the runner; 0: every adapter is unknown.
        rank: fixed for a request's life; of two that wait for a slot the one of the smaller rank goes first.
        most_in_turn: requests of an adapter that may run past the claims of others each time that it gets a slot.
    """

    def __init__(self, num_slots: int, rank: Callable[[Request], Rank], most_in_turn: int = 16) -> None:
        self._rank = rank
        self._most_in_turn = most_in_turn
        self._last_arrival = 0
        self._slots = [_Slot() for _ in range(num_slots)]
        self._slot_of: dict[str, int] = {}
        self._known: dict[str, LoadedAdapter] = {}
        self._dropped: set[str] = set()
        """Known for the requests that name them; new ones are refused."""
        self._users: Counter[str] = Counter()
        """By adapter, live requests that name it."""
        self._adapter_of: dict[str, str] = {}
        """By attempt, of every live request that names one."""
        self._pinned: dict[str, int] = {}
        """By attempt, its slot."""
        self._wanting: dict[str, _Claim] = {}
        """By adapter, of those that have no slot and found none."""
        self._claims: dict[int, _Claim] = {}
        """By slot: of adapters that want one, the first by rank; or of the one that the slot was given to, until it is pinned."""
        self._installs: dict[int, int] = {}
        """By slot, the first part of its adapter that is still to be copied there, in the order of their begin."""
        self._urgent: set[int] = set()
        """Slots whose adapter must be whole before the next step."""
        self._stuck: set[str] = set()
        """Adapters that `may_run` has refused. One leaves the set when it may be otherwise: many may wait, and each that is asked
        costs a look at those in front of it."""
        self._budget: int | None = None
        self._events = self._num_installs = self._num_evictions = 0

    # ---- adapters ----

    def keep(self, adapter: LoadedAdapter) -> None:
        """See KeepAdapter."""
        self._known.setdefault(adapter.id, adapter)
        self._dropped.discard(adapter.id)

    def drop(self, adapter_id: str) -> None:
        """See DropAdapter."""
        if adapter_id in self._known:
            self._dropped.add(adapter_id)
            self._forget_if_unused(adapter_id)

    def check(self, adapter_id: str) -> None:
        """Raises: InvalidRequestError for an adapter that new requests may not name. Args: adapter_id: empty: none."""
        if adapter_id and (adapter_id not in self._known or adapter_id in self._dropped):
            raise InvalidRequestError(f"the adapter {adapter_id!r} is not known here", param="adapter")

    def _forget_if_unused(self, adapter_id: str) -> None:
        if adapter_id not in self._dropped or self._users[adapter_id]:
            return
        self._dropped.remove(adapter_id)
        del self._known[adapter_id]
        slot = self._slot_of.pop(adapter_id, None)
        if slot is not None:
            self._empty(slot)

    def _empty(self, number: int) -> None:
        self._slots[number].adapter = ""
        self._installs.pop(number, None)
        self._wake(number)

    # ---- requests ----

    def enter(self, request: Request) -> None:
        """It is live. Args: request: its adapter is known."""
        adapter = request.adapter
        if adapter:
            self._adapter_of[request.attempt] = adapter
            self._users[adapter] += 1
            self._last_arrival = max(self._last_arrival, request.arrival)
            self._stuck.discard(adapter)  # it may be of a smaller rank than the one that was refused

    def leave(self, request: Request) -> None:
        """It has ended. Idempotent."""
        self.give(request)
        adapter = self._adapter_of.pop(request.attempt, None)
        if adapter is None:
            return
        if (want := self._wanting.get(adapter)) is not None and want.attempt == request.attempt:
            del self._wanting[adapter]
            self._stuck.discard(adapter)  # others may name it
        for number, claim in list(self._claims.items()):
            if claim.attempt == request.attempt:
                self._unclaim(number)
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
        self._forget_if_unused(adapter)

    def begin_step(self, budget: int | None) -> None:
        """Args: budget: bytes that may be installed before the step; None: any number."""
        self._budget = budget
        if budget is None:
            self._stuck.difference_update(self._slots[number].adapter for number in self._installs)

    def may_run(self, request: Request, *, computes: bool = True) -> bool:
        """Whether the slot of its adapter is ready, or will be before the step. If not, its adapter is stuck; it has claimed a
        slot, or is being installed. Args: computes: in the next step; if not, `need` is called before it does."""
        adapter = self._adapter_of.get(request.attempt)
        if adapter is None or request.attempt in self._pinned:
            return True
        slot = self._slot_of.get(adapter)
        if slot is None:
            slot = self._free_slot(adapter, self._rank(request))
            if slot is not None:
                self._put(request, adapter, slot)
        if slot is None:
            self._want(request, adapter)
        elif self._budget is None or slot not in self._installs or not computes:
            turn = self._slots[slot]
            if not self._is_past_claim(request, slot) or (request.arrival <= turn.last_arrival and turn.turn_left):
                return True
        self._stuck.add(adapter)
        return False

    @property
    def stuck(self) -> Collection[str]:
        """Adapters for which `may_run` said no, and nothing has changed since."""
        return self._stuck

    def is_stuck(self, request: Request) -> bool:
        return request.adapter in self._stuck

    def take(self, request: Request) -> None:
        """Pin the slot of its adapter. `may_run` has said yes."""
        adapter = self._adapter_of.get(request.attempt)
        if adapter is None or request.attempt in self._pinned:
            return
        number = self._slot_of[adapter]
        if self._is_past_claim(request, number):
            self._slots[number].turn_left -= 1
        self._pin(request, number)
        if number in self._claims and self._claims[number].adapter == adapter:
            self._unclaim(number)

    def need(self, request: Request) -> None:
        """It computes from the next step on: what is left of its adapter is installed before, whatever the budget."""
        number = self._pinned.get(request.attempt)
        if number in self._installs:
            self._urgent.add(number)

    def _is_past_claim(self, request: Request, number: int) -> bool:
        """Another adapter has claimed the slot, for a request of a smaller rank."""
        claim = self._claims.get(number)
        return claim is not None and claim.adapter != self._slots[number].adapter and claim.rank < self._rank(request)

    def fork(self, parent: Request, other: Request) -> None:
        """Another sequence of an attempt runs with the parent's slot. Args: other: did `enter`."""
        number = self._pinned.get(parent.attempt)
        if number is not None:
            self._pin(other, number)

    def claimed_by(self, request: Request) -> int | None:
        """The slot that its adapter has claimed."""
        adapter = self._adapter_of.get(request.attempt)
        return next((number for number, claim in self._claims.items() if claim.adapter == adapter), None)

    def slot_of(self, request: Request) -> int | None:
        """That it has pinned."""
        return self._pinned.get(request.attempt)

    def give(self, request: Request) -> None:
        """It computes nothing for now. Idempotent."""
        number = self._pinned.pop(request.attempt, None)
        if number is None:
            return
        slot = self._slots[number]
        slot.pins -= 1
        self._note_use(slot)
        self._stuck.discard(slot.adapter)  # preempted, it may be of a smaller rank than the one that was refused
        if not slot.pins:
            self._wake(number)

    def _pin(self, request: Request, number: int) -> None:
        slot = self._slots[number]
        slot.pins += 1
        self._note_use(slot)
        self._pinned[request.attempt] = request.seq.adapter = number

    def _note_use(self, slot: _Slot) -> None:
        self._events += 1
        slot.used_at = self._events

    def _put(self, request: Request, adapter: str, number: int) -> None:
        """Begin to install an adapter. Until the request has pinned the slot, it is claimed for it."""
        slot = self._slots[number]
        if slot.adapter:
            del self._slot_of[slot.adapter]
            self._stuck.discard(slot.adapter)
            self._num_evictions += 1
        slot.adapter = adapter
        slot.last_arrival, slot.turn_left = self._last_arrival, self._most_in_turn
        self._slot_of[adapter] = number
        self._installs.pop(number, None)
        self._installs[number] = 0
        self._wanting.pop(adapter, None)
        before = [at for at, claim in self._claims.items() if claim.adapter == adapter and at != number]
        displaced = self._claims.get(number)
        self._claims[number] = _Claim(adapter, request.attempt, self._rank(request))
        for at in before:
            self._unclaim(at)
        if displaced is not None and displaced.adapter in self._wanting:
            self._claim(displaced)

    def _free_slot(self, adapter: str, rank: Rank) -> int | None:
        """The slot that a request may have; None: there is none."""
        best: tuple[bool, bool, int, int] | None = None
        for number, slot in enumerate(self._slots):
            claim = self._claims.get(number)
            if slot.pins or (claim is not None and claim.adapter != adapter and claim.rank < rank):
                continue
            key = (bool(slot.adapter), self._users[slot.adapter] > 0, slot.used_at, number)
            if best is None or key < best:
                best = key
        return None if best is None else best[-1]

    def _want(self, request: Request, adapter: str) -> None:
        """It found no slot."""
        want, rank = self._wanting.get(adapter), self._rank(request)
        if want is not None and want.rank <= rank:
            return
        new = self._wanting[adapter] = _Claim(adapter, request.attempt, rank)
        for number, claim in self._claims.items():
            if claim.adapter == adapter:
                self._claims[number] = new
                return
        self._claim(new)

    def _claim(self, want: _Claim) -> None:
        """The slot with the fewest requests that none of a smaller rank has claimed, if there is one. An adapter claims one."""
        if any(claim.adapter == want.adapter for claim in self._claims.values()):
            return
        best: tuple[int, int, int] | None = None
        for number, slot in enumerate(self._slots):
            held = self._claims.get(number)
            if held is None or held.rank > want.rank:
                key = (slot.pins, slot.used_at, number)
                if best is None or key < best:
                    best = key
        if best is None:
            return
        displaced = self._claims.get(best[-1])
        self._claims[best[-1]] = want
        self._wake(best[-1])
        if displaced is not None and displaced.adapter in self._wanting:
            self._claim(displaced)

    def _unclaim(self, number: int) -> None:
        """The next one by rank has it, of those that want a slot and have claimed none."""
        del self._claims[number]
        have = {claim.adapter for claim in self._claims.values()}
        wants = [want for adapter, want in self._wanting.items() if adapter not in have]
        if wants:
            self._claims[number] = min(wants, key=lambda want: want.rank)
        self._wake(number)

    def _wake(self, number: int) -> None:
        """The slot, or the claim on it, has changed."""
        slot, claim = self._slots[number], self._claims.get(number)
        self._stuck.discard(slot.adapter)
        if slot.pins:
            return
        for adapter, want in self._wanting.items():
            if claim is None or want.rank <= claim.rank:
                self._stuck.discard(adapter)

    # ---- the runner ----

    def take_installs(self) -> list[Install]:
        """What is to be installed before the next step: within the budget, but a part at least."""
        installs: list[Install] = []
        budget, urgent = self._budget, self._urgent
        for number, first in sorted(self._installs.items(), key=lambda entry: entry[0] not in urgent):
            adapter = self._known[self._slots[number].adapter]
            end = adapter.num_parts
            if budget is not None and number not in urgent:
                size = max(1, adapter.num_bytes // end)
                end = min(end, first + max(budget // size, 0 if installs else 1))
                budget -= (end - first) * size
            if end <= first:
                break
            installs.append(Install(number, adapter, range(first, end)))
            self._installs[number] = end
            if end == adapter.num_parts:
                del self._installs[number]
                self._num_installs += 1
                self._stuck.discard(adapter.id)
        urgent.clear()
        return installs

    def not_installed(self, slot: int) -> list[str]:
        """What the slot holds is unknown. Returns: the attempts that name its adapter: they must end."""
        adapter = self._slots[slot].adapter
        if adapter:
            del self._slot_of[adapter]
            self._empty(slot)
        return [attempt for attempt, name in self._adapter_of.items() if name == adapter]

    # ---- what is read from outside ----

    def stats(self) -> AdapterStats:
        running = tuple((slot.adapter, slot.pins) for slot in self._slots if slot.pins)
        resident = tuple(
            slot.adapter for number, slot in enumerate(self._slots) if slot.adapter and number not in self._installs
        )
        return AdapterStats(resident, running, self._num_installs, self._num_evictions)

    def violations(self, live: Iterable[Request], running: Iterable[Request]) -> list[str]:
        """Laws that do not hold. Args: running: those that compute, or will without another admission."""
        out: list[str] = []
        pins = Counter(self._pinned.values())
        for number, slot in enumerate(self._slots):
            if slot.pins != pins[number]:
                out.append(f"slot {number} has {slot.pins} pins, {pins[number]} requests pin it")
            if slot.adapter and self._slot_of.get(slot.adapter) != number:
                out.append(
                    f"slot {number} holds {slot.adapter}, which is said to be in {self._slot_of.get(slot.adapter)}"
                )
        if len(self._slot_of) != sum(bool(slot.adapter) for slot in self._slots):
            out.append("an adapter is said to be in a slot that is empty")
        users = Counter(request.adapter for request in live if request.attempt in self._adapter_of)
        if users != self._users:
            out.append(f"adapters are used by {dict(self._users)}, by the requests' account {dict(users)}")
        for request in running:
            adapter = request.adapter
            held = self._pinned.get(request.attempt)
            if not adapter:
                continue
            if held is None or self._slots[held].adapter != adapter:
                out.append(f"{request.attempt} runs with {adapter}, and pins slot {held}")
            elif held in self._installs and held not in self._urgent:
                out.append(f"{request.attempt} runs with {adapter}, which is not whole in slot {held}")
            elif request.seq.adapter != held:
                out.append(f"{request.attempt} pins slot {held}, and computes with {request.seq.adapter}")
        return out
