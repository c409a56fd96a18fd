"""One engine without threads: scheduler and executor put together. The step thread and the offline engine drive it.

handle(command)*  ->  step()  ->  take_events()
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container
from functools import partial
from typing import TypeVar

from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import Clock
from diptych.common.errors import ConfigError, DiptychError, InternalError, OverloadedError
from diptych.common.kv_format import KvKind
from diptych.engine.async_unpacks import AsyncUnpacks
from diptych.engine.config import EngineConfig
from diptych.engine.disk_messages import BlockStore
from diptych.engine.disk_traffic import DiskTraffic
from diptych.engine.executor import Executor, ExecutorLost
from diptych.engine.in_flight_step import InFlightStep, PlanTimer
from diptych.engine.messages import (
    AllGiven,
    BlockCopy,
    BlocksRead,
    BlocksWritten,
    Cancel,
    Command,
    CopyKind,
    DropAdapter,
    EndPull,
    EngineEvent,
    EngineRequest,
    EngineStats,
    FetchAgain,
    FirstCandidates,
    FirstToken,
    GrantSlabs,
    KeepAdapter,
    KvComplete,
    PublishCached,
    PullBlocks,
    RangeUnpacked,
    RunLocally,
    UnpackRange,
)
from diptych.engine.runner import OutOfDeviceMemory, RunnerCapabilities, StepAborted
from diptych.engine.sched import async_scheduling as ahead
from diptych.engine.sched.batching.step import SchedulerOutput
from diptych.engine.sched.handoff.packing import PackJob
from diptych.engine.sched.requests.admission import ModelLimits
from diptych.engine.sched.requests.output import DetokenizerFactory
from diptych.engine.sched.scheduler import Drafter, Scheduler

_log = logging.getLogger(__name__)
_FEW_DECODES = 8
"""Events of a step with at most so many tokens are delivered at once: they cost the event loop little."""
_PROBE_BLOCKS = 16
_WRITE_S = 2.0
"""At the end, for blocks that are being written."""
_T = TypeVar("_T")


class InvariantError(AssertionError):
    """A conservation law does not hold: a bug of the engine."""


class EngineCore:
    """Used by one thread at a time.

    Raises: ConfigError when the configuration does not fit the runner. `step` and `handle` raise ExecutorLost when the
    engine cannot go on."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        identity: IdentityHeader,
        clock: Clock,
        detokenizer_factory: DetokenizerFactory | None = None,
        drafter: Drafter | None = None,
        disk: BlockStore | None = None,
    ) -> None:
        able = executor.capabilities
        if config.block_size != able.block_size:
            raise ConfigError("block_size", config.block_size, f"the runner's blocks hold {able.block_size} tokens")
        if config.block_size != identity.block_size:
            raise ConfigError("block_size", config.block_size, f"block identities are made for {identity.block_size}")
        if config.num_host_blocks > able.num_host_blocks:
            raise ConfigError("num_host_blocks", config.num_host_blocks, f"the runner has {able.num_host_blocks}")
        if config.num_disk_blocks and disk is None:
            raise ConfigError("num_disk_blocks", config.num_disk_blocks, "there is no folder for them")
        if config.num_blocks > able.num_blocks:
            raise ConfigError("num_blocks", config.num_blocks, f"the runner's pool has {able.num_blocks}")
        if drafter is not None and not able.verifies_drafts:
            raise ConfigError("drafter", type(drafter).__name__, "the runner does not verify drafts")
        _check_groups(able, config)
        limits = ModelLimits(
            max_model_len=able.max_model_len,
            vocab_size=able.vocab_size,
            eos_token_ids=frozenset(able.eos_token_ids),
            kv_bytes_per_token=able.kv_bytes_per_token,
            num_layers=able.num_layers,
            grammars=able.grammars,
            kv=able.kv,
            group_blocks=(config.num_blocks, *able.group_blocks[1:]) if able.group_blocks else (),
            rank_sizes=able.rank_sizes,
            parts=able.parts,
            max_loras=able.max_loras,
        )
        self.scheduler = Scheduler(config, limits, identity, detokenizer_factory, drafter)
        self.steps = 0
        self._executor = executor
        self._disk: DiskTraffic | None = None
        if disk is not None and config.num_disk_blocks:
            self._disk = DiskTraffic(self.scheduler, executor, disk, clock, self._copy_blocks)
        self._block_bytes = able.block_size * able.kv_bytes_per_token
        self._clock = clock
        self._runs_ahead = able.runs_ahead
        self._reports_layers = able.reports_layers
        self._goes_ahead = config.steps_ahead
        self._in_flight: InFlightStep | None = None
        self._timer = PlanTimer()
        self._landed_at = 0.0
        self.steps_ahead = 0
        """Steps that were launched before the one before them had landed."""
        self._on_launched: Callable[[], None] = lambda: None
        self._check = config.check_invariants
        self._answers: list[EngineEvent] = []
        self._unpacks = AsyncUnpacks()
        self._before_packing: Callable[[], None] = lambda: None
        self._on_packed_early: Callable[[], None] = lambda: None
        self._take_pulls: Callable[[], bool] = lambda: False
        self._computing: SchedulerOutput | None = None
        """The step that `execute` is in the midst of."""
        self._holds_step = False
        self._beside_s = 0.0
        """Of that step's time, what requests took that have no part in it."""
        self.events_may_wait = False
        """The last step had many decodes: its events may be delivered while the next one is on the device."""

    def on_launched(self, callback: Callable[[], None]) -> None:
        """`callback` is called in every step once it is on the device; never where `is_synchronous`."""
        if self._runs_ahead:
            self._on_launched = callback
            self._executor.on_launched(callback)

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """See Executor.on_lost."""
        self._executor.on_lost(callback)

    @property
    def plan_at(self) -> float | None:
        """A step is on the device, and `step` should not be called before this time (monotonic): requests that arrive
        until then take part in the next step. None: no step is on the device."""
        return self._landed_at + self._timer.wait_s if self._in_flight is not None else None

    def wait_for_step(self) -> None:
        """Wait for the step that is on the device, if there is one, and apply it."""
        if self._in_flight is not None:
            self._land(None)

    def close(self) -> None:
        """End the executor, and write what is to be in files; nothing else is called afterwards."""
        try:
            if self._disk is not None:
                self._disk.close(_WRITE_S)
        finally:
            self._executor.close()

    def fail_all(self, error: DiptychError) -> None:
        """Every request ends."""
        if self._disk is not None:
            for request in self._disk.take_all():
                self.scheduler.outbox.fail(request.attempt, error)
        self.scheduler.fail_all(error)

    def open_disk(self) -> None:
        """Blocks in files can be read from now on, and are announced. Nothing happens where there are none."""
        if self._disk is not None:
            self._disk.open()

    @property
    def wakes_at(self) -> float:
        """When `step` has something to do though no command comes; infinite: never."""
        return self._disk.expires_at if self._disk is not None else math.inf

    def on_packing(self, take_grants: Callable[[], None], packed_early: Callable[[], None]) -> None:
        """Args:
        take_grants: called before anything is packed; passes slabs that came back to `handle`.
        packed_early: called while a step runs that has packed something, or has taken commands: `take_events` has what is to be
            sent."""
        self._before_packing, self._on_packed_early = take_grants, packed_early

    def on_layer(self, take_pulls: Callable[[], bool]) -> None:
        """Args: take_pulls: called between two layers of a step, where the runner reports them; passes commands that need no step
        to `handle`. Returns whether there were any."""
        self._take_pulls = take_pulls

    @property
    def is_synchronous(self) -> bool:
        """No step is on a device when `step` returns."""
        return not self._runs_ahead

    @property
    def is_copying(self) -> bool:
        """KV is being copied beside the steps; `take_events` checks whether it has arrived."""
        return bool(self._unpacks)

    def copy_is_done(self) -> bool:
        """`take_events` and then `step` have something to do."""
        return self._unpacks.first_is_done()

    def handle(self, command: Command) -> None:
        scheduler = self.scheduler
        if self._computing is not None and not self._holds_step and not isinstance(command, GrantSlabs):
            # Whatever the command ends, the blocks that this step writes are free when it is over.
            self._holds_step = True
            scheduler.live.hold(self._computing.requests)
        match command:
            case EngineRequest() as request:
                if self._disk is None or not self._disk.begin(request):
                    scheduler.add(request, self._clock.now())
            case PublishCached():
                if self._disk is None or not self._disk.begin_source(command):
                    scheduler.publish_cached(command, self._clock.now())
            case PullBlocks():
                scheduler.pull_blocks(command, self._clock.now())
            case EndPull(attempt):
                new = scheduler.end_pull(attempt)
                if new is not None:
                    self._executor.note_pulled(new.table, new.token_ids, new.first_new, new.first_block)
            case Cancel(attempt):
                if self._disk is None or not self._disk.cancel(attempt):
                    scheduler.cancel(attempt)
            case GrantSlabs(grants, overlap):
                scheduler.packing.grant(grants, overlap)
            case UnpackRange():
                self._unpack(command)
            case FirstToken():
                scheduler.first_token(command)
            case FirstCandidates():
                scheduler.first_candidates(command)
            case AllGiven(attempt):
                self._unpacks.all_given(attempt)
            case KvComplete(attempt):
                scheduler.kv_complete(attempt)
            case FetchAgain(attempt):
                scheduler.fetch_again(attempt)
            case RunLocally(attempt):
                scheduler.run_locally(attempt)
            case KeepAdapter(adapter):
                scheduler.adapters.keep(adapter)
            case DropAdapter(adapter_id):
                scheduler.adapters.drop(adapter_id)
            case BlocksRead() if self._disk is not None:
                self._disk.on_read(command)
            case BlocksWritten() if self._disk is not None:
                self._disk.on_written(command)
            case _:
                raise TypeError(f"not a command: {command!r}")

    def step(self, cancelled: Container[str] = ()) -> bool:
        """Schedule, compute, take the results, pack. On a device that takes steps ahead: the first call launches a
        step, the next one launches another behind it (see engine.sched.async_scheduling) and takes the first one's
        results, and so on.

        Args:
            cancelled: attempts that were cancelled meanwhile (another thread may add to it): a step of such attempts
                only is aborted between two layers.
        Returns: False when there was nothing to do; nothing will be until another command comes.
        """
        self._take_unpacks()  # requests whose KV is complete by now run in this step
        if self._disk is not None:
            self._disk.expire()
        self.events_may_wait = False
        if self._in_flight is not None:
            worked = True
            self._land(self._launch_ahead(self._in_flight))
        else:
            worked = self._begin(cancelled)
        packed = self._pack(self.scheduler.packing.next_job, self.scheduler.pack_failed)
        if self._disk is not None:
            packed |= self._disk.save(idle=not worked and not packed)
        self.events_may_wait &= not packed
        if self._check and (violations := self.scheduler.check()):
            raise InvariantError("; ".join(violations))
        return worked or packed

    def _begin(self, cancelled: Container[str]) -> bool:
        """A step with nothing before it on the device. Returns: whether there was anything to do."""
        if self._pack(self.scheduler.packing.next_job, self.scheduler.pack_failed):
            self._on_packed_early()  # in slabs that came back meanwhile; announced before this step runs
        start = self._clock.now()
        out = self.scheduler.schedule(start)
        copied, installed = self._copy_blocks(), self._install_adapters()
        if copied or installed:
            start = self._clock.now()
        if copied is None or installed is None or not out.seqs:
            return copied is None or installed is not False
        if self._runs_ahead and self._goes_ahead and ahead.can_run_ahead(self.scheduler, out):
            self._in_flight = self._launch(out, None)
            return True
        self._execute(out, cancelled, start)
        self.steps += 1
        self.events_may_wait = self._runs_ahead and out.num_decode > _FEW_DECODES
        return True

    def _launch_ahead(self, flight: InFlightStep) -> InFlightStep | None:
        out = None if flight.step.failed else ahead.plan(self.scheduler, self._clock.now())
        copied, installed = self._copy_blocks(), self._install_adapters()
        if out is None or copied is None or installed is None:
            return None
        behind = self._launch(out, flight.out)
        if behind is not None:
            self.steps_ahead += 1
            self._timer.launched(late=flight.step.done())
        return behind

    def _launch(self, out: SchedulerOutput, before: SchedulerOutput | None) -> InFlightStep | None:
        step = self._attempt(out, lambda: self._executor.launch(out.seqs, out.sources))
        if step is None:
            return None
        ahead.launched(out, before)
        now = self._clock.now()
        if before is None:
            self._landed_at = now
            step.draw()
        self._on_launched()
        return InFlightStep(out, step, now)

    def _land(self, behind: InFlightStep | None) -> None:
        flight, self._in_flight = self._in_flight, behind
        assert flight is not None
        result = self._attempt(flight.out, flight.step.result)
        now = self._clock.now()
        duration_s = now - max(flight.begun, self._landed_at)
        self._timer.landed(duration_s)
        self._landed_at = now
        if result is not None:
            self.scheduler.apply(flight.out, result, duration_s)
        ahead.landed(self.scheduler.live, flight.out, None if behind is None else behind.out)
        if behind is not None:
            behind.step.draw(ahead.ended(behind.out))
        self.steps += 1

    def take_events(self) -> list[EngineEvent]:
        self._take_unpacks()
        events, self._answers = [*self._answers, *self.scheduler.take_events()], []
        return events

    def stats(self, busy_since: float | None = None) -> EngineStats:
        return self.scheduler.stats(steps=self.steps, steps_ahead=self.steps_ahead, busy_since=busy_since)

    def measure_copies(self) -> float:
        """Time copies of a few free blocks to the host tier and back, so that choices are based on a measurement.

        Returns: bytes/s; 0.0 when there is no host tier, or nothing is free to be copied.
        """
        kv = self.scheduler.kv
        count = min(_PROBE_BLOCKS, kv.pool.counts.free, kv.host.num_free)
        if not count:
            return 0.0
        blocks, slots = kv.pool.allocate(count), kv.host.take(count)
        assert blocks is not None
        assert slots is not None
        try:
            both_ways = [BlockCopy(CopyKind.TO_HOST, b, s) for b, s in zip(blocks, slots, strict=True)]
            both_ways += [BlockCopy(CopyKind.FROM_HOST, s, b) for b, s in zip(blocks, slots, strict=True)]
            self._executor.copy_blocks(both_ways)  # not measured: it touches the memory for the first time
            start = self._clock.now()
            self._executor.copy_blocks(both_ways)
            duration_s = self._clock.now() - start
        finally:
            kv.pool.release(blocks)
            kv.host.give(slots)
        if duration_s > 0.0:
            self.scheduler.throughput.copy_bytes_per_s = len(both_ways) * self._block_bytes / duration_s
        return self.scheduler.throughput.copy_bytes_per_s

    def _execute(self, out: SchedulerOutput, cancelled: Container[str], start: float) -> None:
        def all_cancelled() -> bool:
            return all(seq.attempt in cancelled for seq in out.seqs)

        on_layers = self._between_layers(out) if self._reports_layers else None
        self._computing, self._beside_s = out, 0.0
        try:
            result = self._attempt(out, lambda: self._executor.execute(out.seqs, all_cancelled, on_layers))
        finally:
            self._computing = None
            if self._holds_step:
                self._holds_step = False
                self.scheduler.live.let_go(out.requests)
        if result is not None:
            self.scheduler.apply(out, result, self._clock.now() - start - self._beside_s)

    def _attempt(self, out: SchedulerOutput, action: Callable[[], _T]) -> _T | None:
        """Returns: None when the step failed, and then the requests that it concerns have ended; or when it was
        aborted."""
        try:
            return action()
        except StepAborted:
            return None
        except ExecutorLost:
            raise
        except OutOfDeviceMemory as error:
            # New requests cause the shortage. Decoding ones have not advanced; the next step repeats this one for them.
            victims = out.requests[out.num_decode :] or out.requests[-1:]
            _log.error("a step of %d sequences found no memory: %s", len(out.seqs), error)
            for request in victims:
                self.scheduler.fail(request, OverloadedError("the GPU's memory is used up", retry_after_s=1.0))
            return None
        except Exception as error:  # the step's requests end with a typed error, and the engine goes on
            _log.exception("a step of %d sequences failed", len(out.seqs))
            for request in out.requests:
                self.scheduler.fail(request, _internal("the model step failed", error))
            return None

    def _copy_blocks(self) -> bool | None:
        """Carry out what the scheduler decided about blocks. Returns: whether there was anything; None when it failed.

        A failed copy leaves unknown bytes in blocks that many may share: every request ends, the caches are emptied.
        """
        copies = self.scheduler.take_copies()
        if not copies:
            return False
        start = self._clock.now()
        try:
            self._executor.copy_blocks(copies)
        except ExecutorLost:
            raise
        except Exception as error:
            _log.exception("copying %d blocks failed", len(copies))
            self.scheduler.fail_all(_internal("copying KV blocks failed", error))
            self.scheduler.kv.clear()
            return None
        num_moved = sum(copy.kind is not CopyKind.FORK for copy in copies)
        self.scheduler.throughput.observe_copy(self._clock.now() - start, num_moved * self._block_bytes)
        return True

    def _install_adapters(self) -> bool | None:
        """Copy adapters into the slots that the scheduler gave them. Returns: whether there were any; None when one failed: the
        requests that name it have ended, and the step is not computed."""
        installs, failed = self.scheduler.take_installs(), False
        for one in installs:
            start = self._clock.now()
            try:
                self._executor.install_adapter(one.slot, one.adapter, one.parts)
            except ExecutorLost:
                raise
            except Exception as error:
                _log.exception("installing the adapter %s failed", one.adapter.id)
                self.scheduler.install_failed(one.slot, _internal("installing an adapter failed", error))
                failed = True
            else:
                self.scheduler.throughput.observe_install(self._clock.now() - start, one.num_bytes)
        return None if failed else bool(installs)

    def _between_layers(self, out: SchedulerOutput) -> Callable[[int], None]:
        """What the step does between two layers: take the commands of pulls, pack its last chunks' layers, where that is faster,
        and pack what waits for slabs."""
        groups, packing = self.scheduler.layer_groups(out), self.scheduler.packing

        def on_layers(num_layers: int) -> None:
            some = self._beside(self._take_pulls)
            if groups:
                some |= self._pack(partial(groups.next_job, num_layers), lambda job, error: groups.give_up(job))
            if packing.any_late:  # requests that wait for slabs only
                some |= self._beside(lambda: self._pack(packing.late_job, self.scheduler.pack_failed))
            if some:
                self._on_packed_early()

        return on_layers

    def _beside(self, work: Callable[[], bool]) -> bool:
        """Do something in the midst of a step for requests that take no part in it."""
        began = self._clock.now()
        some = work()
        self._beside_s += self._clock.now() - began
        return some

    def _pack(
        self, next_job: Callable[[], PackJob | None], on_failure: Callable[[PackJob, DiptychError], None]
    ) -> bool:
        """Returns: whether there was anything to pack."""
        self._before_packing()
        self._copy_blocks()  # a pull may have taken blocks from a lower tier, whose bytes are not there yet
        any_packed = False
        while (job := next_job()) is not None:
            any_packed = True
            try:
                checksum = self._executor.pack(
                    job.block_ids, job.num_tokens, job.grant.payload, job.layers, job.of.own, job.of.part
                )
            except ExecutorLost:
                raise
            except Exception as error:
                _log.exception(
                    "packing tokens %d+%d of %s failed", job.first_token, job.num_tokens, job.request.attempt
                )
                on_failure(job, _internal("packing KV failed", error))
                continue
            self.scheduler.packed(job, checksum)
        return any_packed

    def _take_unpacks(self) -> None:
        if self._unpacks:
            self._answers.extend(self._unpacks.take_done(self.scheduler))

    def _unpack(self, command: UnpackRange) -> None:
        job = self.scheduler.plan_unpack(command)
        if job is not None and self._copy_blocks() is None:
            job = None  # the request has ended
        if job is not None:
            try:
                copy = self._executor.unpack(
                    job.block_ids, job.num_tokens, command.payload, job.layers, job.into.own, job.into.part
                )
            except ExecutorLost:
                raise
            except Exception as error:
                _log.exception(
                    "unpacking tokens %d+%d of %s failed", command.first_token, job.num_tokens, command.attempt
                )
                self.scheduler.fail(job.request, _internal("unpacking KV failed", error))
                job = None
            else:
                if copy is not None:
                    self._unpacks.begin(self.scheduler, command, job, copy)
                    if not self.scheduler.running.decoding or self._in_flight is not None:
                        copy.done()  # starts the copy now: no step is about to be launched that would start it
                    return
                self.scheduler.unpacked(job, last=command.last)
        self._answers.append(RangeUnpacked(command.attempt, command.job, job is not None))


def _check_groups(able: RunnerCapabilities, config: EngineConfig) -> None:
    """Raises: ConfigError for what an engine cannot do with several KV groups, or with a window."""
    kv = able.kv
    if kv is None or kv.has_one_full_group:
        return
    sizes = {group.name: group.block_size for group in kv.groups}
    if set(sizes.values()) != {config.block_size}:
        raise ConfigError("block_size", sizes, f"every KV group must have blocks of {config.block_size} tokens")
    if able.group_blocks and len(able.group_blocks) != len(kv.groups):
        raise ConfigError("group_blocks", able.group_blocks, f"the runner has {len(kv.groups)} KV groups")
    kinds = [group.name for group in kv.groups if group.kind not in (KvKind.FULL, KvKind.WINDOW)]
    if kinds:
        raise ConfigError("groups", kinds, "the engine has full and window groups only")
    if config.num_host_blocks:
        raise ConfigError(
            "num_host_blocks", config.num_host_blocks, f"this tier cannot hold {', '.join(sizes)}: set it to 0"
        )


def _internal(what: str, error: Exception) -> DiptychError:
    return InternalError(f"{what}: {type(error).__name__}: {error}")
