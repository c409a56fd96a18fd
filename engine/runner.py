"""The interface between an executor and what computes: the torch runner in engine.exec, a fake one in tests."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from diptych.common.adapters.peft import AdapterFacts
from diptych.common.kv_format import KvFormat
from diptych.engine.messages import BlockCopy, LoadedAdapter, Payload, ScheduledSeq, StepResult


class StepAborted(Exception):
    """The step was given up between two layers; it has no effect."""


class RunnerLost(Exception):
    """A rank that computes with this runner is gone, or stands still: it can compute nothing any more, and its process ends."""


class OutOfDeviceMemory(Exception):
    """A step needs more memory than the device has left; it has no effect, and the runner works on."""


@dataclass(frozen=True, slots=True)
class RunnerCapabilities:
    """What a runner declares about itself. Fixed once the runner is constructed; the engine relies on
    nothing else.

    Args:
        num_blocks, block_size: of the pool of the model's first KV group, [num_blocks, num_layers, 2, block_size,
            num_kv_heads, head_dim]; a block id is an index into the pool of its group. A stage need not have that group.
        kv_bytes_per_token, num_layers: over all layers of all groups, K and V.
        num_host_blocks: slots of the host tier, one block each; 0: there is none.
        runs_ahead: `launch` works: the host is free from a step's launch on. `on_launched` is called.
        reports_layers: `on_layers` is called.
        verifies_drafts: rows may have drafts, see ScheduledSeq.
        grammars: rows may have a grammar.
        kv: the groups of its KV; None: one group, which keeps every token.
        group_blocks: blocks of each group's pool; empty: `num_blocks` in every one.
        rank_sizes: layers, and KV bytes of a token, of each rank where there are several. `pack` and `unpack` are for one rank
            then, and each rank's KV is a part of its own (common/kv_parts.py).
        parts: the ranks' formats, where there are several KV groups: each rank has those of its layers. Empty: one group, or one
            rank.
        max_loras: slots for LoRA adapters; 0: no row may have one.
        max_lora_rank: the largest rank that a slot takes.
        kernels: names of the back ends, with their blocks where there are several.
        refused: which faster back end refuses which blocks, and why; empty: none.
        weights: how large its weights are, in words.
    """

    num_blocks: int
    block_size: int
    kv_bytes_per_token: int
    num_layers: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_host_blocks: int = 0
    runs_ahead: bool = False
    reports_layers: bool = False
    verifies_drafts: bool = False
    grammars: bool = True
    kv: KvFormat | None = None
    group_blocks: tuple[int, ...] = ()
    rank_sizes: tuple[tuple[int, int], ...] = ()
    parts: tuple[KvFormat, ...] = ()
    max_loras: int = 0
    max_lora_rank: int = 0
    kernels: str = ""
    refused: str = ""
    weights: str = ""


class CopyHandle(Protocol):
    """KV on its way into blocks beside the steps. The blocks are in use until it is done."""

    def done(self) -> bool:
        """Never blocks."""
        ...

    def wait(self) -> None:
        """Until it is done: milliseconds at most, nothing but this GPU and its link is waited for."""
        ...

    def error(self) -> str:
        """Once it is done: what is wrong with the bytes that came; empty: they are what was packed."""
        ...


class StepInFlight(Protocol):
    """A step that is on the device."""

    @property
    def failed(self) -> bool:
        """Its draws could not be sent: `result` will raise, and nothing may be launched behind it."""
        ...

    def draw(self, ended: Container[int] = ()) -> None:
        """Send the draws that wait for their sequences' last tokens: these are in `history` by now. Called once, before
        anything is launched behind the step; never raises, see `failed`.

        Args:
            ended: indices of sequences that have ended meanwhile: what is drawn for them does not count.
        """
        ...

    def done(self) -> bool:
        """Has it landed? Never blocks."""
        ...

    def result(self) -> StepResult:
        """Wait until it has landed. Raises: what ModelRunner.execute raises."""
        ...


class ModelRunner(Protocol):
    """Owns weights and KV pool. Called from one thread only, but for `read_adapter`."""

    @property
    def capabilities(self) -> RunnerCapabilities: ...

    on_launched: Callable[[], None]
    """If capabilities.runs_ahead: called by `execute` when the step is on the device, before it waits for it."""
    on_layers: Callable[[int], None]
    """If capabilities.reports_layers: called by `execute` between two layers with how many are computed, not
    necessarily after each; not after the last. The KV of those layers lies in the pool."""

    def expect_compiled(self) -> None:
        """The warm-up is over: a kernel that is compiled or loaded from now on is logged as a warning."""
        ...

    def execute(self, seqs: Sequence[ScheduledSeq], should_abort: Callable[[], bool] | None = None) -> StepResult:
        """Compute one step.

        Raises: StepAborted when should_abort() turned true between two layers; OutOfDeviceMemory.
        """
        ...

    def launch(self, seqs: Sequence[ScheduledSeq], sources: Sequence[int] = ()) -> StepInFlight:
        """If capabilities.runs_ahead: begin a step behind the last one that was launched, which may still run.

        Args:
            seqs: of one draw at most, see async_scheduling.host_reason and prompt_reason: those that decode, then chunks.
                They may change once `draw` was called.
            sources: by sequence, the index in the last launched step of the one whose drawn token is its token; -1: its
                tokens are in token_ids. Empty: all are.
        Raises: OutOfDeviceMemory.
        """
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in the order given: what a former copy wrote a later one may read. Done when it returns."""
        ...

    def pack(
        self, block_ids: Sequence[int], num_tokens: int, out: Payload, layers: range | None = None, group: int = 0
    ) -> int:
        """Copy the KV of `num_tokens` tokens that start at block_ids[0]'s first slot into `out`: full blocks one after
        the other as they lie in the pool, then the tail block's [num_layers, 2, tail, num_kv_heads, head_dim].

        Args:
            group: the KV group whose blocks these are, counted among those of this runner; the layers are those of the group.
            layers: of these only, counted within the group, as if it had no others; not into a DeviceRange.

        Writes exactly num_tokens times the group's bytes per token, or the layers' share of them.
        Returns: xxh3-64 of them; of a DeviceRange its kernels.kv_sum.
        """
        ...

    def unpack(
        self, block_ids: Sequence[int], num_tokens: int, src: Payload, layers: range | None = None, group: int = 0
    ) -> CopyHandle | None:
        """The inverse of pack; slots past num_tokens in the tail block are left alone.

        Returns: None: done, `src` is free. A handle (only of a DeviceRange): the copy has begun; `src` and the blocks
        are in use until it is done."""
        ...

    def read_adapter(self, folder: Path, facts: AdapterFacts) -> LoadedAdapter:
        """Read a LoRA adapter into host memory. Any thread may call this, also while a step runs; nothing on the device is
        touched.

        Args: facts: what the folder must hold, by its id; the files are read again, and checked.
        Raises: AdapterError with the numbers, where it does not fit the model or the slots, or the folder holds another one.
        """
        ...

    def install_adapter(self, slot: int, adapter: LoadedAdapter, parts: range | None = None) -> None:
        """Copy an adapter into a slot. Once all its parts are there, rows with this slot have it from the next step on. A step
        that is on the device still has the slot's former one; until all parts are there no other step has rows with this slot.

        Args:
            slot: below max_loras.
            adapter: of `read_adapter`.
            parts: of its num_parts, from 0 on, in their order; None: all.
        """
        ...

    def note_pulled(
        self, block_table: Sequence[int], token_ids: Sequence[int], first_new: int, first_block: int = 0
    ) -> None:
        """A sequence's blocks of the first KV group from `first_block` on; those from `first_new` on hold KV that came from
        another worker under the keys of these tokens. See Provenance.pulled."""
        ...

    def note_overwritten(self, block_ids: Sequence[int]) -> None:
        """Blocks of the model's first KV group hold KV now that came from elsewhere, in the pool of another rank: this one has no
        layers of that group. See Provenance.forget."""
        ...
