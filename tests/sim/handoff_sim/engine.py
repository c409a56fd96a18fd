"""Shared parts of all workers of a world, and the engine's core on virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import TYPE_CHECKING, Any

from handoff_sim.laws import Law, Report
from handoff_sim.links import Links, Node
from handoff_sim.loop import VirtualLoop
from handoff_sim.wire import Wires

from diptych.common.block_identity import IdentityHeader
from diptych.common.compat import Compat, identified
from diptych.common.kv_format import KvFormat, windowed_format
from diptych.common.kv_groups import PoolDemand
from diptych.common.kv_parts import split
from diptych.engine.config import EngineConfig
from diptych.engine.core import EngineCore
from diptych.engine.executor import LocalExecutor
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import (
    Cancel,
    Command,
    EngineEvent,
    EngineStats,
    GrantSlabs,
    RangePacked,
    ScheduledSeq,
    StepResult,
    UnpackRange,
    needs_no_step,
)
from diptych.kvtransfer.slabs.layout import layout_hash
from diptych_tests.fake_ranks import FakeRanks, RanksTogether

if TYPE_CHECKING:
    from handoff_sim.files import Files

BLOCK = 4
LAYERS = 4
VOCAB = 997
MAX_LEN = 64
WINDOWS = ((0, 6, 6, 9), (0, 5, 0, 5), (7, 7, 7, 7), (4, 10, 10, 4))
"""Of each layer, in the schedules with window groups; 0: full."""


@dataclass(frozen=True)
class Facts:
    identity: IdentityHeader
    compat: Compat
    layout: int


@cache
def facts_of(windows: tuple[int, ...]) -> Facts:
    """Of the workers of a world. `windows`: of each layer; empty: all layers are full."""
    identity, compat = identified(
        Compat(
            model="fake", model_revision="model", tokenizer_revision="tokenizer", kv=make_runner(1, windows).kv,
            compute_dtype="int8", attention_version="1", sampler_version="1",
        ),
        bytes(32),
    )  # fmt: skip
    return Facts(identity, compat, layout_hash(compat))


Degrees = tuple[int, int]
"""Tensor parallel and pipeline."""
RANKS: tuple[Degrees, ...] = ((1, 1), (2, 1), (4, 1), (1, 3), (2, 2))


@cache
def whole_of(windows: tuple[int, ...] = ()) -> KvFormat:
    """In the schedules with ranks. Of four ranks two hold the same head, and a pipeline stage has some of the groups only."""
    return windowed_format(windows or (0,) * LAYERS, 2, 2, block_size=BLOCK, dtype="float16")


@cache
def ranks_of(degrees: Degrees, windows: tuple[int, ...] = ()) -> tuple[KvFormat, ...]:
    return split(whole_of(windows), tensor_parallel=degrees[0], pipeline=degrees[1])


@cache
def facts_of_ranks(degrees: Degrees, windows: tuple[int, ...] = ()) -> Facts:
    whole, parts = whole_of(windows), ranks_of(degrees, windows)
    compat = replace(facts_of(()).compat, kv=whole, compute_dtype="float16", kv_parts=parts if len(parts) > 1 else ())
    identity, compat = identified(compat, bytes(32))
    return Facts(identity, compat, layout_hash(compat))


@dataclass(frozen=True)
class Sizes:
    num_slabs: int = 3
    num_blocks: int = 24
    chunk: int = 8
    lease_s: float = 1.0
    read_base_s: float = 0.5
    silence_s: float = 1.0
    quota: int = 2
    cap: int = 1
    grant_quota: int = 2
    overlap: str = "on"
    windows: tuple[int, ...] = ()
    reusable: bool = True
    """Prefill announces that it sends what makes a hit of a prompt."""
    slab_blocks: int = 0
    """Blocks that a slab holds; 0: as many as fit."""
    offers: bool = False
    """Slabs come as they are published to who expects them."""

    ranks: tuple[Degrees, Degrees] | None = None
    """Of prefill and of decode; None: one, as without."""

    def degrees(self, decodes: bool) -> Degrees | None:
        return None if self.ranks is None else self.ranks[decodes]

    def facts(self, decodes: bool = False) -> Facts:
        degrees = self.degrees(decodes)
        return facts_of(self.windows) if degrees is None else facts_of_ranks(degrees, self.windows)


class WatchedRunner(FakeRunner):
    """Reports which blocks it reads: those of a step from the first that a token of it sees, and packed ones."""

    on_read: Callable[[str, int, Sequence[int]], None] = staticmethod(lambda what, group, blocks: None)
    """Called with what reads, the KV group, and the blocks; -1: one in front of the table."""

    def execute(self, seqs: Sequence[ScheduledSeq], should_abort: Callable[[], bool] | None = None) -> StepResult:
        _note_reads(self.on_read, seqs, self.kv)
        return super().execute(seqs, should_abort)

    def pack(
        self, block_ids: Sequence[int], num_tokens: int, out: memoryview, layers: range | None = None, group: int = 0
    ) -> int:
        self.on_read("packing", group, block_ids if len(block_ids) * BLOCK >= num_tokens else [-1])
        return super().pack(block_ids, num_tokens, out, layers, group)


def _note_reads(on_read: Callable[[str, int, Sequence[int]], None], seqs: Sequence[ScheduledSeq], kv: KvFormat) -> None:
    for seq in seqs:
        for index, group in enumerate(kv.groups):
            begin = group.first_block(seq.start) - seq.first_blocks[index]
            on_read(seq.attempt, index, [-1] if begin < 0 else seq.block_tables[index][begin:])


def make_runner(num_blocks: int, windows: tuple[int, ...] = (), demand: PoolDemand | None = None) -> WatchedRunner:
    return WatchedRunner(
        num_blocks,
        BLOCK,
        num_layers=LAYERS,
        head_dim=2,
        vocab_size=VOCAB,
        max_model_len=MAX_LEN,
        eos_token_ids=(VOCAB - 1,),
        windows=windows,
        demand=demand,
    )


class WatchedRanks(FakeRanks):
    """As WatchedRunner."""

    on_read: Callable[[str, int, Sequence[int]], None] = staticmethod(lambda what, group, blocks: None)

    def execute(self, seqs: Sequence[ScheduledSeq], should_abort: Callable[[], bool] | None = None) -> StepResult:
        _note_reads(self.on_read, seqs, self.kv)
        return super().execute(seqs, should_abort)

    def pack_part(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        out: memoryview,
        layers: range | None,
        part: int,
        group: int = 0,
    ) -> int:
        blocks = block_ids if len(block_ids) * BLOCK >= num_tokens else [-1]
        self.on_read("packing", self.held[part, group].group, blocks)
        return super().pack_part(block_ids, num_tokens, out, layers, part, group)


def make_ranks(
    degrees: Degrees, num_blocks: int, windows: tuple[int, ...] = (), demand: PoolDemand | None = None
) -> WatchedRanks:
    return WatchedRanks(
        whole_of(windows), ranks_of(degrees, windows), num_blocks, demand=demand, vocab_size=VOCAB,
        max_model_len=MAX_LEN, eos_token_ids=(VOCAB - 1,),
    )  # fmt: skip


@dataclass
class Context:
    loop: VirtualLoop
    rng: Random
    links: Links
    wires: Wires
    sizes: Sizes
    report: Report
    check_unpack: Callable[[UnpackRange, Degrees | None], None]
    check_packed: Callable[[RangePacked], None]
    files: Files | None = None
    """None: workers have no disks."""


class CancelledLater:
    """Attempts that are found cancelled after so many looks: between two layers of the step."""

    def __init__(self, attempts: set[str], looks: int) -> None:
        self._attempts, self._looks = attempts, looks

    def __contains__(self, attempt: object) -> bool:
        self._looks -= 1
        return self._looks < 0 and attempt in self._attempts


class SimEngine:
    """The engine's core, stepped on virtual time; a step takes some."""

    def __init__(
        self, context: Context, node: Node, on_events: Callable[[list[EngineEvent]], None], *, decodes: bool
    ) -> None:
        self._ctx, self._node, self._on_events = context, node, on_events
        self._degrees = context.sizes.degrees(decodes)
        sizes = context.sizes
        config = EngineConfig(
            num_blocks=sizes.num_blocks, block_size=BLOCK, max_num_seqs=8, max_step_time_s=None, mixed_step_time_s=None,
            max_num_batched_tokens=sizes.chunk, slab_quota_per_peer=sizes.grant_quota,
            num_disk_blocks=context.files.draw_num_blocks() if context.files else 0, check_invariants=True,
        )  # fmt: skip
        executor: Any
        if self._degrees is not None:
            demand = PoolDemand(config.max_num_seqs, sizes.chunk)
            ranks = make_ranks(self._degrees, sizes.num_blocks, sizes.windows, demand)
            ranks.on_read, executor = self._check_read, RanksTogether(ranks)
        else:
            runner = make_runner(sizes.num_blocks, sizes.windows, PoolDemand(config.max_num_seqs, sizes.chunk))
            runner.on_read, executor = self._check_read, LocalExecutor(runner)
        kv = sizes.facts(decodes).compat.kv
        piece_bytes = [group.block_bytes(kv.shard) for group in kv.groups]
        self.store = context.files.store_of(node, piece_bytes) if context.files else None
        self.core = EngineCore(executor, config, sizes.facts().identity, context.loop, disk=self.store)
        self.core.on_packing(self._take_grants, self._deliver_early)
        self.core.on_layer(self._take_pulls)
        if context.files is not None and self.store is not None:
            context.files.watch(self)
            self.store.begin(self.send)
            self.core.open_disk()
        self.is_saving = False
        """Blocks are packed for the disk."""
        self._inbox: list[Command] = []
        self._scheduled = False
        self._wakes_at = math.inf
        self._some_early = False
        self._unfinished: tuple[list[EngineEvent], bool] | None = None
        """A step that the worker was stopped in."""
        node.on_resume += [self._go_on, self._kick]

    def _check_read(self, what: str, group: int, blocks: Sequence[int]) -> None:
        """What is read has an owner: no block that was freed behind the window. Between two steps the cache is one, too."""
        pool = self.core.scheduler.kv.pools[group]
        cached = set(pool._by_key.values()) if self.is_saving else ()
        if any(block < 0 or not (pool.refs(block) or block in cached) for block in blocks):
            self._ctx.report(
                Law.WINDOWS, f"{self._node.worker_id}: {what} reads a block of KV group {group} that is free"
            )

    def send(self, command: Command) -> None:
        if not self._node.dead:
            self._inbox.append(command)
            self._kick()

    def stats(self) -> EngineStats:
        return self.core.stats()

    def _kick(self) -> None:
        if not self._scheduled and not self._node.dead and not self._node.stopped:
            self._scheduled = True
            self._ctx.loop.call_later(self._ctx.rng.random() ** 2 * 0.01, self._begin)

    def _begin(self) -> None:
        """Commands that arrive during a step wait for the next one, but for those of pulls."""
        commands, self._inbox = self._inbox, []
        self._ctx.loop.call_later(self._ctx.rng.random() ** 2 * 0.01, self._step, commands)

    def _step(self, commands: list[Command]) -> None:
        self._scheduled = False
        if self._node.dead:
            return
        if self._node.stopped:
            self._inbox[:0] = commands
            return
        for command in commands:
            self._handle(command)
        if early := self.core.take_events():  # they do not wait for the step
            self._ctx.loop.call_soon(self._deliver, early)
        coming = {command.attempt for command in self._inbox if isinstance(command, Cancel)}
        self._some_early = False
        worked = self.core.step(CancelledLater(coming, self._ctx.rng.randint(0, 6)) if coming else ())
        if self._ctx.files is not None:
            self._ctx.files.check_step(self, self._node.worker_id)
        events = self.core.take_events()
        if self._some_early:  # the rest of the step takes its time
            self._scheduled = True
            self._ctx.loop.call_later(self._ctx.rng.random() ** 2 * 0.02, self._finish, events, worked)
        else:
            self._finish(events, worked)

    def _finish(self, events: list[EngineEvent], worked: bool) -> None:
        if self._node.stopped:
            self._unfinished = events, worked
            return
        self._scheduled = False
        if events:
            self._ctx.loop.call_soon(self._deliver, events)
        if worked or self._inbox:
            self._kick()
        elif self._ctx.loop.time() < self.core.wakes_at < self._wakes_at:
            self._wakes_at = self.core.wakes_at
            self._ctx.loop.call_at(self._wakes_at, self._wake)

    def _wake(self) -> None:
        self._wakes_at = math.inf
        self._kick()

    def _go_on(self) -> None:
        if self._unfinished is not None:
            unfinished, self._unfinished = self._unfinished, None
            self._finish(*unfinished)

    def _take_grants(self) -> None:
        """Slabs returned during the step."""
        for command in [command for command in self._inbox if isinstance(command, GrantSlabs)]:
            self._inbox.remove(command)
            self.core.handle(command)

    def _take_pulls(self) -> bool:
        """Commands of pulls that arrived during the step."""
        commands = [command for command in self._inbox if needs_no_step(command)]
        for command in commands:
            self._inbox.remove(command)
            self._handle(command)
        return bool(commands)

    def _handle(self, command: Command) -> None:
        if isinstance(command, UnpackRange):
            self._ctx.check_unpack(command, self._degrees)
        self.core.handle(command)

    def _deliver_early(self) -> None:
        """In the midst of a step: some layers of a prompt's last chunk are packed, or commands of pulls were handled."""
        self._some_early = True
        self._ctx.loop.call_soon(self._deliver, self.core.take_events())

    def _deliver(self, events: list[EngineEvent]) -> None:
        if not self._node.dead:
            self._on_events(events)

    def left_over(self) -> list[str]:
        counts = [pool.counts for pool in self.core.scheduler.kv.pools]
        busy = {
            "requests": len(self.core.scheduler.requests),
            "running": sum(one.running for one in counts),
            "reserved": sum(one.reserved for one in counts),
        }
        return [f"{self._node.worker_id}: engine has {n} {what} left" for what, n in busy.items() if n]
