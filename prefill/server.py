"""The prefill worker's process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import grpc

from diptych.common.errors import DiptychError
from diptych.engine.messages import EngineEvent, GrantSlabs
from diptych.engine.overlap import Overlap
from diptych.prefill.service import PrefillServicer
from diptych.prefill.sessions import PrefillSessions
from diptych.rpc.stubs import add_prefill
from diptych.worker.config import WorkerConfig
from diptych.worker.incoming import Limits
from diptych.worker.process import run_process
from diptych.worker.runtime import WorkerRuntime


class PrefillRole:
    """See worker.role.Role."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        able = runtime.model.runner.capabilities
        self.handoffs = PrefillSessions(
            runtime.engine,
            runtime.transfer,
            Limits(runtime.worker_id, runtime.incarnation, able.vocab_size, able.max_model_len, able.block_size),
            max_sessions=runtime.config.max_queue,
            alive_every_s=runtime.config.leg_silence_s / 3,
            why_stuck=runtime.why_stuck,
        )
        engine = runtime.engine
        transfer = runtime.transfer
        overlap = Overlap(runtime.config.kv_overlap, transfer.bytes_per_s, transfer.message_s)
        transfer.start(
            lambda grants: engine.send(GrantSlabs(grants, overlap)), self.handoffs.on_settled, self.handoffs.on_silent
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        add_prefill(PrefillServicer(self.handoffs), server)

    async def open(self) -> None:
        return

    def on_step(self, events: Sequence[EngineEvent]) -> None:
        self.handoffs.on_step(events)

    def states(self) -> dict[str, int]:
        return self.handoffs.states()

    def link_rates(self) -> dict[str, float]:
        return {}

    def stop_accepting(self) -> None:
        self.handoffs.stop_accepting()

    async def drained(self) -> None:
        await self.handoffs.drained()

    def fail_all(self, error: DiptychError | None = None) -> None:
        self.handoffs.fail_all(error)

    async def close(self) -> None:
        return


def run_prefill(config: WorkerConfig) -> NoReturn:
    """Run a prefill worker until a signal, then end the process. Raises: ConfigError."""
    run_process(config, PrefillRole)


main = run_prefill
