"""The interface between a worker's runtime and its service: prefill or decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc

from diptych.common.errors import DiptychError
from diptych.engine.messages import EngineEvent


class Role(Protocol):
    """All methods run on the event loop."""

    def add_to(self, server: grpc.aio.Server) -> None: ...

    async def open(self) -> None:
        """Open what the role serves in addition to the worker's server. Raises: ConfigError."""
        ...

    def on_step(self, events: Sequence[EngineEvent]) -> None:
        """The engine's events of one step, in order; must not block."""
        ...

    def states(self) -> dict[str, int]:
        """Number of attempts by state name, for the audit."""
        ...

    def link_rates(self) -> dict[str, float]:
        """Measured bytes per second of KV reads by prefill worker id."""
        ...

    def stop_accepting(self) -> None: ...

    async def drained(self) -> None:
        """Wait until no request is left."""
        ...

    def fail_all(self, error: DiptychError | None = None) -> None: ...

    async def close(self) -> None:
        """Close what the role opened (channels to peers)."""
        ...
