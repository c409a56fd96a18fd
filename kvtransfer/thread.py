"""The transfer thread: takes the turns of a TransferCore. It spins while answers come, and else sleeps on the transport."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from typing import Any

from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.core import TICK_S, TransferCore
from diptych.kvtransfer.fabric.transport import Transport, Wakeup

log = logging.getLogger(__name__)
_SPIN_S = 0.0005
"""Spin for so long after the last sign of life before sleeping on the transport's events."""
_BUSY_WAIT_S = 0.02
_CLOSE_S = 5.0


class TransferThread(TransferCore):
    """Implements `Transfer` (api.py). Build it through build_transfer(). Args: as TransferCore."""

    def __init__(
        self, transport: Transport, config: TransferConfig, *, loop: asyncio.AbstractEventLoop, **identity: Any
    ) -> None:
        self._wakeup = Wakeup()
        super().__init__(transport, config, loop=loop, wake=self._wakeup.set, **identity)
        self._closed: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(target=self._run, name=f"transfer-{self._me[0]}", daemon=True)
        self._thread.start()
        # The thread is a daemon so that a crash elsewhere cannot hang the exit; it must not run into a dying interpreter.
        atexit.register(self._stop_at_exit)

    async def close(self) -> None:
        """Fail what waits, close all endpoints, end the thread. Idempotent."""
        self._stopping = True
        self._wakeup.set()
        if self._thread.is_alive():
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.shield(self._closed)
        self._thread.join(_CLOSE_S)
        self._wakeup.close()
        atexit.unregister(self._stop_at_exit)

    def _run(self) -> None:
        transport, wakeup = self._transport, self._wakeup
        alive = time.monotonic()
        try:
            while not self._stopping:
                worked = self.turn()
                now = time.monotonic()
                if worked:
                    alive = now
                elif not (transport.busy() and now - alive < _SPIN_S):
                    limit = _BUSY_WAIT_S if transport.busy() else TICK_S
                    transport.wait(wakeup, min(max(0.0, self.next_due() - now), limit), awaited=self.awaited)
                    wakeup.clear()
        finally:
            self.shut()
            self._on_loop(self._has_closed)

    def _has_closed(self) -> None:
        if not self._closed.done():
            self._closed.set_result(None)

    def _stop_at_exit(self) -> None:
        self._stopping = True
        self._wakeup.set()
        self._thread.join(_CLOSE_S)
