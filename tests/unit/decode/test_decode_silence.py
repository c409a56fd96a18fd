"""Silence counts this worker's own ticks: its own stop is no silence of the peer."""

from __future__ import annotations

import asyncio
import time

from diptych.decode.silence import Silence


async def test_silence_ends_the_wait_and_a_word_starts_it_anew() -> None:
    silence = Silence(0.06)
    task = asyncio.create_task(silence.lasts())
    for _ in range(10):
        await asyncio.sleep(0.012)
        silence.heard()
    assert not task.done()
    await asyncio.wait_for(task, 1)


async def test_a_stop_of_this_process_counts_as_one_tick() -> None:
    silence = Silence(0.06)
    task = asyncio.create_task(silence.lasts())
    await asyncio.sleep(0)
    time.sleep(0.15)  # noqa: ASYNC251 - the loop stands still, as under SIGSTOP
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    silence.heard()
    await asyncio.wait_for(task, 1)
