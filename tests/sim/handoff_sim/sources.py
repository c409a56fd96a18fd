"""Pulls: the placements of some schedules name workers whose cached blocks prefill, or decode, may take."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from handoff_sim import reference
from handoff_sim.engine import BLOCK
from handoff_sim.files import serves_files

from diptych.rpc.v1 import decode_pb2
from diptych.worker import wire
from diptych.worker.role_spec import PREFILL, SOURCE

if TYPE_CHECKING:
    from handoff_sim.client import Ask
    from handoff_sim.nodes import WorkerNode
    from handoff_sim.world import World

_LATEST_S = 0.4


def has_pulls(seed: int) -> bool:
    """A quarter of the schedules. The others are what they were without, and seeds that once found a fault are among these: they
    stay reproducers."""
    return seed % 10 in (0, 1, 2, 9) and seed % 13 not in (0, 3, 10, 12)


def drains(seed: int) -> bool:
    """In some of these schedules a worker drains, so that their draws differ from what they were."""
    return seed % 11 in (1, 6)


class Sources:
    """Of one schedule; none has WayBack as well. Decode publishes, too, and slabs hold two blocks.

    A source may be right, or of a worker that holds less, has started again, or is the reader itself. Workers lose their
    caches at random times: a block is evicted between two blocks of a read, or before it."""

    def __init__(self, world: World) -> None:
        self._world, self._rng = world, Random(f"sources {world.seed}")
        self.active = world.has_pulls
        if not self.active:
            return
        world.decode.readers = lambda: list(world.prefill.values())
        world.decode.publish_from_now()
        first = world.client.asks[0]
        for ask in world.client.asks[1:]:  # of one history, as the turns of a chat
            ask.family, ask.length = first.family, self._rng.choice([n for n in reference.LENGTHS if n > BLOCK])
        for _ in range(self._rng.randint(0, 2)):
            world.loop.call_later(self._rng.random() * _LATEST_S, self._evict)
        if drains(world.seed) and world.profile in ("killed", "everything"):
            world.loop.call_later(self._rng.random() * _LATEST_S, self._drain)

    def later_s(self, number: int) -> float:
        """The turns of a chat come one after the other."""
        return number * self._rng.uniform(0.05, 0.6) if self.active else 0.0

    def _drain(self) -> None:
        """A prefill worker drains, leaves after a while, whatever it is sending then, and starts again."""
        node = self._rng.choice(list(self._world.prefill.values()))
        if not node.node.dead:
            self._world.trouble.trail.append(f"{node.ref.worker_id} drains at {self._world.loop.num_callbacks}")
            node.drains = True
            node.handoffs.stop_accepting(PREFILL)
            self._world.loop.call_later(self._rng.choice((0.05, 0.3, 1.0)), self._leave, node)

    def _leave(self, node: WorkerNode) -> None:
        if not node.node.dead:
            node.drains = False
            node.handoffs.stop_accepting(SOURCE)
            self._world.trouble.kill_prefill(node.ref.worker_id)

    def _evict(self) -> None:
        node = self._rng.choice(self._world.nodes)
        if not node.node.dead and not node.node.stopped:
            kv = node.engine.core.scheduler.kv
            if self._rng.random() < 0.4:
                kv.clear()
            else:
                keys = kv.pool.dump().tiers[0].keys
                kv.pool.discard(
                    [b for key in keys[self._rng.randint(0, 3) :] if (b := kv.pool.cached_block(key)) is not None]
                )

    def _num_blocks(self, node: WorkerNode) -> int:
        """In its prefix cache, and in files that it serves."""
        kv = node.engine.core.scheduler.kv
        return int(kv.pool.counts.cached) + (kv.disk.num_held if serves_files(self._world.seed) else 0)

    def name(self, placement: decode_pb2.Placement, ask: Ask) -> None:
        """Add sources to an ask's placement. One of the workers has lost its cache before."""
        if not self.active:
            return
        nodes = [node for node in self._world.nodes if not node.node.dead]
        if nodes and self._rng.random() < 0.7:
            loser = self._rng.choice(nodes)
            if not loser.node.stopped:
                loser.engine.core.scheduler.kv.clear()
        for field in (placement.prefill_source, placement.decode_source):
            if nodes and self._rng.random() < 0.8:
                best = max(nodes, key=self._num_blocks)
                holder = best if self._rng.random() < 0.7 else self._rng.choice(self._world.nodes)
                field.holder.CopyFrom(wire.ref_to_proto(holder.ref))
                if self._rng.random() < 0.1:
                    field.holder.incarnation = "before"
                field.num_tokens = max(BLOCK, ask.length // BLOCK * BLOCK)
                field.compute_s = self._rng.choice((0.0, 0.1, 1.0, 5.0))
