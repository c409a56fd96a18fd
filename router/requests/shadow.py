"""Sends copies of requests to the shadow group and discards the answers. It never delays or fails the request itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import structlog

from diptych.common.errors import DiptychError
from diptych.common.ids import new_request_id
from diptych.common.observe.metrics import Metrics
from diptych.router.placement.rollout import SHADOW
from diptych.router.requests.messages import FinishedEvent, GenerateEvent, ValidatedRequest

log = structlog.get_logger(__name__)

MAX_SHADOWS = 16
_DROPPED = "DROPPED"


class Shadows:
    """The copies in flight. `run`: streams a request's answer, as the frontend does for real ones, but without counting
    it."""

    def __init__(self, run: Callable[[ValidatedRequest], AsyncIterator[GenerateEvent]], metrics: Metrics) -> None:
        self._run = run
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests = metrics.counter("shadow_requests", "Copies sent to the shadow group, by outcome", ["outcome"])

    def start(self, request: ValidatedRequest) -> None:
        """Copy the request, unless enough copies are running."""
        if len(self._tasks) >= MAX_SHADOWS:
            self._requests.labels(_DROPPED).inc()
            return
        copy = replace(
            request, request_id=new_request_id(), label=f"shadow of {request.request_id}", group=SHADOW, explain=False
        )
        task = asyncio.create_task(self._follow(copy), name=f"shadow {copy.request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel all copies."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, copy: ValidatedRequest) -> None:
        outcome = "CANCELLED"
        try:
            async for event in self._run(copy):
                if isinstance(event, FinishedEvent):
                    outcome = "finished"
        except DiptychError as error:
            outcome = error.reason
            log.info("a shadow request failed", request_id=copy.request_id, reason=error.reason, error=error.message)
        finally:
            self._requests.labels(outcome).inc()
