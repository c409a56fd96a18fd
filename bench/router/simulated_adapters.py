"""LoRA adapters of one simulated worker: what is in its memory, and the engine's slots (engine.sched.adapters).

in memory --a slot may be had--> runs -> leaves
missing --load--> in memory
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from diptych.engine.sched.adapters import AdapterSlots
from diptych.router.placement.adapters import LOAD_BYTES_PER_S, LOAD_MS, AdapterNeed


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Implements LoadedAdapter."""

    id: str
    rank: int
    num_bytes: int
    num_parts: int = 1


@dataclass(slots=True)
class _Sequence:
    """What the slots read of an engine's request."""

    attempt: str
    adapter: str
    arrival: int
    seq: Any = None
    then: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.seq = _Row()


@dataclass(slots=True)
class _Row:
    adapter: int = -1


@dataclass(slots=True)
class WorkerAdapters:
    """
    Args:
        max_loras: slots.
        max_cpu_loras: most in memory; the one used longest ago leaves first.
        at: calls a function after so many virtual seconds.
    """

    max_loras: int
    max_cpu_loras: int
    at: Callable[[float, Callable[[], None]], None]
    loads: int = 0
    most_running: int = 0
    """Adapters that ran at once."""
    _slots: AdapterSlots = field(init=False)
    _resident: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _loading: dict[str, list[_Sequence]] = field(default_factory=dict)
    _holds: Counter[str] = field(default_factory=Counter)
    _waiting: list[_Sequence] = field(default_factory=list)
    _running: dict[str, _Sequence] = field(default_factory=dict)
    _arrivals: int = 0

    def __post_init__(self) -> None:
        self._slots = AdapterSlots(self.max_loras, lambda request: (request.arrival,))

    @property
    def installs(self) -> int:
        return self._slots.stats().installs

    def counts(self) -> dict[str, int]:
        """As in a lease: of each adapter in memory, the requests that name it."""
        return {name: self._holds[name] for name in self._resident}

    def enter(self, attempt: str, need: AdapterNeed, then: Callable[[], None]) -> None:
        """Call `then` once the adapter is loaded and its request has a slot, which it has until `leave`."""
        self._arrivals += 1
        name = need.adapter_id
        sequence = _Sequence(attempt, name, self._arrivals, then=then)
        self._holds[name] += 1
        if name in self._resident:
            self._resident.move_to_end(name)
            self._queue(sequence)
        elif name in self._loading:
            self._loading[name].append(sequence)
        else:
            self._loading[name] = [sequence]
            self.loads += 1
            load_s = LOAD_MS / 1000.0 + need.num_bytes / LOAD_BYTES_PER_S
            self.at(load_s, lambda: self._loaded(need))

    def leave(self, attempt: str) -> None:
        """The request has ended here. One without an adapter: nothing."""
        sequence = self._running.pop(attempt, None)
        if sequence is None:
            return
        self._slots.leave(cast(Any, sequence))
        self._holds[sequence.adapter] -= 1
        self._serve()

    def _loaded(self, need: AdapterNeed) -> None:
        self._resident[need.adapter_id] = None
        self._slots.keep(_Loaded(need.adapter_id, need.rank, need.num_bytes))
        unused = [name for name in self._resident if not self._holds[name]]
        for name in unused[: max(0, len(self._resident) - self.max_cpu_loras)]:
            del self._resident[name], self._holds[name]
            self._slots.drop(name)
        for sequence in self._loading.pop(need.adapter_id):
            self._queue(sequence)

    def _queue(self, sequence: _Sequence) -> None:
        self._slots.enter(cast(Any, sequence))
        self._waiting.append(sequence)
        self._serve()

    def _serve(self) -> None:
        """As the scheduler before a step in which nothing decodes: those that may run, in order."""
        self._slots.begin_step(None)
        ready = []
        for sequence in self._waiting:
            request = cast(Any, sequence)
            if not self._slots.is_stuck(request) and self._slots.may_run(request):
                self._slots.take(request)
                ready.append(sequence)
        self._waiting = [sequence for sequence in self._waiting if sequence not in ready]
        self._slots.take_installs()
        for sequence in ready:
            self._running[sequence.attempt] = sequence
        self.most_running = max(self.most_running, len({one.adapter for one in self._running.values()}))
        for sequence in ready:
            sequence.then()
