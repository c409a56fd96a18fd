"""Work that waits for a thread is bounded by how long it would take, not by how many there are."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from diptych.common.errors import OverloadedError
from diptych.router.preprocess.bounded_executor import LONG_BYTES, MAX_WAITING_BYTES, BoundedExecutor

HELD_S = 60.0


async def test_hundreds_of_short_ones_at_once_are_served():
    """Item 4.16: the 65th was refused, though 64 take 0.4 s."""
    lanes, go = BoundedExecutor("texts", "lane"), threading.Event()

    def work(number):
        assert go.wait(HELD_S)
        return number

    tasks = [asyncio.create_task(lanes.run(partial(work, number), 100)) for number in range(500)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    go.set()
    assert await asyncio.gather(*tasks) == list(range(500))
    lanes.close()


async def slow_lanes(size, took_s):
    """Lanes that have seen that so many bytes take so long."""
    now = [0.0]
    lanes = BoundedExecutor("texts", "lane", now=lambda: now[0])

    def work():
        now[0] += took_s

    for _ in range(20):
        await lanes.run(work, size)
        await asyncio.sleep(0)
    return lanes


@pytest.mark.parametrize("size", [1000, 2 * LONG_BYTES])
async def test_what_would_wait_for_too_long_is_refused(size):
    lanes = await slow_lanes(size, 1.0)
    threads = 2 if size <= LONG_BYTES else 1
    go = threading.Event()
    tasks = []
    for _ in range(5 * threads):
        tasks.append(asyncio.create_task(lanes.run(partial(go.wait, HELD_S), size)))
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    extra = asyncio.create_task(lanes.run(partial(go.wait, HELD_S), size))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="too many texts are waiting") as refused:
        await lanes.run(lambda: None, size)
    assert refused.value.retry_after_s >= 5.0
    go.set()
    await asyncio.gather(*tasks, extra)
    lanes.close()


async def test_the_long_do_not_count_for_the_short():
    lanes, go = BoundedExecutor("texts", "lane"), threading.Event()
    tasks = [asyncio.create_task(lanes.run(partial(go.wait, HELD_S), MAX_WAITING_BYTES // 8)) for _ in range(2)]
    await asyncio.sleep(0)
    assert await lanes.run(lambda: 5, 100) == 5
    go.set()
    await asyncio.gather(*tasks)
    lanes.close()


async def test_what_has_not_begun_in_time_is_refused_and_what_has_ends():
    lanes, go = BoundedExecutor("texts", "lane", max_wait_s=0.05), threading.Event()
    begun = [asyncio.create_task(lanes.run(partial(go.wait, HELD_S), 10)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="too many texts are waiting"):
        await lanes.run(lambda: None, 10)
    assert not any(task.done() for task in begun)
    go.set()
    assert await asyncio.gather(*begun) == [True, True]
    assert await lanes.run(lambda: 7, 10) == 7
    lanes.close()


async def test_who_is_cancelled_while_waiting_takes_no_room():
    lanes, go = BoundedExecutor("texts", "lane"), threading.Event()
    begun = [asyncio.create_task(lanes.run(partial(go.wait, HELD_S), 10)) for _ in range(2)]
    await asyncio.sleep(0)
    gone = [asyncio.create_task(lanes.run(lambda: None, LONG_BYTES)) for _ in range(200)]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    ended = await asyncio.gather(*gone, return_exceptions=True)
    assert {type(error) for error in ended} <= {asyncio.CancelledError, OverloadedError}
    go.set()
    await asyncio.gather(*begun)
    await asyncio.sleep(0)
    assert (lanes._bytes_waiting, lanes._short._waiting) == (0, 0)
    lanes.close()
