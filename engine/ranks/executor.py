"""An executor over several processes, one for each rank: every rank gets the same step message, one of them samples.

    engine --frame--> every rank        the same bytes to each; numbers and block ids, never KV
    engine <--frame-- every rank        "ok", or why not; the sampling rank's holds the step's result

KV is sharded by rank: a packed range is of one rank, which writes it into shared memory (common.shared_memory): a slab of the
worker's ring, or a buffer from which it is copied. A rank on another host sends it over its own connection (engine.ranks.nodes).

A rank that ends, or is stopped, and a step in which no rank goes on, are noticed by a thread that watches (engine.ranks.watch).
Then all ranks are killed, and every call raises ExecutorLost. So they are where one rank fails in a step and the others wait for
it. A step that fails on all of them, or where nothing is exchanged any more, fails by itself, as one of a single process does.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import json
import logging
import select
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from diptych.common.adapters.peft import AdapterFacts
from diptych.common.errors import ConfigError, InternalError
from diptych.common.kv_format import KvFormat
from diptych.common.kv_parts import group_parts
from diptych.common.shared_memory import SharedArea, find
from diptych.engine.executor import ExecutorLost
from diptych.engine.messages import BlockCopy, LoadedAdapter, Payload, ScheduledSeq, StepResult
from diptych.engine.ranks import step_codec
from diptych.engine.ranks.adapters import RankAdapter, encode_read, read_answer
from diptych.engine.ranks.board import Board
from diptych.engine.ranks.frames import DRAW, ELSEWHERE, MAY_GIVE_UP, RANGE, STEP, WITH_LAYERS, WITH_RESULT, Kind
from diptych.engine.ranks.nodes.links import RemoteEnd
from diptych.engine.ranks.nodes.nodes import Nodes
from diptych.engine.ranks.starting import RankSpec, StartedRank
from diptych.engine.ranks.watch import POLL_S, Watch, read_process
from diptych.engine.runner import OutOfDeviceMemory, RunnerCapabilities, StepAborted

_log = logging.getLogger(__name__)
_READ_POLL_S = 0.02
"""Interval at which ranks are asked whether they have read an adapter."""
_READ_S = 300.0
_ABORT_POLL_S = 0.02
_END_S = 2.0
"""A rank's process ends by itself when its socket is closed; after this it is killed."""
SILENCE_S = 3.0
_AFTER_FAILURE_S = 2.0
"""Without progress of the others, once a rank has failed in a call: they wait for what it does not send."""


class _RemoteRank:
    """The engine's end of a rank on another host."""

    def __init__(self, number: int, link: RemoteEnd) -> None:
        self.number, self.link = number, link


@dataclass(slots=True)
class _Call:
    """Frames that were sent, and what has been answered."""

    number: int
    ranks: Container[int]
    count: int
    answers: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    layers: dict[int, int] = field(default_factory=dict)
    """By rank, how many are computed."""
    counters: list[int] = field(default_factory=list)
    still_since: float = 0.0
    """Signs of life of all ranks since a rank has failed, and since when there is no other one."""

    @property
    def failed(self) -> list[int]:
        """Ranks that have answered with something else than a result."""
        return [rank for rank, (kind, _) in self.answers.items() if kind != Kind.OK]

    @property
    def done(self) -> bool:
        return len(self.answers) == self.count

    @property
    def num_layers(self) -> int:
        """How many are computed on every rank."""
        return min(self.layers.values()) if len(self.layers) == self.count else 0


class RanksExecutor:
    """Starts one process for each spec, in the order of the ranks. Implements Executor.

    Args:
        sampler: the rank that samples: rank 0 of the last pipeline stage.
        nodes: other hosts, which have the ranks after those of `specs`, and have been started. They end with the executor.
        deadline_s: for one call, from its first byte to the last rank's answer.
        start_deadline_s: until all runners are made.
        silence_s: without a sign of life of any rank while a step runs, after which all are lost.
        kv, parts: the model's KV, and of it that of each rank, where there are several KV groups: a rank has those of its
            layers. None: one group, whose layers keep every token.
    Raises: ExecutorLost when a rank does not come up; ConfigError when the ranks' runners do not fit together.
    """

    def __init__(
        self,
        specs: Sequence[RankSpec],
        *,
        sampler: int,
        deadline_s: float,
        start_deadline_s: float = 600.0,
        silence_s: float = SILENCE_S,
        nodes: Nodes | None = None,
        kv: KvFormat | None = None,
        parts: Sequence[KvFormat] = (),
    ) -> None:
        num_ranks = len(specs) if nodes is None else nodes.group.nnodes * len(specs)
        if not 0 <= sampler < num_ranks:
            raise ConfigError("sampler", sampler, f"must be one of {num_ranks} ranks")
        self._sampler, self._deadline_s, self._nodes = sampler, deadline_s, nodes
        self._kv_parts = tuple(parts) if kv is not None else ()
        self._overwrites = None if kv is None else _overwrites(kv, parts, sampler)
        self._may_give_up = not sampler and nodes is None
        """A step, between two layers: all ranks are of one stage, and see one board."""
        self._lost = ""
        self._lock = threading.RLock()
        """Of the frames. A step that `execute` computes holds it for its length."""
        self._losing = threading.Lock()
        """Only one reason is kept, and told."""
        self._closing = threading.Event()
        self._on_lost: Callable[[str], None] = lambda reason: None
        self._on_launched: Callable[[], None] = lambda: None
        self._encoder = step_codec.SeqEncoder()
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        """Those that are not answered."""
        self._last_launched = 0
        self._adapter_numbers, self._area_numbers = itertools.count(), itertools.count()
        self._forgotten: deque[int] = deque()
        """Numbers of adapters that nothing holds any more."""
        self._areas: dict[int, int] = {}
        """id of each area that the ranks have mapped -> its number."""
        self._forgotten_areas: deque[int] = deque()
        self._spare: SharedArea | None = None
        """For KV that is not in shared memory."""
        self._ranks: list[StartedRank | _RemoteRank] = []
        self._board = Board(len(specs))
        self._watch = Watch(silence_s)
        started: deque[BaseException | None] = deque()
        begun = threading.Event()
        self._watcher = threading.Thread(
            target=self._run_watch, args=(specs, started, begun), name="diptych-ranks", daemon=True
        )
        self._watcher.start()
        try:
            begun.wait()
            if (error := started.popleft()) is not None:
                raise error
            for rank in self._started():
                about = json.dumps([len(specs), rank.number]).encode()
                self._tell(Kind.BOARD, 0, {rank.number: about}, self._board.area)
            if nodes is not None:
                links = nodes.links(start_deadline_s, lambda: bool(self._lost))
                self._ranks += [_RemoteRank(number, link) for number, link in links.items()]
            answers = self._call(Kind.READY, b"", deadline_s=start_deadline_s)
            formats = self._kv_parts or (None,) * len(answers)
            self._parts = [
                _capabilities(answer, rank, own)
                for rank, (answer, own) in enumerate(zip(answers, formats, strict=True))
            ]
            self.capabilities = _together(self._parts, sampler)
            if kv is not None:
                blocks = _group_blocks(self._parts, kv, parts)
                self.capabilities = replace(self.capabilities, kv=kv, parts=self._kv_parts, group_blocks=blocks)
        except BaseException:
            self.close(asked=False)
            raise

    def _started(self) -> list[StartedRank]:
        """The ranks of this host."""
        return [rank for rank in self._ranks if isinstance(rank, StartedRank)]

    def check_models(self, fingerprint: str, deadline_s: float) -> None:
        """Args: fingerprint: of this host's weights. Raises: ConfigError where another host has others; ExecutorLost."""
        if self._nodes is not None:
            self._nodes.check_models(fingerprint, deadline_s)

    def on_launched(self, callback: Callable[[], None]) -> None:
        self._on_launched = callback

    def on_lost(self, callback: Callable[[str], None]) -> None:
        self._on_lost = callback
        if self._lost:
            callback(self._lost)

    # ---- steps ----

    def execute(
        self,
        seqs: Sequence[ScheduledSeq],
        should_abort: Callable[[], bool],
        on_layers: Callable[[int], None] | None = None,
    ) -> StepResult:
        """A step is given up where all ranks agree on it: before it is sent, and in one pipeline stage on one host between two
        layers."""
        if should_abort():
            raise StepAborted
        with self._lock:
            self._board.begin_step()
            flags = (WITH_LAYERS if on_layers is not None else 0) | (MAY_GIVE_UP if self._may_give_up else 0)
            call = self._begin_step(Kind.EXECUTE, flags, 0, self._encoder.encode(seqs))
            self._on_launched()
            gave_up, reported, until = False, 0, time.monotonic() + self._deadline_s
            try:
                while not call.done:
                    self._move(_ABORT_POLL_S)
                    if not gave_up and self._may_give_up and should_abort():
                        gave_up = True
                        self._board.give_up(call.number)
                    while on_layers is not None and reported < call.num_layers and not call.done:
                        reported += 1
                        on_layers(reported)
                    self._check_deadline(call, until, self._deadline_s)
            except BaseException:
                self._calls.pop(call.number, None)
                raise
            return step_codec.decode_result(self._taken(call)[self._sampler])

    def launch(self, seqs: Sequence[ScheduledSeq], sources: Sequence[int] = ()) -> StepOnRanks:
        """A rank that cannot launch it says so with the step's result."""
        with self._lock:
            call = self._begin_step(Kind.LAUNCH, 0, self._last_launched, self._encoder.encode(seqs, sources))
            self._last_launched = call.number
        return StepOnRanks(self, call, seqs)

    def draw_step(self, call: _Call, seqs: Sequence[ScheduledSeq], ended: Container[int]) -> None:
        """See StepInFlight.draw. Raises: ExecutorLost."""
        with self._lock:
            body = DRAW.pack(call.number) + self._encoder.encode_draw(seqs, ended)
            self._tell(Kind.DRAW, call.number, self._same(body))

    def step_is_done(self, call: _Call) -> bool:
        """Never blocks. Raises: ExecutorLost."""
        if not call.done:
            with self._lock:
                self._move(0.0)
                self._check_failed(call)
        return call.done

    def step_result(self, call: _Call) -> StepResult:
        with self._lock:
            if not call.done:
                self._tell(Kind.RESULT, call.number, self._same(b""))
            return step_codec.decode_result(self._awaited(call, self._deadline_s)[self._sampler])

    def _begin_step(self, kind: int, flags: int, before: int, body: bytes) -> _Call:
        plain, sampling = (STEP.pack(flags | more, before) + body for more in (0, WITH_RESULT))
        bodies = {rank.number: sampling if rank.number == self._sampler else plain for rank in self._ranks}
        return self._begin(kind, bodies)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self._call(Kind.COPY, step_codec.encode_copies(copies))

    def expect_compiled(self) -> None:
        """See ModelRunner.expect_compiled."""
        self._call(Kind.COMPILED, b"")
        # Until now kernels were compiled. From now on a device computes, while the host looks again and again whether it is done.
        self._watch.cpu_counts = not self.capabilities.runs_ahead

    def note_pulled(
        self, block_table: Sequence[int], token_ids: Sequence[int], first_new: int, first_block: int = 0
    ) -> None:
        """The sampling rank records it: it says what KV was computed from."""
        body = json.dumps([list(block_table), list(token_ids), first_new, first_block]).encode()
        self._call(Kind.PULLED, {self._sampler: body})

    # ---- KV ----

    def pack(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        out: Payload,
        layers: range | None = None,
        group: int = 0,
        part: int = 0,
    ) -> int:
        """KV of rank `part`. Returns: xxh3-64 of its bytes. Raises: InternalError for a range in GPU memory."""
        view = _in_host_memory(out)[: self._size(num_tokens, layers, group, part)]
        with self._lock:
            if isinstance(rank := self._ranks[part], _RemoteRank):
                return int.from_bytes(
                    self._remote_range(rank, Kind.PACK, block_ids, num_tokens, view, layers, group), "little"
                )
            area, offset = self._shared(view)
            [answer] = self._range(Kind.PACK, block_ids, num_tokens, area, offset, len(view), layers, group, part)
            if area is self._spare:
                view[:] = memoryview(area.memory)[offset : offset + len(view)]
        return int.from_bytes(answer, "little")

    def unpack(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        src: Payload,
        layers: range | None = None,
        group: int = 0,
        part: int = 0,
    ) -> None:
        """KV of rank `part`. Raises: InternalError for a range in GPU memory."""
        view = _in_host_memory(src)[: self._size(num_tokens, layers, group, part)]
        with self._lock:
            if (part, group) == self._overwrites:
                self._call(Kind.OVERWRITTEN, {self._sampler: array.array("i", block_ids).tobytes()})
            if isinstance(rank := self._ranks[part], _RemoteRank):
                self._remote_range(rank, Kind.UNPACK, block_ids, num_tokens, view, layers, group)
                return
            area, offset = self._shared(view)
            if area is self._spare:
                memoryview(area.memory)[offset : offset + len(view)] = view
            self._range(Kind.UNPACK, block_ids, num_tokens, area, offset, len(view), layers, group, part)

    def _size(self, num_tokens: int, layers: range | None, group: int, part: int) -> int:
        every, token_bytes = self._parts[part].num_layers, self._parts[part].kv_bytes_per_token
        if self._kv_parts:
            kv = self._kv_parts[part]
            every, token_bytes = kv.groups[group].num_layers, kv.groups[group].bytes_per_token(kv.shard)
        return num_tokens * token_bytes * (every if layers is None else len(layers)) // every

    def _range(
        self,
        kind: int,
        block_ids: Sequence[int],
        num_tokens: int,
        area: SharedArea,
        offset: int,
        size: int,
        layers: range | None,
        group: int,
        part: int,
    ) -> list[bytes]:
        body = _range_body(self._mapped(area), group, offset, size, layers, num_tokens, block_ids)
        return self._call(kind, {part: body})

    def _remote_range(
        self,
        rank: _RemoteRank,
        kind: int,
        block_ids: Sequence[int],
        num_tokens: int,
        view: memoryview,
        layers: range | None,
        group: int,
    ) -> bytes:
        """Receive the KV into `view`, or send it from there. Returns: the answer."""
        self._check()
        call = _Call(next(self._numbers), (rank.number,), 1)
        self._calls[call.number] = call
        if kind == Kind.PACK:
            rank.link.expect_bytes(call.number, view)
        else:
            rank.link.put_bytes(call.number, view)
        body = _range_body(ELSEWHERE, group, 0, len(view), layers, num_tokens, block_ids)
        self._tell(kind, call.number, {rank.number: body})
        [answer] = self._awaited(call, self._deadline_s)
        return answer

    def _shared(self, view: memoryview) -> tuple[SharedArea, int]:
        """Where the ranks find these bytes, or room for as many."""
        found = find(view)
        if found is not None:
            return found
        if self._spare is None or self._spare.size_bytes < len(view):
            self._spare = SharedArea(max(len(view), 1 << 20))
        return self._spare, 0

    def _mapped(self, area: SharedArea) -> int:
        """Its number, once the ranks have its descriptor."""
        if self._forgotten_areas:
            numbers = [self._forgotten_areas.popleft() for _ in range(len(self._forgotten_areas))]
            self._call(Kind.FORGET_AREAS, self._here(json.dumps(numbers).encode()))
        number = self._areas.get(id(area))
        if number is None:
            number = self._areas[id(area)] = next(self._area_numbers)
            self._tell(Kind.MAP, number, self._here(b"\0"), area)
            weakref.finalize(area, _unmapped, self._areas, self._forgotten_areas, id(area)).atexit = False
        return number

    # ---- adapters ----

    def read_adapter(self, folder: Path, facts: AdapterFacts) -> RankAdapter:
        """See ModelRunner.read_adapter, and engine.ranks.adapters. Raises: InternalError when a rank takes too long."""
        self._forget()
        number = next(self._adapter_numbers)
        try:
            self._call(Kind.READ_ADAPTER, encode_read(number, folder, facts))
            until = time.monotonic() + _READ_S
            while True:
                answers = self._call(Kind.ADAPTER_READ, json.dumps(number).encode())
                read = [one for one in map(read_answer, answers) if one is not None]
                if len(read) == len(answers):
                    break
                if time.monotonic() > until:
                    raise InternalError(f"{folder}: the ranks did not read the adapter within {_READ_S:g} s")
                time.sleep(_READ_POLL_S)
        except BaseException:
            self._forgotten.append(number)
            raise
        num_bytes, num_parts = (sum(one[0] for one in read), min(one[1] for one in read))
        adapter = RankAdapter(number, facts.id, facts.rank, num_bytes, num_parts)
        weakref.finalize(adapter, self._forgotten.append, number).atexit = False
        return adapter

    def install_adapter(self, slot: int, adapter: LoadedAdapter, parts: range | None = None) -> None:
        if not isinstance(adapter, RankAdapter):
            raise InternalError(f"{adapter.id} was not read by this executor")
        self._forget()
        body = json.dumps([slot, adapter.number, parts and (parts.start, parts.stop)]).encode()
        self._call(Kind.INSTALL_ADAPTER, body)

    def _forget(self) -> None:
        if self._forgotten:
            numbers = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
            self._call(Kind.FORGET_ADAPTERS, json.dumps(numbers).encode())

    # ---- end ----

    def close(self, *, asked: bool = True) -> None:
        """Ends the ranks' processes. Idempotent. Args: asked: it is no failure, also for other hosts."""
        if self._nodes is not None:
            self._nodes.close(orderly=asked and not self._lost)
        self._lost = self._lost or "the executor was closed"
        with self._lock:
            ranks, self._ranks = self._ranks, []
            for rank in ranks:
                rank.link.close()
        until = time.monotonic() + _END_S
        for rank in ranks:
            if isinstance(rank, _RemoteRank):
                continue
            try:
                rank.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        self._closing.set()
        if self._watcher is not threading.current_thread():
            self._watcher.join(_END_S)

    def _give_up(self, reason: str) -> None:
        """Kill the ranks; any thread. They may wait for the lost one, or be stopped."""
        with self._losing:
            if self._lost:
                return
            self._lost = reason
        _log.critical("the executor is lost: %s", reason)
        for rank in self._started():
            rank.process.kill()
        if self._nodes is not None:
            self._nodes.close(orderly=False)
        self._on_lost(reason)

    def _run_watch(
        self, specs: Sequence[RankSpec], started: deque[BaseException | None], begun: threading.Event
    ) -> None:
        """The thread that starts the processes, which end with it, and watches them."""
        try:
            for number, spec in enumerate(specs):
                self._ranks.append(StartedRank(number, spec))
            started.append(None)
        except BaseException as error:  # raised where the executor is made
            started.append(error)
        ranks = self._started()
        begun.set()
        while not self._closing.wait(POLL_S):
            if self._lost:
                continue
            states = [read_process(rank.process.pid) for rank in ranks]
            busy, pulses, reason = self._board.busy, {}, ""
            if self._nodes is not None:
                elsewhere, pulses, reason = self._nodes.ranks(), self._nodes.pulses(), self._nodes.reason()
                states += [one.state for one in elsewhere]
                busy = busy or any(one.busy for one in elsewhere)
            now = time.monotonic()
            reason = reason or self._watch.look(
                now, busy=busy, counters=self._counters(), processes=states, pulses=pulses
            )
            if reason:
                self._give_up(reason)

    # ---- frames ----

    def _same(self, body: bytes) -> dict[int, bytes]:
        return {rank.number: body for rank in self._ranks}

    def _here(self, body: bytes) -> dict[int, bytes]:
        """Of the ranks on this host."""
        return {rank.number: body for rank in self._started()}

    def _call(self, kind: int, body: bytes | Mapping[int, bytes], *, deadline_s: float = 0.0) -> list[bytes]:
        """Send a frame to every rank, or to those of `body`. Returns: their answers. Raises: ExecutorLost; what a rank raised."""
        with self._lock:
            call = self._begin(kind, self._same(body) if isinstance(body, bytes) else body)
            return self._awaited(call, deadline_s or self._deadline_s)

    def _begin(self, kind: int, bodies: Mapping[int, bytes]) -> _Call:
        call = _Call(next(self._numbers), frozenset(bodies), len(bodies))
        self._calls[call.number] = call
        self._tell(kind, call.number, bodies)
        return call

    def _tell(self, kind: int, number: int, bodies: Mapping[int, bytes], area: SharedArea | None = None) -> None:
        """Send frames. Raises: ExecutorLost."""
        self._check()
        descriptors = () if area is None else (area.descriptor,)
        for number_of_rank, body in bodies.items():
            rank = self._ranks[number_of_rank]
            try:
                rank.link.put(kind, number, body, descriptors)
            except OSError as error:
                self._ended(rank, error)

    def _awaited(self, call: _Call, deadline_s: float) -> list[bytes]:
        until = time.monotonic() + deadline_s
        while not call.done:
            self._move(POLL_S)
            self._check_deadline(call, until, deadline_s)
        return self._taken(call)

    def _taken(self, call: _Call) -> list[bytes]:
        """The bodies of its answers, by rank. Raises: what a rank raised."""
        self._calls.pop(call.number, None)
        answers = []
        for rank, (kind, body) in sorted(call.answers.items()):
            if kind == Kind.ABORTED:
                raise StepAborted
            if kind == Kind.NO_MEMORY:
                raise OutOfDeviceMemory(f"rank {rank}: {body.decode()}")
            if kind == Kind.REFUSED:
                raise ConfigError(*json.loads(body))
            if kind != Kind.OK:
                raise InternalError(f"rank {rank}: {body.decode()}")
            answers.append(body)
        return answers

    def _check_deadline(self, call: _Call, until: float, deadline_s: float) -> None:
        if not call.done and time.monotonic() >= until:
            self._give_up(f"ranks {self._silent(call)} did not answer within {deadline_s:g} s")
            self._check()
        self._check_failed(call)

    def _check_failed(self, call: _Call) -> None:
        """Raises: ExecutorLost where a rank has failed and the others wait for it; ConfigError of a rank that cannot start."""
        if call.done or not (failed := call.failed):
            return
        kind, body = call.answers[failed[0]]
        if kind == Kind.REFUSED:
            self._taken(call)  # others may wait for it until their own deadline; all are closed
        counters, now = self._counters(), time.monotonic()
        if counters != call.counters:
            call.counters, call.still_since = counters, now
        elif now - call.still_since >= _AFTER_FAILURE_S:
            reason = body.decode(errors="replace") or Kind(kind).name.lower()
            self._give_up(f"rank {failed[0]} failed: {reason}; ranks {self._silent(call)} wait for it")
            self._check()

    def _counters(self) -> list[int]:
        """Signs of life of all ranks, on all hosts."""
        elsewhere = [] if self._nodes is None else [one.counter for one in self._nodes.ranks()]
        return self._board.counters() + elsewhere

    def _silent(self, call: _Call) -> list[int]:
        return [rank.number for rank in self._ranks if rank.number in call.ranks and rank.number not in call.answers]

    def _check(self) -> None:
        """Raises: ExecutorLost."""
        if self._lost:
            self._calls.clear()
            self.close()
            raise ExecutorLost(self._lost)

    def _ended(self, rank: StartedRank | _RemoteRank, error: Exception) -> None:
        self._give_up(f"rank {rank.number} ended: {error}")
        self._check()

    def _move(self, timeout_s: float) -> None:
        """Send and receive what can be moved, and wait for so long until there is something. Raises: ExecutorLost."""
        self._check()
        poll = select.poll()
        by_file = {rank.link.fileno(): rank for rank in self._ranks}
        for number, rank in by_file.items():
            poll.register(number, select.POLLIN | (select.POLLOUT if rank.link.outgoing else 0))
        for number, _ in poll.poll(1000.0 * timeout_s):
            rank = by_file[number]
            try:
                rank.link.send()
                for kind, call, body in rank.link.receive():
                    self._on_answer(rank.number, kind, call, body)
            except (OSError, EOFError) as error:
                self._ended(rank, error)
        self._check()

    def _on_answer(self, rank: int, kind: int, number: int, body: bytes) -> None:
        call = self._calls.get(number)
        if call is None:
            return  # of a call that was given up
        if kind == Kind.LAYERS:
            call.layers[rank] = int.from_bytes(body, "little")
        else:
            call.answers[rank] = kind, body


class StepOnRanks:
    """Implements StepInFlight: a step that all ranks have launched."""

    def __init__(self, executor: RanksExecutor, call: _Call, seqs: Sequence[ScheduledSeq]) -> None:
        self._executor, self._call, self._seqs = executor, call, seqs
        self.failed = False

    def draw(self, ended: Container[int] = ()) -> None:
        seqs, self._seqs = self._seqs, ()
        try:
            self._executor.draw_step(self._call, seqs, ended)
        except Exception:
            _log.exception("draws could not be sent to the ranks")
            self.failed = True

    def done(self) -> bool:
        with contextlib.suppress(ExecutorLost):
            return self._executor.step_is_done(self._call)
        return True

    def result(self) -> StepResult:
        return self._executor.step_result(self._call)


def _range_body(
    area: int, group: int, offset: int, size: int, layers: range | None, num_tokens: int, block_ids: Sequence[int]
) -> bytes:
    first, end = (-1, -1) if layers is None else (layers.start, layers.stop)
    head = RANGE.pack(area, group, offset, size, first, end, num_tokens)
    return head + array.array("i", block_ids).tobytes()


def _unmapped(areas: dict[int, int], forgotten: deque[int], key: int) -> None:
    forgotten.append(areas.pop(key))


def _in_host_memory(payload: Payload) -> memoryview:
    if not isinstance(payload, memoryview):
        raise InternalError("an executor over processes has KV in host memory")
    return payload


def _capabilities(answer: bytes, rank: int, own: KvFormat | None) -> RunnerCapabilities:
    """As rank_process declares them, without the formats of its KV; of a rank with `own`, else with one group. Raises:
    ConfigError for other KV groups."""
    declared, names = json.loads(answer)
    expected = names[:1] if own is None else [group.name for group in own.groups]
    if names != expected:
        raise ConfigError("groups", names, f"rank {rank} has these KV groups, and the engine expects {expected}")
    blocks = () if own is None else tuple(declared["group_blocks"])
    tuples = {"eos_token_ids": tuple(declared["eos_token_ids"]), "group_blocks": blocks, "rank_sizes": (), "parts": ()}
    return RunnerCapabilities(**{**declared, **tuples})


def _group_blocks(able: Sequence[RunnerCapabilities], kv: KvFormat, parts: Sequence[KvFormat]) -> tuple[int, ...]:
    """Of the pool of each group. Raises: ConfigError for ranks that have another number of blocks for one group."""
    found: list[set[int]] = [set() for _ in kv.groups]
    for one in group_parts(kv, parts):
        found[one.group].add(able[one.part].group_blocks[one.own])
    if any(len(counts) != 1 for counts in found):
        raise ConfigError("group_blocks", list(map(sorted, found)), "must be the same on every rank")
    return tuple(next(iter(counts)) for counts in found)


def _overwrites(kv: KvFormat, parts: Sequence[KvFormat], sampler: int) -> tuple[int, int] | None:
    """The sampling rank records what the first group's blocks were computed from, and forgets those that it unpacks. Where it has
    no layers of that group: the rank, and the group there, whose unpacked blocks it must be told."""
    holders = [one for one in group_parts(kv, parts) if not one.group]
    return None if any(one.part == sampler for one in holders) else (holders[0].part, holders[0].own)


def _together(parts: Sequence[RunnerCapabilities], sampler: int) -> RunnerCapabilities:
    """
    Args: sampler: the first rank of the last stage; so many ranks as there are from it on are in each stage.
    Raises: ConfigError for ranks whose blocks differ in number or size, or whose slots for adapters differ.
    """
    for name in ("num_blocks", "block_size", "num_host_blocks", "max_loras", "max_lora_rank"):
        values = [asdict(part)[name] for part in parts]
        if any(value != values[0] for value in values):
            raise ConfigError(name, values, "must be the same on every rank")
    return replace(
        parts[sampler],
        num_layers=sum(part.num_layers for part in parts[:: len(parts) - sampler]),
        kv_bytes_per_token=sum(part.kv_bytes_per_token for part in parts),
        rank_sizes=tuple((part.num_layers, part.kv_bytes_per_token) for part in parts) if len(parts) > 1 else (),
        max_model_len=min(part.max_model_len for part in parts),
        runs_ahead=all(part.runs_ahead for part in parts),
        reports_layers=all(part.reports_layers for part in parts),
        verifies_drafts=all(part.verifies_drafts for part in parts),
        grammars=parts[sampler].grammars,
    )
