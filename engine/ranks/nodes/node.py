"""The process of a host other than the worker's: it joins the worker, starts this host's ranks, and reports their signs of life.

    join -> START: start the ranks -> signs of life in both directions -> the connection ends: the ranks are killed

The ranks have connections of their own to the worker. They end with this process, whatever ends it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from diptych.common.addresses import host_port
from diptych.common.errors import ConfigError
from diptych.engine.ranks.board import Board
from diptych.engine.ranks.frames import Kind
from diptych.engine.ranks.nodes.joining import RANK, Hello, Refusal, Welcome, refusal_of
from diptych.engine.ranks.nodes.links import GREETING_S, Place, RemoteEnd, TlsFiles, connect, greet_worker
from diptych.engine.ranks.nodes.nodes import RankPulse, encode_pulse
from diptych.engine.ranks.starting import RankSpec, StartedRank
from diptych.engine.ranks.watch import POLL_S, Silence, read_process

_log = logging.getLogger(__name__)
_RETRY_S = 0.5
_LEAST_SILENCE_S = 10.0
"""Of the worker, after which this host's ranks end: it may be busy, and loses nothing by waiting."""
_END_S = 2.0
"""From a rank's end to that of the connection."""


@dataclass(frozen=True, slots=True)
class Joining:
    """How to find the worker.

    Args:
        host, port: of the worker.
        hello: who this is.
        key: see joining.joining_key. secret_name: of its file, for an error.
        deadline_s: until the worker answers.
    """

    host: str
    port: int
    hello: Hello
    key: bytes
    secret_name: str
    tls: TlsFiles | None
    deadline_s: float


MakeSpecs = Callable[[Mapping[str, object], Welcome, str, str], Sequence[RankSpec]]
"""(the worker's arguments, what it welcomed us with, this host's address, the worker's) -> how this host's ranks are started.
Raises: ConfigError."""


class Node:
    """Args:
    make_specs: see MakeSpecs.
    fingerprint: of this host's model folder, by the worker's arguments. Called in a thread of its own. Raises: ConfigError.
    """

    def __init__(
        self, joining: Joining, make_specs: MakeSpecs, fingerprint: Callable[[Mapping[str, object]], str]
    ) -> None:
        self._joining, self._make_specs, self._fingerprint = joining, make_specs, fingerprint
        self._asked = 0
        self._board: Board | None = None
        self._ranks: list[StartedRank] = []
        self._found: list[str | ConfigError] = []
        self._ended_at: float | None = None

    def ask_to_end(self) -> None:
        """From a signal handler. Once the ranks are started, the worker ends first, when it has drained; a second time ends
        them at once."""
        self._asked += 1

    def run(self) -> int:
        """Until the worker ends. Returns: 0 when it ended as asked, else 1. Raises: ConfigError."""
        joined = self._join()
        if joined is None:
            return 0
        link, welcome, own, worker = joined
        try:
            return self._serve(link, welcome, own, worker)
        except (OSError, EOFError) as error:
            _log.error("the worker is lost: %s", error)
            return 1
        finally:
            link.close()
            self._kill()

    def _join(self) -> tuple[RemoteEnd, Welcome, str, str] | None:
        """None: it was asked to end. Raises: ConfigError."""
        one, until = self._joining, time.monotonic() + self._joining.deadline_s
        where = host_port(one.host, one.port)
        while True:
            try:
                sock = connect(one.host, one.port, one.host, one.tls, GREETING_S)
                try:
                    welcome = greet_worker(sock, one.key, one.hello, one.secret_name)
                    own, worker = sock.getsockname()[0], sock.getpeername()[0]
                except BaseException:
                    sock.close()
                    raise
                _log.info("joined the worker at %s as node %d", where, one.hello.node_rank)
                return RemoteEnd(sock), welcome, own, worker
            except (OSError, EOFError) as error:
                if isinstance(error, ssl.SSLError) and not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
                    rule = f"does not fit the worker's at {where}: {error.reason or error}"
                    raise ConfigError("cluster_cert", one.tls.cert if one.tls else "", rule) from None
                if time.monotonic() >= until:
                    rule = f"no worker answered at port {one.port} within {one.deadline_s:g} s: {error}"
                    raise ConfigError("master_addr", one.host, rule) from None
            if self._asked:
                return None
            time.sleep(_RETRY_S)

    def _serve(self, link: RemoteEnd, welcome: Welcome, own: str, worker: str) -> int:
        silence = Silence(max(_LEAST_SILENCE_S, welcome.silence_s))
        while True:
            link.wait(POLL_S)
            link.send()
            came = False
            for kind, _, body in link.receive():
                came = True
                if kind == Kind.END:
                    _log.info("the worker has ended")
                    return 0
                if kind == Kind.REFUSED:
                    raise msgspec.json.decode(body, type=Refusal).error()
                if kind == Kind.START:
                    self._start(link, json.loads(body), welcome, own, worker)
            now = time.monotonic()
            if silence.lasts(now, came=came):
                raise EOFError(f"it gave no sign of life for {silence.most_s:g} s")
            if self._asked > (1 if self._ranks else 0):
                _log.info("ending at once, as asked")
                return 1
            self._report(link, now)

    def _start(self, link: RemoteEnd, arguments: Mapping[str, object], welcome: Welcome, own: str, worker: str) -> None:
        """Raises: ConfigError, which the worker is told."""
        one = self._joining
        try:
            specs = self._make_specs(arguments, welcome, own, worker)
        except ConfigError as error:
            self._refuse(link, error)
            raise
        self._board = Board(len(specs))
        hello = msgspec.structs.replace(one.hello, kind=RANK, attempt=welcome.attempt)
        for index, spec in enumerate(specs):
            rank = StartedRank(welcome.first_rank + index, spec)
            self._ranks.append(rank)
            place = Place(
                worker, one.port, one.host, one.key.hex(), one.tls, msgspec.structs.replace(hello, rank=rank.number)
            )
            about = json.dumps([len(specs), index, msgspec.to_builtins(place)]).encode()
            rank.link.put(Kind.BOARD, 0, about, (self._board.area.descriptor,))
        threading.Thread(target=self._identify, args=(arguments,), name="diptych-hash", daemon=True).start()

    def _identify(self, arguments: Mapping[str, object]) -> None:
        try:
            self._found.append(self._fingerprint(arguments))
        except ConfigError as error:
            self._found.append(error)
        except Exception as error:
            _log.exception("the model folder could not be read")
            self._found.append(ConfigError("model", str(arguments.get("model", "")), f"cannot be read: {error}"))

    def _refuse(self, link: RemoteEnd, error: ConfigError) -> None:
        with contextlib.suppress(OSError):
            link.put(Kind.REFUSED, 0, msgspec.json.encode(refusal_of(error)))
            link.flush(_END_S)

    def _report(self, link: RemoteEnd, now: float) -> None:
        """Raises: ConfigError; EOFError when a rank has ended, and the worker does not end either."""
        pulses = []
        for index, rank in enumerate(self._ranks):
            assert self._board is not None
            place = self._board.place_of(index)
            state = read_process(rank.process.pid)
            pulses.append(RankPulse(self._board.words[place], bool(self._board.words[place + 1]), state))
            if state.ended and self._ended_at is None:
                _log.error("rank %d has ended", rank.number)
                self._ended_at = now
        link.put(Kind.PULSE, 0, encode_pulse(pulses))
        while self._found:
            found = self._found.pop()
            if isinstance(found, ConfigError):
                self._refuse(link, found)
                raise found
            link.put(Kind.MODEL, 0, found.encode())
        if self._ended_at is not None and now - self._ended_at >= _END_S:
            raise EOFError("a rank of this host has ended")

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
            rank.link.close()
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(_END_S)
