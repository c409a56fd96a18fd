"""The other hosts of a worker, in its process: who has joined, their signs of life, and the connections of their ranks.

    Nodes(...)      listens
    gather()        until every node has joined                       nodes may leave and come again
    start()         each node starts its ranks, which connect         from here on a node that leaves is lost
    links()         the ranks' connections; nothing listens any more
    close()         the nodes end their ranks

One thread accepts, reads and sends signs of life; a greeting has a thread of its own, with a deadline.
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from diptych.common.addresses import host_port
from diptych.common.errors import ConfigError
from diptych.engine.executor import ExecutorLost
from diptych.engine.ranks.frames import Kind
from diptych.engine.ranks.nodes.joining import RANK, Group, Hello, Refusal, Welcome, check, refusal_of
from diptych.engine.ranks.nodes.links import (
    GREETING_S,
    RefusedError,
    RemoteEnd,
    TlsFiles,
    accept_tls,
    greet_other,
    listen,
    prepare,
    stop_listening,
)
from diptych.engine.ranks.watch import POLL_S, ProcessState

_log = logging.getLogger(__name__)
_MOST_GREETINGS = 32
"""At a time."""
_END_S = 1.0
_PULSE = struct.Struct("<qBd")
"""Of each rank: its counter, flags, CPU seconds."""
_ENDED, _STOPPED, _RUNS, _BUSY = 1, 2, 4, 8


@dataclass(frozen=True, slots=True)
class RankPulse:
    """A rank's signs of life. `busy`: it carries out a frame."""

    counter: int = 0
    busy: bool = False
    state: ProcessState = field(default_factory=ProcessState)


def encode_pulse(ranks: list[RankPulse]) -> bytes:
    return b"".join(
        _PULSE.pack(
            one.counter,
            _ENDED * one.state.ended + _STOPPED * one.state.stopped + _RUNS * one.state.runs + _BUSY * one.busy,
            one.state.cpu_s,
        )
        for one in ranks
    )


def decode_pulse(data: bytes) -> list[RankPulse]:
    """Raises: struct.error."""
    return [
        RankPulse(
            counter,
            bool(flags & _BUSY),
            ProcessState(bool(flags & _ENDED), bool(flags & _STOPPED), bool(flags & _RUNS), cpu_s),
        )
        for counter, flags, cpu_s in _PULSE.iter_unpack(data)
    ]


class _Node:
    """A node that was admitted. `link` is None until it is welcomed."""

    def __init__(self, welcome: Welcome, host: str) -> None:
        self.host = host
        self.link: RemoteEnd | None = None
        self.ranks = [RankPulse() for _ in range(welcome.num_ranks)]
        self.num_pulses = 0
        self.fingerprint = ""
        self.refusal: ConfigError | None = None


class Nodes:
    """Args:
        group: of the hosts.
        host, port: where to listen.
        key: see joining.joining_key.
    Raises: ConfigError when nothing can listen there.
    """

    def __init__(self, group: Group, *, host: str, port: int, key: bytes, tls: TlsFiles | None = None) -> None:
        self.group = group
        self._key = key
        self._context = None
        if tls is not None:
            try:
                self._context = tls.context(server=True)
            except OSError as error:
                raise ConfigError("cluster_cert", tls.cert, f"cannot be used: {error}") from None
        self._listener: socket.socket | None = listen(host, port)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._changed = threading.Condition()
        """Guards what follows."""
        self._nodes: dict[int, _Node] = {}
        self._links: dict[int, RemoteEnd | None] = {}
        """By rank; None: it is being welcomed."""
        self._last_refusal = ""
        self._started = False
        self._lost = ""
        self._num_greetings = 0
        self._closing = threading.Event()
        self._orderly = False
        self._thread = threading.Thread(target=self._run, name="diptych-nodes", daemon=True)
        self._thread.start()

    # ---- the worker's start ----

    def gather(self, deadline_s: float) -> None:
        """Wait for all nodes. Raises: ConfigError when some did not join in time."""
        until = time.monotonic() + deadline_s
        with self._changed:
            while len(present := self._present()) < self.group.nnodes - 1:
                if not self._changed.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                    missing = [node for node in range(1, self.group.nnodes) if node not in present]
                    came = f"nodes {missing} did not join at {host_port(*self.address)} within {deadline_s:g} s"
                    more = f"; the last one that came was refused: {self._last_refusal}" if self._last_refusal else ""
                    raise ConfigError("nnodes", self.group.nnodes, came + more)
        _log.info("all nodes have joined: %s", {number: self._nodes[number].host for number in sorted(self._nodes)})

    def start(self, arguments: Mapping[str, object]) -> None:
        """Let the nodes start their ranks. Args: arguments: of every rank, as JSON holds them. Raises: ExecutorLost."""
        body = json.dumps(dict(arguments)).encode()
        with self._changed:
            self._started = True
            for number in range(1, self.group.nnodes):
                node = self._nodes.get(number)
                if node is None or node.link is None:
                    raise ExecutorLost(f"node {number} has left")
                with contextlib.suppress(OSError):  # the thread finds it ended
                    node.link.put(Kind.START, 0, body)

    def links(self, deadline_s: float, stop: Callable[[], bool]) -> dict[int, RemoteEnd]:
        """The connections of all ranks on other hosts; then nothing listens any more.

        Args: stop: the other ranks are lost meanwhile.
        Raises: ConfigError of a node; ExecutorLost.
        """
        until = time.monotonic() + deadline_s
        expected = self.group.ranks_of_a_node * (self.group.nnodes - 1)
        with self._changed:
            while True:
                self._check()
                links = {rank: link for rank, link in self._links.items() if link is not None}
                if len(links) == expected:
                    break
                if stop() or time.monotonic() >= until:
                    raise ExecutorLost(f"{len(links)} of {expected} ranks of other hosts came within {deadline_s:g} s")
                self._changed.wait(POLL_S)
            self._links = dict.fromkeys(links)
            listener, self._listener = self._listener, None
        if listener is not None:
            stop_listening(listener)
        return dict(sorted(links.items()))

    def check_models(self, fingerprint: str, deadline_s: float) -> None:
        """Wait for what the nodes' folders hold. Raises: ConfigError where it is not what this worker's holds; ExecutorLost."""
        until = time.monotonic() + deadline_s
        with self._changed:
            while True:
                self._check()
                found = {number: node.fingerprint for number, node in self._nodes.items()}
                if all(found.values()):
                    break
                if time.monotonic() >= until:
                    late = [number for number, one in found.items() if not one]
                    raise ExecutorLost(f"nodes {late} did not identify their weights within {deadline_s:g} s")
                self._changed.wait(POLL_S)
            for number, one in sorted(found.items()):
                if one != fingerprint:
                    raise self._other_model(number, one, fingerprint)

    def _other_model(self, number: int, found: str, wanted: str) -> ConfigError:
        """Under the lock: the node is told, too, and all of them end."""
        node = self._nodes[number]
        here = ConfigError("model", found, f"has other content than the worker's folder, {wanted}")
        with contextlib.suppress(OSError):
            if node.link is not None:
                node.link.put(Kind.REFUSED, 0, msgspec.json.encode(refusal_of(here)))
        rule = f"of node {number} ({node.host}) has other content than this worker's, {wanted}"
        self._lost = self._lost or f"the model {found} {rule}"
        return ConfigError("model", found, rule)

    # ---- signs of life ----

    def reason(self) -> str:
        """Why the nodes are lost; empty: they are not."""
        with self._changed:
            refused = next((node.refusal for node in self._nodes.values() if node.refusal is not None), None)
            return self._lost or (str(refused) if refused is not None else "")

    def ranks(self) -> list[RankPulse]:
        """Of all ranks of other hosts, in their order."""
        with self._changed:
            return [rank for _, node in sorted(self._nodes.items()) for rank in node.ranks]

    def pulses(self) -> dict[int, int]:
        """How many came from each node."""
        with self._changed:
            return {number: node.num_pulses for number, node in self._nodes.items()}

    def close(self, *, orderly: bool) -> None:
        """Idempotent. The nodes end their ranks. Args: orderly: the worker was asked to end."""
        self._orderly = orderly
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_END_S + POLL_S)

    # ---- the thread ----

    def _check(self) -> None:
        """Raises: ConfigError; ExecutorLost."""
        for node in self._nodes.values():
            if node.refusal is not None:
                raise node.refusal
        if self._lost:
            raise ExecutorLost(self._lost)

    def _present(self) -> list[int]:
        return [number for number, node in self._nodes.items() if node.link is not None]

    def _run(self) -> None:
        pulsed_at = -POLL_S
        while not self._closing.is_set():
            now = time.monotonic()
            pulse = now - pulsed_at >= POLL_S
            pulsed_at = now if pulse else pulsed_at
            self._move(POLL_S, pulse=pulse)
        self._end()

    def _move(self, timeout_s: float, *, pulse: bool) -> None:
        with self._changed:
            by_file = {node.link.fileno(): number for number, node in self._nodes.items() if node.link is not None}
            listener = self._listener
            if pulse:
                for number in by_file.values():
                    self._talk(number, lambda link: link.put(Kind.PULSE, 0, b""))
        poll = select.poll()
        for number in by_file:
            poll.register(number, select.POLLIN)
        if listener is not None and (at := listener.fileno()) >= 0:
            poll.register(at, select.POLLIN)
        for at, _ in poll.poll(1000.0 * timeout_s):
            if at in by_file:
                with self._changed:
                    self._talk(by_file[at], partial(self._read, by_file[at]))
            elif listener is not None:
                self._accept(listener)

    def _talk(self, number: int, action: Callable[[RemoteEnd], None]) -> None:
        """With a node, under the lock. One that has ended its connection is lost, or leaves while others are waited for."""
        node = self._nodes.get(number)
        if node is None or node.link is None:
            return
        try:
            action(node.link)
            return
        except (OSError, EOFError, struct.error) as error:
            reason = f"node {number} ({node.host}) ended: {error}"
        node.link.close()
        node.link = None
        if self._started:
            self._lost = self._lost or reason
        else:
            del self._nodes[number]
            _log.warning("%s; it may join again", reason)
        self._changed.notify_all()

    def _read(self, number: int, link: RemoteEnd) -> None:
        link.send()
        node = self._nodes[number]
        for kind, _, body in link.receive():
            if kind == Kind.PULSE:
                ranks = decode_pulse(body)
                if ranks:
                    node.ranks = ranks
                node.num_pulses += 1
            elif kind == Kind.MODEL:
                node.fingerprint = body.decode()
                self._changed.notify_all()
            elif kind == Kind.REFUSED:
                one = msgspec.json.decode(body, type=Refusal)
                node.refusal = ConfigError(one.field, one.value, f"on node {number} ({node.host}): {one.rule}")
                self._changed.notify_all()

    def _accept(self, listener: socket.socket) -> None:
        try:
            listener.setblocking(False)
            sock, address = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if listener is not self._listener:
                return  # all have joined
            _log.warning("a host could not be accepted: %s", error)
            self._closing.wait(POLL_S)
            return
        with self._changed:
            if self._num_greetings >= _MOST_GREETINGS:
                sock.close()
                return
            self._num_greetings += 1
        threading.Thread(target=self._greet, args=(sock, address[0]), name="diptych-greeting", daemon=True).start()

    def _greet(self, sock: socket.socket, host: str) -> None:
        admitted: list[Hello] = []

        def admit(hello: Hello) -> Welcome:
            with self._changed:
                check(hello, self.group, self._nodes, self._links)
                welcome = self.group.welcome(hello.node_rank)
                if hello.kind == RANK:
                    self._links[hello.rank] = None
                else:
                    self._nodes[hello.node_rank] = _Node(welcome, host)
                admitted.append(hello)
                return welcome

        try:
            sock.settimeout(GREETING_S)
            prepare(sock)
            sock = accept_tls(sock, self._context, GREETING_S)
            greet_other(sock, self._key, admit)
            self._welcomed(admitted[0], RemoteEnd(sock))
        except RefusedError as refused:
            sock.close()
            _log.warning("%s asked to join, and was refused: %s", host, refused)
            with self._changed:
                self._last_refusal = f"{host}: {refused}"
        except (OSError, EOFError) as error:
            sock.close()
            _log.warning("%s connected, and did not join: %s", host, error)
            with self._changed:
                for hello in admitted:
                    self._left(hello)
        finally:
            with self._changed:
                self._num_greetings -= 1

    def _welcomed(self, hello: Hello, link: RemoteEnd) -> None:
        with self._changed:
            if self._closing.is_set():
                link.close()
            elif hello.kind == RANK:
                self._links[hello.rank] = link
            else:
                self._nodes[hello.node_rank].link = link
                _log.info("node %d has joined from %s", hello.node_rank, self._nodes[hello.node_rank].host)
            self._changed.notify_all()

    def _left(self, hello: Hello) -> None:
        if hello.kind == RANK:
            self._links.pop(hello.rank, None)
        else:
            self._nodes.pop(hello.node_rank, None)

    def _end(self) -> None:
        """Close all connections; nodes that are told why end without an error."""
        with self._changed:
            links = [node.link for node in self._nodes.values() if node.link is not None]
            unused = [link for link in self._links.values() if link is not None]
            listener, self._listener = self._listener, None
        if listener is not None:
            stop_listening(listener)
        for one in unused:
            one.close()
        for link in links:
            with contextlib.suppress(OSError):
                if self._orderly and not self._lost:
                    link.put(Kind.END, 0, b"")
                    link.flush(_END_S)
            link.close()
