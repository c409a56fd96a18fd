"""Transfers from decode to prefill, beside the requests: both parts of an arena are in use in one worker."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

import xxhash
from handoff_sim.laws import Law

from diptych.common.errors import DiptychError
from diptych.engine.messages import RangePacked, SlabGrant
from diptych.kvtransfer.api import PeerRef
from diptych.kvtransfer.fabric.transport import peer_key
from diptych.kvtransfer.slabs.handle import SlabHandle

if TYPE_CHECKING:
    from handoff_sim.nodes import PrefillNode
    from handoff_sim.world import World

_LATEST_S = 0.3
_DEADLINE_S = 0.3
_RELEASED_S = 0.5


class WayBack:
    """A few ranges of random bytes, at random times, in six schedules of ten. The others are what they were without it: seeds
    that once found a fault stay reproducers."""

    def __init__(self, world: World) -> None:
        self._world, self._rng = world, Random(f"way back {world.seed}")
        self._core = world.decode.transfer.core
        self._grants: list[SlabGrant] = []
        self._open = 0
        if not world.sources.active:
            self._core.start(self._grants.extend, lambda attempt, slab: None)
        for number in range(self._rng.randint(1, 4) if 3 <= world.seed % 10 <= 8 and not world.sources.active else 0):
            world.loop.call_later(self._rng.random() * _LATEST_S, self._begin, f"back-{number}")

    @property
    def num_open(self) -> int:
        return self._open

    def _begin(self, attempt: str) -> None:
        world, rng = self._world, self._rng
        source = world.decode.node
        targets = [node for node in world.prefill.values() if not node.node.dead]
        if source.dead or source.stopped or not targets or not self._grants:
            return
        target, grant = rng.choice(targets), self._grants.pop()
        data = rng.randbytes(rng.randint(1, 400))
        grant.payload[: len(data)] = data
        digest = xxhash.xxh3_64_intdigest(data)
        packed = RangePacked(attempt, grant.slab, grant.generation, 0, 1, len(data), digest)
        handle = self._core.publish(peer_key(target.ref.worker_id, target.ref.incarnation), packed)
        world.links.deliver(source, target.node, world.links.delay(), lambda: self._announced(target, handle, data))
        world.loop.call_later(_RELEASED_S, self._release, attempt)

    def _release(self, attempt: str) -> None:
        if not self._world.decode.node.dead:
            self._core.release(attempt)

    def _announced(self, target: PrefillNode, handle: SlabHandle, data: bytes) -> None:
        self._open += 1
        task = asyncio.ensure_future(self._read(target, handle, data), loop=self._world.loop)
        task.add_done_callback(lambda _: self._ended())

    def _ended(self) -> None:
        self._open -= 1

    async def _read(self, target: PrefillNode, handle: SlabHandle, data: bytes) -> None:
        core, ref = target.transfer.core, self._world.decode.ref
        try:
            slab = await core.read(
                PeerRef(ref.worker_id, ref.incarnation, self._core.address), handle, deadline_s=_DEADLINE_S
            )
        except (DiptychError, TimeoutError):
            return
        if target.node.dead:
            return
        target.lent.add(slab.local_slab)
        if bytes(slab.payload) != data:
            self._world.report(
                Law.VERIFIED, f"{handle.attempt}: {target.ref.worker_id} read other bytes than were published"
            )
        await asyncio.sleep(self._world.links.delay())
        if bytes(slab.payload) != data:
            self._world.report(Law.ONE_USER, f"{handle.attempt}: a lent slab of {target.ref.worker_id} changed")
        target.lent.discard(slab.local_slab)
        core.finish(slab)
