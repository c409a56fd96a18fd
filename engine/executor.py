"""What stands between the engine and its runners: one in this process, or one for each rank in processes of their own.

The engine knows an executor only. Every rank gets the same step message; the sampling rank's result is the step's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from diptych.common.adapters.peft import AdapterFacts
from diptych.engine.messages import BlockCopy, LoadedAdapter, Payload, ScheduledSeq, StepResult
from diptych.engine.runner import CopyHandle, ModelRunner, RunnerCapabilities, StepInFlight


class ExecutorLost(Exception):
    """A rank died, or did not answer within its deadline. Nothing can be computed any more: the engine ends."""


class Executor(Protocol):
    """The methods of ModelRunner, carried out by all ranks. Each may also raise ExecutorLost."""

    @property
    def capabilities(self) -> RunnerCapabilities:
        """Of all ranks together."""
        ...

    def on_launched(self, callback: Callable[[], None]) -> None:
        """See ModelRunner.on_launched."""
        ...

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """`callback` is called with the reason when ExecutorLost will be raised from now on; by any thread, also while nothing
        is computed."""
        ...

    def execute(
        self,
        seqs: Sequence[ScheduledSeq],
        should_abort: Callable[[], bool],
        on_layers: Callable[[int], None] | None = None,
    ) -> StepResult:
        """See ModelRunner.execute. Args: on_layers: see ModelRunner.on_layers; None: nothing depends on layers."""
        ...

    def launch(self, seqs: Sequence[ScheduledSeq], sources: Sequence[int] = ()) -> StepInFlight: ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None: ...

    def pack(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        out: Payload,
        layers: range | None = None,
        group: int = 0,
        part: int = 0,
    ) -> int: ...

    def unpack(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        src: Payload,
        layers: range | None = None,
        group: int = 0,
        part: int = 0,
    ) -> CopyHandle | None: ...

    def read_adapter(self, folder: Path, facts: AdapterFacts) -> LoadedAdapter: ...

    def install_adapter(self, slot: int, adapter: LoadedAdapter, parts: range | None = None) -> None: ...

    def note_pulled(
        self, block_table: Sequence[int], token_ids: Sequence[int], first_new: int, first_block: int = 0
    ) -> None: ...

    def close(self) -> None:
        """End the ranks' processes, if there are any. Idempotent; nothing else is called afterwards."""
        ...


def _ignore(num_layers: int) -> None: ...


class LocalExecutor:
    """One runner, in this process."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.capabilities = runner.capabilities

    def on_launched(self, callback: Callable[[], None]) -> None:
        self.runner.on_launched = callback

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Never called: there is no other process."""

    def execute(
        self,
        seqs: Sequence[ScheduledSeq],
        should_abort: Callable[[], bool],
        on_layers: Callable[[int], None] | None = None,
    ) -> StepResult:
        self.runner.on_layers = on_layers or _ignore
        try:
            return self.runner.execute(seqs, should_abort)
        finally:
            self.runner.on_layers = _ignore

    def launch(self, seqs: Sequence[ScheduledSeq], sources: Sequence[int] = ()) -> StepInFlight:
        return self.runner.launch(seqs, sources)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self.runner.copy_blocks(copies)

    def pack(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        out: Payload,
        layers: range | None = None,
        group: int = 0,
        part: int = 0,
    ) -> int:
        return self.runner.pack(block_ids, num_tokens, out, layers, group)

    def unpack(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        src: Payload,
        layers: range | None = None,
        group: int = 0,
        part: int = 0,
    ) -> CopyHandle | None:
        return self.runner.unpack(block_ids, num_tokens, src, layers, group)

    def read_adapter(self, folder: Path, facts: AdapterFacts) -> LoadedAdapter:
        return self.runner.read_adapter(folder, facts)

    def install_adapter(self, slot: int, adapter: LoadedAdapter, parts: range | None = None) -> None:
        self.runner.install_adapter(slot, adapter, parts)

    def note_pulled(
        self, block_table: Sequence[int], token_ids: Sequence[int], first_new: int, first_block: int = 0
    ) -> None:
        self.runner.note_pulled(block_table, token_ids, first_new, first_block)

    def close(self) -> None:
        pass
