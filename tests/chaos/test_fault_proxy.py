"""The proxy that other tests put between processes: what it does to a connection is what its settings say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from diptych_tests.fault_proxy import FaultProxy, flip_at, reset_at

DATA = bytes(range(256)) * 400
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def proxy() -> AsyncIterator[FaultProxy]:
    """In front of a server that echoes until the end of input, and then says so."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.write(b"end")
        except ConnectionError:
            pass
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = FaultProxy(lambda: server.sockets[0].getsockname()[:2])
    await proxy.start()
    yield proxy
    await proxy.close()
    server.close()


async def connect(proxy: FaultProxy) -> Streams:
    return await asyncio.open_connection(proxy.host, proxy.port)


async def exchange(proxy: FaultProxy, data: bytes = DATA) -> tuple[bytes, float]:
    """What comes back until the end, and the seconds that it took."""
    began = asyncio.get_running_loop().time()
    reader, writer = await connect(proxy)
    got = asyncio.create_task(reader.read())
    writer.write(data)
    writer.write_eof()
    try:
        return await got, asyncio.get_running_loop().time() - began
    finally:
        writer.close()


async def test_without_faults_it_carries_everything_and_half_closes(proxy: FaultProxy) -> None:
    answers = await asyncio.gather(*(exchange(proxy) for _ in range(3)))
    assert [answer for answer, _ in answers] == [DATA + b"end"] * 3
    assert (proxy.connections, proxy.up.carried, proxy.down.carried) == (3, 3 * len(DATA), 3 * (len(DATA) + 3))


async def test_latency_and_jitter_keep_the_order_and_the_rate(proxy: FaultProxy) -> None:
    proxy.up.latency_s, proxy.up.jitter_s, proxy.up.slice_bytes = 0.05, 0.05, 1000
    answer, took = await exchange(proxy)
    assert answer == DATA + b"end"
    assert 0.05 <= took < 0.05 * len(DATA) / 1000, "every slice waited for the one before it"


async def test_bandwidth(proxy: FaultProxy) -> None:
    proxy.down.bytes_per_s = len(DATA) * 5
    answer, took = await exchange(proxy)
    assert answer == DATA + b"end"
    assert took >= 0.2


async def test_slices(proxy: FaultProxy) -> None:
    sizes: list[int] = []
    proxy.up.slice_bytes, proxy.up.change = 7, lambda data: (sizes.append(len(data)), data)[1]
    assert (await exchange(proxy, DATA[:50]))[0] == DATA[:50] + b"end"
    assert (max(sizes), sum(sizes)) == (7, 50)


@pytest.mark.parametrize("way", ["up", "down", "both"])
async def test_a_cut_link_says_nothing_and_breaks_nothing(proxy: FaultProxy, way: str) -> None:
    reader, writer = await connect(proxy)
    writer.write(b"before")
    assert await reader.readexactly(6) == b"before"
    (proxy if way == "both" else getattr(proxy, way)).cut()
    writer.write(b"after")
    if way == "down":
        await proxy.up.until_carried(11)  # the server has it, and its answer waits
    late = asyncio.create_task(reader.readexactly(5))
    for _ in range(200):
        await asyncio.sleep(0)
    assert not late.done()
    new = asyncio.create_task(exchange(proxy, b"new"))  # a new connection waits, too
    proxy.heal()
    assert await late == b"after"
    assert (await new)[0] == b"newend"
    writer.close()


async def test_a_reset_is_seen_on_both_sides(proxy: FaultProxy) -> None:
    reader, writer = await connect(proxy)
    writer.write(b"a")
    await reader.readexactly(1)
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(1)
    writer.close()


async def test_a_reset_in_the_middle_happens_once(proxy: FaultProxy) -> None:
    proxy.down.change, proxy.down.slice_bytes = reset_at(1500), 100
    with pytest.raises(ConnectionResetError):
        await exchange(proxy)
    assert 0 < proxy.down.carried <= 1500
    assert (await exchange(proxy))[0] == DATA + b"end"


async def test_one_byte_changes_once(proxy: FaultProxy) -> None:
    proxy.up.change = flip_at(3000)
    answer, _ = await exchange(proxy)
    assert [i for i, byte in enumerate(DATA) if answer[i] != byte] == [3000]
    assert (await exchange(proxy))[0] == DATA + b"end"


async def test_a_target_that_is_not_there_resets(proxy: FaultProxy) -> None:
    proxy.target = lambda: ("127.0.0.1", 1)
    with pytest.raises(ConnectionResetError):
        await exchange(proxy)
