"""An executor over several processes, one for each rank: every rank gets the same step message, one of them samples.

    engine --frame--> every rank        the same bytes to each
    engine <--frame-- every rank        "ok", or why not; the sampling rank's holds the step's result

A frame is a kind (1 byte), a length (4 bytes, big endian) and so many bytes. A rank that ends, or does not take a frame
or answer within the deadline, is lost: all ranks are killed, and every call raises ExecutorLost. So no rank waits for a
lost one for longer than the deadline, whatever it waits in.

KV is sharded by rank: a packed range is each rank's bytes, one rank after the other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import xxhash

from diptych.common import child
from diptych.common.adapters.peft import AdapterFacts
from diptych.common.errors import ConfigError, InternalError
from diptych.engine import step_codec
from diptych.engine.executor import ExecutorLost
from diptych.engine.messages import BlockCopy, LoadedAdapter, Payload, ScheduledSeq, StepResult
from diptych.engine.rank_adapters import RankAdapter, encode_read, read_answer
from diptych.engine.runner import OutOfDeviceMemory, RunnerCapabilities, StepAborted, StepInFlight

_log = logging.getLogger(__name__)
READY, EXECUTE, COPY, PACK, UNPACK, PULLED, OK, NO_MEMORY, FAILED = range(9)
READ_ADAPTER, ADAPTER_READ, INSTALL_ADAPTER, FORGET_ADAPTERS = range(9, 13)
"""Kinds of frames."""
HEAD = struct.Struct(">BI")
_READ_POLL_S = 0.02
"""Interval at which ranks are asked whether they have read an adapter."""
_READ_S = 300.0
_END_S = 5.0
"""A rank's process ends by itself when its socket is closed; after this it is killed."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """How a rank's process is started.

    Args:
        factory: "module:callable"; called with `arguments`, returns the rank's ModelRunner.
        arguments: by name, as JSON holds them.
        env: the process's whole environment; None: ours without passwords.
    """

    factory: str
    arguments: Mapping[str, object]
    env: Mapping[str, str] | None = None


class _Rank:
    """The engine's end of one rank."""

    def __init__(self, number: int, spec: RankSpec, *, samples: bool) -> None:
        self.number = number
        self.socket, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable, "-P", "-m", "diptych.engine.rank_process", spec.factory, json.dumps(dict(spec.arguments)),
                "1" if samples else "0",
            ]  # fmt: skip
            self.process: subprocess.Popen[bytes] = child.start(
                command,
                env=child.environment() if spec.env is None else spec.env,
                stdin=theirs.fileno(),
                stdout=child.DEVNULL,
            )
        self.socket.setblocking(False)
        self.outgoing = memoryview(b"")
        self.incoming = bytearray()

    def begin(self, frame: bytes) -> None:
        self.outgoing, self.incoming = memoryview(frame), bytearray()

    @property
    def answered(self) -> bool:
        return len(self.incoming) >= HEAD.size and len(self.incoming) == HEAD.size + HEAD.unpack_from(self.incoming)[1]

    def move(self) -> None:
        """Send and receive what can be moved without waiting. Raises: OSError; EOFError."""
        with contextlib.suppress(BlockingIOError):
            while self.outgoing:
                self.outgoing = self.outgoing[self.socket.send(self.outgoing) :]
        with contextlib.suppress(BlockingIOError):
            while not self.answered:
                data = self.socket.recv(1 << 20)
                if not data:
                    raise EOFError("it ended")
                self.incoming += data


class RanksExecutor:
    """Starts one process for each spec, in the order of the ranks. Implements Executor.

    Args:
        sampler: the rank that samples: rank 0 of the last pipeline stage.
        deadline_s: for one call, from its first byte to the last rank's answer.
        start_deadline_s: until all runners are made.
    Raises: ExecutorLost when a rank does not come up; ConfigError when the ranks' runners do not fit together.
    """

    def __init__(
        self, specs: Sequence[RankSpec], *, sampler: int, deadline_s: float, start_deadline_s: float = 600.0
    ) -> None:
        if not 0 <= sampler < len(specs):
            raise ConfigError("sampler", sampler, f"must be one of {len(specs)} ranks")
        self._sampler, self._deadline_s = sampler, deadline_s
        self._lost: str | None = None
        self._lock = threading.Lock()
        """Of the frames: one call at a time. A step holds it for its length."""
        self._adapter_numbers = itertools.count()
        self._forgotten: deque[int] = deque()
        """Numbers of adapters that nothing holds any more."""
        self._ranks: list[_Rank] = []
        try:
            for number, spec in enumerate(specs):
                self._ranks.append(_Rank(number, spec, samples=number == sampler))
            declared = [json.loads(answer) for answer in self._call(READY, b"", start_deadline_s)]
            self._parts = [
                RunnerCapabilities(
                    **{**one, "eos_token_ids": tuple(one["eos_token_ids"]), "group_blocks": (), "rank_sizes": ()}
                )
                for one in declared
            ]
            self.capabilities = _together(self._parts, self._parts[sampler])
        except BaseException:
            self.close()
            raise

    def on_launched(self, callback: Callable[[], None]) -> None:
        """Never called: no step is on a device when `execute` returns."""

    def execute(
        self,
        seqs: Sequence[ScheduledSeq],
        should_abort: Callable[[], bool],
        on_layers: Callable[[int], None] | None = None,
    ) -> StepResult:
        """A step is given up before it is sent, or not at all: ranks must agree."""
        if should_abort():
            raise StepAborted
        answers = self._call(EXECUTE, step_codec.encode_seqs(seqs), self._deadline_s)
        return step_codec.decode_result(answers[self._sampler])

    def launch(self, seqs: Sequence[ScheduledSeq], sources: Sequence[int] = ()) -> StepInFlight:
        raise InternalError("an executor over processes launches no steps ahead")

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self._call(COPY, step_codec.encode_copies(copies), self._deadline_s)

    def pack(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        out: Payload,
        layers: range | None = None,
        group: int = 0,
        part: int = 0,
    ) -> int:
        """KV of rank `part`. Returns: xxh3-64 of its bytes. Raises: InternalError for a range of some layers or of one of several
        groups, or in GPU memory."""
        if layers is not None or group or not isinstance(out, memoryview):
            raise InternalError("an executor over processes packs whole ranges into host memory")
        body = json.dumps([list(block_ids), num_tokens]).encode()
        [data] = self._call_some(PACK, {part: body}, self._deadline_s)
        out[: len(data)] = data
        return int(xxhash.xxh3_64_intdigest(data))

    def unpack(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        src: Payload,
        layers: range | None = None,
        group: int = 0,
        part: int = 0,
    ) -> None:
        """KV of rank `part`. Raises: InternalError for a range of some layers or of one of several groups, or in GPU memory."""
        if layers is not None or group or not isinstance(src, memoryview):
            raise InternalError("an executor over processes unpacks whole ranges from host memory")
        head = json.dumps([list(block_ids), num_tokens]).encode() + b"\n"
        size = num_tokens * self._parts[part].kv_bytes_per_token
        self._call_some(UNPACK, {part: head + bytes(src[:size])}, self._deadline_s)

    def read_adapter(self, folder: Path, facts: AdapterFacts) -> RankAdapter:
        """See ModelRunner.read_adapter, and engine.rank_adapters. Raises: InternalError when a rank takes too long."""
        self._forget()
        number = next(self._adapter_numbers)
        try:
            self._call(READ_ADAPTER, encode_read(number, folder, facts), self._deadline_s)
            until = time.monotonic() + _READ_S
            while True:
                answers = self._call(ADAPTER_READ, json.dumps(number).encode(), self._deadline_s)
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
        self._call(
            INSTALL_ADAPTER,
            json.dumps([slot, adapter.number, parts and (parts.start, parts.stop)]).encode(),
            self._deadline_s,
        )

    def _forget(self) -> None:
        if self._forgotten:
            numbers = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
            self._call(FORGET_ADAPTERS, json.dumps(numbers).encode(), self._deadline_s)

    def note_pulled(
        self, block_table: Sequence[int], token_ids: Sequence[int], first_new: int, first_block: int = 0
    ) -> None:
        """The sampling rank records it: it says what KV was computed from."""
        body = json.dumps([list(block_table), list(token_ids), first_new, first_block]).encode()
        self._call_some(PULLED, {self._sampler: body}, self._deadline_s)

    def close(self) -> None:
        """Ends the ranks' processes. Idempotent."""
        ranks, self._ranks = self._ranks, []
        self._lost = self._lost or "the executor was closed"
        for rank in ranks:
            rank.socket.close()
        until = time.monotonic() + _END_S
        for rank in ranks:
            try:
                rank.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()

    # ---- frames ----

    def _call(self, kind: int, body: bytes, deadline_s: float) -> list[bytes]:
        """Send one frame to every rank. Returns: the ranks' answers. Raises: ExecutorLost; what a rank raised."""
        return self._call_some(kind, dict.fromkeys(range(len(self._ranks)), body), deadline_s)

    def _call_some(self, kind: int, bodies: Mapping[int, bytes], deadline_s: float) -> list[bytes]:
        """Send a frame to each of these ranks. Returns and raises as _call."""
        with self._lock:
            return self._exchange(kind, bodies, deadline_s)

    def _exchange(self, kind: int, bodies: Mapping[int, bytes], deadline_s: float) -> list[bytes]:
        if self._lost is not None:
            raise ExecutorLost(self._lost)
        until = time.monotonic() + deadline_s
        asked = [self._ranks[number] for number in bodies]
        for rank, body in zip(asked, bodies.values(), strict=True):
            rank.begin(HEAD.pack(kind, len(body)) + body)
        waiting = list(asked)
        while waiting:
            for rank in waiting:
                try:
                    rank.move()
                except (OSError, EOFError) as error:
                    self._give_up(f"rank {rank.number} ended: {error}")
            waiting = [rank for rank in waiting if not rank.answered]
            if waiting and not _wait(waiting, until - time.monotonic()):
                self._give_up(f"ranks {[rank.number for rank in waiting]} did not answer within {deadline_s:g} s")
        return self._answers(asked)

    @staticmethod
    def _answers(asked: Sequence[_Rank]) -> list[bytes]:
        answers = []
        for rank in asked:
            kind, body = rank.incoming[0], bytes(rank.incoming[HEAD.size :])
            if kind == NO_MEMORY:
                raise OutOfDeviceMemory(f"rank {rank.number}: {body.decode()}")
            if kind != OK:
                raise InternalError(f"rank {rank.number}: {body.decode()}")
            answers.append(body)
        return answers

    def _give_up(self, reason: str) -> None:
        self._lost = reason
        _log.critical("the executor is lost: %s", reason)
        for rank in self._ranks:
            rank.process.kill()  # others may wait for the lost one
        self.close()
        raise ExecutorLost(reason)


def _wait(ranks: Sequence[_Rank], timeout_s: float) -> bool:
    """Until one of them can be read, or written where something is to be sent. Returns: False: the time is over."""
    if timeout_s <= 0.0:
        return False
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.outgoing else 0)
            selector.register(rank.socket, events)
        return bool(selector.select(timeout_s))


def _together(parts: Sequence[RunnerCapabilities], sampler: RunnerCapabilities) -> RunnerCapabilities:
    """Raises: ConfigError for ranks whose blocks differ in number or size, or whose slots for adapters differ."""
    for name in ("num_blocks", "block_size", "num_host_blocks", "max_loras", "max_lora_rank"):
        values = [asdict(part)[name] for part in parts]
        if any(value != values[0] for value in values):
            raise ConfigError(name, values, "must be the same on every rank")
    return replace(
        sampler,
        kv_bytes_per_token=sum(part.kv_bytes_per_token for part in parts),
        rank_sizes=tuple((part.num_layers, part.kv_bytes_per_token) for part in parts) if len(parts) > 1 else (),
        max_model_len=min(part.max_model_len for part in parts),
        runs_ahead=False,
        reports_layers=False,
        verifies_drafts=all(part.verifies_drafts for part in parts),
        grammars=False,
    )
