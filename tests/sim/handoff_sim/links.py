"""Between two nodes: delay, stop, partition and death, for KV and control alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from handoff_sim.loop import VirtualLoop


@dataclass(eq=False)
class Node:
    """One incarnation of a worker."""

    worker_id: str
    incarnation: str
    dead: bool = False
    stopped: bool = False
    silenced: bool = False
    """Dead, and its host does not report it."""
    on_resume: list[Callable[[], None]] = field(default_factory=list)


class Links:
    """Things that happen at a node some time after another node caused them."""

    def __init__(self, loop: VirtualLoop, rng: Random, max_delay_s: float) -> None:
        self.loop = loop
        self.rng = rng
        self.max_delay_s = max_delay_s
        self._cut: set[frozenset[str]] = set()
        self._held: list[tuple[Node, Node, Callable[[], None]]] = []

    def delay(self) -> float:
        """Mostly short, sometimes long."""
        return self.rng.random() ** 3 * self.max_delay_s + 1e-6

    def deliver(self, source: Node, target: Node, delay_s: float, call: Callable[[], None]) -> None:
        self.loop.call_later(delay_s, self._arrive, source, target, call)

    @property
    def num_cuts(self) -> int:
        return len(self._cut)

    def cut(self, a: Node, b: Node) -> bool:
        return frozenset((a.worker_id, b.worker_id)) in self._cut

    def partition(self, a: Node, b: Node) -> None:
        self._cut.add(frozenset((a.worker_id, b.worker_id)))

    def heal(self) -> None:
        self._cut.clear()
        self.flush()

    def flush(self) -> None:
        """Everything that was held arrives, in order, where nothing holds it any more."""
        held, self._held = self._held, []
        for source, target, call in held:
            self._arrive(source, target, call)

    def _arrive(self, source: Node, target: Node, call: Callable[[], None]) -> None:
        if target.dead or source.silenced:
            return
        if target.stopped or self.cut(source, target) or (source.stopped and not source.dead):
            self._held.append((source, target, call))
        else:
            self.loop.call_soon(call)
