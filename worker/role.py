"""A worker's role: a set of services. The runtime exchanges it while the worker runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from diptych.common.errors import DiptychError
from diptych.engine.messages import EngineEvent
from diptych.worker.role_spec import FULL_NAMES, ROLES


class Service(Protocol):
    """One gRPC service of a worker, with what it needs. All methods run on the event loop."""

    def add_to(self, server: Any) -> None:
        """Add its handlers to a server, or to what collects them."""
        ...

    async def open(self) -> None:
        """Get what it needs before the first call: a port, grammars. Raises: ConfigError."""
        ...

    def on_step(self, events: Sequence[EngineEvent]) -> None:
        """The engine's events of one step, in order; must not block."""
        ...

    def states(self) -> dict[str, int]:
        """Number of attempts by state name, for the audit."""
        ...

    def link_rates(self) -> dict[str, float]:
        """Measured bytes per second of KV reads by worker id."""
        ...

    def pull_overheads(self) -> dict[str, float]:
        """Measured seconds of a pull beside the transfer of its bytes, by worker id."""
        ...

    def accept(self) -> None:
        """Accept requests, as at first and again after `stop_accepting`."""
        ...

    def stop_accepting(self) -> None: ...

    async def drained(self) -> None:
        """Wait until no request is left."""
        ...

    def fail_all(self, error: DiptychError | None = None) -> None: ...

    async def close(self) -> None:
        """Close what it opened (channels to peers). It is not opened again."""
        ...


ServiceFactories = Mapping[str, Callable[[], Service]]
"""By name. A factory may return one object always: that service outlives a change of role."""


class Role:
    """The services of the role `name`. Methods as those of Service, for all of them.

    Args:
        before: the role until now, whose services are kept where this role has them too.
    """

    def __init__(self, name: str, factories: ServiceFactories, before: Role | None = None) -> None:
        self.name = name
        kept = before.services if before is not None else {}
        self.services: dict[str, Service] = {
            service: kept.get(service) or factories[service]() for service in ROLES[name].services
        }
        self._kept = kept

    @property
    def full_names(self) -> tuple[str, ...]:
        """Of the gRPC services."""
        return tuple(FULL_NAMES[service] for service in self.services)

    def add_to(self, server: Any) -> None:
        for service in self.services.values():
            service.add_to(server)

    async def open(self) -> None:
        """Opens the services that the role before did not have. Raises: ConfigError; nothing is open then."""
        opened: list[str] = []
        try:
            for name, service in self._new():
                opened.append(name)
                await service.open()
        except BaseException:
            await self._close(opened)
            raise

    def on_step(self, events: Sequence[EngineEvent]) -> None:
        for service in self.services.values():
            service.on_step(events)

    def states(self) -> dict[str, int]:
        return {
            f"{name}:{state}": number
            for name, service in self.services.items()
            for state, number in service.states().items()
        }

    def link_rates(self) -> dict[str, float]:
        return {peer: rate for service in self.services.values() for peer, rate in service.link_rates().items()}

    def pull_overheads(self) -> dict[str, float]:
        return {peer: s for service in self.services.values() for peer, s in service.pull_overheads().items()}

    def accept(self) -> None:
        for service in self.services.values():
            service.accept()

    def stop_accepting(self, but: str = "") -> None:
        """Args: but: the name of a service that goes on; so in the next two."""
        for service in self._all(but):
            service.stop_accepting()

    async def drained(self, but: str = "") -> None:
        for service in self._all(but):
            await service.drained()

    def fail_all(self, error: DiptychError | None = None, but: str = "") -> None:
        for service in self._all(but):
            service.fail_all(error)

    async def close(self, but: Role | None = None) -> None:
        """Args: but: the role after this one; its services stay open."""
        await self._close(name for name in self.services if but is None or name not in but.services)

    def _all(self, but: str) -> list[Service]:
        return [service for name, service in self.services.items() if name != but]

    def _new(self) -> list[tuple[str, Service]]:
        return [(name, service) for name, service in self.services.items() if name not in self._kept]

    async def _close(self, names: Iterable[str]) -> None:
        for name in names:
            await self.services[name].close()
