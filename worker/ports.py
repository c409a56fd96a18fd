"""The services' interface to the engine: EngineClient in production, a fake in tests."""

from __future__ import annotations

from typing import Protocol

from diptych.engine.messages import CacheDump, Command, EngineAudit, EngineStats


class Engine(Protocol):
    """Access to the step thread. `send` may be called from any thread, the rest on the event loop."""

    def send(self, command: Command) -> None: ...

    def stats(self) -> EngineStats: ...

    async def audit(self, full: bool = False) -> EngineAudit: ...

    async def dump_blocks(self) -> CacheDump: ...

    async def close_session(self, session: bytes) -> int: ...
