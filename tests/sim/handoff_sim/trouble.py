"""Faults of a world's workers, drawn from the seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from handoff_sim.nodes import PrefillNode

if TYPE_CHECKING:
    from handoff_sim.world import World


class Trouble:
    """Kills, stops, partitions and broken connections; killed workers start again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.rng, self.loop, self.links = world.rng, world.loop, world.links
        self.restarts = 0
        """Workers that were killed and are not there again."""
        self.trail: list[str] = []
        self.last_at = 0.0
        """Start time of the last fault."""
        self._triggers: list[tuple[int, Callable[[], None]]] = []

    def _began(self, what: str) -> None:
        self.trail.append(what)
        self.last_at = self.loop.time()

    def under_way(self) -> bool:
        """Whether a worker is stopped, partitioned, or restarting."""
        return bool(self.restarts or self.links.num_cuts) or any(n.node.stopped for n in self._world.prefill.values())

    def step_in(self) -> None:
        while self._triggers and self._triggers[-1][0] <= self.loop.num_callbacks:
            self._triggers.pop()[1]()
        self.loop.step_in_at = self._triggers[-1][0] if self._triggers else math.inf

    def at(self, call: Callable[[], None], within_s: float) -> None:
        """At a time or callback drawn from the seed."""
        if self.rng.random() < 0.5:
            self.loop.call_later(self.rng.random() * within_s, call)
        else:
            self._triggers.append((self.rng.randint(1, 700), call))
            self._triggers.sort(key=lambda trigger: -trigger[0])
            self.loop.step_in_at = self._triggers[-1][0]

    def plan(self) -> bool:
        p, rng = self._world.profile, self.rng
        wild = p == "everything"
        planned = False
        if p == "killed" or (wild and rng.random() < 0.4):
            for _ in range(rng.randint(1, 2)):
                self.at(self._kill_prefill, 0.4)
                planned = True
            if rng.random() < 0.4:
                self.at(lambda: self._kill_decode(unnoticed=rng.random() < 0.5), 0.4)
        if p == "vanished":
            self.at(lambda: self._kill_decode(unnoticed=True), 0.2)
            planned = True
        if p == "stopped" or (wild and rng.random() < 0.4):
            self.at(self._stop_prefill, 0.4)
            planned = True
        if p == "partitioned" or (wild and rng.random() < 0.4):
            self.at(self._partition, 0.4)
            planned = True
        if wild and rng.random() < 0.3:
            self.at(self._break, 0.4)
            planned = True
        return planned

    def _kill_prefill(self) -> None:
        self.kill_prefill(self.rng.choice(list(self._world.prefill)))

    def kill_prefill(self, worker_id: str) -> None:
        """It starts again."""
        victim = self._world.prefill[worker_id]
        self._began(f"{victim.ref.worker_id} killed at {self.loop.num_callbacks}")
        if not victim.node.dead:
            victim.die()
            self.restarts += 1
            self.loop.call_later(self.rng.choice((0.0, 0.05, 2.0)), self._restart, victim.ref.worker_id)

    def _restart(self, worker_id: str) -> None:
        self.restarts -= 1
        self._world.start_prefill(worker_id)

    def _kill_decode(self, *, unnoticed: bool) -> None:
        if self._world.decode.node.dead:
            return
        self._began(f"d0 killed at {self.loop.num_callbacks}")
        for ask in self._world.client.asks:
            ask.lost = ask.lost or not ask.ended
        self._world.decode.vanish(unnoticed=unnoticed)

    def _stop_prefill(self) -> None:
        victim = self.rng.choice(list(self._world.prefill.values()))
        self._began(f"{victim.ref.worker_id} stopped at {self.loop.num_callbacks}")
        victim.node.stopped = True
        self.loop.call_later(self.rng.choice((0.1, 1.0, 5.0)), self._resume, victim)

    def _resume(self, victim: PrefillNode) -> None:
        victim.node.stopped = False
        for call in victim.node.on_resume:
            call()
        self.links.flush()

    def _partition(self) -> None:
        other = self.rng.choice(list(self._world.prefill.values()))
        self._began(f"{other.ref.worker_id} partitioned at {self.loop.num_callbacks}")
        self.links.partition(other.node, self._world.decode.node)
        self.loop.call_later(self.rng.choice((0.1, 1.0, 5.0)), self.links.heal)

    def _break(self) -> None:
        """The KV connections break, both processes keep running."""
        self._began(f"connections broken at {self.loop.num_callbacks}")
        transport = self._world.decode.transfer.transport
        for conn in list(transport._out.values()):
            side = self.rng.choice((conn.reader, conn.source))
            side.lose(conn, "connection reset")

    def heal(self) -> None:
        for node in self._world.prefill.values():
            if node.node.stopped:
                self._resume(node)
        self.links.heal()
