"""The process of one rank; engine.ranks.executor starts it.

    python -m diptych.engine.ranks.process MODULE:CALLABLE ARGUMENTS_AS_JSON

Its standard input is the socket to the engine, see engine.ranks.frames. It ends when that is closed.
Where the engine is on another host, it is the socket to this host's node (engine.ranks.nodes), which says where the engine is.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import signal
import socket
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NoReturn

import msgspec

from diptych.common.collector import hold_collector, set_collector
from diptych.common.errors import ConfigError
from diptych.common.observe.logging import setup_logging
from diptych.common.shared_memory import SharedArea, attached
from diptych.engine.messages import ScheduledSeq, StepResult
from diptych.engine.progress import count_at, progress
from diptych.engine.ranks import step_codec
from diptych.engine.ranks.adapters import AdaptersOfRank
from diptych.engine.ranks.board import Agreement, Board
from diptych.engine.ranks.frames import (
    DRAW,
    ELSEWHERE,
    MAY_GIVE_UP,
    RANGE,
    STEP,
    WITH_LAYERS,
    WITH_RESULT,
    Kind,
    RankEnd,
)
from diptych.engine.ranks.nodes.links import Place, RemoteRankEnd, join_as_rank
from diptych.engine.runner import ModelRunner, OutOfDeviceMemory, RunnerLost, StepAborted, StepInFlight

_log = logging.getLogger(__name__)
_POLL_S = 0.0001
"""Interval at which a step on a device is asked whether it has landed."""


@dataclass(slots=True)
class _Launched:
    """A step on the device. `error`: it could not be launched."""

    call: int
    with_result: bool
    seqs: Sequence[ScheduledSeq]
    step: StepInFlight | None = None
    error: Exception | None = None
    drawn: bool = False

    def result(self) -> StepResult:
        """Waits. Raises: what ModelRunner.execute raises."""
        if self.error is not None:
            raise self.error
        assert self.step is not None
        return self.step.result()


class Rank:
    """One runner, and what the engine wants of it.

    Args: board, number: of this rank, where signs of life are counted.
    """

    def __init__(self, runner: ModelRunner, link: RankEnd, board: Board, number: int) -> None:
        self._runner, self._link = runner, link
        self._board, self._number = board, number
        self._decoder = step_codec.SeqDecoder()
        self._adapters = AdaptersOfRank(runner)
        self._areas: dict[int, SharedArea] = {}
        self._flying: deque[_Launched] = deque()
        self._failed_call = -1
        """The last step that was launched in vain."""
        self._calls: dict[int, Callable[[bytes], bytes | None]] = {
            Kind.READY: lambda body: _declared(runner),
            Kind.COPY: lambda body: runner.copy_blocks(step_codec.decode_copies(body)),
            Kind.FORGET_AREAS: self._forget_areas,
            Kind.UNPACK: self._unpack,
            Kind.PULLED: lambda body: runner.note_pulled(*json.loads(body)),
            Kind.OVERWRITTEN: lambda body: runner.note_overwritten(array("i", body)),
            Kind.READ_ADAPTER: self._adapters.begin,
            Kind.ADAPTER_READ: lambda body: self._adapters.answer(json.loads(body)),
            Kind.INSTALL_ADAPTER: lambda body: self._adapters.install(*json.loads(body)),
            Kind.FORGET_ADAPTERS: lambda body: self._adapters.forget(json.loads(body)),
            Kind.COMPILED: lambda body: runner.expect_compiled(),
        }

    def serve(self) -> None:
        """Until the engine closes the connection. Raises: EOFError."""
        while True:
            first = self._flying[0] if self._flying else None
            if first is None or not first.drawn or self._link.comes(_POLL_S):
                self._take_one()
            elif first.step is None or first.step.done():
                self._land()

    def _take_one(self) -> None:
        """Receive a frame, and carry it out. Raises: EOFError."""
        kind, call, body, descriptor = self._link.receive()
        with self._busy():
            self._carry_out(Kind(kind), call, body, descriptor)

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """Signs of life are expected meanwhile."""
        words, at = self._board.words, self._board.place_of(self._number) + 1
        before, words[at] = words[at], 1
        progress()
        try:
            yield
        finally:
            progress()
            words[at] = before

    def _carry_out(self, kind: Kind, call: int, body: bytes, descriptor: int) -> None:
        match kind:
            case Kind.MAP:
                self._areas[call] = attached(descriptor)
            case Kind.EXECUTE:
                self._execute(call, body)
            case Kind.LAUNCH:
                self._launch(call, body)
            case Kind.PACK:
                self._answer(call, lambda: self._pack(call, body))
            case Kind.DRAW:
                self._draw(body)
            case Kind.RESULT:
                while self._flying and self._flying[0].call <= call:
                    self._land()
            case _:
                carry_out = self._calls[kind]
                self._answer(call, lambda: carry_out(body))

    def _answer(self, call: int, action: Callable[[], bytes | None]) -> None:
        try:
            kind, body = Kind.OK, action() or b""
        except StepAborted:
            kind, body = Kind.ABORTED, b""
        except OutOfDeviceMemory as error:
            kind, body = Kind.NO_MEMORY, str(error).encode()
        except RunnerLost:
            raise  # this rank can compute nothing any more: the executor finds it ended
        except Exception as error:  # the engine ends the step's requests, as it does for a runner of its own
            _log.exception("call %d failed", call)
            kind, body = Kind.FAILED, f"{type(error).__name__}: {error}".encode()
        self._link.send(kind, call, body)

    # ---- steps ----

    def _execute(self, call: int, body: bytes) -> None:
        flags, _ = STEP.unpack_from(body)
        seqs, _ = self._decoder.decode(body[STEP.size :])
        agreed = Agreement(self._board, call, decides=not self._number) if flags & MAY_GIVE_UP else None

        def should_abort() -> bool:
            progress()
            return agreed is not None and agreed()

        def compute() -> bytes:
            result = self._runner.execute(seqs, should_abort)
            return step_codec.encode_result(result) if flags & WITH_RESULT else b""

        if flags & WITH_LAYERS:
            self._runner.on_layers = lambda num_layers: self._between_layers(call, num_layers)
        try:
            self._answer(call, compute)
        finally:
            self._runner.on_layers = _ignore

    def _between_layers(self, call: int, num_layers: int) -> None:
        """Report, and carry out what the engine wants meanwhile: it packs the KV of these layers."""
        progress()
        self._link.send(Kind.LAYERS, call, num_layers.to_bytes(4, "little"))
        while self._link.comes(0.0):
            self._take_one()

    def _launch(self, call: int, body: bytes) -> None:
        flags, before = STEP.unpack_from(body)
        seqs, sources = self._decoder.decode(body[STEP.size :])
        one = _Launched(call, bool(flags & WITH_RESULT), seqs)
        self._flying.append(one)
        try:
            if before == self._failed_call and any(source >= 0 for source in sources):
                raise RuntimeError("the step in front of it was not computed")
            one.step = self._runner.launch(seqs, sources)
        except Exception as error:  # its result says so
            one.error, self._failed_call = error, call

    def _draw(self, body: bytes) -> None:
        [call] = DRAW.unpack_from(body)
        one = next(one for one in self._flying if one.call == call)
        ended = self._decoder.decode_draw(body[DRAW.size :], one.seqs)
        one.drawn = True
        if one.step is not None:
            one.step.draw(ended)
            if one.step.failed:
                self._failed_call = call

    def _land(self) -> None:
        """Answer with the first step's result; waits for it."""
        one = self._flying.popleft()

        def result() -> bytes:
            found = one.result()
            return step_codec.encode_result(found) if one.with_result else b""

        with self._busy():
            self._answer(one.call, result)

    # ---- KV ----

    def _pack(self, call: int, body: bytes) -> bytes:
        blocks, num_tokens, view, layers, group = self._range(body)
        checksum = self._runner.pack(blocks, num_tokens, view, layers, group)
        if isinstance(self._link, RemoteRankEnd):
            self._link.send_bytes(call, view)
        return checksum.to_bytes(8, "little")

    def _unpack(self, body: bytes) -> None:
        blocks, num_tokens, view, layers, group = self._range(body)
        copy = self._runner.unpack(blocks, num_tokens, view, layers, group)
        if copy is not None:
            copy.wait()

    def _range(self, body: bytes) -> tuple[list[int], int, memoryview, range | None, int]:
        number, group, offset, size, first, end, num_tokens = RANGE.unpack_from(body)
        blocks = array("i")
        blocks.frombytes(body[RANGE.size :])
        if number == ELSEWHERE:
            assert isinstance(self._link, RemoteRankEnd)
            view = self._link.room(size)
        else:
            view = memoryview(self._areas[number].memory)[offset : offset + size]
        return blocks.tolist(), num_tokens, view, None if first < 0 else range(first, end), group

    def _forget_areas(self, body: bytes) -> None:
        for number in json.loads(body):
            self._areas.pop(number, None)


def _ignore(num_layers: int) -> None: ...


def _declared(runner: ModelRunner) -> bytes:
    able = runner.capabilities
    names = ["full"] if able.kv is None else [group.name for group in able.kv.groups]
    return json.dumps([asdict(replace(able, kv=None)), names]).encode()


def _end() -> NoReturn:
    """At once: an orderly end of the libraries takes seconds."""
    logging.shutdown()
    signal.raise_signal(signal.SIGKILL)
    raise AssertionError("the process has ended")


def main(factory: str, arguments: str) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # sent to all processes of a worker, which goes on until it has drained
    link = RankEnd(socket.socket(fileno=0))
    try:
        kind, _, body, descriptor = link.receive()
        assert kind == Kind.BOARD, f"a frame of kind {kind} came first"
        num_ranks, number, *elsewhere = json.loads(body)
        board = Board(num_ranks, attached(descriptor))
        count_at(board.words, board.place_of(number))
        place = msgspec.convert(elsewhere[0], Place) if elsewhere else None
        setup_logging(rank=number if place is None else place.hello.rank)
        if place is not None:
            link = join_as_rank(place)
        module, _, name = factory.partition(":")
        hold_collector()
        make = getattr(importlib.import_module(module), name)
        try:
            runner = make(**json.loads(arguments))
        except ConfigError as error:
            _, call, _, _ = link.receive()
            link.send(Kind.REFUSED, call, json.dumps([error.field, error.value, error.rule], default=str).encode())
            link.receive()  # until the engine has read it, and closes the socket
            return
        set_collector()
        Rank(runner, link, board, number).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        _end()


if __name__ == "__main__":
    main(*sys.argv[1:])
