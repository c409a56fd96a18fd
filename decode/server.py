"""What a decode worker serves: requests, from Submit to End."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diptych.common.errors import DiptychError
from diptych.common.grammar import Grammar
from diptych.common.secret import derive_key, load_secret
from diptych.common.ticket import PURPOSE
from diptych.decode.attempt_manager import AttemptManager, no_grammars
from diptych.decode.direct_server import DirectEndpoint
from diptych.decode.refetch_policy import PrefillRates
from diptych.decode.remote_prefill import RemotePrefillContext
from diptych.decode.service import DecodeServicer
from diptych.decode.ticket_verifier import TicketVerifier
from diptych.engine.grammar.compiler import GrammarCompiler
from diptych.engine.grammar.program import Program
from diptych.engine.messages import EngineEvent
from diptych.rpc.fields import same_fields
from diptych.rpc.stubs import add_decode
from diptych.worker.reads.range_reads import ReadContext
from diptych.worker.reads.reading import Reading
from diptych.worker.runtime import WorkerRuntime


class DecodeService:
    """See worker.role.Service."""

    def __init__(self, runtime: WorkerRuntime, reading: Reading) -> None:
        config = runtime.config
        self._runtime, self._reading = runtime, reading
        self._grammars: GrammarCompiler | None = None
        context = RemotePrefillContext(
            **same_fields(ReadContext, reading.context),
            rates=PrefillRates(),
            pulls=reading.pulls,
            backend=runtime.compat.backend,
        )
        self.intake = AttemptManager(
            runtime.engine,
            context,
            runtime.limits,
            path=runtime.transfer.path,
            max_attempts=config.max_queue,
            compile_grammar=self._compile_grammar,
            adapters=runtime.adapters,
            detach_s=config.detach_s,
        )
        self._endpoint: DirectEndpoint | None = None
        if config.client_port is not None:
            key = derive_key(load_secret(Path(config.secret_file)), PURPOSE)
            self._endpoint = DirectEndpoint(config, self.intake, TicketVerifier(key, now=runtime.clock.now))

    def add_to(self, server: Any) -> None:
        add_decode(DecodeServicer(self.intake), server)

    async def open(self) -> None:
        self._grammars = await self._runtime.load_text()
        if self._grammars is not None and self._runtime.config.grammar_warm_up:
            # A moved answer may come first of all, and would wait: where all cores are busy a process takes seconds to come up.
            self._grammars.warm_up()
            await self._grammars.warmed_up()
        if self._endpoint is not None:
            await self._endpoint.open()

    async def _compile_grammar(self, grammar: Grammar) -> tuple[Program, bytes]:
        if self._grammars is None:
            return await no_grammars(grammar)
        return await self._grammars.compile_with_mask(grammar)

    @property
    def client_address(self) -> str:
        """Address for clients with tickets, or ""."""
        return self._endpoint.address if self._endpoint is not None else ""

    def on_step(self, events: Sequence[EngineEvent]) -> None:
        self.intake.on_step(events)

    def states(self) -> dict[str, int]:
        return self.intake.states()

    def link_rates(self) -> dict[str, float]:
        return self._reading.links.snapshot()

    def pull_overheads(self) -> dict[str, float]:
        return {}

    def accept(self) -> None:
        self.intake.accept()

    def stop_accepting(self) -> None:
        self.intake.stop_accepting()

    async def drained(self) -> None:
        await self.intake.drained()
        await self._reading.unpacker.drained()

    def fail_all(self, error: DiptychError | None = None) -> None:
        self.intake.fail_all(error)

    async def close(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()
        if self._grammars is not None:
            await self._grammars.close()
