"""A TCP proxy that misbehaves as a network does: latency, jitter, bandwidth, slices, silence, resets, damaged bytes.

    client --up--> proxy --up--> target
    client <-down- proxy <-down- target

Faults of a direction (`Link`) hold for all connections and may change while bytes flow. Nothing that TCP delivers is lost or
reordered: a link that is cut holds its bytes, as retransmission does, and both sides go on waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from diptych_tests import waiting

_MOST = 1 << 16
_WAITING = 4096
"""Slices that are under way in a direction before its sender is held up."""
_ABORT = struct.pack("ii", 1, 0)
Change = Callable[[bytes], bytes]


class Reset(Exception):
    """Raised by a `change`: the connection is reset before these bytes are sent."""


@dataclass
class Link:
    """One direction.

    Args:
        latency_s: each byte arrives so much later; without effect on the rate.
        jitter_s: at most so much more, drawn for each slice; the order stays.
        bytes_per_s: rate of each connection.
        slice_bytes: most bytes that are sent at once.
        change: gets each slice, returns what is sent instead, of the same length; see `flip_at` and `reset_at`.
    """

    latency_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = math.inf
    slice_bytes: int = _MOST
    change: Change | None = None
    carried: int = 0
    """Bytes that arrived, on all connections."""
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.opened.set()

    def cut(self) -> None:
        self.opened.clear()

    def heal(self) -> None:
        self.opened.set()

    async def until_carried(self, count: int) -> None:
        await waiting.until(lambda: self.carried >= count, f"{count} bytes were carried")


def flip_at(offset: int) -> Change:
    """Change the byte that comes so many bytes from now, once."""
    left = offset

    def change(data: bytes) -> bytes:
        nonlocal left
        at, left = left, left - len(data)
        return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :] if 0 <= at < len(data) else data

    return change


def reset_at(offset: int) -> Change:
    """Reset the connection in the slice that has the byte that comes so many bytes from now, once."""
    left = offset

    def change(data: bytes) -> bytes:
        nonlocal left
        at, left = left, left - len(data)
        if 0 <= at < len(data):
            raise Reset
        return data

    return change


class FaultProxy:
    """Listens at `host`:`port` for `target`, which is asked for at each connection. `up` and `down` are the directions."""

    def __init__(
        self, target: Callable[[], tuple[str, int]], *, host: str = "127.0.0.1", port: int = 0, seed: int = 1
    ) -> None:
        self.target, self.host, self.port = target, host, port
        self.up, self.down = Link(), Link()
        self.connections = self.resets = 0
        """So far; resets by a `change`."""
        self._rng = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._on_connection, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Nothing arrives any more in either direction, and nothing breaks."""
        self.up.cut()
        self.down.cut()

    def heal(self) -> None:
        self.up.heal()
        self.down.heal()

    def reset(self) -> None:
        """RST to both sides of every connection."""
        _reset(self._writers)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = {writer}
        try:
            await self.up.opened.wait()  # as an answer to a SYN that did not arrive
            there, back = await asyncio.open_connection(*self.target())
            mine.add(back)
            self._writers |= mine
            async with asyncio.TaskGroup() as group:
                for link, source, sink in ((self.up, reader, back), (self.down, there, writer)):
                    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_WAITING)
                    group.create_task(self._take(link, source, under_way))
                    group.create_task(self._deliver(link, under_way, sink))
        except* Reset:
            self.resets += 1
            _reset(mine)
        except* OSError:
            _reset(mine)
        finally:
            self._writers -= mine
            for one in mine:
                one.close()

    async def _take(
        self, link: Link, source: asyncio.StreamReader, under_way: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        """Slices, and when each is due; an empty one is the end."""
        loop = asyncio.get_running_loop()
        sent_at = due = 0.0
        while True:
            data = await source.read(link.slice_bytes)
            sent_at = max(loop.time(), sent_at) + len(data) / link.bytes_per_s
            due = max(due, sent_at + link.latency_s + self._rng.random() * link.jitter_s)
            await under_way.put((due, data))
            if not data:
                return

    async def _deliver(
        self, link: Link, under_way: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await under_way.get()
            if (left := due - loop.time()) > 0:
                await asyncio.sleep(left)  # sleep: the link's own delay
            await link.opened.wait()
            if not data:
                sink.write_eof()
                return
            sink.write(link.change(data) if link.change is not None else data)
            await sink.drain()
            link.carried += len(data)


def _reset(writers: Iterable[asyncio.StreamWriter]) -> None:
    for writer in list(writers):
        with contextlib.suppress(OSError):  # closed already
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        writer.transport.abort()


@asynccontextmanager
async def fault_proxy(
    target: Callable[[], tuple[str, int]], *, host: str = "127.0.0.1", port: int = 0, seed: int = 1
) -> AsyncIterator[FaultProxy]:
    proxy = FaultProxy(target, host=host, port=port, seed=seed)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
