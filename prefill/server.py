"""What a worker publishes: prompts that it computes for others, and blocks that it has cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diptych.common.errors import ConfigError, DiptychError
from diptych.engine.messages import EngineEvent, GrantSlabs, SlabGrant
from diptych.engine.overlap import Overlap
from diptych.kvtransfer.slabs.layout import payload_capacity
from diptych.prefill.service import PrefillServicer, SourceServicer
from diptych.prefill.sessions import PrefillSessions
from diptych.rpc.stubs import add_prefill, add_source
from diptych.worker.reads.reading import Reading
from diptych.worker.role_spec import PREFILL, SOURCE
from diptych.worker.runtime import WorkerRuntime

_KEEP_RATES_S = 300.0


class Publishing:
    """A worker's sessions, and the slabs that it packs. They outlive a change of role."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._began = False
        self.sessions = PrefillSessions(
            runtime.engine,
            runtime.transfer,
            runtime.limits,
            max_sessions=runtime.config.max_queue,
            alive_every_s=runtime.config.leg_silence_s / 3,
            why_stuck=runtime.why_stuck,
            adapters=runtime.adapters,
        )

    def begin(self) -> None:
        """Grant slabs to the engine. Idempotent. Raises: ConfigError when a slab cannot hold a block."""
        if self._began:
            return
        runtime, sessions = self._runtime, self.sessions
        block_bytes = max(part.block_bytes for part in runtime.compat.parts)
        slab_bytes = runtime.config.slab_bytes
        if payload_capacity(slab_bytes) < block_bytes:
            raise ConfigError("slab_bytes", slab_bytes, f"a slab must hold a block of {block_bytes} bytes")
        self._began = True
        engine, transfer = runtime.engine, runtime.transfer
        overlap = Overlap(runtime.config.kv_overlap, transfer.bytes_per_s, transfer.message_s)

        def grant(grants: tuple[SlabGrant, ...]) -> None:
            engine.send(GrantSlabs(grants, overlap))

        transfer.start(grant, sessions.on_settled, sessions.on_silent)


class PrefillService:
    """See worker.role.Service. Sessions get their events through SourceService, which every role has."""

    name = PREFILL

    def __init__(self, publishing: Publishing) -> None:
        self._publishing = publishing
        self.handoffs = publishing.sessions

    def add_to(self, server: Any) -> None:
        add_prefill(PrefillServicer(self.handoffs), server)

    async def open(self) -> None:
        self._publishing.begin()

    def on_step(self, events: Sequence[EngineEvent]) -> None:
        return

    def states(self) -> dict[str, int]:
        return self.handoffs.states(self.name)

    def link_rates(self) -> dict[str, float]:
        return {}

    def pull_overheads(self) -> dict[str, float]:
        return {}

    def accept(self) -> None:
        self.handoffs.accept(self.name)

    def stop_accepting(self) -> None:
        self.handoffs.stop_accepting(self.name)

    async def drained(self) -> None:
        await self.handoffs.drained(self.name)

    def fail_all(self, error: DiptychError | None = None) -> None:
        self.handoffs.fail_all(error, self.name)

    async def close(self) -> None:
        return


class SourceService(PrefillService):
    """See worker.role.Service: blocks of the prefix cache, by their identities. And the other way: pulls from other workers."""

    name = SOURCE

    def __init__(self, publishing: Publishing, reading: Reading) -> None:
        super().__init__(publishing)
        self._reading = reading

    def add_to(self, server: Any) -> None:
        add_source(SourceServicer(self.handoffs, self._publishing.begin), server)

    async def open(self) -> None:
        """Slabs are granted with the first fetch: a worker that nobody reads from needs none."""

    def on_step(self, events: Sequence[EngineEvent]) -> None:
        self._reading.pulls.on_step(events)
        self.handoffs.on_step(events)

    def link_rates(self) -> dict[str, float]:
        """Of the last minutes: where nothing is read any more because it was slow once, the link is tried again."""
        return self._reading.links.snapshot(self._reading.context.clock.now() - _KEEP_RATES_S)

    def pull_overheads(self) -> dict[str, float]:
        return self._reading.pulls.overheads()

    async def close(self) -> None:
        await self._reading.peers.close()
