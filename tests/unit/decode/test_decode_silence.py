"""The liveness timer counts this worker's ticks: a stop of this process is not silence of the peer."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from diptych.worker import liveness_timer as silence_module
from diptych.worker.liveness_timer import LivenessTimer


async def test_silence_ends_the_wait_and_a_message_restarts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, pause = asyncio.Semaphore(0), asyncio.sleep

    async def tick(seconds: float) -> None:
        assert seconds == 1.0
        await ticks.acquire()

    async def tell(count: int) -> None:
        for _ in range(count):
            ticks.release()
            for _ in range(5):
                await pause(0)

    monkeypatch.setattr(silence_module, "asyncio", SimpleNamespace(sleep=tick))
    silence = LivenessTimer(6.0)
    task = asyncio.create_task(silence.expired())
    for _ in range(10):
        await tell(5)
        silence.on_message()
    assert not task.done()
    await tell(5)
    assert not task.done()
    await tell(1)
    assert task.done()


async def test_a_stop_of_this_process_counts_as_one_tick() -> None:
    silence = LivenessTimer(0.06)
    task = asyncio.create_task(silence.expired())
    await asyncio.sleep(0)
    time.sleep(0.15)  # noqa: ASYNC251  # sleep: the loop stands still, as under SIGSTOP
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    silence.on_message()
    await asyncio.wait_for(task, 60)
