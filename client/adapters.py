"""The calls about adapters that both clients make: their messages, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diptych.client import wire
from diptych.common.errors import InvalidRequestError
from diptych.rpc.v1 import router_pb2

LOAD_TIMEOUT_S = 60.0
"""Workers read files."""


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One version of an adapter.

    Args:
        number: from 1; never used twice for a name.
        id: hash of its content.
        folder: of its files, on the workers' machines.
        rank: the largest of its modules.
        num_bytes: of its tensors.
        created: seconds since 1970.
        other_base: the base model that its configuration names, where that is another one than it was loaded for; else "".
    """

    number: int
    id: str
    folder: str
    rank: int
    num_bytes: int
    created: int
    other_base: str = ""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A name and its versions.

    Args:
        name: in requests, as `adapter` or `model`.
        model: its base model's name.
        versions: those that are kept, oldest first.
        stable: number of the version that answers.
        canary: number of the version that answers `canary_share` of the requests instead; 0: none.
        previous: number of the version that was stable before; 0: none.
    """

    name: str
    model: str
    versions: tuple[AdapterVersion, ...]
    stable: int
    canary: int = 0
    canary_share: float = 0.0
    previous: int = 0


def adapter_from(message: router_pb2.Adapter) -> Adapter:
    versions = tuple(
        AdapterVersion(one.number, one.id, one.folder, one.rank, one.num_bytes, one.created, one.other_base)
        for one in message.versions
    )
    return Adapter(
        message.name, message.model, versions, message.stable, message.canary, message.canary_share, message.previous
    )


def adapters_from(message: router_pb2.ListAdaptersResponse) -> list[Adapter]:
    return [adapter_from(one) for one in message.adapters]


def method_of(name: str, answer: Any) -> Callable[[Any], Callable[..., Any]]:
    """A method of the router's service that takes encoded messages. `answer`: type of its message."""

    def on(channel: Any) -> Callable[..., Any]:
        made: Callable[..., Any] = channel.unary_unary(
            wire.SERVICE + name,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return made

    return on


LIST = method_of("ListAdapters", router_pb2.ListAdaptersResponse)
ADD = method_of("AddAdapter", router_pb2.Adapter)
REMOVE = method_of("RemoveAdapter", router_pb2.Adapter)
ROUTE = method_of("RouteAdapter", router_pb2.Adapter)


def _made(kind: Any, values: dict[str, Any]) -> Any:
    """Raises: InvalidRequestError naming a value that cannot be sent."""
    for name, value in values.items():
        try:
            kind(**{name: value})
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"{name} cannot be sent: {error}", param=name) from None
    return kind(**values)


def add_request(
    name: str, folder: str, model: str, in_place: bool, canary_share: float
) -> router_pb2.AddAdapterRequest:
    values = {"name": name, "folder": folder, "model": model, "in_place": in_place, "canary_share": canary_share}
    made: router_pb2.AddAdapterRequest = _made(router_pb2.AddAdapterRequest, values)
    return made


def remove_request(name: str) -> router_pb2.RemoveAdapterRequest:
    made: router_pb2.RemoveAdapterRequest = _made(router_pb2.RemoveAdapterRequest, {"name": name})
    return made


def canary_request(name: str, version: int, share: float) -> router_pb2.RouteAdapterRequest:
    made: router_pb2.RouteAdapterRequest = _made(router_pb2.RouteAdapterRequest, {"name": name})
    made.canary.CopyFrom(_made(router_pb2.AdapterCanary, {"version": version, "share": share}))
    return made


def promotion_request(name: str) -> router_pb2.RouteAdapterRequest:
    made: router_pb2.RouteAdapterRequest = _made(router_pb2.RouteAdapterRequest, {"name": name})
    made.promote.SetInParent()
    return made


def rollback_request(name: str, version: int) -> router_pb2.RouteAdapterRequest:
    made: router_pb2.RouteAdapterRequest = _made(router_pb2.RouteAdapterRequest, {"name": name})
    made.roll_back.CopyFrom(_made(router_pb2.AdapterRollback, {"version": version}))
    made.roll_back.SetInParent()
    return made
