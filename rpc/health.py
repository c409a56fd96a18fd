"""grpc.health.v1: sets the status of all service names at once."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """Health of one server. Starts as NOT_SERVING; after `leave` it stays NOT_SERVING. `services`: full service names;
    the overall name "" is always included."""

    def __init__(self, services: Iterable[str] = ()) -> None:
        self._servicer = HealthServicer()
        self._names = ("", *services)
        self._serving: bool | None = None

    @property
    def serving(self) -> bool:
        return bool(self._serving)

    async def install(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self.set(False)

    async def set(self, serving: bool) -> None:
        """Idempotent; watchers are notified of changes only."""
        if serving == self._serving:
            return
        self._serving = serving
        for name in self._names:
            await self._servicer.set(name, SERVING if serving else NOT_SERVING)

    async def offer(self, services: Iterable[str]) -> None:
        """Other services from now on: those that are no longer offered are NOT_SERVING."""
        before, self._names = self._names, ("", *services)
        for name in before:
            if name not in self._names:
                await self._servicer.set(name, NOT_SERVING)
        for name in self._names:
            await self._servicer.set(name, SERVING if self._serving else NOT_SERVING)

    async def leave(self) -> None:
        """First step of a shutdown: NOT_SERVING permanently."""
        self._serving = False
        await self._servicer.enter_graceful_shutdown()
